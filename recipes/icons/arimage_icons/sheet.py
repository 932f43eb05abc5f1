"""A sheet of samples of a model in training."""

from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torchvision.utils import make_grid

from .words import LENGTH


PROMPTS = (
    "heart", "home", "camera", "rocket", "cat", "fish", "trophy", "tree", "car", "coffee", "umbrella", "bell",
    "calendar", "gift", "star", "flower", "filled heart", "outlined heart", "thin camera", "bold camera",
    "filled fish", "outlined fish", "pixel heart", "thin tree",
)  # fmt: skip


@torch.no_grad()
def sampled(trainer: Any, text: torch.Tensor, guidance_scale: float = 2.0, seed: int = 0) -> torch.Tensor:
    """Tokens [B, N] for captions with token ids [B, P], one after the other, at temperature 1."""
    model, count = trainer.model, len(text)
    generator = torch.Generator(text.device).manual_seed(seed)
    condition = {name: torch.cat([it, it]) for name, it in model.condition(text).items()}
    unconditional = torch.arange(2 * count, device=text.device) >= count
    places = trainer.farthest.shape[1]
    order = torch.arange(places, device=text.device).expand(count, -1)
    given = {}
    if model.any_order:
        order = trainer.farthest[torch.arange(count, device=text.device) % len(trainer.farthest)]
        given = {"order": torch.cat([order, order])}
    tokens = torch.zeros(count, places, dtype=torch.long, device=text.device)
    for rank in range(places):
        both = torch.cat([tokens, tokens])
        logits = model.transformer.predict(both, unconditional=unconditional, **given, **condition)[:, rank]
        conditional, without = logits.float().chunk(2)
        probabilities = (without + guidance_scale * (conditional - without)).softmax(-1)
        tokens.scatter_(1, order[:, rank : rank + 1], torch.multinomial(probabilities, 1, generator=generator))
    return tokens


def save_sheet(trainer: Any, tokenizer: Any, path: Path, tiny: bool = False) -> None:
    """Eight samples of each of `PROMPTS`, one prompt per row."""
    prompts, seeds = (PROMPTS[:1], 1) if tiny else (PROMPTS, 8)
    given = {"padding": "max_length", "max_length": LENGTH, "truncation": True, "return_tensors": "pt"}
    text = tokenizer([prompt for prompt in prompts for _ in range(seeds)], **given).input_ids.to(trainer.device)
    side = trainer.model.transformer.config.grid_size
    pixels = trainer.vq.decode(sampled(trainer, text).view(-1, side, side))
    grid = make_grid(pixels.clamp(-1, 1) / 2 + 0.5, nrow=seeds, pad_value=0.8)
    Image.fromarray((255 * grid[0]).round().byte().cpu().numpy()).save(path, optimize=True)
