"""What the tests of arimage-emoji share."""

import io

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image


def encoded(array: np.ndarray) -> dict:
    file = io.BytesIO()
    Image.fromarray(array).save(file, "PNG")
    return {"bytes": file.getvalue(), "path": None}


@pytest.fixture(scope="session")
def write_pictures():
    """A function that writes a data set of pictures. Of a row it needs the `image`, uint8 [side, side, 3], and its
    `name`; `alpha` is whether each pixel is covered."""

    def write(path, rows):
        whole = []
        for row in rows:
            alpha = np.broadcast_to(row.get("alpha", np.True_), row["image"].shape[:2]).astype(np.uint8) * 255
            usual = {"caption": row["name"], "captions": [row["name"]], "style": "noto", "group": "objects"}
            usual |= {"base": row["name"], "skin_tones": [], "weight": 1.0}
            whole.append(usual | row | {"image": encoded(row["image"]), "alpha": encoded(alpha)})
        pq.write_table(pa.Table.from_pylist(whole), path)
        return path

    return write
