"""A denoiser changes what is computed where there is noise; with any one, its pipeline samples from the model."""

import pytest
import tiny
import torch
from families import seeded
from pipelines.llamagen import tiny as tiny_llamagen

from arimage import LlamaGenPipeline, SpeculativeJacobiDecoding
from arimage.decoding import Layout
from arimage.pipelines.llamagen.denoiser_llamagen import LlamaGenDenoiser
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


def test_noise_is_read_by_vector_and_level_and_not_by_token(inputs):
    tokens, positions, vectors = inputs
    model, noise = model_of(), torch.full(tokens.shape, 0.5)
    noisy, _ = logits_of(model, tokens, positions, vectors=vectors, noise=noise)
    others, _ = logits_of(model, (tokens + 1) % tiny.CODES, positions, vectors=vectors, noise=noise)
    assert torch.equal(noisy, others)
    for change in ({"vectors": vectors + 1, "noise": noise}, {"vectors": vectors, "noise": noise / 2}):
        assert (logits_of(model, tokens, positions, **change)[0] - noisy).abs().amin((0, 1, 2)).max() > 1e-2


def test_adapters_begin_with_nothing():
    denoiser = type(tiny_llamagen.denoiser(tiny_llamagen.transformer("class"))).for_transformer(
        tiny_llamagen.transformer("class"), 4
    )
    hidden = torch.randn(2, 3, 32)
    assert len(denoiser.adapters) == 2
    assert all((adapter(hidden) == 0).all() for adapter in denoiser.adapters)


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


def test_a_denoiser_of_another_width_is_refused():
    pipe = tiny_llamagen.class_pipeline()
    with pytest.raises(ValueError, match="the denoiser .* 768.* the transformer 32"):
        LlamaGenPipeline(pipe.transformer, pipe.vq, denoiser=LlamaGenDenoiser())
