"""`BoundNetwork`, the base of the models of all kinds: what is taken, put and merged goes to the models next to it."""

from typing import Any

import torch

from arimage.models.bound import BoundNetwork
from arimage.models.conditions import Conditions


LABELS = torch.tensor([4, 7, 4])


class Bound(BoundNetwork):
    companions = ("drafter",)

    def __init__(self, drafter: "Bound | None" = None):
        super().__init__("network", Conditions({"labels": LABELS.clone()}), torch.zeros(2, 3))
        self.drafter: Any = drafter


class Reading(Bound):
    reads_values = True


def labels(model):
    return model.condition["labels"].tolist()


def test_companions_are_bound_to_the_same_images():
    model = Bound(Bound())
    model.merge_prompts()
    taken = model.take(torch.tensor([1, 1, 0]))
    for each in (taken, taken.drafter):
        assert labels(each) == [7, 7, 4] and each.conditions.to_prefill(3)[1] == [0, 0, 1]
    assert labels(model.drafter) == [4, 7, 4] and taken.put_key == model.put_key


def test_put_replaces_what_forward_passes_read():
    model = Reading(Reading())
    other = Reading(Reading()).take(torch.tensor([1]))
    other.codebook = torch.ones(2, 3)
    codebook = model.codebook
    model.merge_prompts()
    assert not model.put(torch.tensor([2]), other)
    for each in (model, model.drafter):
        assert labels(each) == [4, 7, 7]
    assert model.codebook is codebook and codebook.all()
    # One of two calls may have no drafter.
    assert not model.put(torch.tensor([0]), Reading().take(torch.tensor([1])))
    assert labels(model) == [7, 7, 7] and labels(model.drafter) == [4, 7, 7]
