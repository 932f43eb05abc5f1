"""A cache of tokens on disk: images are encoded once, and training reads tokens instead of pixels.

A folder with tokens.json, which says what the tokens are of, and shards: safetensors files with `tokens` [n, V, ...]
of n images in V views, and `labels` [n], or `captions` (bytes in UTF-8) with `ends` [n].
"""

import hashlib
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from tqdm import tqdm

from ...eval.runs.files import check_same, remove_leftovers, write_json, write_whole
from ...media.texts import parse_json
from ...pipelines.base import ARPipeline
from ...schema import COMPLETE, Count, Flag, Text, Whole, check
from ..data import to_unit_range
from ..losses import Losses, losses_of
from ..resuming import alone_in, digest
from .sources import Source, decode
from .views import COUNTS, Views, views_of


INDEX = "tokens.json"
REMEDY = "give the folder of `arimage train tokens`, or make it again"
# Images that are decoded ahead.
AHEAD = 64


@dataclass(frozen=True)
class Shard:
    """A file of the cache with `count` images."""

    file: Text
    count: Count
    sha256: Text
    __pydantic_config__ = COMPLETE


@dataclass(frozen=True)
class Index:
    """What tokens.json holds.

    Attributes:
        about: what the tokens depend on: the model whose image tokenizer made them, a digest of its weights, the size
            of the images, their views, the data set, and the images of a shard.
        shape: of the tokens of one view.
        labelled: whether images have classes, not captions.
        num_classes: how many classes there are, or 0.
        classes: their names, if the data set has them.
        complete: whether the data set was read to its end.
    """

    about: dict[str, Any]
    shape: tuple[Count, ...]
    labelled: Flag
    num_classes: Whole
    classes: list[Text] | None
    complete: Flag
    shards: list[Shard] = field(default_factory=list)
    __pydantic_config__ = COMPLETE


def read_index(folder: Path) -> Index:
    """The index of a folder.

    Raises:
        ValueError: if it has none, or a damaged one.
    """
    path = folder / INDEX
    if not path.is_file():
        raise ValueError(f"{folder} has no {INDEX}: {REMEDY}")
    return check(Index, parse_json(path.read_bytes(), path, REMEDY), path)


def encode_tokens(
    source: Source,
    pipe: ARPipeline,
    out: Path,
    *,
    model: str,
    size: int,
    views: Views = "centre",
    shard_size: int = 1024,
    batch_size: int = 32,
    limit: int | None = None,
) -> Index:
    """Encode the images of a data set by the image tokenizer of a pipeline into a cache in `out`. A second call with
    the same settings goes on after the last whole shard.

    Args:
        model: the name of the pipeline.
        size: pixels along each side of a view.
        limit: encode at most this many images.

    Raises:
        ValueError: if the cache was begun with other settings, or a row cannot be read.
    """
    about = {
        "model": model,
        "vq": digest(_image_tokenizer(pipe)),
        "image_size": size,
        "views": views,
        "data": source.name,
        "columns": [source.image, source.text],
        "limit": limit,
        "shard_size": shard_size,
    }
    with alone_in(out):
        index = read_index(out) if (out / INDEX).is_file() else None
        if index is not None:
            check_same(out / INDEX, index.about, about)
            if index.complete:
                return index
        if index is None:
            index = Index(about, (), source.labelled, 0, source.classes, False)
        losses = losses_of(pipe, "an image" if pipe.num_classes is None else "0")
        remove_leftovers(out / "*.safetensors")
        begun = sum(shard.count for shard in index.shards)
        rows = _decoded(source, begun, limit, size, views)
        with tqdm(initial=begun, unit="image", mininterval=5) as progress:
            while part := list(islice(rows, shard_size)):
                tokens = _encode(losses, pipe._execution_device, [pixels for pixels, _ in part], batch_size)
                texts = [text for _, text in part]
                if source.labelled:
                    labels = torch.tensor(list(map(int, texts)))
                    content, most = {"labels": labels}, max(index.num_classes, int(labels.max()) + 1)
                else:
                    content, most = _packed(texts), 0
                name = f"tokens-{len(index.shards):05d}.safetensors"
                write_whole(
                    out / name,
                    lambda file, content=content, tokens=tokens: save_file({"tokens": tokens, **content}, file),
                )
                shards = [*index.shards, Shard(name, len(part), _sha256(out / name))]
                index = replace(index, shape=tuple(tokens.shape[2:]), num_classes=most, shards=shards)
                _write(out, index)
                progress.update(len(part))
        if not index.shards:
            raise ValueError(f"{source.name} has no images: give another data set")
        count = index.num_classes if source.classes is None else len(source.classes)
        index = replace(index, num_classes=count, complete=True)
        _write(out, index)
    return index


