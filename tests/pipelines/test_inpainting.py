"""Changing a part of a given image: what is kept, what is generated, and what is refused."""

import numpy as np
import pytest
import tiny
import torch
from families import LATENT, seeded
from PIL import Image
from pipelines.llamagen import tiny as tiny_llamagen
from presets import FOR_TOKENS, quick

from arimage.pipelines.pictures.images import prepare_image


PROMPTS = ["a red heart", "tree"]
GRID = 4
CELL = tiny.SCALE_FACTOR
SIZE = GRID * CELL


def random_images(count, seed=0):
    """float32 [count, 3, SIZE, SIZE] in [0, 1], of the 256 levels that a PIL image has."""
    levels = torch.randint(256, (count, 3, SIZE, SIZE), generator=seeded(seed))
    return levels / 255


def mask_of(*cells):
    """A mask [SIZE, SIZE] that is 1 at the upper left pixel of each of these cells (row, column)."""
    mask = torch.zeros(SIZE, SIZE)
    for row, column in cells:
        mask[row * CELL, column * CELL] = 1
    return mask


def to_pil(image):
    return Image.fromarray((image.permute(1, 2, 0) * 255).round().byte().numpy())


CELLS = [(0, 1), (1, 1), (2, 3), (3, 3)]
MASK = mask_of(*CELLS)
GENERATED = torch.zeros(GRID, GRID, dtype=torch.bool)
GENERATED[tuple(zip(*CELLS, strict=True))] = True


@pytest.fixture(scope="module")
def pipe():
    return tiny_llamagen.text_pipeline(GRID)


def codes_of(pipe, images):
    with torch.no_grad():
        return pipe.vq.encode(images * 2 - 1)


@pytest.mark.every(3)
@pytest.mark.parametrize("decoding", quick(FOR_TOKENS))
def test_each_image_is_what_it_is_alone(pipe, decoding):
    images, masks = random_images(2), torch.stack([MASK, mask_of((0, 0), (3, 0))])
    settings = {"decoding": decoding, **LATENT}
    batch = pipe(PROMPTS, image=images, mask_image=masks, generator=[seeded(7), seeded(8)], **settings).tokens
    for i, prompt in enumerate(PROMPTS):
        alone = pipe(prompt, image=images[i], mask_image=masks[i], generator=seeded(7 + i), **settings).tokens
        assert torch.equal(batch[i], alone[0])
    assert torch.equal(batch[0, ~GENERATED], codes_of(pipe, images[:1])[0, ~GENERATED])


@pytest.mark.parametrize("output_type", ["pil", "np", "pt"])
def test_the_pixels_outside_the_mask_come_out_as_they_went_in(pipe, output_type):
    image = random_images(1)
    output = pipe(PROMPTS, image=image, mask_image=MASK, generator=seeded(0), output_type=output_type)
    images = output.images
    if output_type == "pil":
        images = torch.stack([torch.from_numpy(np.array(one)).permute(2, 0, 1) / 255 for one in images])
    elif output_type == "np":
        images = torch.from_numpy(images).permute(0, 3, 1, 2)
    with torch.no_grad():
        decoded = (pipe.vq.decode(output.tokens) / 2 + 0.5).clamp(0, 1)
    tolerance = 0.5 / 255 + 1e-6 if output_type == "pil" else 1e-6
    assert (images - torch.where(MASK > 0, decoded, image)).abs().max() <= tolerance
    assert (images - image)[..., MASK > 0].abs().mean() > 0.05
    if output_type == "pil":
        assert torch.equal(images[..., MASK == 0], image[..., MASK == 0].expand(2, -1, -1))


def test_a_mask_that_is_lost_when_it_is_resized_is_refused(pipe):
    mask = Image.new("L", (64 * SIZE, 64 * SIZE))
    mask.putpixel((7, 7), 255)
    with pytest.raises(ValueError, match="^mask_image selects nothing"):
        pipe("tree", image=random_images(1), mask_image=mask)


def test_all_white_generates_as_without_an_image(pipe):
    image = random_images(1)
    arguments = {"generator": seeded(3), "output_type": "pt"}
    whole = pipe("tree", image=image, mask_image=torch.ones(SIZE, SIZE), **arguments)
    free = pipe("tree", generator=seeded(3), output_type="pt")
    assert torch.equal(whole.tokens, free.tokens) and torch.equal(whole.images, free.images)


def paint(mask):
    layer = Image.new("RGBA", (SIZE, SIZE), (255, 255, 255, 0))
    layer.putalpha(Image.fromarray((mask * 255).byte().numpy()))
    return layer


