"""Training sets: image-caption data in parquet files with the columns `image`, `alpha`, `caption`, `captions`,
`style`, `group`, `name`, `base`, `skin_tones` and `weight`, where `image` and `alpha` are encoded pictures (`{"bytes":
..., "path": ...}`)."""

import io
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image
from pydantic import BaseModel, Field

from arimage.eval.runs.files import write_whole
from arimage.media.files import open_image, to_levels, to_rgb
from arimage.settings.schema import Caption, Positive, check
from arimage.training.resuming import of_data


Bytes = Annotated[bytes, Field(strict=True, min_length=1)]


class Row(BaseModel):
    """A row of a training set. `keywords` is a column that may be absent."""

    image: Bytes
    alpha: Bytes
    caption: Caption
    captions: list[Caption]
    style: Caption
    group: Caption
    name: Caption
    base: Caption
    skin_tones: list[Caption] | None
    weight: Positive
    keywords: list[Caption] | None = None


OPTIONAL = ["keywords"]
COLUMNS = [name for name in Row.model_fields if name not in OPTIONAL]
# How CLDR names of flags of countries begin.
COUNTRY_FLAG = "flag: "


@dataclass
class ImageCaptions:
    """Decoded images with their captions.

    Attributes:
        images: uint8 [M, 3, S, S] on white.
        alpha: uint8 [M, 1, S, S] coverage; 255 = opaque.
        captions: the caption variants of each image; the first is the primary one. None of frames.
        names, bases: the concept shown, and the code points of its variant without skin tone.
        weights: float32 [M], how often to sample each image.
        groups, keywords: the Unicode group of each image, and words for it from the optional column `keywords`.
    """

    images: torch.Tensor
    alpha: torch.Tensor
    captions: list[list[str]]
    names: list[str]
    bases: list[str]
    weights: torch.Tensor
    groups: list[str] = field(default_factory=list)
    keywords: list[list[str]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.captions)

    @property
    def size(self) -> int:
        return self.images.shape[-1]

    @property
    def about(self) -> dict[str, Any]:
        return of_data(self)

    def read(self, images: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        return self.images[images], self.alpha[images]

    def batch(self, step: int, count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        return self.read(self.sample(count, generator).tolist())

    def sample(self, count: int, generator: torch.Generator) -> torch.Tensor:
        """Indices [count] sampled with replacement in proportion to `weights`."""
        return torch.multinomial(self.weights, count, replacement=True, generator=generator)

    def more_often(self, names: Collection[str], factor: float) -> "ImageCaptions":
        """The same images, those of `names` sampled `factor` times as often."""
        factors = torch.tensor([factor if name in names else 1.0 for name in self.names])
        return replace(self, weights=self.weights * factors)


def is_captioned(path: str | Path) -> bool:
    """Whether a file is one for `load_captioned_images`."""
    try:
        return Path(path).is_file() and set(COLUMNS) <= set(pq.read_schema(path).names)
    except pa.ArrowException:
        return False


def load_captioned_images(
    path: str | Path,
    image_size: int,
    styles: list[str] | None = None,
    skin_tones: bool = True,
    groups: list[str] | None = None,
    flags: str | None = None,
    weighted: bool = True,
) -> ImageCaptions:
    """Read a parquet file, keep the rows of `styles` and of the Unicode `groups` (all of them if `None`), without
    toned variants if `skin_tones` is false, and box-resize the images to `image_size` pixels. Flags of countries are
    also kept in the style `flags`. Unless `weighted`, all images have the same weight.

    Raises:
        ValueError: if the file does not exist or lacks a column, no row is left, or a row has no picture, no caption,
            or a weight that is not positive.
    """
    if not Path(path).is_file():
        raise ValueError(f"{path} is not a file: give a parquet file")
    try:
        table = pq.read_table(path)
    except pa.ArrowException as error:
        raise ValueError(f"{path} cannot be read as parquet ({error}): get the file again") from error
    missing = [name for name in COLUMNS if name not in table.column_names]
    if missing:
        raise ValueError(f"{path} lacks the columns {missing}: a training set needs {COLUMNS}")
    table = table.select([name for name in COLUMNS + OPTIONAL if name in table.column_names])
    rows = [
        _row(row, f"{path}, row {number}")
        for number, row in enumerate(table.to_pylist(), 1)
        if (
            styles is None
            or row["style"] in styles
            or (row["style"] == flags and row["name"].startswith(COUNTRY_FLAG))
        )
        and (skin_tones or not row["skin_tones"])
        and (groups is None or row["group"] in groups)
    ]
    if not rows:
        raise ValueError(f"{path} has no row left with styles={styles} and groups={groups}: keep more of it")

    def pixels(row: Row, column: str, read: Callable[[str, Image.Image], Image.Image]) -> torch.Tensor:
        name = f"{column} of {row.name!r} in {path}"
        image = read(name, open_image(name, io.BytesIO(getattr(row, column))))
        array = np.asarray(image.resize((image_size, image_size), Image.Resampling.BOX))
        return torch.from_numpy(array.copy()).reshape(image_size, image_size, -1).permute(2, 0, 1)

    return ImageCaptions(
        images=torch.stack([pixels(row, "image", to_rgb) for row in rows]),
        alpha=torch.stack([pixels(row, "alpha", to_levels) for row in rows]),
        captions=[[row.caption, *row.captions] for row in rows],
        names=[row.name for row in rows],
        bases=[row.base for row in rows],
        weights=torch.tensor([row.weight if weighted else 1.0 for row in rows]),
        groups=[row.group for row in rows],
        keywords=[row.keywords or [] for row in rows],
    )


def _row(row: dict, where: str) -> Row:
    files = {name: row[name].get("bytes") if isinstance(row[name], dict) else row[name] for name in ("image", "alpha")}
    return check(Row, row | files, where)


def write_pictures(data: ImageCaptions, path: Path) -> None:
    """Write images and their captions as a parquet file with the columns `image`, PNG with transparency, and
    `captions`, as other commands read them."""

    def encoded(image: torch.Tensor, alpha: torch.Tensor) -> bytes:
        # On white, each colour is (1 - coverage) white and the rest that of the picture itself.
        share, white = alpha.float() / 255, 255.0
        colours = ((image.float() - (1 - share) * white) / share.clamp(min=1 / 255)).clamp(0, 255).round().byte()
        file = io.BytesIO()
        Image.fromarray(torch.cat([colours, alpha]).permute(1, 2, 0).numpy()).save(file, "PNG")
        return file.getvalue()

    images = [{"bytes": encoded(*layers), "path": None} for layers in zip(data.images, data.alpha, strict=True)]
    table = pa.table({"image": images, "captions": data.captions})
    write_whole(path, lambda file: pq.write_table(table, file))
