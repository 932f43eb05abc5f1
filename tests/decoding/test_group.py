"""Group decoding samples images from the product of the distributions of its groups, on tables small enough to
enumerate."""

import itertools
from dataclasses import replace

import pytest
import torch
from decoding.conftest import TableModel, some_order
from decoding.test_exactness import FEWER, assert_follows, sample_images

from arimage.decoding import (
    GroupDecoding,
    LazyJacobiDecoding,
    Sampling,
    SpeculativeJacobiDecoding,
    TreeJacobiDecoding,
    decode,
)


class GroupTable(TableModel):
    """A `GroupModel`: a token of a group follows the table of the group's first rank given all tokens before the
    group, with the ids shifted by how far behind that rank it is. The first group is prefilled."""

    predicts_groups = True

    def group_logits(self, rank, index, count):
        """Logits [G, M, count, V] after the groups of number `index` [M]."""
        logits = self.tables[rank][:, index]
        return torch.stack([logits.roll(shift, -1) for shift in range(count)], dim=2)

    def prefill_group(self, batch_size, count, scratch=0):
        cache, _ = self.prefill(batch_size, scratch)
        cache.number = torch.zeros(batch_size, dtype=torch.long)
        cache.causal = []
        return cache, self.group_logits(0, cache.number, count)

    def forward_group(self, tokens, rank, count, cache, *, causal=False):
        self.forward_passes += 1
        cache.causal.append(causal)
        for token in tokens.unbind(1):
            cache.number = cache.number * self.vocab_size + token
        return self.group_logits(rank + tokens.shape[1], cache.number, count)

    def guidance_progress(self, rank, count):
        return (rank + torch.arange(count)) / self.num_tokens

    def joint_of_groups(self, sizes, sampling, linear):
        """Probabilities [V ** N] of all images."""
        joint, rank = torch.ones(1, dtype=torch.float64), 0
        for size in sizes:
            logits = self.group_logits(rank, torch.arange(len(joint)), size)
            group = joint[:, None]
            for token in range(size):
                progress = (rank + token) / self.num_tokens if linear else 1
                own = Sampling(
                    guidance_scale=1 + (sampling.guidance_scale - 1) * progress if sampling.guided else 1.0,
                    temperature=sampling.temperature,
                    top_k=sampling.top_k,
                )
                # A scale of 1 is the condition's own.
                logit = logits if own.guided else logits[:1]
                rows = own.probabilities(logit[:, None, :, token], torch.zeros(1, len(joint), dtype=torch.long))[0]
                rows = rows.double() / rows.double().sum(-1, keepdim=True)
                group = (group[:, :, None] * rows[:, None]).flatten(1)
            joint, rank = group.flatten(), rank + size
        return joint


SIZES = [(1, 1, 1, 1), (4,), (1, 3), (2, 1, 1), (1, 2, 1)]
SETTINGS = list(itertools.product(SIZES, ["linear", "constant"], ["raster", "random"]))


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("sizes", "schedule", "order", "size"),
    [(*settings, 10_000) for settings in SETTINGS[::3]]
    + [pytest.param(*settings, 200_000, marks=pytest.mark.slow) for settings in SETTINGS],
    ids=str,
)
def test_images_follow_the_product_of_the_groups(sizes, schedule, order, size):
    model = GroupTable(branches=2, order=some_order(order, (2, 2), size))
    sampling = Sampling(guidance_scale=2.5, temperature=1.2, top_k=2)
    decoding = GroupDecoding(sizes, guidance_schedule=schedule)
    tokens = sample_images(model, decoding, sampling, size, f"{order} {size}")
    assert_follows(tokens, model.joint_of_groups(sizes, sampling, schedule == "linear"), model.vocab_size)


def test_every_row_of_a_stack_has_its_own_guidance():
    model, seeds = GroupTable(branches=2), torch.arange(40)
    samplings = [Sampling(guidance_scale=scale) for scale in (1.5, 4.0)]
    stack = Sampling.stack([samplings[seed % 2] for seed in seeds.tolist()])
    together = decode(model, GroupDecoding((1, 3)), stack, seeds).tokens
    for row, sampling in enumerate(samplings):
        alone = decode(model, GroupDecoding((1, 3)), sampling, seeds[row::2]).tokens
        assert torch.equal(together[row::2], alone)


STARTS_WITH_COMMON = [
    SpeculativeJacobiDecoding(2, init="common"),
    SpeculativeJacobiDecoding(4, "independent", init="common"),
    SpeculativeJacobiDecoding(4, init="common", corrections=1),
    TreeJacobiDecoding(4, 2, 2, "common"),
    LazyJacobiDecoding(4, 1, 2, "common"),
]


@pytest.mark.parametrize("given", [False, True], ids=["all", "given"])
@pytest.mark.parametrize("order", ["raster", "random"])
@pytest.mark.parametrize("decoding", STARTS_WITH_COMMON, ids=repr)
def test_images_that_begin_with_a_common_token_follow_the_joint_distribution(decoding, order, given):
    model = GroupTable(branches=2, order=some_order(order, (2, 2), FEWER))
    forced = torch.tensor([1, -1, -1, -1]).expand(FEWER, -1) if given else None
    sampling = Sampling(guidance_scale=2.5, temperature=1.2, forced=forced)
    tokens = sample_images(model, decoding, sampling, FEWER, f"{order} {given}")
    joint = model.joint(replace(sampling, forced=None))
    if given:
        first = torch.arange(len(joint)) * model.vocab_size // len(joint) == 1
        joint = torch.where(first, joint, 0) / joint[first].sum()
    assert_follows(tokens, joint, model.vocab_size)


class PlainGroupTable(GroupTable):
    """Its ids are not shifted."""

    def group_logits(self, rank, index, count):
        return self.tables[rank][:, index][:, :, None].expand(-1, -1, count, -1)


def test_a_common_token_saves_forward_passes():
    model = PlainGroupTable(grid=(3, 3))
    for table in (*model.tables, model._rows):
        table.zero_()[..., 2] = 9.0
    passes = {}
    for init in ("uniform", "common"):
        decoding = SpeculativeJacobiDecoding(8, init=init)
        passes[init] = decode(model, decoding, Sampling(), torch.arange(20)).steps.double().mean()
    assert passes["common"] < 2.5 < passes["uniform"]


def test_only_models_that_predict_groups_tell_a_common_token():
    assert "sjd-coupled" in SpeculativeJacobiDecoding(init="common").supports(TableModel())


@pytest.mark.parametrize("schedule", ["arccos", "cosine"])
@pytest.mark.parametrize("count", [1, 2, 7, 16, 99, 256, 1000])
def test_schedules_divide_an_image_into_groups_that_grow(schedule, count):
    sizes = GroupDecoding(count, schedule).sizes(256)
    assert len(sizes) == min(count, 256) and sum(sizes) == 256 and min(sizes) >= 1
    assert sizes[-1] >= sizes[0]


def test_models_and_sizes_that_do_not_fit_are_refused():
    assert GroupDecoding().supports(GroupTable()) is None
    assert "one token after the other" in GroupDecoding().supports(TableModel())
    with pytest.raises(ValueError, match="groups have 7 tokens"):
        decode(GroupTable(), GroupDecoding((3, 4)), Sampling(), torch.arange(2))


def test_a_step_after_the_end_changes_nothing():
    decoding = GroupDecoding((1, 3))
    state = decode(GroupTable(), decoding, Sampling(), torch.arange(3))
    tokens, steps = state.tokens.clone(), state.steps.clone()
    decoding.step(state)
    assert torch.equal(state.tokens, tokens) and torch.equal(state.steps, steps) and state.finished.all()
