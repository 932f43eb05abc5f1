"""Images for the browser and from it: their settings, acceptance maps, and painted masks."""

import base64
import hashlib
import io
import os
import tempfile
import zipfile
from pathlib import Path
from urllib.parse import quote

import numpy as np
from gradio.utils import get_upload_folder
from PIL import Image, ImageOps

from ...media.files import to_rgb
from ...media.metadata import KEY, saving
from ...media.trace import acceptance_map
from ...media.writing import own_path


# Side in pixels of maps, and the smallest side of images in the editor.
SHOWN = 384
EDITOR = 512
# Largest side in pixels of the images that the history shows.
SMALL = 96


def png(image: Image.Image) -> bytes:
    """The image as a PNG file, with its metadata."""
    data = io.BytesIO()
    image.save(data, "PNG", **saving(".png", image.info.get(KEY)))
    return data.getvalue()


def saved(image: Image.Image) -> str:
    """The image as a PNG file in the folder of the demo. Equal images share one file, which is written once: Gradio
    itself would write it again each time it shows the image, also while a page loads it."""
    data = png(image)
    path = Path(get_upload_folder()) / hashlib.sha256(data).hexdigest() / "image.png"
    try:
        # The oldest files are deleted first.
        os.utime(path)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(data)
        os.replace(file.name, path)
    return str(path)


def file_url(image: Image.Image) -> str:
    """The address of the image as a PNG file, for HTML: the page may be sent many times, the file is sent once."""
    return f"gradio_api/file={quote(saved(image))}"


def webp_uri(image: Image.Image) -> str:
    """The image as a lossy data URI."""
    data = io.BytesIO()
    image.save(data, "WEBP", quality=80)
    return "data:image/webp;base64," + base64.b64encode(data.getvalue()).decode()


def thumbnail(image: Image.Image) -> str:
    """The image as a small data URI."""
    return webp_uri(ImageOps.contain(image, (SMALL, SMALL)))


def write_download(images: list[Image.Image], name: str, folder: str) -> Path:
    """A PNG, or an archive of several, at its `own_path`."""
    path = own_path(name, ".png" if len(images) == 1 else ".zip", folder)
    if len(images) == 1:
        path.write_bytes(png(images[0]))
        return path
    with zipfile.ZipFile(path, "w") as archive:
        for i, image in enumerate(images):
            archive.writestr(f"{path.stem}-{i}.png", png(image))
    return path


def map_of(passes: np.ndarray) -> Image.Image:
    """The acceptance map of an image. `passes` [rows, columns] is the forward pass that decided each token."""
    rows, columns = passes.shape
    cell = max(1, SHOWN // max(rows, columns))
    return acceptance_map(passes, (rows * cell, columns * cell))


def for_editor(image: Image.Image) -> Image.Image:
    """The image, enlarged by an integer factor without smoothing if it is too small to paint on."""
    factor = max(1, EDITOR // min(image.size))
    return image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)


def image_and_mask(
    drawing: dict, size: tuple[int, int], box: tuple[float, float, float, float] | None = None
) -> tuple[Image.Image, Image.Image]:
    """The content of an `ImageEditor` as an image and a mask, white where something was painted, or in a box.

    Args:
        drawing: the value of the `ImageEditor`, with PIL images.
        size: width and height in pixels; an image of another shape is cropped to its centre.
        box: left, top, right and bottom of the part to mask instead of the painted one, in percent of `size`.
    """
    image = to_rgb("the image", drawing["background"])
    if box is not None:
        mask = Image.new("L", size)
        left, top, right, bottom = (round(side * each / 100) for side, each in zip(2 * size, box, strict=True))
        mask.paste(255, (left, top, right, bottom))
        return ImageOps.fit(image, size, Image.Resampling.BOX), mask
    mask = Image.new("L", image.size)
    for layer in drawing["layers"]:
        mask.paste(255, mask=layer.getchannel("A").point(lambda alpha: 255 * (alpha > 0)))
    # The mean of each block undoes `for_editor`.
    return ImageOps.fit(image, size, Image.Resampling.BOX), ImageOps.fit(mask, size, Image.Resampling.BOX)
