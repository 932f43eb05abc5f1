"""A denoiser changes what is computed where there is noise; with any one, its pipeline samples from the model."""

import pytest
import tiny
import torch
from families import seeded
from pipelines.llamagen import tiny as tiny_llamagen

from arimage import LlamaGenPipeline, SpeculativeJacobiDecoding
from arimage.decoding import Layout
from arimage.pipelines.llamagen.transformer_llamagen import LlamaGenTokenModel


BATCH, COUNT = 2, 6
LABELS = {"class_labels": torch.tensor([3, 5])}


def model_of(dtype=torch.float32):
    transformer = tiny_llamagen.transformer("class").to(dtype)
    denoiser = tiny_llamagen.denoiser(transformer).to(dtype)
    return LlamaGenTokenModel(transformer, LABELS, Layout((4, 4)), guided=True, denoiser=denoiser)


@pytest.fixture
def inputs():
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(tiny.CODES, (BATCH, COUNT), generator=generator)
    vectors = torch.randn(BATCH, COUNT, 4, generator=generator)
    return tokens, torch.arange(COUNT).expand(BATCH, -1), vectors


def logits_of(model, tokens, positions, **noisy):
    cache, _ = model.prefill(BATCH)
    with torch.no_grad():
        return model.forward(tokens, positions, cache, **noisy), cache


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_queries_that_see_no_noise_compute_what_they_compute_without_a_denoiser(inputs, dtype):
    tokens, positions, vectors = inputs
    model = model_of(dtype)
    noise = torch.tensor([[0, 0, 0, 0, 1, 1], [0, 0, 0.5, 1, 1, 1]])
    clean, _ = logits_of(model, tokens, positions)
    noisy, cache = logits_of(model, tokens, positions, vectors=vectors, noise=noise)
    seen = noise.cummax(1).values > 0
    assert torch.equal(clean[:, ~seen], noisy[:, ~seen])
    assert ((clean - noisy).abs().amax(-1) > 1e-2)[:, seen].all()
    # A token that is fed again leaves nothing of the noise behind.
    with torch.no_grad():
        assert torch.equal(model.forward(tokens, positions, cache), clean)


def tokens(pipe, **call):
    return pipe(class_labels=[1, 2], generator=seeded(0), output_type="latent", **call).tokens


def test_greedy_images_are_those_of_one_token_per_step_whatever_the_denoiser():
    pipe = tiny_llamagen.class_pipeline()
    expected = tokens(pipe, top_k=1, decoding="ar")
    for seed in range(2):
        pipe.denoiser = tiny_llamagen.denoiser(pipe.transformer, seed)
        for levels in (1, 3):
            assert torch.equal(tokens(pipe, top_k=1, decoding=SpeculativeJacobiDecoding(4, levels=levels)), expected)


def test_a_pipeline_without_a_denoiser_says_what_it_lacks():
    pipe = tiny_llamagen.class_pipeline()
    pipe = LlamaGenPipeline(pipe.transformer, pipe.vq)
    assert "sjd2" not in pipe.decoding_names
    with pytest.raises(ValueError, match="no denoiser: train one with `arimage train denoiser`"):
        pipe(class_labels=1, decoding="sjd2")
