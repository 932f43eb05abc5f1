"""A token model small enough to enumerate, which every decoding is compared with."""

import copy
import math
from functools import cache

import pytest
import tiny
import torch
from pipelines.infinity import tiny as tiny_infinity
from pipelines.var import tiny as tiny_var

from arimage.decoding import Layout
from arimage.decoding.contract.cache import Cache
from arimage.models.conditions import with_unconditional
from arimage.pipelines.infinity.scale_model import InfinityScaleModel
from arimage.pipelines.infinity.schedules import SCHEDULES
from arimage.pipelines.var.transformer_var import VARScaleModel


class TokenCache(Cache):
    """The tokens that were fed, their positions and a number of their noise (0 is none), by slot [B, S + 1]; -1 was
    never written. The last slot takes what is to be thrown away."""

    def __init__(self, batch_size, slots):
        self.tokens, self.positions, self.noise = (torch.full((batch_size, slots + 1), -1) for _ in range(3))

    def move(self, source, target):
        """Copy the slots `source` [B, M] to `target` [B, M]; a target of -1 copies nowhere."""
        for values in (self.tokens, self.positions, self.noise):
            values.scatter_(1, target % values.shape[1], values.gather(1, source))

    def likeness(self, slots):
        """How many of `slots` [B, M] hold the same token."""
        tokens = self.tokens.gather(1, slots)
        return (tokens[..., None] == tokens[:, None]).sum(2).float()

    def expand(self, images):
        self.tokens, self.positions, self.noise = self.tokens[images], self.positions[images], self.noise[images]

    def put(self, images, other):
        self.tokens[images], self.positions[images], self.noise[images] = other.tokens, other.positions, other.noise


@cache
def tables_of(num_tokens, vocab_size, branches, sharpness, seed, block):
    """The table of each rank, and their rows one after the other; not to be written."""
    generator = torch.Generator().manual_seed(seed)
    tables = [
        -sharpness
        * torch.empty(branches, vocab_size ** (n - n % block), vocab_size).exponential_(generator=generator).log()
        for n in range(num_tokens)
    ]
    return tables, torch.cat(tables, dim=1)


