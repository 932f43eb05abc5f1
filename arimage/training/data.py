"""Training sets: image-caption data in parquet files with the columns `image`, `alpha`, `caption`, `captions`,
`style`, `group`, `name`, `base`, `skin_tones` and `weight`, where `image` and `alpha` are encoded pictures (`{"bytes":
..., "path": ...}`); and folders of images without captions."""

import io
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from pydantic import BaseModel, Field

from ..media.files import open_image, to_levels, to_rgb, to_rgba
from ..media.folders import IMAGE_SUFFIXES, visible_files
from ..schema import Positive, Text, check


Bytes = Annotated[bytes, Field(strict=True, min_length=1)]


class Row(BaseModel):
    """A row of a training set. `keywords` is a column that may be absent."""

    image: Bytes
    alpha: Bytes
    caption: Text
    captions: list[Text]
    style: Text
    group: Text
    name: Text
    base: Text
    skin_tones: list[Text] | None
    weight: Positive
    keywords: list[Text] | None = None


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
        captions: the caption variants of each image; the first is the primary one. None in a folder of images.
        names, bases: the concept shown, and the code points of its variant without skin tone.
        weights: float32 [M], how often to sample each image.
        groups, keywords: the Unicode group of each image, and words for it from the optional column `keywords`. None
        in a
            folder of images.
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

    def draw(self, count: int, generator: torch.Generator) -> torch.Tensor:
        """Indices [count] sampled with replacement in proportion to `weights`."""
        return torch.multinomial(self.weights, count, replacement=True, generator=generator)

    def more_often(self, names: Collection[str], factor: float) -> "ImageCaptions":
        """The same images, those of `names` sampled `factor` times as often."""
        factors = torch.tensor([factor if name in names else 1.0 for name in self.names])
        return replace(self, weights=self.weights * factors)


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
        raise ValueError(f"{path} is not a file: give a parquet file, or, for a tokenizer, a folder of images")
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


def load_image_folder(folder: str | Path, image_size: int) -> ImageCaptions:
    """Read the png, jpg and webp files in `folder` and below it, without hidden ones, resize each to `image_size`
    pixels along its shorter side, crop the centre, and put what is transparent on white.

    Raises:
        ValueError: if it holds no image, or one cannot be read.
    """
    paths = visible_files(Path(folder), IMAGE_SUFFIXES)
    if not paths:
        raise ValueError(f"{folder} has no image: put files of {', '.join(IMAGE_SUFFIXES)} there")

    def pixels(path: Path) -> torch.Tensor:
        image = to_rgba(str(path), open_image(str(path), path))
        layers = [*to_rgb(str(path), image).split(), image.getchannel("A")]
        layers = [ImageOps.fit(layer, (image_size, image_size), Image.Resampling.LANCZOS) for layer in layers]
        return torch.from_numpy(np.stack(layers))

    images = torch.stack([pixels(path) for path in paths])
    return ImageCaptions(
        images=images[:, :3],
        alpha=images[:, 3:],
        captions=[[] for _ in paths],
        names=[path.stem for path in paths],
        bases=[path.stem for path in paths],
        weights=torch.ones(len(paths)),
    )


def to_unit_range(images: torch.Tensor) -> torch.Tensor:
    """uint8 images to float32 in [-1, 1]."""
    return images.float() / 127.5 - 1


def save_grid(images: torch.Tensor, path: Path, columns: int) -> None:
    """Save images [M, 3, S, S] in [0, 1] as one image, row by row, with white in place of missing ones."""
    images = F.pad(images.float().cpu(), [0] * 7 + [-len(images) % columns], value=1)
    grid = images.unflatten(0, (-1, columns)).permute(0, 3, 1, 4, 2).flatten(0, 1).flatten(1, 2)
    Image.fromarray((grid * 255).round().byte().numpy()).save(path)
