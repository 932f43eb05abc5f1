"""`Conditions`, which every model of a call holds: merged, taken and replaced rows, and what they prefill."""

import pytest
import torch

from arimage.decoding import Layout
from arimage.models.conditions import (
    Conditions,
    check_image,
    check_raster,
    with_unconditional,
)


# Images 0 and 2 have one condition, and without it all rows are equal.
VALUES = {"labels": torch.tensor([4, 7, 4]), "embeds": torch.tensor([[[1.0, 2.0]], [[3.0, 4.0]], [[1.0, 2.0]]])}
# The names of these embeddings, and of those without a condition.
NAMES = ["a heart", "a book", "a heart"], [None] * 3


def guided(seen=((0, 1), (1, 1), (0, 1))):
    seen = torch.tensor(seen, dtype=torch.bool)
    return Conditions(with_unconditional(VALUES), branches=2, seen=torch.cat([seen, torch.ones_like(seen)]))


def labels(conditions):
    values = conditions.values
    return torch.where(values["unconditional"], -1, values["labels"]).tolist()


@pytest.mark.parametrize("merged", [False, True])
def test_images_are_taken_in_any_order_and_more_than_once(merged):
    conditions = guided()
    if merged:
        conditions.merge(*NAMES)
    for images, expected in (([1, 0, 0, 2], [7, 4, 4, 4]), ([2], [4])):
        taken = conditions.take(torch.tensor(images))
        assert taken.images == len(images) and labels(taken) == expected + [-1] * len(images)
        assert torch.equal(taken.seen, conditions.seen[[*images, *(3 + i for i in images)]])
    assert labels(conditions) == [4, 7, 4, -1, -1, -1]
    # What is taken may be taken from again.
    assert labels(conditions.take(torch.tensor([1, 0])).take(torch.tensor([1]))) == [4, -1]


def test_equal_conditions_are_prefilled_once_after_a_merge():
    conditions = guided()
    values, copies = conditions.to_prefill(3)
    assert list(copies) == list(range(6)) and values["labels"].tolist() == [4, 7, 4, 1, 1, 1]
    conditions.merge(*NAMES)
    for _ in range(2):
        values, copies = conditions.to_prefill(3)
        assert copies == [0, 1, 0, 2, 2, 2] and values["embeds"].tolist() == [[[1, 2]], [[3, 4]], [[1, 1]]]
        assert labels(conditions) == [4, 7, 4, -1, -1, -1]
        conditions.merge(*NAMES)
    values, copies = conditions.take(torch.tensor([2, 1])).to_prefill(2)
    assert copies == [0, 1, 2, 2] and values["labels"].tolist() == [4, 7, 1]
    # Rows that must differ have copies of their own.
    values, copies = conditions.to_prefill(3, shared=False)
    assert list(copies) == list(range(6)) and values["labels"].tolist() == [4, 7, 4, 1, 1, 1]


@pytest.mark.parametrize("merged", [False, True])
def test_another_number_of_images_is_refused(merged):
    conditions = guided()
    if merged:
        conditions.merge(*NAMES)
    with pytest.raises(ValueError, match="batch_size is 6, .* 3 images"):
        conditions.to_prefill(6)


@pytest.mark.parametrize(
    ("names", "ids", "copies"),
    [
        # Equal embeddings without equal names may be of two prompts.
        ((), None, [0, 1, 2, 3, 4, 5]),
        ((range(3), [None] * 3), None, [0, 1, 2, 3, 3, 3]),
        # Equal names of prompts whose labels differ.
        ((["a", "a", "a"], [None] * 3), None, [0, 1, 0, 2, 2, 2]),
        # A negative prompt that is one of the prompts.
        ((["a", "b", "a"], ["a", "c", "a"]), None, [0, 1, 0, 2, 3, 2]),
        ((), torch.tensor([[3, 1], [3, 2], [3, 1]]), [0, 1, 0, 2, 3, 2]),
    ],
)
def test_embeddings_are_compared_by_what_they_were_made_of(names, ids, copies):
    values = with_unconditional(VALUES)
    conditions = Conditions(values, branches=2, ids=None if ids is None else torch.cat([ids, ids]))
    conditions.merge(*names)
    merged, found = conditions.to_prefill(3)
    assert list(found) == copies
    assert all(torch.equal(merged[name][found], value) for name, value in values.items())


@pytest.mark.parametrize("check", [check_image, check_raster])
def test_models_of_one_grid_refuse_others_before_it(check):
    check(Layout((2, 3)), "this model")
    with pytest.raises(ValueError, match="before the image: this model generates one grid only"):
        check(Layout((2, 3), before=[(1, 2)]), "this model")


def test_prefixes_of_different_length_end_together():
    short, long = guided(), Conditions(VALUES, seen=torch.tensor([[1, 1, 0, 1]] * 3, dtype=torch.bool))
    long = Conditions(with_unconditional(VALUES), 2, torch.cat([long.seen, long.seen]))
    assert long.take(torch.tensor([0])).put(torch.tensor([0]), short.take(torch.tensor([1]))) is False
    images = torch.tensor([1])
    assert short.put(images, long.take(images)) and short.prefix_length == 4
    assert short.seen.int().tolist()[:3] == [[0, 0, 0, 1], [1, 1, 0, 1], [0, 0, 0, 1]]
    long.put(images, guided().take(images))
    assert long.seen.int().tolist()[1::3] == [[0, 0, 1, 1]] * 2
