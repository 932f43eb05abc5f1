"""Calls of NextStep: what an image depends on, the steps of a token, and what is refused."""

import json
import math
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from pipelines.nextstep import tiny

from arimage.convert import CheckpointError, convert_nextstep
from arimage.convert.folder import load_original_folder, read_json
from arimage.pipelines.nextstep.convert import nextstep_from_original
from arimage.pipelines.nextstep.flow import STEPS


@pytest.fixture(scope="module")
def pipe():
    return tiny.pipeline(**tiny.drafting())


def call(pipe, prompt="a red heart", seeds=(0,), **settings):
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    return pipe(prompt, generator=generators, **{"output_type": "latent", **settings})


def test_a_suffix_is_part_of_the_prompt(pipe):
    one = call(pipe, "a fox", prompt_suffix="best quality.")
    assert torch.equal(one.images, call(pipe, "a fox best quality.").images)
    assert not torch.equal(one.images, call(pipe, "a fox").images)
    assert call(pipe, "a fox", height=8, width=24).images.shape == (1, 3, 4, 12)


def picture(seed=0, width=16, height=12):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


@pytest.mark.parametrize(
    ("decoding", "image_guidance_scale"),
    [("ar", 1.5), pytest.param("path-speculative:window=2", 1.0, marks=pytest.mark.slow)],
)
def test_an_edit_depends_on_its_own_reference_only(pipe, decoding, image_guidance_scale):
    pictures, prompts = [picture(0), picture(1, 8, 16), picture(0)], ["make <image> red", "a fox", "a fox"]
    settings = {"decoding": decoding, "image_guidance_scale": image_guidance_scale, "height": 16, "width": 16}
    together = call(pipe, prompts, (0, 1, 2), image=pictures, negative_prompt="lowres", **settings)
    assert together.stats.exact
    for number, (prompt, image) in enumerate(zip(prompts, pictures, strict=True)):
        alone = call(pipe, prompt, (number,), image=image, negative_prompt="lowres", **settings)
        torch.testing.assert_close(together.images[number], alone.images[0], atol=1e-3, rtol=1e-3)
    others = call(pipe, prompts, (0, 1, 2), image=[[picture(2)]] * 3, negative_prompt="lowres", **settings)
    assert all((others.images - together.images).flatten(1).abs().amax(1) > 1e-3)


def test_guidance_by_a_reference_is_a_third_row(pipe):
    def branches(**settings):
        return pipe.prepare("a", image=picture(), **settings).model.branches

    assert [branches(image_guidance_scale=scale) for scale in (0.5, 1.0, 1.5)] == [2, 2, 3]
    assert branches(image_guidance_scale=1.5, guidance_scale=1.0) == 1
    # The rows of equal prompts with the same image are prefilled once.
    same, other = picture(), picture(1)
    images, prompts = [same, same, other], ["a", "a", "a"]
    model = pipe.prepare(prompts, image=images, image_guidance_scale=1.5, num_images_per_prompt=2).model
    rows, copies = model.conditions.to_prefill(6)
    assert len(rows["prompt"]) == 5 and copies == [0, 0, 0, 0, 1, 1, 2, 2, 2, 2, 3, 3, *[4] * 6]


def test_an_edit_has_the_size_of_its_reference(pipe):
    assert call(pipe, image=picture(0, 16, 12)).images.shape == (1, 3, 6, 8)
    # Larger and odd ones are resized to about the size of the training images.
    assert call(pipe, image=picture(0, 60, 31)).images.shape == (1, 3, 6, 12)
    assert call(pipe, image=picture(0, 3, 3)).images.shape == (1, 3, 2, 2)
    with pytest.raises(ValueError, match="image has 640x2 pixels: crop it"):
        call(pipe, image=picture(0, 640, 2))
    with pytest.raises(ValueError, match="differ in size: give height and width"):
        call(pipe, ["a", "b"], (0, 1), image=[picture(), picture(0, 8, 8)])


def test_odd_edits_are_refused(pipe):
    for prompt, given, message in (
        ("<image> or <image>", {}, "says '<image>' 2 times: write it once"),
        ("a <|image_placeholder|>", {}, "'<|image_placeholder|>', a special token of the model"),
        ("a", {"image": [[picture(), picture()]]}, "holds 2 references for a prompt: this model takes at most 1"),
        ("a", {"image_guidance_scale": math.inf}, "image_guidance_scale is inf: give a number"),
        ("a", {"image_guidance_scale": 2.0, "guidance_schedule": "linear"}, "which needs constant guidance"),
    ):
        with pytest.raises(ValueError, match=message.replace("|", "\\|")):
            call(pipe, prompt, **{"image": picture(), **given})
    with pytest.raises(ValueError, match="is for calls with an image"):
        call(pipe, "a", image_guidance_scale=1.5)
    # Without a reference it is a text.
    assert call(pipe, "<image> or <image>").images.isfinite().all()


def test_the_steps_of_a_sampler_are_the_authors_unless_a_number_is_given(pipe):
    asked = [
        pipe.prepare("a", sampler=sampler, num_diffusion_steps=count).sampling.num_diffusion_steps
        for sampler, count in ((None, None), ("em", None), ("sde", None), ("em-1.0", None), ("sde", 7))
    ]
    assert asked == [tiny.STEPS, tiny.STEPS, STEPS["sde"], STEPS["em-1.0"], 7]


