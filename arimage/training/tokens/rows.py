"""Rows of a data set as the views that are encoded, decoded ahead in threads."""

import hashlib
import logging
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from PIL import Image

from ...settings.schema import check
from ..data.row import SEPARATOR, Source, content_of, decode, decode_clip
from .augmentation import Augmentation
from .views import count_views, views_of


# Images in at most ten views, or frames of clips, that are decoded ahead.
AHEAD = 64

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Row(NamedTuple):
    """The views [V, 3, (T,) H, W] of an image or clip, None for one that is too short, what belongs to it, and a
    digest of its file and that."""

    pixels: torch.Tensor | None
    text: str
    digest: bytes


def digest_of(content: Path | bytes, text: str) -> bytes:
    if isinstance(content, bytes):
        found = hashlib.sha256(content)
    else:
        with open(content, "rb") as file:
            found = hashlib.file_digest(file, "sha256")
    return hashlib.sha256(found.digest() + text.encode()).digest()


def row_digest(where: str, file: Any, text: str) -> bytes:
    return digest_of(content_of(file), text)


def rows_of(source: Source, start: int, about: dict[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """The rows of a data set from row `start` on."""
    limit = about["limit"]
    return islice(source.read(start), None if limit is None else max(limit - start, 0))


def decoded_rows(source: Source, start: int, about: dict[str, Any]) -> Iterator[Row]:
    """The images or clips from row `start` on, decoded ahead in threads."""
    size, views, count = tuple(about["image_size"]), about["views"], about.get("frames")
    augmentation = check(Augmentation, about["augmentation"], "augmentation") if "augmentation" in about else None

    def viewed(frames: list[Image.Image], text: str, digest: bytes) -> torch.Tensor:
        """The views [V, 3, T, H, W] of the frames of a clip, or of an image."""
        if augmentation is None:
            return torch.stack([views_of(frame, size, views) for frame in frames], 2)
        texts = [source.classes[int(text)]] if source.labelled and source.classes else text.split(SEPARATOR)
        middles = torch.cat([views_of(frame, size, "centre") for frame in frames])
        number = int.from_bytes(digest[:8])
        return augmentation.copies_of(middles, augmentation.may_mirror(texts), number).transpose(1, 2)

    def decoded(where: str, file: Any, text: str) -> Row:
        content = content_of(file)
        if count is None:
            # Read once, so that the digest is that of what is encoded.
            content = content if isinstance(content, bytes) else content.read_bytes()
            image, found = decode(where, {"bytes": content, "path": None}), digest_of(content, text)
            return Row(viewed([image], text, found).squeeze(2), text, found)
        frames, found = decode_clip(where, file, count, about["fps"]), digest_of(content, text)
        if len(frames) < count:
            logger.warning(f"{where}, has {len(frames)} frames of {about['fps']} per second, not {count}: left out")
            return Row(None, text, found)
        return Row(viewed(frames, text, found), text, found)

    return ahead(decoded, rows_of(source, start, about), AHEAD // (count or 1) * 10 // max(10, count_views(about)))


def ahead(work: Callable[..., T], rows: Iterator[tuple[str, Any, str]], count: int) -> Iterator[T]:
    """What `work` makes of each row, in their order, `count` of them ahead in threads."""
    waiting: deque[Future[T]] = deque()
    with ThreadPoolExecutor() as threads:
        try:
            for row in rows:
                waiting.append(threads.submit(work, *row))
                if len(waiting) > count:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for one in waiting:
                one.cancel()
