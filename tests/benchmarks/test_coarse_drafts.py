"""`benchmarks/coarse_drafts.py` on grids that are made up, and on the files of a small random model."""

import coarse_drafts
import pytest
import torch


@pytest.mark.parametrize(("small", "large"), [((2, 2), (4, 6)), ((3, 2), (5, 5))])
def test_each_draft_is_compared_at_its_place(small, large):
    coarse = torch.arange(2 * small[0] * small[1]).view(2, *small)
    rows, columns = ((2 * torch.arange(n) + 1) * of // (2 * n) for n, of in zip(large, small, strict=True))
    same = coarse[:, rows[:, None], columns]
    found = coarse_drafts.shares(coarse, same)
    assert [share.tolist() for share in found.values()][:2] == [[1, 1], [0, 0]]
    for name, moved in (("the token to the left", same.diff(dim=2)), ("the token above", same.diff(dim=1))):
        assert found[name].tolist() == (moved == 0).double().mean((1, 2)).tolist()
    same[1, 0, 0] = -1
    assert coarse_drafts.shares(coarse, same)["the small grid"].tolist() == [1, 1 - 1 / (large[0] * large[1])]
