"""Next-scale decoding samples images from the model's joint distribution: on a model of tables small enough to
enumerate, and on a VAR of random weights."""

import math
from dataclasses import replace

import pytest
import torch
from decoding.conftest import scale_models
from decoding.test_exactness import KINDS_OF_SAMPLING, SAMPLINGS, assert_follows, sample_images
from presets import FOR_SCALES

from arimage.decoding import (
    AutoregressiveDecoding,
    NextScaleDecoding,
    Sampling,
    decode,
    decoding_from_name,
)
from arimage.decoding.contract.cache import ImageCache
from arimage.pipelines.infinitystar.guidance import projected_guidance


SEEDS = torch.tensor([0, 1, -1, 2**31, 2**32 + 5, -(2**63), 2**63 - 1, 77])
SIZES = {"1 2 of 3": ((1, 2), 3), "1 1 2 of 2": ((1, 1, 2), 2)}


class FedCache(ImageCache):
    """How many scales were fed."""

    def __init__(self, scales):
        self.scales = scales


class ScaleTable:
    """A `ScaleModel` whose every conditional distribution of V tokens is a row of a random table: one row per token of
    a map, given all maps before it. Its latents are the number of the tokens so far among all such tokens."""

    kind, guidance_schedule, prunes, last_clip = "scales", "linear", True, 0

    device = torch.device("cpu")
    refiner = None

    def __init__(self, scales=(1, 2), vocab_size=3, branches=1, seed=1):
        self.scales, self.vocab_size, self.branches = [(side, side) for side in scales], vocab_size, branches
        self.costs = self.scale_sizes = self.counts = [side**2 for side in scales]
        self.num_tokens = sum(self.counts)
        self.codebook = torch.arange(vocab_size)[:, None].float()
        self.network = self
        self.forward_passes = 0
        generator = torch.Generator().manual_seed(seed)
        self.tables = []
        for scale, count in enumerate(self.counts):
            shape = branches, vocab_size ** sum(self.counts[:scale]), count, vocab_size
            self.tables.append(-1.2 * torch.empty(shape).exponential_(generator=generator).log())

    def prefill(self, batch_size, latents=(), pruned=None):
        # There are no hidden states, so cells that are pruned are as good as others.
        self.forward_passes += 1
        for scale, (before, after) in enumerate(zip(latents, latents[1:], strict=False), 1):
            assert torch.equal(before, after.div(self.vocab_size ** self.counts[scale], rounding_mode="floor"))
        index = latents[-1] if latents else torch.zeros(batch_size, 1, 1, 1)
        return FedCache(len(latents) + 1), self.logits(len(latents), index)

    def forward(self, scale, latents, cache, guided=True):
        self.forward_passes += 1
        assert cache.scales == scale, "the scales before were not fed"
        cache.scales += 1
        return self.logits(scale, latents)[: None if guided else 1]

    def take(self, images):
        return self

    def logits(self, scale, latents):
        return self.tables[scale][:, latents.flatten().long()]

    def guide(self, logits, guidance_scale, temperature):
        return None

    def vectors(self, scale, tokens):
        return self.codebook[tokens].transpose(1, 2).unflatten(2, self.scales[scale])

    def accumulate(self, scale, latents, added):
        before = 0 if latents is None else latents.flatten()
        for token in added.flatten(1).unbind(1):
            before = before * self.vocab_size + token
        return before.view(-1, 1, 1, 1)

    def joint(self, sampling):
        """Probabilities [V ** N] of all images under `sampling`, the first token varying slowest. A published guidance
        t of the last scale, s - 1 here, is t k / (K - 1) at scale k."""
        joint = torch.ones(1, dtype=torch.float64)
        for scale, table in enumerate(self.tables):
            rows, count = table.shape[1:3]
            positions = torch.arange(count).add(sum(self.counts[:scale])).repeat(1, rows)
            logits = table.flatten(1, 2)
            if self.branches == 2:
                strength = (sampling.guidance_scale - 1) * scale / (len(self.scales) - 1)
                first = self.num_tokens if sampling.guided_tokens is None else sampling.guided_tokens
                strength = strength * (positions < first)[0, :, None]
                logits = (1 + strength) * logits[:1] - strength * logits[1:]
            distribution = (
                replace(sampling, guidance_scale=1)
                .probabilities(logits[:, None], positions)
                .view(rows, count, -1)
                .double()
            )
            of_map = torch.ones(rows, 1, dtype=torch.float64)
            for token in range(count):
                of_map = (of_map[..., None] * distribution[:, token, None]).flatten(1)
            joint = (joint[:, None] * of_map).flatten()
        return joint


