"""The small random GLM-Image of the fixtures."""

from pathlib import Path

import arimage


FOLDER = Path(__file__).parent / "fixtures" / "glm_image"


class GlmImagePipeline(arimage.GlmImagePipeline):
    """Generates small images by default."""

    image_sizes = [(64, 32), (32, 64)]


def pipeline():
    pipe = GlmImagePipeline.from_pretrained(FOLDER)
    pipe.set_progress_bar_config(disable=True)
    pipe.generation_config["num_inference_steps"] = 2
    return pipe
