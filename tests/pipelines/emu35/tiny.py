"""The tiny random Emu3.5 of the fixtures, as the authors publish it, and what their code computes with it."""

import json
import shutil
from pathlib import Path

from PIL import Image
from safetensors.torch import load_file

from arimage.convert import convert_emu35
from arimage.pipelines.emu35.pipeline_emu35 import Emu35Pipeline


FOLDER = Path(__file__).parent / "fixtures"
VISION_TOKENIZER = FOLDER / "vision_tokenizer"
EXPECTED = load_file(FOLDER / "expected.safetensors")
REFERENCE = json.loads((FOLDER / "reference.json").read_text(encoding="utf-8"))
REFERENCES = [Image.fromarray(EXPECTED[f"ref_{i}.image"].numpy()) for i in range(2)]


def pipeline(image_area: int = 64 * 64) -> Emu35Pipeline:
    """Text to images, by default of 4x4 codes where no size is given."""
    pipe = convert_emu35(FOLDER, vision_tokenizer=VISION_TOKENIZER, image_area=image_area)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def write_original(folder: Path) -> Path:
    """A copy of the authors' folder of the language model."""
    ignored = ("vision_tokenizer", "expected.safetensors", "reference.json")
    return shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns(*ignored))


PIPELINES = {"emu3.5": (pipeline, {"usual", "language", "text", "fused", "lines", "shared steps"})}
