"""What an image tokenizer makes of held-out images."""

import json
from collections.abc import Callable
from pathlib import Path

import torch

from ..data.pictures import Pixels, save_grid, to_unit_range


# The squared error of 60 dB: an image that is reproduced exactly counts as that.
LEAST = 4e-6
PSNR = "held-out PSNR"


def report_reconstructions(
    heldout: Pixels,
    quantised: Callable[[torch.Tensor], list[torch.Tensor]],
    decode: Callable[[torch.Tensor], torch.Tensor],
    out: Path,
) -> dict[str, float]:
    """Save reconstructions.png in `out`, held-out images next to their reconstructions, from the first scale to all of
    them, and return the mean PSNR in dB.

    Args:
        quantised: of images uint8 [B, 3, S, S], what is decoded: from their first scale, the first two, ...
        decode: of one of these the images [B, 3, S, S], nominally in [-1, 1].
    """
    every = range(len(heldout))
    shown, _ = heldout.read(every[:: max(1, len(every) // 16)][:16])
    partial = [decode(one).clamp(-1, 1).cpu() for one in quantised(shown)]
    rows = torch.stack([to_unit_range(shown), *partial], dim=1)
    columns = rows.shape[1] * max(1, 8 // rows.shape[1])
    save_grid((rows.flatten(0, 1) + 1) / 2, out / "reconstructions.png", columns)
    errors = []
    for start in every[::64]:
        images, _ = heldout.read(every[start : start + 64])
        error = decode(quantised(images)[-1]).clamp(-1, 1).cpu() - to_unit_range(images)
        errors.append(error.pow(2).flatten(1).mean(-1))
    return {PSNR: float((10 * torch.log10(4 / torch.cat(errors).clamp(min=LEAST))).mean())}


def held_out_psnr(out: Path) -> float:
    """The newest PSNR in the log of the run in `out`."""
    rows = [json.loads(line) for line in (out / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    return next(row[PSNR] for row in reversed(rows) if PSNR in row)
