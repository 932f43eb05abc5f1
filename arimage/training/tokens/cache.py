"""A cache of tokens on disk: images or clips are encoded once, and training reads tokens instead of pixels.

A folder with tokens.json, which says what the tokens are of, and shards: safetensors files with `tokens` [n, V, ...]
of n images or clips in V views, and `labels` [n], or `captions` (bytes in UTF-8) with `ends` [n].
"""

import hashlib
import logging
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
from ...pipelines.cosmos.pipeline_cosmos import CosmosPipeline
from ...schema import COMPLETE, Count, Flag, Number, Text, Whole, check
from ..data.captioned import to_unit_range
from ..data.row import Source, decode, decode_clip
from ..losses import Losses, losses_of
from ..resuming import alone_in, digest
from .views import COUNTS, Views, views_of


INDEX = "tokens.json"
REMEDY = "give the folder of `arimage train tokens`, or make it again"
# Images, or frames of clips, that are decoded ahead.
AHEAD = 64

logger = logging.getLogger(__name__)


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
            of the images, their views, the data set, and the images of a shard; of clips also their `frames` and
            `fps`.
        shape: of the tokens of one view.
        labelled: whether images have classes, not captions.
        num_classes: how many classes there are, or 0.
        classes: their names, if the data set has them.
        norms: of the weights of the image tokenizer.
        rows: how many rows of the data set were read, those of clips that are too short too.
        complete: whether the data set was read to its end.
    """

    about: dict[str, Any]
    shape: tuple[Count, ...]
    labelled: Flag
    num_classes: Whole
    classes: list[Text] | None
    norms: list[Number]
    rows: Whole
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
    size: int | None = None,
    views: Views = "centre",
    shard_size: int = 1024,
    batch_size: int = 32,
    limit: int | None = None,
) -> Index:
    """Encode the images of a data set by the image tokenizer of a pipeline into a cache in `out`, or the first frames
    of its videos, as many as the pipeline generates and at its frame rate. Shorter videos are left out. A second call
    with the same settings goes on after the last whole shard.

    Args:
        model: the name of the pipeline.
        size: pixels along each side of a view; by default the size that the pipeline generates.
        limit: read at most this many rows.

    Raises:
        ValueError: if the cache was begun with other settings, or a row cannot be read.
    """
    losses, tokenizer = losses_of(pipe, "an image" if pipe.num_classes is None else "0"), image_tokenizer_of(pipe)
    about = {
        "model": model,
        "vq": digest(tokenizer),
        "image_size": list(pipe.image_sizes[0]) if size is None else [size, size],
        "views": views,
        "data": source.name,
        "columns": [source.image, source.text],
        "limit": limit,
        "shard_size": shard_size,
    }
    if isinstance(pipe, CosmosPipeline):
        about |= {"frames": pipe.num_frames, "fps": pipe.config.fps}
    with alone_in(out):
        index = read_index(out) if (out / INDEX).is_file() else None
        if index is not None:
            check_same(out / INDEX, index.about, about)
            if index.complete:
                return index
        if index is None:
            index = Index(about, (), source.labelled, 0, source.classes, norms_of(tokenizer), 0, False)
        remove_leftovers(out / "*.safetensors")
        rows = iter(tqdm(_decoded(source, index.rows, about), initial=index.rows, unit="row", mininterval=5))
        while True:
            tokens, texts, read = _encode(losses, pipe._execution_device, islice(rows, shard_size), batch_size, about)
            if not read:
                break
            index = replace(index, rows=index.rows + read)
            if texts:
                index = _with_shard(out, index, tokens, texts)
            _write(out, index)
        if not index.shards:
            what = f"clips of {about['frames']} frames" if "frames" in about else "images"
            raise ValueError(f"{source.name} has no {what}: give another data set")
        count = index.num_classes if source.classes is None else len(source.classes)
        index = replace(index, num_classes=count, complete=True)
        _write(out, index)
    return index


def image_tokenizer_of(pipe: ARPipeline) -> nn.Module:
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


def norms_of(network: nn.Module) -> list[float]:
    """The norm of each weight, which hardly changes with the dtype that a network is stored in."""
    return [float(weight.double().norm()) for weight in network.state_dict().values()]


def _write(out: Path, index: Index) -> None:
    content = vars(index) | {"shards": [vars(shard) for shard in index.shards]}
    write_json(out / INDEX, content)


def _with_shard(out: Path, index: Index, tokens: torch.Tensor, texts: list[str]) -> Index:
    """Write a shard of the tokens of views and their captions or classes; the index that has it."""
    tokens = tokens.unflatten(0, (len(texts), -1))
    if index.labelled:
        labels = torch.tensor(list(map(int, texts)))
        content, most = {"labels": labels}, max(index.num_classes, int(labels.max()) + 1)
    else:
        content, most = _packed(texts), 0
    name = f"tokens-{len(index.shards):05d}.safetensors"
    write_whole(out / name, lambda file: save_file({"tokens": tokens, **content}, file))
    shards = [*index.shards, Shard(name, len(texts), _sha256(out / name))]
    return replace(index, shape=tuple(tokens.shape[2:]), num_classes=most, shards=shards)


def _decoded(source: Source, start: int, about: dict[str, Any]) -> Iterator[tuple[torch.Tensor, str] | None]:
    """The views of the images or clips from row `start` on and what belongs to them, decoded ahead in threads; None
    for a video that is too short."""
    limit, size, views, count = about["limit"], tuple(about["image_size"]), about["views"], about.get("frames")

    def decoded(where: str, file: Any, text: str) -> tuple[torch.Tensor, str] | None:
        if count is None:
            return views_of(decode(where, file), size, views), text
        frames = decode_clip(where, file, count, about["fps"])
        if len(frames) < count:
            logger.warning(f"{where}, has {len(frames)} frames of {about['fps']} per second, not {count}: left out")
            return None
        return torch.stack([views_of(frame, size, views) for frame in frames], 2), text

    rows = islice(source.read(start), None if limit is None else max(limit - start, 0))
    waiting: deque[Future] = deque()
    with ThreadPoolExecutor() as threads:
        try:
            for row in rows:
                waiting.append(threads.submit(decoded, *row))
                if len(waiting) > AHEAD // (count or 1):
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for one in waiting:
                one.cancel()


@torch.no_grad()
def _encode(
    losses: Losses,
    device: torch.device,
    rows: Iterator[tuple[torch.Tensor, str] | None],
    batch_size: int,
    about: dict[str, Any],
) -> tuple[torch.Tensor, list[str], int]:
    """The tokens of views [V, 3, (T,) H, W], in the smallest type that holds them, what belongs to each row, and the
    number of rows."""
    views = COUNTS[about["views"]]
    count, texts, read, done = max(1, batch_size // about.get("frames", 1)), [], 0, 0
    tokens = torch.empty(0)
    while group := list(islice(rows, max(1, count // views))):
        read += len(group)
        kept = [row for row in group if row is not None]
        for pixels in torch.cat([pixels for pixels, _ in kept]).split(count) if kept else ():
            found = losses.tokens(to_unit_range(pixels).to(device)).cpu()
            if not done:
                # One tensor for all: small ones among large ones keep the memory of those from being used again.
                dtype = torch.float16 if found.is_floating_point() else torch.int32
                tokens = torch.empty(about["shard_size"] * views, *found.shape[1:], dtype=dtype)
            tokens[done : done + len(found)] = found
            done += len(found)
        texts += [text for _, text in kept]
    return tokens[:done], texts, read


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
