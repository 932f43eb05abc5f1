"""MAR agrees with the original implementation: image tokenizer, encoder and decoder, head, denoising steps, whole
generations."""

import json

import pytest
import torch
from families import close
from pipelines.mar.tiny import FOLDER
from safetensors.torch import load_file

from arimage.convert import convert_mar
from arimage.decoding import Layout
from arimage.decoding.masked import latents as masked
from arimage.decoding.masked.sets import masked_counts
from arimage.models.denoising_head import diffusion_tables
from arimage.pipelines.mar.transformer_mar import MARLatentModel


pytestmark = pytest.mark.usefixtures("no_grad")


SPACING = (6, 3, 1)
GENERATIONS = json.loads((FOLDER / "config.json").read_text())["generations"]


@pytest.fixture(scope="module")
def expected():
    return load_file(FOLDER / "expected.safetensors")


@pytest.fixture(scope="module")
def pipe():
    return convert_mar(FOLDER / "checkpoint-last.pth", FOLDER / "kl16.ckpt", num_heads=3)


def layout_of(pipe):
    return Layout((pipe.transformer.config.grid_size,) * 2)


def test_the_image_tokenizer(pipe, expected):
    posterior = pipe.vae.encode(expected["vae_image"]).latent_dist
    close(posterior.mean, expected["vae_mean"], 1e-4)
    close(posterior.logvar, expected["vae_logvar"], 1e-4)
    scale = pipe.vae.config["scaling_factor"]
    latents = (posterior.mean + posterior.std * expected["vae_posterior_noise"]) * scale
    close(latents, expected["vae_latent"], 1e-4)
    close(pipe.to_latents(expected["vae_patches"]), expected["vae_latent"], 0)
    close(pipe.decode_tokens(None, expected["vae_patches"]), expected["vae_recon"], 1e-4)
    close(pipe.encode_image(expected["vae_image"]), (posterior.mean * scale).flatten(2).transpose(1, 2), 0)


@pytest.mark.parametrize("masked_tokens", [0, 1, 8, 15, 16])
@pytest.mark.parametrize("padded", [False, True])
def test_the_transformer(pipe, expected, masked_tokens, padded):
    tokens, orders = expected["tf_tokens"], expected["orders"]
    visible = torch.ones(2, 16, dtype=torch.bool).scatter(1, orders[:, :masked_tokens], False)
    # What is not visible may be anything.
    tokens = torch.where(visible[..., None], tokens, 7.0)
    model = MARLatentModel(pipe.transformer, pipe.head, expected["class_labels"], layout_of(pipe), guided=True)
    conditions = model.forward(tokens, visible, 16 if padded else 16 - masked_tokens, padded=padded)
    close(conditions[0], expected[f"tf_cond_masked{masked_tokens}_z"], 1e-4)
    close(conditions[1], expected[f"tf_uncond_masked{masked_tokens}_z"], 1e-4)


@pytest.mark.parametrize(("setting", "prefix"), [(SPACING, "schedule"), (100, "plain100")])
def test_the_tables_of_the_diffusion(expected, setting, prefix):
    tables = diffusion_tables(setting)
    steps = expected["timestep_map" if prefix == "schedule" else "plain100_timestep_map"]
    assert list(tables.timesteps) == steps.tolist()
    names = {
        "alphas_cumprod": tables.alphas_cumprod,
        "betas": tables.betas,
        "posterior_log_variance_clipped": tables.log_variances,
        "posterior_mean_coef1": tables.mean_of_clean,
        "posterior_mean_coef2": tables.mean_of_noisy,
    }
    for name, values in names.items():
        close(torch.tensor(values, dtype=torch.float64), expected[f"{prefix}_{name}"], 1e-12)


@pytest.mark.every(2)
@pytest.mark.parametrize("generation", GENERATIONS, ids=lambda one: one["name"])
def test_a_whole_generation_through_the_pipeline(pipe, expected, generation, monkeypatch):
    def normals(seeds, positions, steps, purpose, count):
        step = int(steps[0])
        noise = expected["noise_init"] if step == 10 else expected["noise_steps"][:, :, step]
        return noise.gather(1, positions[..., None].expand(-1, -1, count))

    monkeypatch.setattr(masked, "random_orders", lambda seeds, count: expected["orders"])
    monkeypatch.setattr(masked, "normals", normals)
    seen = []

    def callback(pipe, step, passes, tensors):
        seen.append(tensors)

    options = {
        "class_labels": expected["class_labels"],
        "num_inference_steps": generation["num_iter"],
        "num_diffusion_steps": list(SPACING),
        "guidance_scale": generation["cfg"],
        "guidance_schedule": generation["cfg_schedule"],
        "temperature": generation["temperature"],
        "callback_on_step_end": callback,
        "callback_on_step_end_tensor_inputs": ["tokens", "decided"],
    }
    name = f"gen_{generation['name']}"
    latents = pipe(**options, output_type="latent").images
    close(latents, expected[f"{name}_latent"], 1e-3)
    left = [int((~one["decided"][0]).sum()) for one in seen]
    assert left == expected[f"{name}_masked_after"].tolist()
    before = expected[f"{name}_tokens_before_step"]
    stride = 4 if generation["name"] == "full" else 1
    for i in range(1, before.shape[1]):
        close(seen[i * stride - 1]["tokens"], before[:, i], 1e-3)
    images = pipe(**options, output_type="pt").images
    close(images, (expected[f"{name}_image"] / 2 + 0.5).clamp(0, 1), 1e-4)


@pytest.mark.parametrize(("tokens", "steps"), [(256, 256), (256, 64), (256, 8), (64, 16)])
def test_the_number_of_tokens_per_step(expected, tokens, steps):
    assert masked_counts(tokens, steps)[1:] == expected[f"masked_after_{tokens}_{steps}"].tolist()