@pytest.mark.parametrize(
    ("size", "sampling"), [*(("1 2 of 3", name) for name in KINDS_OF_SAMPLING), ("1 1 2 of 2", "guidance")]
)
def test_images_follow_the_joint_distribution(size, sampling):
    sampling = SAMPLINGS[sampling]
    model = ScaleTable(*SIZES[size], branches=1 if sampling.guidance_scale == 1 else 2)
    tokens = sample_images(model, NextScaleDecoding(), sampling, 20_000, f"{size} {sampling}")
    assert_follows(tokens, model.joint(sampling), model.vocab_size)


class ProjectedTable(ScaleTable):
    """A `ScaleTable` with guidance of its own, by all tokens of a map."""

    guidance_schedule = "constant"

    def guide(self, logits, guidance_scale, temperature):
        return None if len(logits) == 1 else projected_guidance(logits, guidance_scale, temperature, 0.7)

    def joint(self, sampling):
        plain = ScaleTable(*SIZES["1 2 of 3"])
        plain.tables = [self.guide(table, sampling.guidance_scale, sampling.temperature) for table in self.tables]
        return plain.joint(replace(sampling, guidance_scale=1.0, temperature=1.0))


@pytest.mark.every(2)
@pytest.mark.parametrize("cut", [{}, {"top_p": 0.9}, {"top_k": 2}, {"min_p": 0.2}], ids=str)
def test_guidance_of_the_models_own_comes_before_the_cuts(cut):
    model = ProjectedTable(*SIZES["1 2 of 3"], branches=2)
    sampling = Sampling(guidance_scale=4.0, temperature=0.8, **cut)
    tokens = sample_images(model, NextScaleDecoding(), sampling, 20_000, str(cut))
    assert_follows(tokens, model.joint(sampling), 3)
    usual = ScaleTable(*SIZES["1 2 of 3"], branches=2)
    with pytest.raises(AssertionError, match="chi-square|total variation|an impossible image"):
        assert_follows(tokens, usual.joint(sampling), 3)


def test_every_image_of_a_stack_is_guided_by_its_own_scale():
    model, scales = ProjectedTable(*SIZES["1 2 of 3"], branches=2), (1.0, 4.0, 9.0)
    stack = Sampling.stack([Sampling(guidance_scale=scale, temperature=0.8) for scale in scales])
    together = decode(model, NextScaleDecoding(), stack, SEEDS[:3]).tokens
    for image, scale in enumerate(scales):
        sampling = Sampling(guidance_scale=scale, temperature=0.8)
        alone = decode(model, NextScaleDecoding(), sampling, SEEDS[image : image + 1]).tokens
        assert torch.equal(together[image : image + 1], alone)


def test_the_work_of_an_image_is_that_of_its_scales_so_far():
    model, seen = ScaleTable((1, 1, 2), 2), []
    model.costs = (1, 2, 5)
    decode(model, NextScaleDecoding(), Sampling(), SEEDS, lambda state, _: seen.append(state.work.tolist()))
    assert seen == [[0.125] * 8, [0.375] * 8, [1.0] * 8]
    short = decode(model, NextScaleDecoding(stop_after=2), Sampling(), SEEDS)
    assert short.work.tolist() == [1.0] * 8


def test_free_tokens_follow_their_distribution_given_the_maps_before_and_forced_tokens_stand():
    model, forced = ScaleTable(), torch.tensor([[-1, 2, -1, -1, 0]])
    joint = model.joint(Sampling(forced=forced))
    assert math.isclose(joint.sum(), 1, rel_tol=1e-6) and (joint > 0).sum() == 27
    tokens = sample_images(model, NextScaleDecoding(), Sampling(forced=forced.expand(20_000, -1)), 20_000)
    assert_follows(tokens, joint, 3)


@pytest.mark.parametrize("preset", FOR_SCALES)
def test_every_step_decides_a_map_and_is_reported(preset):
    model = ScaleTable((1, 1, 2), 2)
    model.refiner = ScaleTable((1, 1, 2), 2, seed=2)
    seen = []

    def watch(state, step):
        assert state.forward_passes == step
        assert torch.equal(state.decided, (torch.arange(6) < [1, 2, 6][state.forward_passes - 1]).expand(8, -1))
        assert torch.equal(state.finished, state.decided.all(1))
        assert torch.equal(state.accepted_per_step().sum(0), state.decided.sum(1))
        seen.append(state.tokens.clone())

    state = decode(model, decoding_from_name(preset), Sampling(), SEEDS, on_step=watch)
    assert len(seen) == state.forward_passes == model.forward_passes + model.refiner.forward_passes == 3
    assert torch.equal(seen[0][:, 0], state.tokens[:, 0])


