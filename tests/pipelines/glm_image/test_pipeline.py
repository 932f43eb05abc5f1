"""GLM-Image: tokens and images against diffusers and transformers, on the files of a small random model."""

import diffusers
import numpy as np
import pytest
import torch
from families import seeded
from PIL import Image
from pipelines.glm_image.tiny import CASES, EXPECTED, FOLDER, INPUTS, sources

from arimage import AutoPipeline, GlmImagePipeline


@pytest.fixture(scope="module")
def loaded():
    pipe = GlmImagePipeline.from_pretrained(FOLDER)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture
def pipe(loaded):
    return GlmImagePipeline.from_pipe(loaded)


def arguments(case, prompts=(0, 1)):
    given = INPUTS[case]
    words = {"prompt": [given["prompt"][b] for b in prompts], "height": given["height"], "width": given["width"]}
    return words | ({"image": [sources(case, b) for b in prompts]} if "sources" in given else {})


def decoder(case, prompts=(0, 1)):
    steps = {name: INPUTS[name] for name in ("num_inference_steps", "guidance_scale")}
    return steps | {"latents": EXPECTED[f"{case}_latents"][list(prompts)]}


@pytest.mark.parametrize("case", CASES)
def test_tokens_and_images_are_those_of_diffusers(pipe, case):
    out = pipe(**arguments(case), **decoder(case), top_k=1, output_type="pt")
    torch.testing.assert_close(out.images[..., ::4, ::4], EXPECTED[f"{case}_images"], rtol=0, atol=1e-4)
    assert out.stats.exact and out.stats.decoder_steps == INPUTS["num_inference_steps"]
    assert set(out.stats.seconds) == {"tokens", "hand_off", "decoder", "pixels"}
    assert out.stats.tokenizer_seconds == pytest.approx(
        sum(out.stats.seconds.values()) - out.stats.seconds["tokens"], rel=0.1, abs=0.05
    )


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_every_decoding_gives_the_greedy_tokens(pipe, case):
    expected = [EXPECTED[name] for grid in ("small", "large") if (name := f"{case}_{grid}") in EXPECTED]
    for decoding in pipe.decoding_names:
        out = pipe(**arguments(case), top_k=1, decoding=decoding, output_type="latent")
        assert all(torch.equal(*grids) for grids in zip(out.tokens, expected, strict=True)), decoding
        assert torch.equal(out.images, expected[-1])
        assert out.stats.decoder_steps == 0 and set(out.stats.seconds) == {"tokens", "pixels"}


def test_images_do_not_depend_on_their_batch(pipe, case="i2i2"):
    settings = {"num_inference_steps": 2, "output_type": "np"}
    together = pipe(**arguments(case), generator=[seeded(3), seeded(4)], **settings)
    waiting = pipe(**arguments(case), generator=[seeded(3), seeded(4)], batch_size=1, **settings)
    alone = pipe(**arguments(case, [1]), generator=[seeded(4)], **settings)
    np.testing.assert_allclose(waiting.images, together.images, atol=1e-5)
    np.testing.assert_allclose(alone.images[0], together.images[1], atol=1e-5)
    more = pipe(**arguments(case, [1]), generator=[seeded(4)], **settings | {"num_inference_steps": 3})
    assert torch.equal(more.tokens[-1], alone.tokens[-1]) and not np.allclose(more.images, alone.images, atol=1e-3)


def test_images_of_one_prompt_differ_in_tokens_and_noise(pipe):
    out = pipe(
        **arguments("i2i1", [0]), num_images_per_prompt=2, generator=seeded(0), num_inference_steps=1, output_type="pt"
    )
    assert not torch.equal(*out.tokens[-1]) and not torch.allclose(*out.images)
    greedy = pipe(**arguments("i2i1", [0]), num_images_per_prompt=2, top_k=1, num_inference_steps=1, output_type="pt")
    assert torch.equal(*greedy.tokens[-1]) and not torch.allclose(*greedy.images)


def test_a_pipeline_of_diffusers_shares_its_modules(pipe):
    theirs = diffusers.GlmImagePipeline.from_pretrained(FOLDER, torch_dtype=torch.bfloat16)
    theirs.text_encoder.float()
    ours = GlmImagePipeline.from_pipe(theirs)
    assert all(getattr(ours, name) is part for name, part in theirs.components.items())
    assert (ours.vision_language_encoder.dtype, ours.text_encoder.dtype) == (torch.bfloat16, torch.float32)
    assert ours.generation_config == pipe.generation_config
    assert (pipe.generation_config["temperature"], pipe.generation_config["top_p"]) == (0.9, 0.75)
    assert ours.decoding == pipe.decoding


def test_a_saved_folder_is_loaded_by_both_libraries(pipe, tmp_path):
    pipe.decoding = "sjd-coupled:window=8"
    pipe.generation_config["temperature"] = 0.8
    pipe.save_pretrained(tmp_path)
    again = AutoPipeline.from_pretrained(tmp_path)
    assert type(again) is GlmImagePipeline and again.decoding == pipe.decoding
    assert again.generation_config == pipe.generation_config
    theirs = [
        diffusers.GlmImagePipeline.from_pretrained(tmp_path),
        diffusers.DiffusionPipeline.from_pretrained(tmp_path),
    ]
    for other in theirs:
        assert type(other) is diffusers.GlmImagePipeline
        for name, weight in pipe.transformer.state_dict().items():
            assert torch.equal(other.transformer.state_dict()[name], weight)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"prompt": "x <|image|>"}, r"contains '<\|image\|>'"),
        ({"prompt": "x <|dit_token_16385|>"}, "special token"),
        ({"height": 100}, "height is 100: give a multiple of 32"),
        ({"num_inference_steps": 0}, "num_inference_steps is 0"),
        ({"guidance_scale": float("nan")}, "guidance_scale is nan"),
        ({"latents": torch.zeros(1, 4, 2, 2)}, r"latents are .*\(1, 4, 2, 2\).*give floats \(1, 4, 4, 8\)"),
        ({"latents": torch.full((1, 4, 4, 8), float("inf"))}, "latents are not finite"),
        ({"image": Image.new("RGB", (200, 40))}, "sides differ at most 4 times"),
    ],
)
def test_bad_input_is_refused(pipe, given, message):
    with pytest.raises(ValueError, match=message):
        pipe(**{"prompt": "a red heart", "height": 32, "width": 64} | given)


@pytest.mark.parametrize("size", [(97, 31), (130, 163)])
def test_sources_may_have_any_size(pipe, size):
    picture = Image.effect_noise(size, 50).convert("RGB")
    out = pipe("make it blue", image=picture, height=32, width=64, num_inference_steps=1, generator=seeded(0))
    assert out.images[0].size == (64, 32)


@torch.no_grad()
def test_a_preview_shows_the_grid_that_is_generated(pipe):
    call = pipe.prepare(**arguments("t2i", [0]))
    tokens = torch.full((1, call.model.num_tokens), -1)
    empty = pipe.preview(call, tokens)
    assert empty.shape == (1, 3, 128, 192) and (empty == empty[0, 0, 0, 0]).all()
    tokens[:, :5] = torch.arange(5)
    small = pipe.preview(call, tokens)
    assert len(small.flatten(2).unique(dim=2)[0, 0]) > 3
    tokens[:, -1] = 7
    large = pipe.preview(call, tokens)
    cell = large[0, :, -32:, -32:]
    assert (cell == cell[:, :1, :1]).all() and (large[0, :, :96] == empty[0, :, :96]).all()
