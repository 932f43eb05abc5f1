"""A tiny GLM-Image under the names of published files."""

import shutil
from pathlib import Path

from pipelines.glm_image import tiny


def write(root: Path) -> None:
    shutil.copytree(tiny.FOLDER, root / "zai-org/GLM-Image")
    (root / "zai-org/GLM-Image/expected.safetensors").unlink()


MODELS = {
    "glm-image": (
        write,
        {"prompt": "a cat", "height": 64, "width": 32, "num_inference_steps": 1},
        "GlmImagePipeline",
        {},
    )
}