def _image_tokenizer(pipe: ARPipeline) -> nn.Module:
    """The image tokenizer of a pipeline: a component, or a part of its language model."""
    parts = {name: part for name, part in pipe.components.items() if isinstance(part, nn.Module)}
    if "vq" in parts:
        return parts["vq"]
    return next(
        module
        for part in parts.values()
        for name, module in part.named_modules()
        if name.rpartition(".")[2] == "vqmodel"
    )


def _write(out: Path, index: Index) -> None:
    content = vars(index) | {"shards": [vars(shard) for shard in index.shards]}
    write_json(out / INDEX, content)


def _decoded(
    source: Source, start: int, limit: int | None, size: int, views: Views
) -> Iterator[tuple[torch.Tensor, str]]:
    """The views of the images from `start` on and what belongs to them, decoded ahead in threads."""

    def decoded(where: str, image: Any, text: str) -> tuple[torch.Tensor, str]:
        return views_of(decode(where, image), size, views), text

    rows = islice(source.read(start), None if limit is None else max(limit - start, 0))
    waiting: deque[Future] = deque()
    with ThreadPoolExecutor() as threads:
        try:
            for row in rows:
                waiting.append(threads.submit(decoded, *row))
                if len(waiting) > AHEAD:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for one in waiting:
                one.cancel()


@torch.no_grad()
def _encode(losses: Losses, device: torch.device, images: list[torch.Tensor], batch_size: int) -> torch.Tensor:
    """The tokens [n, V, ...] of views [V, 3, S, S] of n images, in the smallest type that holds them."""
    pixels, parts = torch.cat(images), []
    for part in pixels.split(batch_size):
        found = losses.tokens(to_unit_range(part).to(device)).cpu()
        parts.append(found.half() if found.is_floating_point() else found.to(torch.int32))
    return torch.cat(parts).unflatten(0, (len(images), -1)).contiguous()


def _packed(texts: list[str]) -> dict[str, torch.Tensor]:
    encoded = [text.encode() for text in texts]
    ends = torch.tensor([len(one) for one in encoded]).cumsum(0)
    return {"captions": torch.from_numpy(np.frombuffer(b"".join(encoded), dtype=np.uint8).copy()), "ends": ends}


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class TokenCache:
    """The tokens of a finished cache. Only the rows that are asked for are read from the disk.

    Args:
        folder: what `encode_tokens` wrote.

    Attributes:
        index: its `Index`.
        digest: a SHA-256 of all its contents.

    Raises:
        ValueError: if it is not finished, or a shard is missing or damaged.
    """

    def __init__(self, folder: Path):
        self.folder, self.index = folder, read_index(folder)
        if not self.index.complete:
            raise ValueError(f"{folder} is not finished: run `arimage train tokens` again, which resumes it")
        for shard in self.index.shards:
            path = folder / shard.file
            if not path.is_file() or _sha256(path) != shard.sha256:
                raise ValueError(f"{path} is missing or damaged: {REMEDY}")
        self.digest = hashlib.sha256("".join(shard.sha256 for shard in self.index.shards).encode()).hexdigest()[:16]
        self._ends = np.cumsum([shard.count for shard in self.index.shards])
        self.views = COUNTS[self.index.about["views"]]
        self._open: dict[int, Any] = {}

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getstate__(self) -> dict:
        # Processes that load batches open the files themselves.
        return self.__dict__ | {"_open": {}}

    def read(self, images: list[int], views: list[int]) -> tuple[torch.Tensor, list[str]]:
        """The tokens [B, ...] of some images, each in one of its views, int64 or float32, and their captions, or the
        ids of their classes in digits."""
        tokens, texts = [], []
        for image, view in zip(images, views, strict=True):
            number = int(np.searchsorted(self._ends, image, side="right"))
            row = image - (int(self._ends[number - 1]) if number else 0)
            shard = self._shard(number)
            tokens.append(shard.get_slice("tokens")[row, view])
            if self.index.labelled:
                texts.append(str(int(shard.get_slice("labels")[row : row + 1])))
            else:
                first = int(shard.get_slice("ends")[row - 1 : row]) if row else 0
                last = int(shard.get_slice("ends")[row : row + 1])
                texts.append(shard.get_slice("captions")[first:last].numpy().tobytes().decode())
        found = torch.stack(tokens)
        return (found.float() if found.is_floating_point() else found.long()), texts

    def _shard(self, number: int) -> Any:
        if number not in self._open:
            path = self.folder / self.index.shards[number].file
            try:
                self._open[number] = safe_open(path, "pt")
            except (OSError, SafetensorError) as error:
                raise ValueError(f"{path} cannot be read ({error}): {REMEDY}") from error
        return self._open[number]
