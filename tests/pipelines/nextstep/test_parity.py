"""Conditions, denoising steps and pixels next to the authors' (tiny random weights in the published format)."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from pipelines.nextstep import tiny
from safetensors.torch import load_file
from transformers import Qwen2TokenizerFast

from arimage.decoding import AutoregressiveDecoding
from arimage.decoding.continuous import path_coupling
from arimage.decoding.run.batch import decode
from arimage.pipelines.nextstep.prompts import NextStepPrompts


CALLS = [name for name in tiny.REFERENCE if name not in ("texts", "law", "special_ids")]
SAMPLERS = {"sde": "sde", "em_": "em", "v10": "em-1.0"}


@pytest.fixture(scope="module")
def expected():
    return load_file(tiny.FIXTURES / "expected.safetensors")


@pytest.fixture(scope="module")
def pipes():
    return {version: tiny.golden_pipeline(version) for version in ("1.0", "1.1")}


def prepared(pipes, expected, name):
    """The pipeline of a call of the authors' and the call."""
    given = tiny.REFERENCE[name]
    pipe = pipes["1.0" if name.startswith("v10") else "1.1"]
    pipe.register_to_config(normalises_tokens=given.get("use_norm", False))
    edit = {"image_guidance_scale": given.get("cfg_img", 1.0)}
    edit["image"] = [Image.fromarray(expected[image].numpy()) for image in given.get("images", ())]
    call = pipe.prepare(
        given["prompts"],
        given.get("negative_prompt"),
        prompt_suffix=given.get("positive_prompt"),
        sampler=SAMPLERS[name[:3]],
        timesteps_shift=given.get("timesteps_shift", 1.0),
        num_diffusion_steps=given["steps"],
        guidance_scale=given["cfg"],
        guidance_schedule=given.get("cfg_schedule", "constant"),
        height=given["hw"][0],
        width=given["hw"][1],
        num_images_per_prompt=given.get("num_images_per_caption", 1),
        **(edit if edit["image"] else {}),
    )
    return pipe, call


@pytest.mark.every(4)
@pytest.mark.parametrize("name", CALLS)
@torch.no_grad()
def test_conditions_and_steps_equal_the_originals(pipes, expected, name):
    pipe, call = prepared(pipes, expected, name)
    model, count = call.model, tiny.REFERENCE[name]["steps"]
    # By the authors, x before each step and then the token.
    theirs, noise, conditions = (expected[f"{name}.{part}"] for part in ("paths", "noise", "conds"))
    batch, tokens = theirs.shape[:2]
    cache, first = model.prefill(batch)
    positions = torch.arange(tokens - 1).expand(batch, -1)
    others = model.forward(theirs[:, :-1, -1], positions, cache)
    torch.testing.assert_close(torch.cat([first[:, :, None], others], dim=2), conditions, atol=1e-4, rtol=0)
    guidance = call.sampling.guidance_at((torch.arange(tokens) / tokens).expand(batch, -1))[..., None]
    means = model.denoise_paths(theirs.flip(2)[:, :, 1:], conditions, guidance, count)
    for taken in range(count):
        step = count - 1 - taken
        mean, std = model.denoise(step, theirs[:, :, taken], conditions, guidance, count)
        torch.testing.assert_close(means[:, :, step], mean, atol=1e-5, rtol=1e-5)
        after = mean if taken + 1 == noise.shape[2] else mean + std * noise[:, :, taken + 1]
        torch.testing.assert_close(after, theirs[:, :, taken + 1], atol=1e-4, rtol=0)
    latents = pipe.whole_tokens(call, theirs[:, :, -1])
    torch.testing.assert_close(latents, expected[f"{name}.latents"], atol=1e-5, rtol=1e-5)
    pixels = pipe.to_images(call, pipe.decode_tokens(call, theirs[:, :, -1]))
    image = np.stack([np.asarray(one) for one in pixels]).astype(int)
    # Both round to the nearest level.
    assert np.abs(image - expected[f"{name}.image"].numpy()).max() <= 1


@pytest.mark.parametrize("name", ["em_guided", "sde_many", "sde_edit3"])
def test_a_call_with_the_authors_noise_makes_their_first_tokens(pipes, expected, name, monkeypatch):
    noise = expected[f"{name}.noise"]

    def replayed(seeds, positions, steps, purpose, dim):
        # Step S begins a path; ours count down to the last.
        rows = torch.arange(len(seeds))[:, None]
        return noise[rows, positions.clamp(max=noise.shape[1] - 1), noise.shape[2] - 1 - int(steps[0])]

    monkeypatch.setattr(path_coupling, "normals", replayed)
    pipe, call = prepared(pipes, expected, name)
    with torch.no_grad():
        state = decode(call.model, AutoregressiveDecoding(), call.sampling, call.seeds)
    theirs = expected[f"{name}.paths"][:, :, -1]
    # Guidance multiplies rounding errors from token to token.
    torch.testing.assert_close(state.tokens[:, :2], theirs[:, :2], atol=2e-3, rtol=0)
    assert (state.tokens - theirs).abs().max() < 0.2


@pytest.mark.parametrize("name", ["sde_edit3", "v10_edit"])
def test_reference_images_have_the_authors_latents(pipes, expected, name):
    images = torch.stack([expected[image] for image in tiny.REFERENCE[name]["images"]])
    tokens = pipes["1.1"].encode_image(images.permute(0, 3, 1, 2) / 127.5 - 1)
    theirs = F.unfold(expected[f"{name}.reference_latents"], 2, stride=2).transpose(1, 2)
    torch.testing.assert_close(tokens, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", tiny.REFERENCE["texts"])
@torch.no_grad()
def test_token_ids_follow_the_tokenizers_rule_of_bos(pipes, expected, kind):
    folder = tiny.FIXTURES / ("v1.1" if kind == "None" else f"tokenizer_bos_{kind}")
    pipe = pipes["1.1"]
    own, pipe.tokenizer = pipe.tokenizer, Qwen2TokenizerFast.from_pretrained(folder)
    try:
        for number, (text, ids) in enumerate(tiny.REFERENCE["texts"][kind]):
            found, mask = NextStepPrompts(pipe.tokenizer, repeats_bos=True).encode([text], (2, 3))
            assert found.tolist() == [ids] and mask.all()
            call = pipe.prepare(text, height=32, width=48, guidance_scale=1.0)
            _, conditions = call.model.prefill(1)
            torch.testing.assert_close(conditions[0, 0], expected[f"texts.{kind}.conds"][number], atol=1e-4, rtol=0)
    finally:
        pipe.tokenizer = own
