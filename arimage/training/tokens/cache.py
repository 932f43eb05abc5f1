"""A cache of tokens on disk: images or clips are encoded once, and training reads tokens instead of pixels.

A folder with tokens.json, which says what the tokens are of, and shards: safetensors files with `tokens` [n, V, ...]
of n images or clips in V views, and `labels` [n], or `captions` (bytes in UTF-8, several of an image separated by
U+001E) with `ends` [n].
"""

import hashlib
import json
import logging
import os
import reprlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import AfterValidator, BaseModel, Field
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from tqdm import tqdm

from ...eval.runs.files import check_same, remove_leftovers, to_json, write_json, write_whole
from ...media.texts import parse_json
from ...pipelines.base import ARPipeline
from ...pipelines.cosmos.pipeline_cosmos import CosmosPipeline
from ...settings.schema import COMPLETE, Caption, Count, Flag, Items, Number, Pixels, Rows, Text, check
from ..data.pictures import to_unit_range
from ..data.row import SEPARATOR, Source
from ..losses import Losses, losses_of
from ..processes import first_of_machine
from ..resuming import alone_in, digest
from .augmentation import Augmentation
from .rows import AHEAD, Row, ahead, decoded_rows, row_digest, rows_of
from .views import Views, count_views


INDEX = "tokens.json"
# The bytes, time (`st_mtime_ns`), SHA-256 and classes of each shard when all was well.
CHECKED = "checked.json"
Checked = dict[str, tuple[int, int, str, int]]
REMEDY = "give the folder of `arimage train tokens`, or make it again"
NONE = np.empty(0, np.int64)
# Shards that are open at a time: systems allow some 65,000 mapped files.
OPEN = 4096

logger = logging.getLogger(__name__)


class About(BaseModel):
    """What the tokens depend on: the model whose image tokenizer made them, a digest of its weights, the size of the
    images, their views, the data set, its columns, and the images of a shard; of clips also their `frames` and
    `fps`, and of copies that differ at random their `augmentation`."""

    model_config = COMPLETE
    model: Text
    vq: Text
    image_size: Annotated[list[Pixels], Field(min_length=2, max_length=2)]
    views: Views
    data: Text
    columns: Annotated[list[Text | None], Field(min_length=2, max_length=2)]
    limit: Items | None
    shard_size: Count
    frames: Count | None = None
    fps: Count | None = None
    augmentation: Augmentation | None = None


def _as_about(about: dict[str, Any]) -> dict[str, Any]:
    check(About, about, "there")
    return about


@dataclass(frozen=True)
class Shard:
    """A file of the cache with `count` images."""

    file: Text
    count: Items
    sha256: Text
    __pydantic_config__ = COMPLETE


@dataclass(frozen=True)
class Part:
    """Consecutive rows of a data set: how many, and a digest of their files, captions and classes."""

    rows: Items
    sha256: Text
    __pydantic_config__ = COMPLETE


@dataclass(frozen=True)
class Record:
    """Which data were read.

    Attributes:
        listing: a digest of the names, sizes and times of all files, or of the revision of a data set of the Hub.
        parts: the rows that were read, in their order. Where the listing differs, they say whether the data do.
    """

    listing: Text
    parts: list[Part] = field(default_factory=list)
    __pydantic_config__ = COMPLETE


@dataclass(frozen=True)
class Index:
    """What tokens.json holds.

    Attributes:
        about: what the tokens depend on, see `About`.
        shape: of the tokens of one view.
        labelled: whether images have classes, not captions.
        num_classes: how many classes there are, or 0.
        classes: their names, if the data set has them.
        norms: of the weights of the image tokenizer.
        rows: how many rows of the data set were read, those of clips that are too short too.
        complete: whether the data set was read to its end.
        record: which data were read; None in caches of earlier versions.
    """

    about: Annotated[dict[str, Any], AfterValidator(_as_about)]
    shape: tuple[Count, ...]
    labelled: Flag
    num_classes: Rows
    classes: list[Caption] | None
    norms: Annotated[list[Number], Field(min_length=1)]
    rows: Rows
    complete: Flag
    shards: list[Shard] = field(default_factory=list)
    record: Record | None = None
    __pydantic_config__ = COMPLETE


