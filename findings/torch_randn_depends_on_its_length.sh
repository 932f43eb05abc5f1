#!/usr/bin/env bash
# Normal numbers of one seed depend on how many are asked for at once.
#
# Packages: torch 2.14.1 (CPU), numpy 2.4.6; Python 3.11.
# Guess: a seeded generator is one stream, so torch.randn(n) gives the first n numbers of torch.randn(m), m > n, and two
# calls of n give what one call of 2 n gives.
# Really: only where n is a multiple of 16. From 16 numbers on they are made in blocks of 16, and a rest makes the LAST 16
# numbers again from fresh ones: of 24 numbers the first 8 agree with those of a longer call. Below 16 none does.
# torch.rand has one stream at every length.
# Where it hurts: the noise of one image against that of a batch from one generator (3 x 5 x 5 latents, odd sizes, heads of
# continuous tokens): the first images agree or not with the number of values per image modulo 16. Noise that is made
# image by image, or that is padded to a multiple of 16, is the same for any batch.
#
# Set PIP_EXTRA_INDEX_URL to PyTorch's index of CPU wheels to skip the CUDA libraries. Exit code 1: it behaves otherwise.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.14.1 numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import torch

SEED = 0


def numbers(kind, *counts):
    generator = torch.Generator().manual_seed(SEED)
    return torch.cat([kind(count, generator=generator) for count in counts])


same = {}
for kind in (torch.randn, torch.rand):
    long = numbers(kind, 96)
    for count in (8, 15, 16, 24, 32, 75):
        same[kind.__name__, count] = int((numbers(kind, count) == long[:count]).sum())
        print(f"{kind.__name__}({count}): {same[kind.__name__, count]} of {count} numbers are those of {kind.__name__}(96)")
twice = int((numbers(torch.randn, 24, 24) == numbers(torch.randn, 48)).sum())
print(f"two calls of randn(24): {twice} of 48 numbers are those of randn(48)")

assert all(same["rand", count] == count for count in (8, 15, 16, 24, 32, 75))
assert [same["randn", count] for count in (16, 32)] == [16, 32]
assert same["randn", 24] == 8 and same["randn", 75] == 59 and same["randn", 8] == 0 and twice == 8
PYTHON
