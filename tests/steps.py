"""Lets the kernels of a step run where they otherwise would not: in float32, of any shape, off a GPU."""

import pytest
import torch
from torch.utils._pytree import tree_leaves

from arimage.models import language_model, step
from arimage.models.denoising_head import HeadBlock
from arimage.pipelines.cosmos import transformer_cosmos
from arimage.pipelines.infinity import transformer_infinity
from arimage.pipelines.infinitystar import transformer_infinitystar
from arimage.pipelines.llamagen import transformer_llamagen
from arimage.pipelines.rar import transformer_rar
from arimage.pipelines.var import transformer_var


BLOCKS = (
    transformer_llamagen.Block,
    transformer_var.Block,
    transformer_infinity.Block,
    transformer_infinitystar.Block,
    transformer_rar.Block,
    HeadBlock,
)


def allow_steps(patch: pytest.MonkeyPatch) -> None:
    """On the CPU the references of the kernels run, as on the card of the tests."""
    patch.setattr(step, "DTYPES", (torch.float32, torch.bfloat16))
    patch.setattr(step, "HEAD_DIMS", range(1, 257))
    patch.setattr(step, "WIDTH", 1)
    patch.setattr(step, "has_kernels", lambda weight: True)


def count_layers(patch: pytest.MonkeyPatch) -> list[int]:
    """A list that gets the number of rows of every layer that a step goes through."""
    rows = []

    def counted(of_block):
        def run(*args):
            rows.append(len(next(each for each in tree_leaves(args) if isinstance(each, torch.Tensor))))
            return of_block(*args)

        return run

    for block in BLOCKS:
        patch.setattr(block, "step", counted(block.step))
    for module in (language_model, transformer_cosmos):
        patch.setattr(module, "attend_layer", counted(module.attend_layer))
    return rows
