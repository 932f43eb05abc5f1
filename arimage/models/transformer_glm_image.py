"""The language model of GLM-Image: its prompts, which may hold pictures, and the positions of its tokens."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from transformers import GlmImageForConditionalGeneration

from .compiled import compiled_like
from .language_model import LanguageTokenModel, code_head


Grid = tuple[int, int]


def grids_of(size: tuple[int, int]) -> tuple[Grid, Grid]:
    """The large and the small grid of an image of `size` (height, width), multiples of 32 pixels."""
    rows, columns = size[0] // 32, size[1] // 32
    small = int(math.sqrt(rows / columns) * 16), int(math.sqrt(1 / (rows / columns)) * 16)
    return (rows, columns), small


def source_codes(
    encoder: GlmImageForConditionalGeneration, pixels: torch.Tensor, grids: Sequence[Grid]
) -> list[torch.LongTensor]:
    """The tokens [rows * columns] of pictures, of which `pixels` are the patches, one after the other."""
    shapes = torch.tensor([(1, *grid) for grid in grids], device=pixels.device)
    features = encoder.get_image_features(pixels, shapes).pooler_output
    codes = encoder.get_image_tokens(features, shapes).flatten()
    return list(codes.split([rows * columns for rows, columns in grids]))


def prompt_positions(
    input_ids: torch.LongTensor, mask: torch.Tensor, sources: Sequence[Sequence[Grid]], image_token: int
) -> torch.LongTensor:
    """The positions [B, 3, P] of the tokens of prompts: time, row and column.

    A text token has one number on all axes. A picture that begins at p has its tokens at (p, p + row, p + column),
    and the text goes on at p + max(rows, columns). Padding is 1.

    Args:
        input_ids, mask: [B, P], padded on the left.
        sources: the grids of the pictures of each prompt, whose tokens are `image_token`.
    """
    positions = torch.ones(len(input_ids), 3, input_ids.shape[1], dtype=torch.long)
    for row, (ids, seen, grids) in enumerate(zip(input_ids.tolist(), mask.tolist(), sources, strict=True)):
        place, at, waiting = len(seen) - sum(seen), 0, list(grids)
        while place < len(ids):
            if ids[place] == image_token:
                grid = waiting.pop(0)
                end = place + grid[0] * grid[1]
                positions[row, :, place:end] = at + _within(grid)
                place, at = end, at + max(grid)
            else:
                positions[row, :, place] = at
                place, at = place + 1, at + 1
    return positions


def token_positions(grids: Sequence[Grid]) -> torch.LongTensor:
    """The positions [3, N] of the tokens of grids that are generated one after the other, from that after the
    prompt."""
    parts, at = [], 0
    for grid in grids:
        parts.append(at + _within(grid))
        at += max(grid)
    return torch.cat(parts, dim=1)


def _within(grid: Grid) -> torch.LongTensor:
    """Time, row and column [3, rows * columns] of the tokens of a grid."""
    place = torch.arange(grid[0] * grid[1])
    return torch.stack([torch.zeros_like(place), place // grid[1], place % grid[1]])


def bind_prompts(
    encoder: GlmImageForConditionalGeneration,
    input_ids: torch.LongTensor,
    mask: torch.Tensor,
    sources: Sequence[Sequence[Grid]],
    codes: Sequence[torch.LongTensor],
    layout,
    device: torch.device,
) -> LanguageTokenModel:
    """The `TokenModel` of prompts, without guidance. Its tokens are the codes of the image tokenizer, so special ids
    cannot be sampled.

    Args:
        input_ids, mask: int64 [B, P], on the CPU, padded on the left.
        sources, codes: the grids of the pictures of each prompt, and the tokens of all pictures.
        layout: the `Layout` of what is generated.
    """
    config, parts = encoder.config, encoder.model
    vocab_size = config.vq_config.num_embeddings
    ids = input_ids.to(device)
    if codes:
        ids = ids.masked_scatter(ids == config.image_token_id, torch.cat(list(codes)).to(device))
    # Other parts of the module keep the state of a call on it, so only its decoder is called.
    decoder = parts.language_model
    codebook = parts.vqmodel.quantize.embedding(torch.arange(vocab_size, device=device))
    return LanguageTokenModel(
        compiled_like(encoder, decoder),
        embed=decoder.get_input_embeddings(),
        head=code_head(encoder.lm_head, 0, vocab_size),
        layout=layout,
        input_ids=ids,
        attention_mask=mask,
        prompt_positions=prompt_positions(input_ids, mask, sources, config.image_token_id),
        token_positions=token_positions(layout.grids),
        codebook=F.normalize(codebook, dim=-1).to(device),
        network=encoder,
    )