def test_an_image_of_one_map_takes_one_step():
    state = decode(ScaleTable((2,)), NextScaleDecoding(), Sampling(guidance_scale=2.0), SEEDS)
    assert state.forward_passes == 1 and state.finished.all()


def test_a_decoding_for_the_other_kind_of_model_is_refused(table_model):
    with pytest.raises(ValueError, match="AutoregressiveDecoding.*next-scale"):
        decode(ScaleTable(), AutoregressiveDecoding(), Sampling(), SEEDS)
    with pytest.raises(ValueError, match="NextScaleDecoding.*sjd"):
        decode(table_model(), NextScaleDecoding(), Sampling(), SEEDS)


# Smooth pictures


def test_smooth_tokens_of_the_first_scale_follow_the_distribution():
    # Gumbel noise on log p, which the first scale does not sharpen.
    model, decoding = ScaleTable(), NextScaleDecoding(more_smooth=True)
    assert not decoding.exact and NextScaleDecoding().exact
    state = decoding.start(model, Sampling(top_k=2), torch.arange(20_000))
    sampling = Sampling(top_k=2).probabilities(model.tables[0], torch.zeros(1, 1, dtype=torch.long))[0, 0]
    assert_follows(state.tokens[:, :1], sampling.double(), 3)
    # Between the tokens, more often than a single token would be.
    assert (state.latents != state.latents.round()).float().mean() > 0.2
    assert 0 <= state.latents.min() and state.latents.max() <= 2


@pytest.fixture(scope="module", params=["class", "text"])
def bound(request):
    return scale_models(request.param)


SHARP = Sampling(guidance_scale=3.0, top_k=30, top_p=0.95)


@torch.no_grad()
def test_smooth_pictures_keep_forced_tokens_and_differ_elsewhere(bound):
    rows = [0, 1, 2]
    exact = decode(bound(rows), NextScaleDecoding(), SHARP, SEEDS[:3])
    smooth = decode(bound(rows), NextScaleDecoding(True), replace(SHARP, forced=exact.tokens), SEEDS[:3])
    torch.testing.assert_close(smooth.latents, exact.latents)
    free = decode(bound(rows), NextScaleDecoding(True), SHARP, SEEDS[:3])
    assert not torch.allclose(free.latents, exact.latents, atol=0.1)


@torch.no_grad()
@pytest.mark.parametrize("smooth", [False, True])
def test_an_image_of_a_batch_is_that_of_its_condition_alone(bound, smooth):
    decoding = NextScaleDecoding(smooth)
    batch = decode(bound([0, 1, 2]), decoding, SHARP, SEEDS[:3])
    assert len(batch.tokens.unique(dim=0)) == 3
    for row in range(3):
        alone = decode(bound([row]), decoding, SHARP, SEEDS[row : row + 1])
        assert torch.equal(alone.tokens[0], batch.tokens[row])
        torch.testing.assert_close(alone.latents[0], batch.latents[row], atol=1e-4, rtol=1e-4)


# Settings per scale


def test_images_follow_their_distribution_under_settings_per_scale():
    model, listed = ScaleTable((1, 1, 2), 2, branches=2), Sampling([1.0, 3.0, 0.5], temperature=(0.5, 2.0, 1.5))
    tokens = sample_images(model, NextScaleDecoding(), listed, 20_000)
    same = ScaleTable((1, 1, 2), 2)
    for scale, (guidance, temperature) in enumerate(zip(listed.guidance_scale, listed.temperature, strict=True)):
        table = model.tables[scale]
        # 0.5 disables guidance, as a single number does.
        same.tables[scale] = (table[1:] + max(guidance, 1) * (table[:1] - table[1:])) / temperature
    assert_follows(tokens, same.joint(Sampling()), 2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"guidance_scale": [1.0, 2.0]}, "guidance_scale holds 2 numbers.* 3 scales"),
        ({"temperature": (0.5,) * 4}, "temperature holds 4 numbers.* 3 scales"),
        ({"guidance_scale": [1.0, -1.0, 2.0]}, "guidance_scale is"),
        ({"guidance_scale": []}, "guidance_scale is"),
        ({"temperature": [1.0, 0.0, 1.0]}, "temperature is"),
    ],
)
def test_settings_that_do_not_fit_the_scales_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        decode(ScaleTable((1, 1, 2)), NextScaleDecoding(), Sampling(**settings), SEEDS)


