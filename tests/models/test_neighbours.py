"""A model of neighbours says how the logits of a token change with the tokens next to it."""

import pytest
import torch

from arimage.models.neighbours import NeighbourModel


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_change_is_the_difference_of_the_logits(dtype):
    model = NeighbourModel(5, rank=3).to(dtype)
    now, before = torch.randint(-1, 5, (2, 2, 7, 4), generator=torch.Generator().manual_seed(0))
    change = model.change(now, before)
    assert change.shape == (2, 7, 5) and change.dtype == torch.float32
    exact = NeighbourModel(5, rank=3)
    exact.load_state_dict({name: value.float() for name, value in model.state_dict().items()})
    torch.testing.assert_close(change, exact(now) - exact(before), atol=1e-5, rtol=1e-5)
    assert (model.change(now, now) == 0).all()


def test_no_neighbour_is_one_of_its_own():
    model = NeighbourModel(2, rank=4)
    around = torch.tensor([[[-1, 0, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0]]])
    logits = model(around)[0]
    assert not torch.equal(logits[0], logits[1]) and not torch.equal(logits[1], logits[2])
