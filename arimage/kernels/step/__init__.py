"""The kernels of a decoding step: for 1 to `MOST_ROWS` rows five launches per layer of a Llama decoder, which read
every weight once. Rows are the fed tokens of all images, with and without a condition.

Products are taken as W x^T, so that the rows of a weight fill the tensor cores and the few tokens their columns. The
order of every sum over the width of a weight is fixed: no row depends on how many there are. Sums are float32;
products are rounded before they are rotated or added to the residual, as by torch. RMSNorm multiplies x by its gain
before the product, and by its factor after it.

On an H100 and newer, a kernel starts while the one before it ends (programmatic dependent launch): it brings its
weights into the L2 cache, and waits before it reads anything else.

More rows take their products from torch, in ten launches per layer with what is left between them: see `many`. Then
rows depend on how many there are.
"""

import os

import torch


MOST_ROWS = 64
# Read once, so that captured steps and the others run the same kernels.
ENABLED = os.environ.get("ARIMAGE_STEP_KERNELS", "1") != "0"


def has_many_rows(x: torch.Tensor) -> bool:
    """Whether a step of the rows `x` [R, ...] takes its products from torch."""
    return len(x) > MOST_ROWS