def test_settings_per_scale_are_refused_where_there_are_none(table_model):
    with pytest.raises(ValueError, match="guidance_scale holds 2 numbers: give one number"):
        decode(table_model(), AutoregressiveDecoding(), Sampling([1.0, 2.0]), SEEDS)
    with pytest.raises(ValueError, match="guidance_scale is one number per scale"):
        Sampling.stack([Sampling([1.0, 2.0]), Sampling(2.0)])


@torch.no_grad()
@pytest.mark.parametrize("fed", [1, 3])
def test_scales_without_guidance_are_fed_without_unconditional_rows(bound, fed):
    """From scale `fed` on only the conditional branch is fed, and their logits stay the same."""
    model, state = bound([0, 1, 2]), decode(bound([0, 1, 2]), NextScaleDecoding(), SHARP, SEEDS[:3])
    found, maps = [], state.tokens.split([1, 4, 9, 16], dim=1)
    for dropped in (False, True):
        cache, logits = model.prefill(3)
        every, latents = [logits[0]], None
        for scale in range(1, 4):
            latents = model.accumulate(scale - 1, latents, model.vectors(scale - 1, maps[scale - 1]))
            logits = model.forward(scale, latents, cache, **({"guided": False} if dropped and scale >= fed else {}))
            assert len(logits) == (1 if dropped and scale >= fed else 2)
            every.append(logits[0])
        found.append(torch.cat(every, dim=1))
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)


def rows_fed(model):
    """How many rows the transformer is fed with in each forward pass, filled as it runs."""
    rows = []
    model.network.register_forward_hook(lambda module, inputs, output: rows.append(len(output)))
    return rows


@torch.no_grad()
def test_only_the_first_scales_are_guided(bound):
    """The later scales are as under a list that ends with ones, and are fed without the unconditional branch."""
    decoding, model = NextScaleDecoding(guided_scales=2), bound([0, 1, 2])
    rows = rows_fed(model)
    state = decode(model, decoding, SHARP, SEEDS[:3])
    assert rows == [6, 6, 3, 3] and not decoding.exact
    listed = replace(SHARP, guidance_scale=[1.0, 1 + 2 / 3, 1.0, 1.0])
    assert torch.equal(state.tokens, decode(bound([0, 1, 2]), NextScaleDecoding(), listed, SEEDS[:3]).tokens)
    assert rows[4:] == [6, 6, 3, 3]
    every = decode(bound([0, 1, 2]), NextScaleDecoding(), SHARP, SEEDS[:3])
    assert torch.equal(state.tokens[:, :5], every.tokens[:, :5]) and not torch.equal(state.tokens, every.tokens)
    # A guided scale follows: all rows are kept.
    later = replace(SHARP, guidance_scale=[1.0, 1.0, 1.0, 3.0])
    decode(bound([0, 1, 2]), NextScaleDecoding(), later, SEEDS[:3])
    assert rows[-4:] == [6] * 4


@torch.no_grad()
def test_an_image_may_stop_before_the_last_scales(bound):
    decoding = NextScaleDecoding(stop_after=3)
    every = decode(bound([0, 1, 2]), NextScaleDecoding(), SHARP, SEEDS[:3])
    state = decode(bound([0, 1, 2]), decoding, SHARP, SEEDS[:3])
    assert state.forward_passes == 3 and state.finished.all() and not decoding.exact
    assert torch.equal(state.tokens[:, :14], every.tokens[:, :14]) and (state.tokens[:, 14:] == -1).all()
    assert state.latents.shape == every.latents.shape
    parts = state.tokens[:, :14].split([1, 4, 9], dim=1)
    maps = [part.unflatten(1, (side, side)) for side, part in zip((1, 2, 3), parts, strict=True)]
    torch.testing.assert_close(state.latents, state.model.vq.latents(maps))


@pytest.mark.parametrize("name", ["guided_scales", "stop_after"])
def test_more_scales_than_there_are_are_refused(name):
    with pytest.raises(ValueError, match=f"{name} is 4: give at most its 3 scales"):
        decode(ScaleTable((1, 1, 2)), NextScaleDecoding(**{name: 4}), Sampling(), SEEDS)
