"""Other pictures of the same icons: shifted, scaled and mirrored, on the device that they are on."""

import torch
import torch.nn.functional as F


# At most: pixels of a shift, and change of a size.
SHIFT, SCALE = 3, 0.1


def augmented(
    pixels: torch.Tensor, may_mirror: torch.Tensor, strength: float, generator: torch.Generator
) -> torch.Tensor:
    """Pixels uint8 [B, H, W], changed at random, as float32 [B, H, W] from 0 to 255. One in five keeps its place, half
    of the others are also scaled, and half of those that `may_mirror` [B] are mirrored. Shifts and scales are
    `strength` times as large as they may be."""
    count, height, width = pixels.shape
    draw = torch.rand(count, 7, device=pixels.device, generator=generator)
    moves, scales = draw[:, 0] < 0.8, draw[:, 1] < 0.5
    shift = (2 * draw[:, 2:4] - 1) * SHIFT * strength
    # Whole pixels where nothing is scaled, so that edges stay sharp.
    shift = torch.where(scales[:, None], shift, shift.round()) * moves[:, None]
    both, aspect = 2 * draw[:, 4] - 1, 2 * draw[:, 5] - 1
    size = torch.stack([both + aspect / 4, both - aspect / 4], dim=1) * SCALE * strength
    size = 1 + size * (moves & scales)[:, None]
    mirror = may_mirror & (draw[:, 6] < 0.5)
    theta = torch.zeros(count, 2, 3, device=pixels.device)
    theta[:, 0, 0] = torch.where(mirror, -1.0, 1.0) / size[:, 0]
    theta[:, 1, 1] = 1 / size[:, 1]
    theta[:, :, 2] = 2 * shift / torch.tensor([width, height], device=pixels.device)
    grid = F.affine_grid(theta, [count, 1, height, width], align_corners=False)
    # Outside of a picture is paper, so ink is what is moved.
    ink = (255 - pixels.float())[:, None]
    moved = F.grid_sample(ink, grid, mode="bicubic", padding_mode="zeros", align_corners=False)
    return 255 - moved[:, 0].clamp(0, 255)
