import numpy as np
import pytest
from PIL import Image


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Eight pictures of three modes and sizes above and below that of the network."""
    folder = tmp_path_factory.mktemp("pictures")
    for i in range(8):
        noise = np.random.default_rng(i).integers(0, 256, (9 + i, 7, 3), dtype=np.uint8)
        image = Image.fromarray(noise).resize((40 + 50 * i, 320 - 30 * i))
        image.convert(("RGB", "L", "RGBA", "P")[i % 4]).save(folder / f"{i}.png")
    return folder