def _checked(index: Index) -> Index:
    """Refuse an index that contradicts itself."""
    if index.complete and not (index.shards and index.shape):
        raise ValueError(f"it is complete and has no tokens: {REMEDY}")
    if sum(shard.count for shard in index.shards) > index.rows:
        raise ValueError(f"its shards have more images than the {index.rows} rows that were read: {REMEDY}")
    if index.complete and (index.num_classes > 0) != index.labelled:
        raise ValueError(f"it has {index.num_classes} classes, and labelled is {index.labelled}: {REMEDY}")
    if index.classes is not None:
        if index.complete and len(index.classes) != index.num_classes:
            raise ValueError(f"it has {index.num_classes} classes and {len(index.classes)} names of them: {REMEDY}")
        twice = [name for name, count in Counter(index.classes).items() if count > 1]
        if twice:
            raise ValueError(f"it names the class {twice[0]!r} twice: {REMEDY}")
    return index


def read_index(folder: Path) -> Index:
    """The index of a folder."""
    path = folder / INDEX
    if not path.is_file():
        raise ValueError(f"{folder} has no {INDEX}: {REMEDY}")
    return check(Annotated[Index, AfterValidator(_checked)], parse_json(path.read_bytes(), path, REMEDY), path)


def encode_tokens(
    source: Source,
    pipe: ARPipeline,
    out: Path,
    *,
    model: str,
    size: int | None = None,
    views: Views = "centre",
    augmentation: Augmentation | None = None,
    shard_size: int = 1024,
    batch_size: int = 32,
    limit: int | None = None,
) -> Index:
    """Encode the images of a data set by the image tokenizer of a pipeline into a cache in `out`, or the first frames
    of its videos, as many as the pipeline generates and at its frame rate. Shorter videos are left out. A second call
    with the same settings goes on after the last whole shard, and a finished cache with the rows that were added.

    Args:
        model: the name of the pipeline.
        size: pixels along each side of a view; by default the size that the pipeline generates.
        augmentation: how the views differ, which are copies of the middle of an image.
        limit: read at most this many rows.

    Raises:
        ValueError: if the cache was begun with other settings, classes or data, or a row cannot be read.
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
    if augmentation is not None:
        # As in a file, where a tuple is a list.
        about["augmentation"] = json.loads(to_json(asdict(augmentation)))
    with alone_in(out):
        remove_leftovers(out / INDEX)
        remove_leftovers(out / "*.safetensors")
        if (out / INDEX).is_file():
            index = _resumed(out, source, about)
        else:
            record = Record(_listing(source))
            norms = norms_of(tokenizer)
            index = Index(about, (), source.labelled, 0, source.classes, norms, 0, False, record=record)
        if index.complete:
            return index
        rows = iter(tqdm(decoded_rows(source, index.rows, about), initial=index.rows, unit="row", mininterval=5))
        while True:
            tokens, texts, part = _encode(losses, pipe._execution_device, islice(rows, shard_size), batch_size, about)
            if part is None:
                break
            assert index.record is not None
            parts = index.record.parts
            parts.append(part)
            index = replace(index, rows=index.rows + part.rows)
            if texts:
                index = _with_shard(out, index, tokens, texts)
            # Of a billion rows the index is large, and is not written for each of a million shards.
            if len(parts) % (1 + len(parts) // 1000) == 0:
                write_json(out / INDEX, asdict(index))
        if not index.shards:
            what = f"clips of {about['frames']} frames" if "frames" in about else "images"
            raise ValueError(f"{source.name} has no {what}: give another data set")
        count = index.num_classes if source.classes is None else len(source.classes)
        index = replace(index, num_classes=count, complete=True)
        write_json(out / INDEX, asdict(index))
    return index


def _listing(source: Source) -> str:
    """A digest of all that can be known about a data set without reading it."""
    found = hashlib.sha256(repr((source.name, source.revision, source.classes)).encode())
    for file in source.files:
        found.update(repr((file.name, file.size, file.modified)).encode())
    return found.hexdigest()


def _resumed(out: Path, source: Source, about: dict[str, Any]) -> Index:
    """The index of the cache in `out`, after a check that its tokens are those of the first rows of a data set. It is
    not complete if the data set changed otherwise."""
    index, path = read_index(out), out / INDEX
    check_same(path, index.about | {"data": about["data"]}, about)
    again = "give another --out to encode all"
    if index.record is None or sum(part.rows for part in index.record.parts) != index.rows:
        raise ValueError(
            f"{path} does not say which data were read, as one of an earlier version: train on it, or {again}"
        )
    for shard in index.shards:
        if not (out / shard.file).is_file():
            raise ValueError(f"{out / shard.file} is missing: restore it, or {again}")
    before, now = index.classes, source.classes
    if before != now and (before is None or now is None or now[: len(before)] != before):
        raise ValueError(
            f"{path} has {_named(before)}, and {source.name} has {_named(now)}: give the same, or {again}"
        )
    listing = _listing(source)
    if listing == index.record.listing:
        return index
    logger.info(f"{source.name} is not as it was listed before: the {index.rows} rows that were encoded are compared")
    rows, first = ahead(row_digest, rows_of(source, 0, about), AHEAD), 0
    for part in index.record.parts:
        digests = list(islice(rows, part.rows))
        if _part(digests) != part:
            raise ValueError(
                f"{source.name} has changed since it was encoded: its rows {first + 1} to {first + part.rows} are not "
                f"those in {out}: restore them, or {again}"
            )
        first += part.rows
    kept = index.about | {"data": about["data"]}
    return replace(index, about=kept, classes=now, complete=False, record=replace(index.record, listing=listing))


def _named(classes: list[str] | None) -> str:
    """Classes in words."""
    return "classes without names" if classes is None else f"the classes {reprlib.repr(classes)}"


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
    index.shards.append(Shard(name, len(texts), _sha256(out / name)))
    return replace(index, shape=tuple(tokens.shape[2:]), num_classes=most)


def _part(digests: list[bytes]) -> Part:
    return Part(len(digests), hashlib.sha256(b"".join(digests)).hexdigest())


@torch.no_grad()
def _encode(
    losses: Losses, device: torch.device, rows: Iterator[Row], batch_size: int, about: dict[str, Any]
) -> tuple[torch.Tensor, list[str], Part | None]:
    """The tokens of views, in the smallest type that holds them, what belongs to each image, and the rows that were
    read, None if there were none."""
    views = count_views(about)
    count, texts, digests, done = max(1, batch_size // about.get("frames", 1)), [], [], 0
    tokens = torch.empty(0)
    while group := list(islice(rows, max(1, count // views))):
        digests += [row.digest for row in group]
        kept = [row.pixels for row in group if row.pixels is not None]
        for pixels in torch.cat(kept).split(count) if kept else ():
            found = losses.tokens(to_unit_range(pixels).to(device)).cpu()
            if not done:
                # One tensor for all: small ones among large ones keep the memory of those from being used again.
                dtype = torch.float16 if found.is_floating_point() else torch.int32
                tokens = torch.empty(about["shard_size"] * views, *found.shape[1:], dtype=dtype)
            tokens[done : done + len(found)] = found
            done += len(found)
        texts += [row.text for row in group if row.pixels is not None]
    return _narrow(tokens[:done]), texts, _part(digests) if digests else None


def _narrow(tokens: torch.Tensor) -> torch.Tensor:
    """Whole numbers in the smallest type that holds them."""
    if tokens.is_floating_point():
        return tokens
    most = int(tokens.max())
    return tokens.to(next(kind for kind in (torch.uint8, torch.uint16, torch.int32) if most <= torch.iinfo(kind).max))


def _packed(texts: list[str]) -> dict[str, torch.Tensor]:
    encoded = [text.encode() for text in texts]
    ends = torch.tensor([len(one) for one in encoded]).cumsum(0)
    return {"captions": torch.from_numpy(np.frombuffer(b"".join(encoded), dtype=np.uint8).copy()), "ends": ends}


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class TokenCache:
    """The tokens of a finished cache. Only the rows that are asked for are read from the disk, through memory maps.

    Args:
        folder: what `encode_tokens` wrote.

    Attributes:
        index: its `Index`.
        digest: a SHA-256 of all its contents.

    Raises:
        ValueError: if it is not finished, or a shard is missing, damaged or not as the index says.
    """

    def __init__(self, folder: Path):
        self.folder, self.index = folder, read_index(folder)
        if not self.index.complete:
            raise ValueError(f"{folder} is not finished: run `arimage train tokens` again, which resumes it")
        self._ends = np.cumsum([shard.count for shard in self.index.shards])
        self._starts = np.append(0, self._ends)
        self.views = count_views(self.index.about)
        self._open: dict[int, MappedShard] = {}
        # Of processes that train together one per machine reads all files.
        if first_of_machine():
            self._check_shards()
        self.digest = hashlib.sha256("".join(shard.sha256 for shard in self.index.shards).encode()).hexdigest()[:16]

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getstate__(self) -> dict:
        # Processes that load batches open the files themselves.
        return self.__dict__ | {"_open": {}}

    def read(
        self, images: list[int], views: list[int], variants: list[float] | None = None
    ) -> tuple[torch.Tensor, list[str]]:
        """The tokens [B, ...] of some images, each in one of its views, int64 or float32, and their captions, or the
        ids of their classes in digits. Of an image with several captions it is the first one, or that at the share
        `variants` [B], in [0, 1), of them."""
        places = np.asarray(images)
        numbers = np.searchsorted(self._ends, places, side="right")
        rows, opened = places - self._starts[numbers], self._open
        shards = [opened.get(number) or self._shard(number) for number in numbers.tolist()]
        if len({shard.size for shard in shards}) == 1:
            size = shards[0].size
            starts = (rows * self.views + views) * size
            bounds = zip(shards, starts.tolist(), (starts + size).tolist(), strict=True)
            content = b"".join([shard.content[start:end] for shard, start, end in bounds])
            found = np.frombuffer(content, shards[0].tokens.dtype).reshape(len(images), *self.index.shape)
        else:
            # Shards without large tokens are of a smaller type.
            found = np.stack([one.tokens[row, view] for one, row, view in zip(shards, rows, views, strict=True)])
        tokens = torch.from_numpy(found.astype(np.float32 if found.dtype.kind == "f" else np.int64))
        if self.index.labelled:
            return tokens, list(map(str, self.labels[places].tolist()))
        every = [shard.captions_of(row) for shard, row in zip(shards, rows.tolist(), strict=True)]
        shares = variants or [0.0] * len(every)
        return tokens, [those[int(share * len(those))] for those, share in zip(every, shares, strict=True)]

    @cached_property
    def labels(self) -> np.ndarray:
        """The class of each image, in the smallest type that holds it."""
        kind = np.min_scalar_type(self.index.num_classes)
        return np.concatenate([shard.labels.astype(kind) for shard in self.shards()])

    def captions(self) -> Iterator[str]:
        """All captions of all images."""
        for shard in self.shards():
            for row in range(len(shard.tokens)):
                yield from shard.captions_of(row)

    def shards(self) -> Iterator["MappedShard"]:
        """All shards, which are not kept open."""
        return map(self._mapped, range(len(self.index.shards)))

    def _shard(self, number: int) -> "MappedShard":
        if number not in self._open:
            if len(self._open) == OPEN:
                del self._open[next(iter(self._open))]
            self._open[number] = self._mapped(number)
        return self._open[number]

    def _mapped(self, number: int) -> "MappedShard":
        shard = self.index.shards[number]
        path = self.folder / shard.file
        try:
            with safe_open(path, "pt") as file:
                arrays = {name: file.get_tensor(name).numpy() for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{path} cannot be read ({error}): {REMEDY}") from error
        expected = {"tokens": (shard.count, self.views, *self.index.shape)}
        if self.index.labelled:
            expected["labels"] = (shard.count,)
        else:
            expected |= {"ends": (shard.count,), "captions": arrays.get("captions", NONE).shape}
        if (found := {name: array.shape for name, array in arrays.items()}) != expected:
            raise ValueError(f"{path} holds {found}, and {INDEX} says {expected}: {REMEDY}")
        return MappedShard(**arrays)

    def _check_shards(self) -> None:
        """Refuse shards that are not as the index says. Those whose size and time are as they were when all was well
        are not read."""
        before, known, now = self.folder / CHECKED, {}, {}
        if before.is_file():
            known = check(Checked, parse_json(before.read_bytes(), before, "delete it"), before)
        for number, shard in enumerate(self.index.shards):
            path = self.folder / shard.file
            if not path.is_file():
                raise ValueError(f"{path} is missing: {REMEDY}")
            state = path.stat()
            now[shard.file] = (state.st_size, state.st_mtime_ns, shard.sha256, self.index.num_classes)
            if known.get(shard.file) == now[shard.file]:
                continue
            if _sha256(path) != shard.sha256:
                raise ValueError(f"{path} is damaged: {REMEDY}")
            labels = self._mapped(number).labels
            if len(labels) and not 0 <= labels.min() <= labels.max() < self.index.num_classes:
                raise ValueError(
                    f"{path} has the class {labels.max()}, and {INDEX} says that there are {self.index.num_classes}: "
                    f"{REMEDY}"
                )
        if now != known and os.access(self.folder, os.W_OK):
            write_json(before, now)


class MappedShard:
    """The arrays of a shard, which are mapped, not read: `tokens` [n, V, ...], and the `labels` or captions of its
    images. Memory views give single rows in a fraction of the time of arrays."""

    # Of thousands of shards a batch reads each once: slots are found faster.
    __slots__ = "_captions", "_ends", "content", "labels", "size", "tokens"

    def __init__(
        self, tokens: np.ndarray, labels: np.ndarray = NONE, captions: np.ndarray = NONE, ends: np.ndarray = NONE
    ):
        self.tokens, self.size, self.labels = tokens, tokens[0, 0].nbytes, labels
        self.content = memoryview(tokens).cast("B")
        self._captions, self._ends = memoryview(captions), memoryview(ends)

    def captions_of(self, row: int) -> list[str]:
        ends = self._ends
        return str(self._captions[ends[row - 1] if row else 0 : ends[row]], "utf-8").split(SEPARATOR)
