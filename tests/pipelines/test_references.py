"""Reading reference images: one list per prompt, whatever a user gives."""

import numpy as np
import pytest
import torch
from PIL import Image
from profiles import WIDE, as_shown

from arimage.pipelines.pictures.references import as_references, split_references


RED, GREEN, BLUE = (Image.new("RGB", (4 + i, 8), colour) for i, colour in enumerate(("red", "lime", "blue")))


@pytest.mark.parametrize(
    ("images", "count", "expected"),
    [
        (RED, 1, [[RED]]),
        (RED, 2, [[RED], [RED]]),
        ([RED, GREEN], 1, [[RED, GREEN]]),
        ((RED, GREEN), 2, [[RED, GREEN], [RED, GREEN]]),
        ([[RED], [GREEN, BLUE]], 2, [[RED], [GREEN, BLUE]]),
        ([[RED, RED]], 1, [[RED, RED]]),
    ],
    ids=["one", "one for two prompts", "list", "tuple for two prompts", "lists", "list in a list"],
)
def test_every_prompt_has_a_list_of_images(images, count, expected):
    assert as_references("image", images, count, 3) == expected


def test_an_image_given_twice_is_read_once():
    first, second = as_references("image", [[RED, GREEN], [RED]], 2, 3)
    assert first[0] is second[0] and first[0] is not first[1]


def test_arrays_and_tensors_are_images_too():
    levels = np.asarray(RED) / 255
    tensor = torch.from_numpy(levels).permute(2, 0, 1)
    batch = np.stack([levels, levels[:, :, ::-1]])
    assert as_references("image", levels, 1, 3) == [[RED]]
    assert as_references("image", [RED, tensor], 1, 3) == [[RED] * 2]
    assert as_references("image", batch, 2, 3) == [[RED, BLUE.resize(RED.size)]] * 2


def test_images_are_read_as_everywhere():
    clear = Image.new("RGBA", (4, 4), (0, 0, 0, 0))
    [[image]] = as_references("image", clear, 1, 1)
    assert image.mode == "RGB" and image.getpixel((0, 0)) == (255, 255, 255)
    photo = Image.new("RGB", (4, 4), (60, 200, 60))
    photo.info["icc_profile"] = WIDE
    [[image]] = as_references("image", photo, 1, 1)
    assert image == as_shown(photo, WIDE) and image != Image.new("RGB", (4, 4), (60, 200, 60))


@pytest.mark.parametrize(
    ("images", "count", "message"),
    [
        ([[[RED]]], 1, "lists of lists of lists"),
        ([RED] * 4, 1, "image holds 4 references for a prompt: this model takes at most 3"),
        ([[RED], [RED] * 4], 2, "image holds 4 references for a prompt: this model takes at most 3"),
        ([[RED], [RED], [RED]], 2, "image holds 3 lists for 2 prompts"),
        ([[RED], GREEN], 2, "image holds lists and images"),
        ([], 1, "image is empty"),
        ("red.png", 1, "image cannot be used"),
    ],
)
def test_anything_else_is_refused_in_a_sentence(images, count, message):
    with pytest.raises(ValueError, match=message):
        as_references("image", images, count, 3)


def test_an_image_is_a_reference_unless_there_is_a_mask():
    assert split_references(RED, None, None) == (None, RED)
    assert split_references(None, None, RED) == (None, RED)
    assert split_references(RED, BLUE, GREEN) == (RED, GREEN)
    assert split_references(RED, BLUE, None) == (RED, None)
    assert split_references(None, None, None) == (None, None)
    with pytest.raises(ValueError, match="image without mask_image is a reference, like image_reference"):
        split_references(RED, None, GREEN)