def forms():
    image, mask = random_images(1)[0], MASK
    array, pil, gray = image.permute(1, 2, 0).numpy(), to_pil(image), Image.fromarray((mask * 255).byte().numpy())
    return {
        "pil": (pil, gray),
        "pil with other modes": (pil.convert("RGBA"), gray.convert("RGB")),
        "pil of another size": (pil.resize((4 * SIZE, 4 * SIZE), 0), gray.resize((4 * SIZE, 4 * SIZE), 0)),
        "list of pil": ([pil], [gray]),
        "array": (array, mask.numpy()),
        "batch of arrays": (array[None], mask.numpy()[None]),
        "tensor": (image, mask),
        "batch of tensors": (image[None], mask[None, None]),
        "list of tensors": ([image], [mask]),
        "boolean mask": (image, mask.bool()),
        "boolean array": (array, mask.bool().numpy()),
        "mask of bytes": (image, (mask * 255).byte()),
        "half precision": (image, mask.half()),
        "gray that counts as white": (image, mask * 0.5),
        "levels of bytes": (image, (mask * 155 + 100).byte()),
        "array of levels": (array, (mask * 155 + 100).byte().numpy()),
        "labels": (image, mask.long()),
        "labels of bytes": (array, mask.byte().numpy()),
        "16 bits": (array, (mask.numpy() * 65535).astype(np.uint16)),
        "big-endian 16 bits": (array, (mask.numpy() * 65535).astype(">u2")),
        "mask with its channel last": (array, mask.numpy()[..., None]),
        "mask with its channel first": (image, mask[None]),
        "list of arrays": ([array], [mask.numpy()]),
        "tuple of pil": ((pil,), (gray,)),
        "16-bit pil": (pil, Image.fromarray((mask.numpy() * 65535).astype(np.uint16))),
        "pil labels": (pil, Image.fromarray(mask.byte().numpy())),
        "pil of floats": (pil, Image.fromarray(mask.numpy())),
        "pil with paint": (pil, paint(mask)),
    }


@pytest.mark.parametrize("form", forms())
def test_every_form_of_an_image_and_a_mask_is_taken(pipe, form):
    image, mask = forms()[form]
    pixels, repaint = prepare_image(image, mask, (SIZE, SIZE), 2)
    assert pixels.dtype == torch.float32 and repaint.dtype == torch.bool
    expected = (random_images(1) * 2 - 1).expand(2, -1, -1, -1)
    if form == "pil of another size":
        # Lanczos, as in diffusers: near the image, not the image.
        assert pixels.shape == expected.shape and repaint.shape == (2, 1, SIZE, SIZE)
        assert (pixels - expected).abs().mean() < 0.3
    else:
        assert torch.equal(repaint, (MASK > 0).expand(2, 1, -1, -1))
        torch.testing.assert_close(pixels, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("size", [(12, 30), (64, 64)], ids=str)
def test_arrays_tensors_and_masks_are_resized_as_pil_images_are(size):
    # Fine stripes, as of cloth, next to noise.
    levels = np.random.default_rng(0).integers(0, 256, (48, 36, 3), dtype=np.uint8)
    levels[:, :18] = np.where(np.arange(48) % 3 == 0, 255, 0)[:, None, None]
    grey = levels[..., 0]
    array = levels / np.float32(255)
    tensor = torch.from_numpy(array).movedim(-1, 0)
    expected, repaint = prepare_image(Image.fromarray(levels), Image.fromarray(grey), size, 1)
    for image, mask in ((array, grey), (tensor, tensor[0]), ([array.astype(np.float64)], [grey])):
        pixels, selected = prepare_image(image, mask, size, 1)
        assert pixels.dtype == torch.float32
        # PIL rounds to 256 levels after each direction.
        torch.testing.assert_close(pixels, expected, atol=2.1 / 127.5, rtol=0)
        assert (selected != repaint).float().mean() < 0.01


def test_what_was_given_is_left_as_it_was(pipe):
    image, mask = random_images(1), MASK[None, None] * 0.7
    prepare_image(image, mask, (SIZE, SIZE), 1)
    prepare_image(image.permute(0, 2, 3, 1).numpy(), mask.permute(0, 2, 3, 1).numpy(), (SIZE, SIZE), 1)
    assert torch.equal(image, random_images(1)) and torch.equal(mask, MASK[None, None] * 0.7)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"image": random_images(1)}, "image and mask_image belong together: give both, or neither"),
        ({"mask_image": MASK}, "image and mask_image belong together"),
        (
            {"image": random_images(3), "mask_image": MASK},
            "image holds 3 images for 2 prompts or classes: give one for all",
        ),
        (
            {"image": random_images(1) * 255, "mask_image": MASK},
            r"values outside \[0, 1\]: give PIL images, or arrays of",
        ),
        ({"image": random_images(1), "mask_image": MASK.expand(1, 3, -1, -1)}, "mask_image has 3 channels"),
        ({"image": random_images(1)[:, :1], "mask_image": MASK}, "image has 1 channels where 3 are expected"),
        *(
            (
                {"image": random_images(1), "mask_image": mask},
                "mask_image has 3 channels where 1 are expected: convert it",
            )
            for mask in (MASK[..., None].expand(-1, -1, 3), np.zeros((SIZE, SIZE, 3)), [np.zeros((SIZE, SIZE, 3))])
        ),
        (
            {"image": random_images(1), "mask_image": MASK.expand(3, -1, -1)},
            "mask_image holds 3 images for 2 prompts or classes: give one for all, or one for each, without colours",
        ),
        ({"image": random_images(1), "mask_image": MASK * 255}, r"mask_image has values outside \[0, 1\]"),
        ({"image": random_images(1), "mask_image": MASK * torch.nan}, r"mask_image has values outside \[0, 1\]"),
        ({"image": [to_pil(random_images(1)[0]), np.zeros((SIZE, SIZE, 3))], "mask_image": MASK}, "give one kind"),
        ({"image": Image.new("RGB", (0, 0)), "mask_image": MASK}, "image is empty"),
        ({"image": random_images(1), "mask_image": Image.new("F", (8, 8), 200)}, "mask_image has levels from 200"),
        ({"image": random_images(1), "mask_image": "heart.png"}, "^mask_image cannot be used"),
        ({"image": random_images(1), "mask_image": torch.ones(8)}, "^mask_image has the shape"),
    ],
)
def test_unfitting_images_are_refused(pipe, arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        pipe(PROMPTS, **arguments)