def test_a_noiseless_step_is_refused_by_decodings_that_couple(pipe):
    first = tiny.golden_pipeline("1.0")
    assert first.sampler == "em-1.0" and first.decoding_names == ["ar"]
    assert {"ar", "sjd-coupled", "path-jacobi", "path-speculative"} <= set(pipe.decoding_names)
    with pytest.raises(ValueError, match="its last denoising step adds no noise, so that two paths never meet"):
        call(pipe, sampler="em-1.0", num_diffusion_steps=4, decoding="sjd-coupled:window=4")
    call(pipe, sampler="em-1.0", num_diffusion_steps=4, decoding="ar")


@pytest.mark.parametrize("edit", [{}, {"image": picture(), "image_guidance_scale": 1.5}], ids=["text", "edit"])
def test_drafts_of_the_model_itself_are_accepted(pipe, edit):
    parts = {"drafter": pipe.model, "drafter_projector": pipe.projector, "drafter_head": pipe.denoising_head}
    drafting = tiny.pipeline(**parts)
    settings = {"height": 16, "width": 16, "negative_prompt": "lowres", **edit}
    out = call(drafting, ["a red heart", "x"], (0, 1), decoding="path-speculative:window=4", **settings)
    # The first token, and then five per pass.
    assert out.stats.forward_passes == 4


def test_parts_of_a_drafter_belong_together():
    parts = tiny.drafting()
    with pytest.raises(ValueError, match="belong together: give all three, or none"):
        tiny.pipeline(**{**parts, "drafter_head": None})
    with pytest.raises(ValueError, match="channels per token"):
        tiny.pipeline(**{**parts, "drafter_projector": tiny.NextStepProjector(16, tiny.WIDTH)})


def test_odd_arguments_are_refused(pipe):
    for given, message in (
        ({"sampler": "ode"}, "sampler is 'ode': choose among em, sde, em-1.0"),
        ({"timesteps_shift": 0}, "timesteps_shift is 0: give a number above 0"),
        ({"timesteps_shift": float("inf")}, "timesteps_shift is inf: give a number above 0"),
        ({"guidance_schedule": "linear", "sampler": "sde"}, "begins at half of guidance_scale, 2.0"),
        ({"guidance_schedule": "cosine"}, "guidance_schedule is 'cosine': choose among linear"),
        ({"num_diffusion_steps": [2, 2]}, "num_diffusion_steps is .*: give one number"),
        ({"height": 10}, "height is 10: give a multiple of 4"),
        ({"negative_prompt": ["a", "b"]}, "negative_prompt holds 2 for 1 prompts"),
    ):
        with pytest.raises(ValueError, match=message):
            call(pipe, **given)


def test_defaults_are_saved(tmp_path):
    pipe = tiny.golden_pipeline("1.0", editing=True, out=tmp_path / "model")
    assert (pipe.timesteps_shift, pipe.image_guidance_scale) == (3.2, 2.0)
    pipe.save_pretrained(tmp_path / "again")
    loaded = type(pipe).from_pretrained(tmp_path / "again")
    assert (loaded.sampler, loaded.timesteps_shift, loaded.image_guidance_scale) == (
        "em-1.0",
        3.2,
        2.0,
    ) and loaded.config.normalises_tokens
    assert loaded.generation_config["num_diffusion_steps"] == 50 and loaded.image_sizes == [(512, 512)]


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_folder_that_lacks_a_file_of_the_tokenizer_is_refused(tmp_path, name):
    folder = shutil.copytree(tiny.FIXTURES / "v1.1", tmp_path / "copy")
    (folder / name).unlink()
    with pytest.raises(CheckpointError, match=name):
        convert_nextstep(folder)


@pytest.mark.parametrize(("setting", "value"), [("num_hidden_layers", 10**12), ("patch_size", "x")])
def test_settings_out_of_their_range_are_refused(tmp_path, setting, value):
    folder = shutil.copytree(tiny.FIXTURES / "v1.1", tmp_path / "copy")
    config = read_json(folder / "config.json")
    (folder / "config.json").write_text(json.dumps(config | {setting: value}))
    with pytest.raises(CheckpointError, match=rf"config\.json.*{setting}"):
        convert_nextstep(folder)


def test_folders_that_say_too_little_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="config.json"):
        convert_nextstep(tiny.FIXTURES / "v1.0")
    config = read_json(tiny.FIXTURES / "v1.1" / "config.json")
    state = load_original_folder(tiny.FIXTURES / "v1.1")
    with pytest.raises(CheckpointError, match="has no 'hidden_size'"):
        nextstep_from_original(dict(state), config | {"hidden_size": None})
    with pytest.raises(CheckpointError, match="rope_scaling"):
        nextstep_from_original(dict(state), config | {"rope_scaling": {"factor": 2}})


def test_samplers_do_not_share_captured_steps(pipe):
    keys = {
        pipe.prepare("a", sampler=sampler, timesteps_shift=shift).model.put_key
        for sampler in ("em", "sde")
        for shift in (1.0, 2.0)
    }
    assert len(keys) == 4
