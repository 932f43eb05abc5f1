"""`arimage generate --image` with models that read reference images."""

from pathlib import Path

import numpy as np
import pytest
from families import seeded
from PIL import Image
from pipelines.emu35 import tiny as tiny_emu35
from pipelines.emu35.tiny import REFERENCES
from pipelines.llamagen import tiny as tiny_llamagen
from pipelines.lumina_dimoo import tiny as tiny_lumina_dimoo
from pipelines.mammothmoda2 import tiny as tiny_mammothmoda2
from pipelines.nextstep import tiny as tiny_nextstep

from arimage.media.files import read_metadata


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    tiny_emu35.pipeline().save_pretrained(root / "reads")
    tiny_nextstep.pipeline().save_pretrained(root / "latents")
    tiny_lumina_dimoo.pipeline().save_pretrained(root / "tasks")
    tiny_mammothmoda2.pipeline().save_pretrained(root / "decoder")
    tiny_llamagen.text_pipeline(4).save_pretrained(root / "text")
    return root


@pytest.fixture
def options(models, tmp_path):
    """The command on a model, next to the images of references."""
    for i, image in enumerate(REFERENCES):
        image.save(tmp_path / f"{i}.png")
    return lambda name: ["generate", "make it blue", "--model", models / name, "--device", "cpu", "--out", "out.png"]


@pytest.fixture
def generate(run, options):
    """Run the command; returns the image that it wrote."""

    def generate(model, *arguments):
        code, _, err = run(*options(model), *arguments)
        assert code == 0, err
        return np.asarray(Image.open("out.png"))

    return generate


def expected(**arguments):
    pipe = tiny_emu35.pipeline()
    return np.asarray(pipe("make it blue", **arguments, generator=seeded(0)).images[0])


def test_images_without_a_mask_are_references(generate):
    found = generate("reads", "--image", "0.png", "--image", "1.png")
    np.testing.assert_array_equal(found, expected(image=REFERENCES))


def test_continuous_tokens_read_one_image(generate, refused, options):
    found = generate("latents", "--image", "0.png", "--height", 16, "--width", 24)
    pipe = tiny_nextstep.pipeline()
    [image] = pipe("make it blue", image=REFERENCES[0], height=16, width=24, generator=seeded(0)).images
    np.testing.assert_array_equal(found, np.asarray(image))
    assert "reads 1 reference images, not 2" in refused(*options("latents"), "--image", "0.png", "--image", "1.png")
    assert "mask_image" in refused(*options("latents"), "--image", "0.png", "--mask-image", "1.png")


def test_with_a_mask_the_first_image_is_edited(generate):
    given = Image.effect_noise((64, 64), 60).convert("RGB")
    mask = Image.new("L", (64, 64))
    mask.paste(255, (0, 32, 64, 64))
    given.save("given.png")
    mask.save("mask.png")
    size = {"height": 64, "width": 64}
    words = ["--image", "given.png", "--mask-image", "mask.png", "--height", 64, "--width", 64]
    for more, references in (([], None), (["--image", "1.png"], REFERENCES[1])):
        found = generate("reads", *words, *more)
        options = {"image": given, "mask_image": mask, "image_reference": references, **size}
        np.testing.assert_array_equal(found, expected(**options))
        np.testing.assert_array_equal(found[:32], np.asarray(given)[:32])


def test_too_many_images_are_refused(refused, options):
    assert "reads 3 reference images, not 4" in refused(*options("reads"), *["--image", "0.png"] * 4)
    assert "reads no reference images, not 1" in refused(*options("text"), *["--image", "0.png"] * 2)
    assert "has no transparency" in refused(*options("text"), "--image", "0.png")


def test_a_task_and_the_guidance_of_a_decoder_are_those_of_the_pipeline(generate):
    found = generate("tasks", "--image", "0.png", "--task", "canny_pred")
    [image] = tiny_lumina_dimoo.pipeline()(
        "make it blue", image=REFERENCES[0], task="canny_pred", generator=seeded(0)
    ).images
    np.testing.assert_array_equal(found, np.asarray(image))
    assert read_metadata("x", Path("out.png")).task == "canny_pred"
    found = generate("decoder", "--decoder-guidance-scale", 3)
    [image] = tiny_mammothmoda2.pipeline()("make it blue", decoder_guidance_scale=3.0, generator=seeded(0)).images
    np.testing.assert_array_equal(found, np.asarray(image))
    assert read_metadata("x", Path("out.png")).decoder_guidance_scale == 3
