"""`arimage generate --image` with models that read reference images."""

import sys

import numpy as np
import pytest
from families import seeded
from PIL import Image
from pipelines.emu35 import tiny as tiny_emu35
from pipelines.emu35.tiny import REFERENCES
from pipelines.llamagen import tiny as tiny_llamagen
from pipelines.nextstep import tiny as tiny_nextstep

from arimage.cli import main as cli


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    tiny_emu35.pipeline().save_pretrained(root / "reads")
    tiny_nextstep.pipeline().save_pretrained(root / "latents")
    tiny_llamagen.text_pipeline(4).save_pretrained(root / "text")
    return root


@pytest.fixture
def generate(models, tmp_path, monkeypatch, capsys):
    """Run the command; returns the image that it wrote, or the line of its error."""
    monkeypatch.chdir(tmp_path)
    for i, image in enumerate(REFERENCES):
        image.save(f"{i}.png")

    def generate(model, *arguments):
        words = ["generate", "make it blue", "--model", models / model, "--device", "cpu", "--out", "out.png"]
        monkeypatch.setattr(sys, "argv", ["arimage", *map(str, words), *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            cli.main()
        if not end.value.code:
            return np.asarray(Image.open("out.png"))
        error = capsys.readouterr().err
        assert end.value.code == 2 and error.count("\n") == 1
        return error

    return generate


def expected(**arguments):
    pipe = tiny_emu35.pipeline()
    return np.asarray(pipe("make it blue", **arguments, generator=seeded(0)).images[0])


def test_images_without_a_mask_are_references(generate):
    found = generate("reads", "--image", "0.png", "--image", "1.png")
    np.testing.assert_array_equal(found, expected(image=REFERENCES))


def test_continuous_tokens_read_one_image(generate):
    found = generate("latents", "--image", "0.png", "--height", 16, "--width", 24)
    pipe = tiny_nextstep.pipeline()
    [image] = pipe("make it blue", image=REFERENCES[0], height=16, width=24, generator=seeded(0)).images
    np.testing.assert_array_equal(found, np.asarray(image))
    assert "reads 1 reference images, not 2" in generate("latents", "--image", "0.png", "--image", "1.png")
    assert "mask_image" in generate("latents", "--image", "0.png", "--mask-image", "1.png")


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


def test_too_many_images_are_refused(generate):
    assert "reads 3 reference images, not 4" in generate("reads", *["--image", "0.png"] * 4)
    assert "reads no reference images, not 1" in generate("text", *["--image", "0.png"] * 2)
    assert "has no transparency" in generate("text", "--image", "0.png")
