"""The kernels of a decoding step: for 1 to `MOST_ROWS` rows five launches per layer of a Llama decoder, which read
every weight once, or twice for the last few rows. Rows are the fed tokens of all images, with and without a condition.

Products are taken as W x^T, so that the rows of a weight fill the tensor cores and the few tokens their columns. Each
warp of a program sums over a part of the width, since sums, one number after the other, would take longer than the
weights to arrive; in attention it takes a part of the keys. The order of every sum is fixed: no row depends on how
many there are. Sums are float32; products are rounded before they are rotated or added to the residual, as by torch.
RMSNorm multiplies x by its gain before the product, and by its factor after it; over more than a few rows, in a launch
of its own.

Layers that a condition modulates take `modulated`, which may follow a LayerNorm, whose moments it takes in a first
pass over the tokens, and multiplies float32 without tensor cores. Above `MOST_ROWS` rows, `modulated_norm` comes
before a product of torch.

More rows take their products from torch, in ten launches per layer with what is left between them. Then rows depend on
how many there are.
"""

import os

import torch

from ..operation import DEVICES


# A window of 32 tokens, with a row end, and the same without a condition, is 66 rows.
MOST_ROWS = 72
# Tensor cores do not multiply float32 in full precision, and the kernels need them.
DTYPES = (torch.bfloat16, torch.float16)
# The widths of weights are multiples of this.
WIDTH = 64
# Read once, so that captured steps and the others run the same kernels.
ENABLED = os.environ.get("ARIMAGE_STEP_KERNELS", "1") != "0"


def has_many_rows(x: torch.Tensor) -> bool:
    """Whether a step of the rows `x` [R, ...] takes its products from torch."""
    return len(x) > MOST_ROWS


def has_few_rows(x: torch.Tensor, *_, **__) -> bool:
    return not has_many_rows(x)


def has_kernels(weight: torch.Tensor) -> bool:
    """Whether the card of a weight runs the kernels: an NVIDIA GPU of compute capability 8.0 or newer, 8.9 for
    float8."""
    if weight.device.type not in DEVICES or torch.version.hip is not None:
        return False
    least = (8, 9) if weight.dtype == torch.float8_e4m3fn else (8, 0)
    # Fake tensors need no card.
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(weight.device) >= least