class TableModel:
    """A `TokenModel` whose every conditional distribution of V tokens at N ranks is a row of a random table.

    A query sees the tokens that lie in the cache. The model refuses to read a slot that was never written, and to see
    anything but one token for each rank before. The logits of padding are NaN, or `padding`.

    Args:
        grid: (rows, columns) or (frames, rows, columns).
        branches: 2 adds a second, independent table: the logits without the condition.
        sharpness: the logits are Gumbel noise times this; 1.2 gives distributions that differ much from prefix to
            prefix.
        truncated: whether a query may see fewer tokens; token 0 stands in for the others.
        order: the place of each rank [B, N], see `Layout`. The tables are by rank, so the joint distribution is that
            of the raster order.
        before: the grids that are generated before an image, see `Layout`. The tables are by rank.
        context: tokens [B, rows * columns] of the frame before the first, which drafts may copy; no distribution
            depends on them.
        block: how many ranks are predicted together. The model refuses to be fed a part of a block.

    The features of a position tell the tokens up to it from all others. A `TableDrafter` is its drafter. A query that
    sees noise has the distribution of other tokens, which depends on all noisy vectors and levels that it sees.
    """

    kind = "tokens"
    predicts_groups = False
    put_key = None

    device = torch.device("cpu")
    denoises = True

    def __init__(
        self,
        grid=(2, 2),
        vocab_size=3,
        branches=1,
        sharpness=1.2,
        seed=1,
        padding=float("nan"),
        truncated=False,
        order=None,
        before=(),
        context=None,
        block=1,
    ):
        self.layout, self.vocab_size = Layout(grid, order, before), vocab_size
        self.branches, self.padding = branches, padding
        self.truncated, self.context, self.block = truncated, context, block
        self.num_tokens = self.layout.num_tokens
        self.forward_passes = 0
        self.network = self
        # Tokens on a line: the nearest of a token are those next to it.
        self.codebook = torch.arange(vocab_size)[:, None].float()
        self.tables, self._rows = tables_of(self.num_tokens, vocab_size, branches, sharpness, seed, block)
        self._first_row = torch.tensor([0, *(table.shape[1] for table in self.tables[:-1])]).cumsum(0)

    @property
    def drafter(self):
        return TableDrafter(self)

    @property
    def neighbours(self):
        return TableNeighbours(self)

    def prefill(self, batch_size, scratch=0, given=None, return_features=False, slots=None):
        self.forward_passes += 1
        cache = TokenCache(batch_size, (slots or self.num_tokens) + scratch)
        logits = torch.stack(self.tables[: self.block], dim=2).expand(-1, batch_size, -1, -1)
        logits = logits[:, :, 0] if self.block == 1 else logits
        if given is not None:
            assert self.layout.order is not None
            ranks, known = torch.arange(given.shape[1]).expand_as(given), (given >= 0).sum(1)
            after = self.forward(given, torch.where(given < 0, -1, ranks), cache)
            # It is the same forward pass.
            self.forward_passes -= 1
            last = after[:, torch.arange(batch_size), (known - 1).clamp(min=0)]
            logits = torch.where(known[:, None] > 0, last, logits)
        outputs = cache, logits
        none = torch.full((batch_size, 1), -1)
        return (*outputs, self.features(none, 0)[:, :, 0]) if return_features else outputs

    def features(self, positions, index):
        """[G, B, Q, 1] of the tokens up to `positions` [B, Q], the number `index` of all such tokens; -1 is none of
        them."""
        first = (self.vocab_size ** (positions + 1) - 1) // (self.vocab_size - 1)
        return torch.stack([first + index + branch / 2 for branch in range(self.branches)])[..., None]

    def forward(
        self,
        tokens,
        positions,
        cache,
        *,
        visible=None,
        slots=None,
        return_features=False,
        vectors=None,
        noise=None,
    ):
        self.forward_passes += 1
        live = positions >= 0
        if slots is None and self.block == 1:
            start = positions.masked_fill(~live, self.num_tokens).amin(1)
            assert (positions.amax(1) < start + positions.shape[1]).all(), "queries are too far apart"
        slots = positions if slots is None else slots
        assert (positions < self.num_tokens).all() and (tokens[live] < self.vocab_size).all()
        # What is seen of its block is all of it.
        end = positions - positions % self.block + self.block - 1
        if self.block > 1:
            together = (end[..., None] == end[:, None]) & live[:, None]
            assert (together.sum(2) == self.block)[live].all(), "a part of a block is fed"
        # Token 0 stands in for a token that is not known yet.
        dump = cache.tokens.shape[1] - 1
        cache.tokens.scatter_(1, torch.where(live, slots, dump), tokens.clamp(min=0))
        cache.positions.scatter_(1, torch.where(live, slots, dump), positions)
        noise_number = torch.zeros_like(tokens)
        if noise is not None:
            assert vectors.shape == (*tokens.shape, self.codebook.shape[1]) and ((noise >= 0) & (noise <= 1)).all()
            noise_number = torch.where(noise > 0, 1 + (100 * vectors[..., 0].abs() + 10 * noise).long(), 0)
        cache.noise.scatter_(1, torch.where(live, slots, dump), noise_number)
        fed, fed_at = cache.tokens[:, None, :dump], cache.positions[:, None, :dump]
        if visible is None:
            visible = (torch.arange(dump) <= end[..., None]).expand(*positions.shape, dump)
        visible = visible & live[..., None]
        assert not (visible & (fed < 0)).any(), "a slot is read that was never written"
        assert not (visible & (fed_at > end[..., None])).any(), "a query sees what comes after it"
        place = fed_at.clamp(min=0).expand_as(visible)
        seen, times = torch.zeros(2, *positions.shape, self.num_tokens, dtype=torch.long)
        seen.scatter_add_(2, place, fed * visible)
        times.scatter_add_(2, place, visible.long())
        assert (times <= 1).all(), "a query sees two tokens for one position"
        assert self.truncated or (times.sum(2) == end + 1)[live].all(), "a table needs every token before"
        distance = end[..., None] - torch.arange(self.num_tokens)
        index = (seen * self.vocab_size ** distance.clamp(min=0)).sum(2)
        # The last block has none after it: its logits mean nothing either.
        live = live & (positions < self.num_tokens - self.block)
        after = (positions + self.block).clamp(max=self.num_tokens - 1)
        rows = torch.where(live, self._first_row[after] + index, 0)
        noise_number = (cache.noise[:, None, :dump] * visible).sum(2)
        rows = torch.where(noise_number > 0, (rows + 7 * noise_number) % self._rows.shape[1], rows)
        logits = self._rows[:, rows].masked_fill(~live[..., None], self.padding)
        return (logits, self.features(positions, index)) if return_features else logits

    def take(self, images):
        other = copy.copy(self)
        other.layout = self.layout.take(images)
        other.context = None if self.context is None else self.context[images]
        return other

    def put(self, images, other):
        if self.context is not None:
            self.context[images] = other.context
        self.layout.put(images, other.layout)
        return False

    def joint(self, sampling):
        """Probabilities [V ** N] of all images under `sampling`, the first token varying slowest."""
        return self.joint_given(sampling, [-1] * self.num_tokens)

    def joint_given(self, sampling, forced):
        """Probabilities [V ** N] of all images where each token of `forced` [N] is given (-1 is free) and each other
        follows its distribution given the tokens before it."""
        joint = torch.ones(1, dtype=torch.float64)
        for position, (table, token) in enumerate(zip(self.tables, forced, strict=True)):
            rows = sampling.probabilities(table[:, None], torch.full((1, table.shape[1]), position))[0].double()
            # Whatever the tokens of its own block are.
            rows = rows.repeat_interleave(self.vocab_size ** (position % self.block), 0)
            if token >= 0:
                rows = torch.nn.functional.one_hot(torch.tensor(token), self.vocab_size).expand_as(rows)
            joint = (joint[:, None] * rows / rows.sum(-1, keepdim=True)).flatten()
        return joint


