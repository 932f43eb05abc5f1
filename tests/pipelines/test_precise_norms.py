"""Image tokenizers decode large images as precisely as small ones on a CPU, where torch's group norm is coarse in
channels_last."""

import pytest
import torch
import torch.nn.functional as F
from families import EVERY, condition_of, one_of_each_kind, seeded
from torch import nn

from arimage.models.layers import GroupNorm


def test_a_group_norm_is_that_of_float64_whatever_the_layout():
    hidden = torch.randn(1, 4, 768, 768, generator=seeded(0)) + 30
    expected = F.group_norm(hidden.double(), 1).float()
    found = GroupNorm(1, 4)(hidden.to(memory_format=torch.channels_last))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", one_of_each_kind(EVERY))
def test_no_family_gives_torch_images_in_channels_last(name, monkeypatch):
    layouts, group_norm = [], F.group_norm

    def watched(hidden, *arguments, **options):
        layouts.append(hidden.is_contiguous())
        return group_norm(hidden, *arguments, **options)

    monkeypatch.setattr(F, "group_norm", watched)
    with torch.no_grad():
        pipe = EVERY[name]()
        norms = [
            module
            for part in pipe.components.values()
            if isinstance(part, nn.Module)
            for module in part.modules()
            if isinstance(module, nn.GroupNorm)
        ]
        pipe(**condition_of(pipe), generator=seeded(0))
    assert all(layouts) and bool(layouts) == bool(norms)
