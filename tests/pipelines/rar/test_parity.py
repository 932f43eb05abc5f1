"""From the published files to the pixels, RAR equals the authors' implementation on random weights in their format."""

import numpy as np
import pytest
import torch
from pipelines.rar.tiny import FIXTURES
from safetensors.torch import load_file

from arimage.convert import convert_rar


# guidance_scale, guidance_scale_pow and temperature of the authors' runs.
GREEDY = {
    "plain": (0.0, 0.0, 1.0),
    "constant": (4.0, 0.0, 1.0),
    "b": (16.0, 2.75, 1.0),
    "xxl": (8.0, 1.2, 1.02),
}
SAMPLED = {"plain": (0.0, 0.0, 0.9), "constant": (4.0, 0.0, 1.0), "b": (16.0, 2.75, 1.0), "l": (15.5, 2.5, 1.02)}
EXACT = ["ar", *(f"{name}:window={size}" for name in ("sjd", "sjd-coupled", "sjd-gumbel") for size in (1, 4, 16))]


@pytest.fixture(scope="module")
def expected():
    return load_file(FIXTURES / "expected.safetensors")


@pytest.fixture(scope="module")
def pipe():
    return convert_rar(FIXTURES / "rar_tiny.bin", FIXTURES / "maskgit-vqgan-tiny-f4.bin")


def settings(guidance_scale, guidance_scale_pow, temperature):
    return locals()


def close(ours, theirs, atol):
    torch.testing.assert_close(ours, theirs, atol=atol, rtol=0)


@torch.no_grad()
def test_logits_equal_the_original(pipe, expected):
    tokens, labels = expected["tf_tokens"], expected["class_labels"]
    close(pipe.transformer.predict(tokens, labels), expected["tf_logits_cond"], 1e-3)
    nobody = torch.ones(len(labels), dtype=torch.bool)
    close(pipe.transformer.predict(tokens, labels, nobody), expected["tf_logits_uncond"], 1e-3)


@torch.no_grad()
def test_the_image_tokenizer_equals_the_original(pipe, expected):
    images = expected["vq_image"] * 2 - 1
    close(pipe.vq.encode_latents(images), expected["vq_encoder_out"], 1e-4)
    assert torch.equal(pipe.vq.encode(images).flatten(1), expected["vq_indices"])
    close(pipe.vq.decode(expected["greedy_constant_tokens"].view(3, 6, 6)) / 2 + 0.5, expected["vq_decoded_raw"], 1e-4)
    images = pipe(class_labels=expected["class_labels"], **settings(*GREEDY["constant"]), top_k=1).images
    ours = np.stack([np.asarray(image) for image in images]).astype(int)
    assert np.abs(ours - expected["sample_fn_uint8"].numpy()).max() <= 1


@pytest.mark.parametrize("decoding", EXACT)
def test_greedy_tokens_equal_the_original(pipe, expected, decoding):
    for name, values in GREEDY.items():
        options = {**settings(*values), "top_k": 1, "decoding": decoding, "output_type": "latent"}
        output = pipe(class_labels=expected["class_labels"], **options)
        assert torch.equal(output.tokens.flatten(1), expected[f"greedy_{name}_tokens"]) and output.stats.exact


@torch.no_grad()
def test_the_distribution_of_every_token_equals_the_original(pipe, expected):
    """All tokens in one forward pass: each has the guidance scale of its own rank."""
    for name, values in SAMPLED.items():
        tokens = expected[f"sampled_{name}_tokens"]
        call = pipe.prepare(class_labels=expected["class_labels"], **settings(*values))
        cache, first = call.model.prefill(len(tokens))
        ranks = torch.arange(tokens.shape[1]).expand_as(tokens)
        rest = call.model.forward(tokens[:, :-1], ranks[:, :-1], cache)
        logits = torch.cat([first[:, :, None], rest], dim=2)
        close(call.sampling.probabilities(logits, ranks), expected[f"sampled_{name}_probs"], 1e-4)


@torch.no_grad()
@pytest.mark.parametrize("decoding", ["ar", "sjd:window=4", "sjd-coupled:window=16"])
def test_sampled_tokens_follow_the_distribution_of_the_original(pipe, expected, decoding):
    """Token counts at every place of 400 images against those of the authors' 4,000."""
    count = 400
    options = settings(3.0, 1.5, 1.0) | {"decoding": decoding, "output_type": "latent"}
    generator = torch.Generator().manual_seed(0)
    tokens = pipe(class_labels=4, num_images_per_prompt=count, generator=generator, **options).tokens.flatten(1)
    theirs = expected["law_counts"].double() / 4000
    ours = torch.zeros_like(theirs).scatter_add_(1, tokens.T, torch.ones(tokens.T.shape, dtype=torch.double)) / count
    both = (theirs * 4000 + ours * count) / (4000 + count)
    often = both * count >= 5
    z = (ours - theirs) / (both * (1 - both) * (1 / count + 1 / 4000)).sqrt().clamp(min=1e-9)
    assert z[often].square().mean() < 1.35 and z[often].abs().max() < 5
