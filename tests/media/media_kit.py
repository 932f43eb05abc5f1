"""What the tests of media share."""

import io

from PIL import Image


def saved(image: Image.Image, format: str = "PNG", **options) -> bytes:
    """The bytes of a file."""
    data = io.BytesIO()
    image.save(data, format, **options)
    return data.getvalue()


def reopened(image: Image.Image, format: str = "PNG", **options) -> Image.Image:
    return Image.open(io.BytesIO(saved(image, format, **options)))
