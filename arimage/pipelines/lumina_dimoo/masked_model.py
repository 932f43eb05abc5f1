"""A `LuminaDiMOOTransformer` with the prompts of one call, as a `MaskedTokenModel`."""

from collections.abc import Hashable, Sequence
from typing import ClassVar, Literal

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from ...models.bound import BoundNetwork
from ...models.conditions import Conditions, check_raster
from ...models.layer_cache import MaskedContext
from .vocabulary import END_OF_ANSWER, END_OF_IMAGE, FIRST_CODE, MASK, ROW_END


class LuminaDiMOOModel(BoundNetwork):
    """A `LuminaDiMOOTransformer` with the prompts of one call, as a `MaskedTokenModel` (see
    `arimage.decoding.contract.models`).

    Its rows are the places of the image, then the tokens between and after its rows, then the ids before it, which are
    fewer in some images and branches than in others. The context has the logits of each branch, before any guidance.

    Args:
        transformer: the `LuminaDiMOOTransformer`, or what `torch.compile` made of it. Every forward pass calls it.
        branches: for each branch the ids [P] before the first place of each image: conditional, without a prompt if
            that is needed, and without pictures if `image_guidance_scale` is above 1.
        layout: the `Layout` of the tokens.
        published: the `ConfidenceSettings` that the authors sample by.
        codebook: see `BoundNetwork`.
        image_guidance_scale: s' in c + (s - 1) (c - u) + (s' - 1) (c - w), with the logits w of the last branch and
            the guidance scale s; 1 without that branch.
    """

    kind: ClassVar[Literal["masked_tokens"]] = "masked_tokens"
    reads_values = True

    def __init__(
        self,
        transformer: nn.Module,
        branches: Sequence[Sequence[torch.LongTensor]],
        layout,
        published,
        *,
        codebook: torch.Tensor | None = None,
        image_guidance_scale: float = 1.0,
    ):
        check_raster(layout, "Lumina-DiMOO")
        prefixes = [ids for branch in branches for ids in branch]
        ids, lengths = pad_sequence(prefixes, batch_first=True), torch.tensor([len(prefix) for prefix in prefixes])
        device = ids.device
        height, width = layout.shape
        self.layout, self.published, self.num_tokens = layout, published, height * width
        image = self.num_tokens + height + 2
        # On a GPU, attention copies a mask in every layer unless its rows begin at multiples of 16.
        ids = nn.functional.pad(ids, (0, -(image + ids.shape[1]) % 16))
        values = {"prefix_ids": ids, "prefix_lengths": lengths.to(device)}
        super().__init__(transformer, Conditions(values, len(branches)), codebook)
        self.vocab_size, self.num_rows = transformer.config.num_codes, image + ids.shape[1]
        self.image_guidance_scale = image_guidance_scale
        # Where the rows of an image are in its part of the sequence.
        grid = torch.arange(height * (width + 1), device=device).view(height, width + 1)
        ends = grid.numel() + torch.arange(2, device=device)
        self._offsets = torch.cat([grid[:, :-1].flatten(), grid[:, -1], ends])
        self._marks = torch.tensor([*[ROW_END] * height, END_OF_IMAGE, END_OF_ANSWER], device=device)

    @property
    def put_key(self) -> Hashable:
        return super().put_key, self.image_guidance_scale

    def open_context(self, batch_size: int, *, logits: bool = False) -> MaskedContext:
        """See `MaskedTokenModel.open_context`."""
        return MaskedContext.of(self, batch_size, self.num_rows if logits else None)

    def forward(
        self,
        tokens: torch.LongTensor,
        places: torch.LongTensor,
        *,
        rows: torch.LongTensor | None = None,
        context: MaskedContext | None = None,
    ) -> torch.Tensor:
        """Logits [G, B, Q, V]; see `MaskedTokenModel.forward`. They are float32 where three branches become two."""
        ids, positions, there = self._rows_of(tokens)
        at, last = places.clamp(max=self.num_tokens - 1).repeat(self.branches, 1), self.num_rows
        fed = None
        if rows is not None:
            assert context is not None
            fed = rows.flatten(0, 1) if rows.ndim == 3 else rows.repeat(self.branches, 1)
            inside = fed.clamp(max=last - 1)
            ids, positions = ids.gather(1, inside), positions.gather(1, inside)
            context.write_at(fed, last)
        elif context is not None:
            context.write_all()
        if context is not None and context.logits is not None:
            logits = self.network(ids, positions, there, cache=context)
            if rows is None:
                # Never among the lowest.
                logits = logits.masked_fill(~there[..., None], torch.inf)
            kept = context.write_logits(logits)
            logits = kept.gather(1, at[..., None].expand(-1, -1, self.vocab_size))
        else:
            if fed is not None:
                index = torch.arange(fed.shape[1], device=fed.device).expand_as(fed)
                at = fed.new_zeros(len(fed), last + 1).scatter(1, fed, index).gather(1, at)
            logits = self.network(ids, positions, there, at=at, cache=context)
        return self._guided(logits.unflatten(0, (self.branches, -1)))

    def _rows_of(self, tokens: torch.LongTensor) -> tuple[torch.LongTensor, torch.LongTensor, torch.BoolTensor]:
        """Ids and positions of all rows, and which of them there are, [branches * B, num_rows] each."""
        prefix, lengths = self.condition["prefix_ids"], self.condition["prefix_lengths"][:, None]
        codes = torch.where(tokens < 0, MASK, FIRST_CODE + tokens).repeat(self.branches, 1)
        before = torch.arange(prefix.shape[1], device=prefix.device)
        ids = torch.cat([codes, self._marks.expand(len(prefix), -1), prefix], dim=1)
        positions = torch.cat([lengths + self._offsets, before.expand(len(prefix), -1)], dim=1)
        there = torch.ones(len(prefix), len(self._offsets), dtype=torch.bool, device=prefix.device)
        return ids, positions, torch.cat([there, before < lengths], dim=1)

    def _guided(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits [branches, B, Q, V] as those of at most two branches, whose guidance that of the pictures adds
        to."""
        if self.image_guidance_scale == 1:
            return logits
        *branches, without = logits.float().unbind(0)
        change = (self.image_guidance_scale - 1) * (branches[0] - without)
        return torch.stack([branch + change for branch in branches])
