"""A window drafter says how logits change with the tokens next to them, from the features that they come from."""

import pytest
import torch
from pipelines.llamagen import tiny as tiny_llamagen

from arimage.models.window_drafter import WindowDrafter


def inputs():
    generator = torch.Generator().manual_seed(0)
    now, before = torch.randint(-1, 8, (2, 3, 7, 8), generator=generator)
    return now, before, torch.randn(3, 7, 32, generator=generator)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_change_depends_on_the_tokens_and_the_features(dtype):
    drafter = tiny_llamagen.window_drafter(tiny_llamagen.transformer("class")).to(dtype)
    now, before, features = inputs()
    change = drafter.change(now, before, features)
    assert change.shape[:2] == (3, 7) and change.dtype == torch.float32
    for other in ((before, now, features), (now, before, features.flip(0))):
        assert not torch.equal(drafter.change(*other), change)


def test_nothing_changes_where_the_tokens_are_the_same():
    drafter = tiny_llamagen.window_drafter(tiny_llamagen.transformer("class"))
    now, before, features = inputs()
    before[:, ::2] = now[:, ::2]
    change = drafter.change(now, before, features)
    assert (change[:, ::2] == 0).all() and (change[:, 1::2] != 0).any(-1).all()


def test_a_new_one_is_the_model_of_neighbours_that_it_begins_with():
    transformer, table = tiny_llamagen.transformer("class"), tiny_llamagen.neighbours()
    drafter = WindowDrafter.for_transformer(transformer, rank=4)
    assert (drafter.change(*inputs()) == 0).all()
    assert torch.equal(drafter.head.weight, transformer.head.weight)
    drafter, (now, before, features) = WindowDrafter.for_transformer(transformer, table, rank=4), inputs()
    assert torch.equal(drafter.change(now, before, features), table.change(now[..., :4], before[..., :4]))


@pytest.mark.parametrize("further", [[[0, 1, 2]], [[1, 0]]])
def test_offsets_that_are_none_are_refused(further):
    with pytest.raises(ValueError, match="further"):
        WindowDrafter(8, 32, further=further)
