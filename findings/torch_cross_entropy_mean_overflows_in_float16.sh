#!/usr/bin/env bash
# The mean of a cross-entropy over many tokens in float16 is infinite or not a number, though every loss is small.
#
# Packages: torch 2.14.1 (CPU), numpy 2.4.6; Python 3.11.
# Guess: the mean is added up in float32 and rounded once, as mse_loss and Tensor.mean do it; so 4.64 in float16 for any
# number of tokens.
# Really: cross_entropy and nll_loss add losses AND count rows in the type of the logits. 16,384 tokens of loss 4.6 add up
# to more than 65,504: infinity. From 65,520 tokens on the count is infinite too: not a number. In bfloat16 nothing
# overflows, but means of 16,384 tokens and more are 4.59 or 4.62 for 4.65 (by the number of threads). With
# reduction="none" and then .mean() all are right. No warning.
# Where it hurts: held-out losses of image tokens (256 to 4,096 per image, so a batch of 16 is enough) and tests on a CPU with
# half-precision logits: a loss scaler sees infinity and lowers its scale for ever, or a validation figure depends on the
# size of the batch. logits.float() helps.
#
# Set PIP_EXTRA_INDEX_URL to PyTorch's index of CPU wheels to skip the CUDA libraries. Exit code 1: it behaves otherwise.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.14.1 numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import math

import torch
import torch.nn.functional as F

generator = torch.Generator().manual_seed(0)
found = {}
for dtype in (torch.float16, torch.bfloat16):
    for tokens in (4_096, 16_384, 65_536, 1_048_576):
        logits = torch.randn(tokens, 64, generator=generator).to(dtype)
        labels = torch.randint(0, 64, (tokens,), generator=generator)
        exact = F.cross_entropy(logits.double(), labels).item()
        mean = F.cross_entropy(logits, labels).item()
        apart = F.cross_entropy(logits, labels, reduction="none").mean().item()
        found[dtype, tokens] = mean
        print(f"{dtype}, {tokens} tokens: {exact:.4f} in float64, mean {mean:.4f}, mean of single losses {apart:.4f}")
        assert abs(apart - exact) < 0.02

assert math.isfinite(found[torch.float16, 4_096])
assert found[torch.float16, 16_384] == math.inf
assert math.isnan(found[torch.float16, 65_536])
assert found[torch.bfloat16, 1_048_576] < 4.64
PYTHON
