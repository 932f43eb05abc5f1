"""Continuous tokens in turn: the transformer, its head, the pipeline, its training, and its decodings on a device."""

import pytest
import tiny
import torch
from families import seeded
from pipelines.latent_llama import tiny as tiny_latent_llama

from arimage import LatentLlamaPipeline, LatentLlamaTransformer
from arimage.decoding import Layout
from arimage.models.denoising_head import diffusion_tables
from arimage.pipelines.latent_llama.transformer_latent_llama import LatentLlamaModel, velocity
from arimage_emoji.training.beginning import Beginning, Run
from arimage_emoji.training.captioned import ImageCaptions
from arimage_emoji.training.tables import read_tables
from arimage_emoji.training.transformers.latent_llama import LatentLlamaTask


LATENT, NAMES = {"output_type": "latent"}, ["ar", "sjd-coupled", "path-jacobi", "path-speculative"]


@pytest.fixture(scope="module")
def pipe():
    return tiny_latent_llama.pipeline()


def near(found, wanted):
    """Up to the rounding of differently shaped matrix products."""
    return torch.allclose(found, wanted, atol=1e-2, rtol=1e-2)


@pytest.mark.every(2)
@pytest.mark.parametrize(("name", "scale"), zip(NAMES, (1.0, 2.0, 2.0, 1.0), strict=True))
def test_every_decoding_generates_images(pipe, name, scale):
    options = {"guidance_scale": scale, "decoding": name}
    out = pipe(class_labels=[1, 2, 2], generator=[seeded(seed) for seed in (1, 2, 3)], output_type="pt", **options)
    assert out.images.shape == (3, 3, 12, 12) and out.tokens.shape == (3, 4, 6, 6) and out.stats.exact
    assert (out.stats.accepted.sum(0) == 9).all() and out.stats.forward_passes <= 9
    if name == "ar":
        assert (out.stats.forward_passes, out.stats.head_calls) == (9, 9 * 6)
    in_turn = pipe(
        class_labels=[1, 2, 2], generator=[seeded(seed) for seed in (1, 2, 3)], batch_size=1, **options, **LATENT
    )
    assert near(in_turn.tokens, out.tokens) and not near(out.tokens[1], out.tokens[2])


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


def test_components_that_do_not_fit_are_refused(pipe):
    with pytest.raises(ValueError, match="channels per token: .* the image tokenizer 16"):
        LatentLlamaPipeline(tiny_latent_llama.transformer(token_dim=8), pipe.vq)
    with pytest.raises(ValueError, match="num_classes: the drafter has 4"):
        LatentLlamaPipeline(pipe.transformer, pipe.vq, drafter=tiny_latent_llama.transformer(num_classes=4))
    with pytest.raises(TypeError, match="top_k"):
        pipe(class_labels=1, top_k=5)
    with pytest.raises(ValueError, match="its tokens are continuous"):
        pipe(class_labels=1, decoding="sjd-gumbel")


@pytest.mark.slow
def test_training_teaches_transformer_and_drafter(tmp_path, monkeypatch):
    images = torch.randint(0, 255, (6, 3, 12, 12), dtype=torch.uint8, generator=seeded(0))
    names = [f"picture {number}" for number in range(6)]
    data = ImageCaptions(images, images[:, :1], [[name] for name in names], names, names, torch.ones(6))
    config = {
        "patch_size": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_layers": 1,
        "num_attention_heads": 4,
        "head_hidden_size": 32,
        "num_head_layers": 1,
    }
    text = {"d_model": 16, "d_kv": 8, "num_heads": 2, "d_ff": 32, "num_layers": 1}
    training = {"batch_size": 6, "drafter_steps": 3, "input_noise": 0.1, "sample_prompts": ["picture 1"]}
    recipe = {
        "image_size": 12,
        "tokenizer": {"model": {}},
        "text_encoder": text,
        "transformer": {
            "class": "LatentLlamaTransformer",
            "model": config,
            "drafter": config,
            "optimizer": {"steps": 30, "learning_rate": 1e-2, "warmup_steps": 2, "ema_decay": 0.5},
            "training": training | {"caption_length": 6, "text_vocab_size": 300},
        },
        "generation": {"decoding": {"name": "ar"}, "sampling": {"num_diffusion_steps": 3}},
    }
    tiny.image_tokenizer().save_pretrained(tmp_path / "vq")
    losses = []
    read, predict = [], LatentLlamaTransformer.predict

    def recorded(self, tokens, **condition):
        read.append((self.training, tokens))
        return predict(self, tokens, **condition)

    monkeypatch.setattr(LatentLlamaTransformer, "predict", recorded)
    parts = read_tables(recipe), tmp_path / "vq", data, data, tmp_path, "cpu", losses.append, Beginning()
    pipe = LatentLlamaTask.run(Run(*parts))
    # Vectors of the image tokenizer have one length, but for what noise adds in training.
    clean = [(training, (tokens.square().sum(-1) - 16).abs().max() < 1e-3) for training, tokens in read]
    assert {training for training, _ in clean} == {True, False}
    assert all(training != is_clean for training, is_clean in clean)
    log = (tmp_path / "transformer" / "log.jsonl").read_text()
    assert "held-out loss" in log and (tmp_path / "drafter" / "log.jsonl").is_file() and len(losses) == 1
    assert float(log.split('"loss": ')[1].split("}")[0]) < 1.0
    out = pipe("picture 2", decoding="path-speculative", num_diffusion_steps=4, output_type="pt")
    assert out.images.shape == (1, 3, 12, 12) and pipe.drafter is not None
