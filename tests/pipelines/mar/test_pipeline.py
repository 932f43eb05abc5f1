"""The pipeline of MAR: its settings, editing, output, callbacks, saving and loading."""

import numpy as np
import pytest
import torch
from families import LATENT, seeded
from PIL import Image
from pipelines.mar import tiny as tiny_mar

from arimage import MARPipeline


@pytest.fixture(scope="module")
def pipe():
    return tiny_mar.pipeline()


def near(found, wanted):
    """Up to the rounding of differently shaped matrix products, which an untrained head multiplies."""
    return torch.allclose(found, wanted, atol=1e-2, rtol=1e-3)


def test_a_smaller_model_may_draft(pipe):
    parts = {name: part for name, part in pipe.components.items() if not name.startswith("drafter")}
    with_drafter = MARPipeline(**parts, drafter=tiny_mar.transformer(num_layers=1), drafter_head=tiny_mar.head())
    with_drafter.generation_config.update(tiny_mar.STEPS)
    assert with_drafter.decoding_names == ["mar", "mar-disa", "recap", "lazy-mar", "cspd"]
    out = with_drafter(class_labels=[1, 2], guidance_scale=2.0, decoding="cspd", output_type="pt")
    # One set by the model, and three by the drafter, which one pass of the model tests.
    assert out.stats.forward_passes == 2 and not out.stats.exact and out.images.isfinite().all()
    assert out.stats.head_calls == 5 * 7 and out.stats.accepted.sum(0).tolist() == [16, 16]
    with pytest.raises(ValueError, match="no drafter"):
        pipe(class_labels=1, decoding="cspd")
    with pytest.raises(ValueError, match="drafter_head"):
        MARPipeline(**parts, drafter=tiny_mar.transformer())


def test_patches_of_several_places_are_put_where_they_were(pipe):
    image = torch.rand(1, 3, 16, 16) * 2 - 1
    with torch.no_grad():
        wanted = pipe.vae.encode(image).latent_dist.mode() * pipe.vae.config["scaling_factor"]
        tokens = pipe.encode_image(image)
    assert tokens.shape == (1, 16, 12) and torch.equal(pipe.to_latents(tokens), wanted)
    # Channel first, then the rows of a patch.
    assert torch.equal(tokens[0, 1], wanted[0, :, :2, 2:4].flatten())


def test_masks_of_one_call_may_have_other_sizes(pipe):
    images = [Image.new("RGB", (16, 16), color) for color in ("red", "blue")]
    masks = [Image.new("L", (16, 16)), Image.new("L", (16, 16), 255)]
    masks[0].paste(255, (0, 0, 4, 4))
    options = {"class_labels": [1, 2], **LATENT}
    together = pipe(**options, image=images, mask_image=masks, generator=[seeded(0), seeded(1)]).images
    alone = pipe(class_labels=2, image=images[1], mask_image=masks[1], generator=seeded(1), **LATENT).images
    assert near(alone[0], together[1])


def test_tokens_that_float16_cannot_hold_are_distinguished_from_logits():
    pipe = tiny_mar.pipeline()
    # An untrained head that takes few steps makes tokens larger than float16 can hold.
    options = {"class_labels": 3, "num_inference_steps": 3, "num_diffusion_steps": 5}
    assert 1e5 < pipe(**options, generator=seeded(0), output_type="latent").tokens.abs().max() < 1e12
    with pytest.raises(ValueError, match="the tokens of the model are not finite .* float32 or bfloat16"):
        pipe.to(torch.float16)(**options, generator=seeded(0))


def test_components_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="per token and per condition: the head has"):
        MARPipeline(tiny_mar.transformer(), tiny_mar.head(condition_dim=32), tiny_mar.vae())
    with pytest.raises(ValueError, match="channels per token: .* the image tokenizer 3"):
        MARPipeline(tiny_mar.transformer(patch_size=1), tiny_mar.head(), tiny_mar.vae())


@pytest.mark.parametrize(
    ("name", "value"),
    [("guidance_schedule", "cosine"), ("num_inference_steps", 17), ("num_diffusion_steps", 1), ("decoding", "ar")],
)
def test_an_argument_that_makes_no_sense_is_refused(pipe, name, value):
    with pytest.raises(ValueError, match="continuous" if name == "decoding" else name):
        pipe(class_labels=1, **{name: value})


def test_numbers_of_numpy_are_numbers(pipe):
    steps = {"num_inference_steps": np.int64(3), "num_diffusion_steps": np.int64(5)}
    assert (
        pipe.prepare(class_labels=1, **steps).sampling
        == pipe.prepare(class_labels=1, num_inference_steps=3, num_diffusion_steps=5).sampling
    )
