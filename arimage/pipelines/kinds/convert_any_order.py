"""What the converters of any-order models share: their files, what these do not say, and the pipeline."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ...convert.checkpoint import load_original, pipeline_of
from ...convert.folder import read_json
from ...convert.imagenet import class_names
from ...convert.paths import CheckpointError
from ...convert.vqgan import llamagen_tokenizer_from_original
from .any_order import AnyOrderPipeline


Pipeline = TypeVar("Pipeline", bound=AnyOrderPipeline)
# Of all published models: pixels per token along each side, pixels along each side, and channels per head.
PIXELS_PER_TOKEN, IMAGE_SIZE, HEAD_WIDTH = 16, 256, 64


@dataclass(frozen=True)
class AnyOrderFiles:
    """The files of a published model, tokens along each side of its images, and attention heads; None if neither the
    arguments nor config.json say."""

    transformer: Path
    tokenizer: Path | None
    grid_size: int
    num_heads: int | None

    def pipeline(self, kind: type[Pipeline], transformer: Any) -> Pipeline:
        """The pipeline of the transformer and the image tokenizer, if there is one."""
        vq = None
        if self.tokenizer is not None:
            vq = llamagen_tokenizer_from_original(load_original(self.tokenizer), source=self.tokenizer)
        source, labels = f"{self.transformer} with {self.tokenizer}", class_names(transformer.config.num_classes)
        return pipeline_of(kind, source, transformer, vq, id2label=labels)


def heads_of(num_heads: int | None, hidden_size: int) -> int:
    """The attention heads of a transformer of this width, by default the published 64 channels per head."""
    return num_heads or max(hidden_size // HEAD_WIDTH, 1)


def find_files(
    folder: str | Path,
    tokenizer: str | Path | None,
    image_size: int | None,
    num_heads: int | None,
    suffixes: tuple[str, ...] = (".pt", ".pth"),
) -> AnyOrderFiles:
    """The files in a folder with one transformer, or next to the transformer's own file, and what their config.json or
    the arguments say."""
    given = Path(folder)
    folder = given.parent if given.is_file() else given
    if given.is_file():
        transformer = given
    else:
        found = sorted(path for path in folder.glob("*") if path.suffix in suffixes and not path.name.startswith("vq"))
        if len(found) != 1:
            names = ", ".join(path.name for path in found) or f"no file that ends in {' or '.join(suffixes)}"
            raise CheckpointError(f"{folder} has {names}: give the file of one transformer")
        transformer = found[0]
    if tokenizer is None and not given.is_file():
        tokenizer = next((path for path in sorted(folder.glob("vq*")) if path.suffix in (".pt", ".pth")), None)
    config = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    if image_size is None:
        image_size = config.get("img_size") or math.isqrt(config.get("block_size", 0)) * PIXELS_PER_TOKEN or IMAGE_SIZE
    if image_size < 1 or image_size % PIXELS_PER_TOKEN:
        raise CheckpointError(
            f"image size {image_size} does not fit a tokenizer of {PIXELS_PER_TOKEN} pixels per token: give the "
            f"multiple of {PIXELS_PER_TOKEN} that {transformer} was trained for"
        )
    heads = num_heads or config.get("n_head") or config.get("decoder_num_heads")
    return AnyOrderFiles(
        transformer, None if tokenizer is None else Path(tokenizer), image_size // PIXELS_PER_TOKEN, heads
    )
