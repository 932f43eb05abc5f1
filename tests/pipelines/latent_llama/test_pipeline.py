"""Continuous tokens in turn: the transformer, its head, the pipeline, its training, and its decodings on a device."""

import pytest
import tiny
import torch
import torch.nn.functional as F
from families import seeded
from pipelines.latent_llama import tiny as tiny_latent_llama

from arimage import LatentLlamaPipeline
from arimage.decoding import Layout
from arimage.models.denoising_head import diffusion_tables
from arimage.pipelines.latent_llama.transformer_latent_llama import LatentLlamaModel, velocity


LATENT, NAMES = {"output_type": "latent"}, ["ar", "sjd-coupled", "path-jacobi", "path-speculative"]


@pytest.fixture(scope="module")
def pipe():
    return tiny_latent_llama.pipeline()


def test_what_a_pipeline_can_do(pipe):
    assert pipe.decoding_names == NAMES and pipe.image_sizes == [(12, 12)] and pipe.num_classes == tiny.NUM_CLASSES
    assert LatentLlamaPipeline(pipe.transformer, pipe.vq).decoding_names == NAMES[:3]


def model_of(guided, device="cpu"):
    labels = {"class_labels": torch.tensor([1, 2], device=device)}
    parts = Layout((3, 3)), tiny_latent_llama.transformer()
    return LatentLlamaModel(parts[1], labels, parts[0], guided=guided)


@pytest.mark.parametrize("guided", [False, True])
def test_the_cache_and_all_steps_at_once_change_nothing(guided):
    model, tokens = model_of(guided), torch.randn(2, 9, 16, generator=seeded(0))
    with torch.no_grad():
        cache, first = model.prefill(2)
        positions = torch.arange(8).expand(2, -1)
        parts = [model.forward(tokens[:, part], positions[:, part], cache) for part in (slice(0, 3), slice(3, 8))]
        conditions = torch.cat([first[:, :, None], *parts], dim=2)
        expected = model.transformer.predict(tokens, class_labels=torch.tensor([1, 2]))
        torch.testing.assert_close(conditions[0], expected, atol=1e-5, rtol=1e-4)
        guidance, paths = torch.tensor([1.5, 2.0])[:, None, None].expand(-1, 9, -1), torch.randn(2, 9, 6, 16)
        together = model.denoise_paths(paths, conditions, guidance, 6)
        for step in range(6):
            alone, std = model.denoise(step, paths[:, :, step], conditions, guidance, 6)
            torch.testing.assert_close(together[:, :, step], alone, atol=1e-4, rtol=1e-4)
            assert std.shape == (1,) and std > 0


def test_components_that_do_not_fit_are_refused(pipe):
    with pytest.raises(ValueError, match="channels per token: .* the image tokenizer 16"):
        LatentLlamaPipeline(tiny_latent_llama.transformer(token_dim=8), pipe.vq)
    with pytest.raises(ValueError, match="num_classes: the drafter has 4"):
        LatentLlamaPipeline(pipe.transformer, pipe.vq, drafter=tiny_latent_llama.transformer(num_classes=4))
    with pytest.raises(TypeError, match="top_k"):
        pipe(class_labels=1, top_k=5)
    with pytest.raises(ValueError, match="its tokens are continuous"):
        pipe(class_labels=1, decoding="sjd-gumbel")


def test_a_perfect_velocity_leads_to_the_token():
    model, token = model_of(False), torch.randn(2, 1, 16, generator=seeded(0))
    kept, x = torch.tensor(0.3), torch.randn(2, 1, 16)
    noisy, speed = velocity(token, x, kept)
    torch.testing.assert_close(kept.sqrt() * noisy - (1 - kept).sqrt() * speed, token)
    # A head that is always right about the clean token, whatever its condition.
    tables = diffusion_tables(6, model.transformer.config.num_train_timesteps)
    of_step = {step: i for i, step in enumerate(tables.timesteps)}

    def head(tokens, timesteps, conditions):
        kept = torch.tensor([tables.alphas_cumprod[of_step[int(step)]] for step in timesteps])[:, None]
        return (kept.sqrt() * tokens - token) / (1 - kept).sqrt()

    model.transformer.denoising_head.forward = head
    for step in reversed(range(6)):
        mean, std = model.denoise(step, x, torch.zeros(1, 2, 1, 32), torch.ones(2, 1, 1), 6)
        x = mean + std * torch.randn(mean.shape)
    torch.testing.assert_close(x, token, atol=0.1, rtol=0.1)


def test_vectors_of_the_image_tokenizer_are_tokens_and_tokens_become_pixels(pipe):
    latents = F.normalize(torch.randn(2, 4, 6, 6, generator=seeded(0)), dim=1)
    torch.testing.assert_close(pipe.to_latents(pipe.to_tokens(latents)), latents)
    out = pipe(class_labels=[1, 2], generator=seeded(1), decoding="ar", output_type="pt")
    assert out.images.shape == (2, 3, 12, 12) and out.tokens.shape == (2, 4, 6, 6)
    assert (out.stats.forward_passes, out.stats.head_calls) == (9, 9 * 6)


@torch.no_grad()
def test_training_starts_from_a_head_that_predicts_nothing():
    transformer = tiny_latent_llama.transformer()
    transformer.init_weights()
    tokens = torch.randn(2, 9, 16, generator=seeded(0))
    conditions = transformer.predict(tokens, class_labels=torch.tensor([1, 2]))
    assert not transformer.denoising_head(tokens, torch.full((2, 9), 5.0), conditions).any() and conditions.any()
