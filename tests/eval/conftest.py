import json

import numpy as np
import pytest
from PIL import Image

from arimage.eval.runs.files import to_lines
from arimage.eval.runs.run_folder import manifest_digest


@pytest.fixture
def write_run():
    """Write a finished run of given rows and images, uint8 [N, H, W, 3], or videos, [N, T, H, W, 3]."""

    def write_run(folder, rows, images):
        (folder / "images").mkdir(parents=True, exist_ok=True)
        (folder / "results").mkdir(exist_ok=True)
        for row, image in zip(rows, images, strict=True):
            array = np.asarray(image)
            first, *others = map(Image.fromarray, array if array.ndim == 4 else [array])
            first.save(folder / row["path"], **({"save_all": True, "append_images": others} if others else {}))
        config = {
            "model": "tiny",
            "weights": "0",
            "decoding_name": "ar",
            "decoding": {},
            "sampling": {},
            "source": {},
            "manifest": manifest_digest(rows),
            "images": len(rows),
            "seed": 0,
            "batch_size": 1,
            "dtype": "float32",
            "machine": {"device": "cpu", "threads": 1, "torch": "2"},
        }
        result = {
            "batch_size": 1,
            "seconds": 1.0,
            "batch_passes": 1,
            "exact": True,
            "peak_memory": None,
            "warm": True,
            "passes": 1,
            "tokens_per_pass": 1.0,
        }
        results = [{"id": row["id"], "batch": row["id"], **result} for row in rows]
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "manifest.jsonl").write_bytes(to_lines(rows))
        (folder / "results" / "rank-00000.jsonl").write_bytes(to_lines(results))

    return write_run
