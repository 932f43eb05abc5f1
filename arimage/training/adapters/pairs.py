"""Pictures with captions, in the layouts of diffusers' examples: a folder with metadata.jsonl or with NAME.txt next to
each picture, or a parquet file."""

import hashlib
import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image, ImageOps

from ...media.files import open_image, to_rgb
from ...media.folders import IMAGE_SUFFIXES, list_files, say_left_out
from ..data.folder import METADATA, captions_of
from ..data.pictures import to_unit_range
from ..data.row import caption_of, content_of
from ..data.shards import encoded


@dataclass
class Pairs:
    """Pictures uint8 [M, 3, H, W] and the caption of each."""

    images: torch.Tensor
    captions: list[str]

    def __len__(self) -> int:
        return len(self.captions)

    def take(self, index: list[int]) -> "Pairs":
        return Pairs(self.images[index], [self.captions[i] for i in index])

    def pictures(self) -> list[bytes]:
        """A digest of each picture: equal where a picture has several captions."""
        return [hashlib.sha256(image.numpy().tobytes()).digest() for image in self.images]

    def pixels(self, index: slice | list[int]) -> torch.Tensor:
        """float32 [B, 3, H, W] in [-1, 1]."""
        return to_unit_range(self.images[index])


def load_pairs(path: Path, size: tuple[int, int], caption: str | None = None) -> Pairs:
    """Read pictures and captions, and resize and crop the pictures to `size` (height, width).

    Args:
        path: a parquet file with the columns `image` and `caption` or `text`, or a folder. The captions of a folder
            are in its metadata.jsonl (`file_name`, `text`), or in a file NAME.txt for each picture. A picture that
            metadata.jsonl lists several times has several captions. Hidden files and folders are left out.
        caption: a template for all captions, in which {} stands for the picture's own. Without {} no picture
            needs one.
    """
    if path.is_dir():
        found = _read_folder(path, needed=caption is None or "{}" in caption)
    elif path.is_file():
        found = _read_parquet(path)
    else:
        raise ValueError(f"{path} is neither a folder of pictures nor a parquet file: check the path")
    if not found:
        raise ValueError(f"{path} has no pictures: put files of {', '.join(IMAGE_SUFFIXES)} there")
    images, captions = [], []
    for name, source, text in found:
        image = to_rgb(name, open_image(name, source))
        image = ImageOps.fit(image, size[::-1], Image.Resampling.LANCZOS)
        images.append(torch.from_numpy(np.array(image)).permute(2, 0, 1))
        captions.append(text if caption is None else caption.replace("{}", text))
    return Pairs(torch.stack(images), captions)


def _read_folder(folder: Path, needed: bool) -> list[tuple[str, Path, str]]:
    listing = list_files(folder, IMAGE_SUFFIXES)
    captions, notes = captions_of(folder, listing)
    texts: dict[str, list[str]] = {}
    for one in captions:
        text = one.fields.get("text")
        if text is None:
            raise ValueError(f'{one.where} has no "text": write {{"text": "..."}}')
        # None is needed where all have the same.
        empty = isinstance(text, str) and not text.strip()
        texts.setdefault(one.name, []).append("" if empty else caption_of(one.where, text))
    say_left_out(folder, sorted({*listing.others, *listing.lost} - {*notes}))
    found = []
    for name in sorted({*listing.files, *texts}, key=lambda name: name.split("/")):
        path = folder / name
        if not all(texts.get(name, [""])) and needed:
            raise ValueError(
                f"{path} has no caption: write it into {path.stem}.txt or {METADATA}, or give one for all as --caption"
            )
        found += [(str(path), path, text) for text in texts.get(name, [""])]
    return found


def _read_parquet(path: Path) -> list[tuple[str, Path | io.BytesIO, str]]:
    try:
        table = pq.read_table(path)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path} cannot be read as parquet ({error}): get the file again") from error
    column = next((name for name in ("caption", "text") if name in table.column_names), None)
    if column is None or "image" not in table.column_names:
        raise ValueError(f"{path} has the columns {table.column_names}: it needs image, and caption or text")
    found = []
    for number, row in enumerate(table.select(["image", column]).to_pylist(), 1):
        where = f"{path}, row {number}"
        if row[column] is None:
            raise ValueError(f"{where}, has no {column}: leave the row out")
        content = content_of(encoded(where, "image", row["image"], path.parent))
        source = content if isinstance(content, Path) else io.BytesIO(content)
        found.append((where, source, caption_of(where, row[column])))
    return found
