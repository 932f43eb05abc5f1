"""How images enter a batch, and what they must have in common with those before them."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

import torch
from torch import nn

from .distribution import Sampling
from .models import Model


@dataclass
class Admission:
    """How the images of a `DecodingState` are replaced by others, from what the state declares about its fields. A
    field that holds no tensor is the model, the sampling settings, or in `caches` or one of the three after it.

    Attributes:
        model, sampling, seeds: see `DecodingState`.
        refillable: whether finished images may be replaced by others while the rest goes on, see `put`.
        image_dims: the batch dimension of those tensors where it is not the first.
        shared: the tensors that all images share, which have no batch dimension.
        caches: the fields that hold caches; None where there is none.
        structure: the values that steps are made for, hashable: images may use a state one after another only if these
            are equal.
        renewed: the values that further images bring with them, see `restart`.
        settled: the values that follow from the decoding and the network, or that `put` of the class takes care of.
    """

    model: Model
    sampling: Sampling
    seeds: torch.LongTensor

    refillable: ClassVar[bool] = True
    image_dims: ClassVar[dict[str, int]] = {"accepted": 1}
    shared: ClassVar[frozenset[str]] = frozenset()
    caches: ClassVar[tuple[str, ...]] = ("cache",)
    structure: ClassVar[frozenset[str]] = frozenset()
    renewed: ClassVar[frozenset[str]] = frozenset()
    settled: ClassVar[frozenset[str]] = frozenset()

    def starter(self, decoding: Any) -> Any:
        """The decoding to `start` further images with, so that they can be `put` into this state, which `decoding`
        opened."""
        return decoding

    def put(self, images: torch.LongTensor, other: Self) -> bool:
        """Replace the `images` [M] with the images of `other`, a state of M images that the same decoding has
        started with the same network. Everything is written in place. Returns True if prompts or sampling settings did
        not fit, so that captured steps no longer apply.

        Raises:
            ValueError: if the images have settings that cannot be in one batch with these.
        """
        sampling, self.sampling = self.sampling, self.sampling.join(images, other.sampling, len(self.seeds))
        for name in self.caches:
            theirs = getattr(other, name)
            if theirs is None:
                setattr(self, name, None)
            else:
                getattr(self, name).put(images, theirs)
        for name, dim, values in self.per_image():
            theirs = getattr(other, name)
            if dim == 0 and values.ndim > 1:
                # The states may have different numbers of spare columns.
                values = values[:, : theirs.shape[1]]
            values.index_copy_(dim, images, theirs)
        for name in self.shared:
            getattr(self, name).copy_(getattr(other, name))
        # Two calls of `decode` may have one model.
        replaced = self.model is not other.model and self.model.put(images, other.model)  # pyright: ignore[reportArgumentType] of the same kind
        return replaced or self.sampling is not sampling

    def restart(self, images: torch.LongTensor, other: Self) -> bool:
        """`put` into a state whose images are all finished."""
        for name in self.renewed:
            setattr(self, name, getattr(other, name))
        return self.put(images, other)

    def select(self, images: torch.LongTensor) -> None:
        """Make image j the former image `images[j]`, [M], to drop images or to make room for others."""
        for name, dim, values in list(self.per_image()):
            setattr(self, name, values.index_select(dim, images))
        self.model, self.sampling = self.model.take(images), self.sampling.take(images)
        for cache in self._caches():
            cache.expand(images)

    def allocate(self) -> None:
        """Allocate what steps need; see `ImageCache`."""
        for cache in self._caches():
            cache.allocate()

    @property
    def nbytes(self) -> int:
        """The memory that the state holds: its tensors, those of its caches and of its sampling settings, and the
        conditions of its images."""
        return held_bytes(self)

    @property
    def shapes(self) -> tuple:
        """The shapes of its tensors, but for the number of images, and their dtypes."""
        return tuple(
            (name, values.dtype, values.shape[:dim], values.shape[dim + 1 :]) for name, dim, values in self.per_image()
        )

    def per_image(self) -> Iterator[tuple[str, int, torch.Tensor]]:
        """The tensors with a batch dimension: name, batch dimension, tensor."""
        for item in fields(self):
            values = getattr(self, item.name)
            if isinstance(values, torch.Tensor) and item.name not in self.shared:
                yield item.name, self.image_dims.get(item.name, 0), values

    def _caches(self) -> list[Any]:
        return [cache for name in self.caches if (cache := getattr(self, name)) is not None]


def held_tensors(*values: Any) -> list[torch.Tensor]:
    """All tensors in these objects, their attributes and containers. The weights of networks belong to others."""
    waiting, seen, found = list(values), set(), []
    while waiting:
        value = waiting.pop()
        if id(value) in seen or isinstance(value, nn.Module | type):
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, list | tuple):
            waiting += value
        else:
            waiting += getattr(value, "__dict__", {}).values()
    return found


def held_bytes(*values: Any) -> int:
    """The memory of `held_tensors`, each storage once."""
    storages = (each.untyped_storage() for each in held_tensors(*values))
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())