class TableDrafter:
    """A drafter with tables of its own, which differ from the model's. It refuses features other than those of the
    tokens before."""

    def __init__(self, model):
        layout = model.layout
        sizes = {
            "grid": layout.shape,
            "before": layout.before,
            "vocab_size": model.vocab_size,
            "branches": model.branches,
        }
        self.table = TableModel(**sizes, seed=2, padding=model.padding)

    def bind(self, model):
        return self

    def open_cache(self, batch_size, scratch):
        return TokenCache(batch_size, self.table.num_tokens + scratch)

    def forward(self, tokens, features, positions, cache, *, visible=None, slots=None):
        table = self.table
        logits, after = table.forward(tokens, positions, cache, visible=visible, slots=slots, return_features=True)
        index = (after - table.features(positions, 0))[0, ..., 0].long() // table.vocab_size
        expected = table.features(positions - 1, index)
        assert (features == expected)[:, positions >= 0].all(), "these are not the features of the tokens before"
        return logits, after


class TableNeighbours:
    """Random changes of logits, as large as the differences between the model's own, which also depend on the
    features. In raster order, one of the neighbours is generated later."""

    offsets = ((0, -1), (-1, 0), (0, 1))
    reads_features = True

    def __init__(self, model):
        size, generator = model.vocab_size, torch.Generator().manual_seed(5)
        self.table = 1.5 * torch.randn(len(self.offsets), size + 1, size, generator=generator)
        self.of_features = torch.randn(101, size, generator=generator)

    def change(self, now, before, features):
        which = torch.arange(len(self.offsets))
        change = (self.table[which, now] - self.table[which, before]).sum(-2)
        return change + self.of_features[(2 * features[..., 0]).long() % 101]


def some_order(name, shape, batch_size):
    """An order [B, N]: "raster", "random" (another for each image) or "spread-out" (every third place first); "none"
    is None."""
    size = math.prod(shape)
    if name == "none":
        return None
    if name == "random":
        return torch.rand(batch_size, size, generator=torch.Generator().manual_seed(3)).argsort(dim=1)
    order = torch.arange(size)
    if name == "spread-out":
        order = torch.cat([order[first::3] for first in range(3)])
    return order.expand(batch_size, -1)


@pytest.fixture(scope="session")
def table_model():
    """`table_model(grid=..., vocab_size=..., groups=..., ...)` makes a `TableModel`."""
    return TableModel


def scale_condition(kind, count=3):
    """Of `count` classes, or texts of different length."""
    if kind == "class":
        return {"class_labels": torch.tensor([1, 7, 3, 2])[torch.arange(count) % 4]}
    embeds = torch.randn(count, tiny.TEXT_LENGTH, tiny.TEXT_WIDTH, generator=torch.Generator().manual_seed(0))
    mask = torch.arange(tiny.TEXT_LENGTH) < torch.tensor([3, 12, 1, 7])[torch.arange(count) % 4, None]
    return {"prompt_embeds": embeds, "prompt_attention_mask": mask.long()}


def scale_models(kind):
    """`bind(rows, guided=True, dtype=...)`: a VAR of classes ("class") or texts ("text") or an Infinity ("bits") of
    random weights, bound to some of three conditions."""
    if kind == "bits":
        parts = tiny_infinity.transformer(), tiny_infinity.tokenizer()
    else:
        parts = tiny_var.transformer(kind), tiny.scale_tokenizer()

    def bind(rows, guided=True, dtype=torch.float32, **settings):
        parts[0].to(dtype)
        some = {name: value[rows] for name, value in scale_condition(kind).items()}
        if kind != "bits":
            return VARScaleModel(*parts, some, guided=guided, **settings)
        some = with_unconditional(some, kept=("prompt_attention_mask",)) if guided else some
        return InfinityScaleModel(*parts, some, SCHEDULES[16, 16], guided=guided, **settings)

    return bind
