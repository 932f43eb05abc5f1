"""The language model of GLM-Image, `GlmImageForConditionalGeneration` of transformers, with the prompts of one call.

It generates a small grid of tokens before the image, or the image alone if the prompt has references. Tokens have
positions on three axes: time, row and column.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from transformers import GlmImageForConditionalGeneration

from ...models.compiled import compiled_like
from ...models.language_heads import CodeHead
from ...models.language_model import LanguageTokenModel


Grid = tuple[int, int]


def grids_of(size: tuple[int, int]) -> tuple[Grid, Grid]:
    """Rows and columns of the large and of the small grid of an image of `size` (height, width), multiples of 32
    pixels."""
    ratio = size[0] / size[1]
    return (size[0] // 32, size[1] // 32), (int(math.sqrt(ratio) * 16), int(math.sqrt(1 / ratio) * 16))


def _within(grid: Grid) -> torch.LongTensor:
    """The positions [3, rows * columns] of the tokens of a grid, from that of its first one."""
    place = torch.arange(grid[0] * grid[1])
    return torch.stack([torch.zeros_like(place), place // grid[1], place % grid[1]])


def prompt_positions(
    input_ids: torch.LongTensor, attention_mask: torch.Tensor, sources: Sequence[Grid], image_token: int
) -> torch.LongTensor:
    """The positions [B, 3, P] of the tokens of prompts.

    A text token has the same position on all axes. The tokens of a reference that begins at p are at
    (p, p + row, p + column), and the text goes on at p + max(rows, columns). Padding is at 1.

    Args:
        input_ids, attention_mask: [B, P], padded on the left.
        sources: the grids of all references, prompt after prompt, whose tokens are `image_token`.
    """
    there, pictured = attention_mask.bool(), input_ids == image_token
    within, taken = torch.zeros(3, *input_ids.shape, dtype=torch.long), there.long()
    if sources:
        within[:, pictured] = torch.cat([_within(grid) for grid in sources], dim=1)
        taken[pictured] = torch.cat([F.pad(torch.tensor([max(grid)]), (math.prod(grid) - 1, 0)) for grid in sources])
    return (taken.cumsum(1) - taken + within).masked_fill(~there, 1).transpose(0, 1)


def token_positions(grids: Sequence[Grid]) -> torch.LongTensor:
    """The positions [3, N] of the tokens of grids that are generated one after the other, from that of the first
    token."""
    parts, first = [], 0
    for grid in grids:
        parts.append(first + _within(grid))
        first += max(grid)
    return torch.cat(parts, dim=1)


@torch.no_grad()
def source_codes(
    encoder: GlmImageForConditionalGeneration, pixels: torch.Tensor, grids: Sequence[Grid]
) -> list[torch.LongTensor]:
    """The tokens [rows * columns] of references with these grids. `pixels` are the patches of all of them, one after
    the other, as `GlmImageProcessor` returns them."""
    shapes = torch.tensor([(1, *grid) for grid in grids], device=pixels.device)
    # A list: in a tensor, as diffusers makes it, references of one size only would fit, with their channels mixed up.
    features = encoder.get_image_features(pixels, shapes, return_dict=True).pooler_output
    return list(encoder.get_image_tokens(features).split([math.prod(grid) for grid in grids]))


def bind_prompts(
    encoder: GlmImageForConditionalGeneration,
    input_ids: torch.LongTensor,
    attention_mask: torch.Tensor,
    sources: Sequence[Grid],
    codes: Sequence[torch.LongTensor],
    layout,
    device: torch.device,
) -> LanguageTokenModel:
    """The `TokenModel` of prompts, without guidance.

    Its tokens are the codes of the image tokenizer. The head also has logits of special tokens, which `generate` of
    transformers may sample in the middle of an image: here the distribution is the model's own, given that this does
    not happen. Only the decoder is called, since the forward pass of `encoder` keeps positions of a call on itself.

    Args:
        encoder: the language model, or what `torch.compile` made of it.
        input_ids, attention_mask: int64 [B, P], padded on the left, on the CPU.
        sources, codes: the grids of all references, prompt after prompt, and their `source_codes`.
        layout: the `Layout` of the image, with the small grid before it if there are no references.
        device: the device of the model.
    """
    config, parts = encoder.config, encoder.model
    ids = input_ids.to(device)
    if codes:
        ids = ids.masked_scatter(ids == config.image_token_id, torch.cat(list(codes)))
    vectors, count = parts.vqmodel.quantize.embedding, config.vq_config.num_embeddings
    return LanguageTokenModel(
        compiled_like(encoder, parts.language_model),
        embed=parts.language_model.get_input_embeddings(),
        head=CodeHead(encoder.lm_head, 0, count),
        layout=layout,
        input_ids=ids,
        attention_mask=attention_mask,
        prompt_positions=prompt_positions(input_ids, attention_mask, sources, config.image_token_id),
        token_positions=token_positions(layout.grids),
        codebook=F.normalize(vectors(torch.arange(count, device=device)).float(), dim=-1).to(device),
        network=encoder,
    )
