"""An exact decoding samples images from the model's own joint distribution: at every setting, order and sampling.

A new exact decoding is one row of `ROWS`.
"""

import itertools
import math
import sys
import zlib

import pytest
import torch
from decoding.conftest import some_order
from decoding.pairwise import each_once, pairwise
from presets import FOR_TOKENS

from arimage.decoding import (
    AutoregressiveDecoding,
    DraftTreeDecoding,
    FlowDecoding,
    GroupAcceptance,
    GroupDecoding,
    LazyJacobiDecoding,
    LineCacheDecoding,
    ParallelJacobiDecoding,
    Sampling,
    SpeculativeJacobiDecoding,
    TreeJacobiDecoding,
    ZipARDecoding,
    decode,
    decoding_from_name,
)
from arimage.decoding.contract.noise import Purpose, uniforms
from arimage.decoding.jacobi import speculative_jacobi
from arimage.decoding.jacobi.corrections import correct, ranks_around
from arimage.kernels.coupling import couple_at, sample
from arimage.kernels.siblings import sample_siblings
from arimage.kernels.window import close_window


# Of a quick test: as many show what is wrong with nearly all of the broken decodings below.
IMAGES = 10_000
# Of tests of orders and layouts: to mix up places changes a distribution much more than to accept a bit too often.
FEWER = 3_000
INITS = ["uniform", "left", "above"]
ROWS = [
    (AutoregressiveDecoding, {}),
    (
        SpeculativeJacobiDecoding,
        {"window": [1, 2, 4], "refresh": ["independent", "coupled", "gumbel"], "init": INITS, "levels": [0, 1, 3]},
    ),
    (SpeculativeJacobiDecoding, {"window": [1, 2, 4, 16], "corrections": [1, 2, 4], "init": INITS, "levels": [0, 1]}),
    (TreeJacobiDecoding, {"window": [4], "width": [2, 3], "depth": [1, 2, 3], "init": INITS}),
    (
        DraftTreeDecoding,
        {"drafter": [None], "tree": ["dynamic", "static"], "depth": [1, 3], "width": [1, 3], "nodes": [4, 8]},
    ),
    (LazyJacobiDecoding, {"window": [4], "chain": [1, 2, "auto"], "tokens": [2, 3], "init": INITS}),
]

SAMPLINGS = {
    "plain": Sampling(),
    "temperature": Sampling(temperature=0.6),
    "top-k": Sampling(top_k=2),
    "top-p": Sampling(top_p=0.75),
    **{f"top-p {p}, min-p {m}": Sampling(top_p=p, min_p=m) for p in (1.0, 0.9) for m in (0.03, 0.3)},
    "guidance": Sampling(guidance_scale=2.5),
    "guided first 2": Sampling(guidance_scale=2.5, guided_tokens=2),
    "allowed": Sampling(allowed=torch.tensor([True, False, True])),
    "everything": Sampling(guidance_scale=1.7, temperature=1.3, top_k=2, top_p=0.9, guided_tokens=3),
}
# Others differ from these in what both distributions of a verification are made by.
KINDS_OF_SAMPLING = ("plain", "top-k", "top-p 0.9, min-p 0.03", "guidance", "guided first 2", "allowed", "everything")
# Small enough to enumerate: in any order, a video, and after grids that are generated before the image.
LAYOUTS = {
    **{
        f"{order} {shape}": {"grid": shape, "order": order}
        for shape in ((2, 3), (2, 2, 2))
        for order in ("raster", "random", "spread-out")
    },
    "after 1x3": {"grid": (2, 2), "before": [(1, 3)]},
    "after 2x1": {"grid": (2, 2), "before": [(2, 1)]},
    "after 1x2 and 2x1": {"grid": (1, 3), "before": [(1, 2), (2, 1)]},
}


def name(decoding):
    return "-".join([type(decoding).__name__.removesuffix("Decoding"), *map(str, vars(decoding).values())])


def assert_follows(tokens, joint, vocab_size):
    """Whether images [M, N] are samples of `joint` [V ** N]; an exact decoding fails each check one time in M / 2."""
    powers = vocab_size ** torch.arange(tokens.shape[1] - 1, -1, -1)
    counts = torch.bincount((tokens * powers).sum(1), minlength=len(joint)).double()
    size = len(tokens)
    assert counts[joint == 0].sum() == 0, "an impossible image"
    # Pearson's statistic needs 5 of each kind: the rarer images are counted as one.
    expected, rare = joint * size, joint * size < 5
    if expected[rare].sum() >= 5:
        counts_of = torch.cat([counts[~rare], counts[rare].sum()[None]])
        expected_of = torch.cat([expected[~rare], expected[rare].sum()[None]])
    else:
        counts_of, expected_of = counts[~rare], expected[~rare]
    statistic = ((counts_of - expected_of) ** 2 / expected_of).sum()
    freedom = torch.tensor(len(expected_of) - 1.0, dtype=torch.float64)
    chance = torch.special.gammaincc(freedom / 2, statistic / 2)
    assert chance > 2 / size, f"chi-square {statistic:.0f} at {freedom:.0f} degrees of freedom"
    # The total variation of as many exact samples, and how far chance may raise it (McDiarmid).
    distance = (counts / size - joint).abs().sum() / 2
    floor = (2 * joint * (1 - joint) / (math.pi * size)).sqrt().sum() / 2
    limit = floor + math.sqrt(math.log(size / 2) / (2 * size))
    assert distance < limit, f"total variation {distance:.4f}, exact samples have {floor:.4f}"


def sample_images(model, decoding, sampling, size, case=""):
    """Images [size, N] of `decoding`, after checks that hold for each of them; every case has seeds of its own."""
    seeds = torch.arange(size) + (zlib.crc32(f"{case} {name(decoding)}".encode()) << 20)
    before = model.forward_passes
    state = decode(model, decoding, sampling, seeds)
    assert state.forward_passes == len(state.accepted_per_step()) == model.forward_passes - before <= model.num_tokens
    assert state.decided.all() and state.finished.all()
    assert (state.accepted_per_step().sum(0) == model.num_tokens).all()
    return state.tokens


def cases(images=IMAGES, full=True, **others):
    """Every decoding of `ROWS`, with `others`: each value once, and as slow tests of many more images all products, or
    without `full` every pair."""
    for method, settings in ROWS:
        everything = {**settings, **others}
        few = each_once(everything, lambda choice: choice.get("sampling", "plain") in KINDS_OF_SAMPLING)
        products = [dict(zip(everything, values, strict=True)) for values in itertools.product(*everything.values())]
        for choice in products if full else pairwise(everything):
            decoding = method(**{key: choice[key] for key in settings})
            label = "-".join([name(decoding), *(str(choice[key]) for key in others)])
            arguments = decoding, *(choice[key] for key in others)
            if choice in few:
                yield pytest.param(*arguments, images, id=label)
            yield pytest.param(*arguments, 200_000, id=f"{label}-many", marks=pytest.mark.slow)


@pytest.mark.parametrize(("decoding", "sampling", "size"), list(cases(sampling=SAMPLINGS)))
def test_images_follow_the_joint_distribution(table_model, decoding, sampling, size):
    case, sampling = sampling, SAMPLINGS[sampling]
    model = table_model(branches=1 if sampling.guidance_scale == 1 else 2)
    tokens = sample_images(model, decoding, sampling, size, case)
    assert_follows(tokens, model.joint(sampling), model.vocab_size)


@pytest.mark.every(4)
@pytest.mark.parametrize(
    ("decoding", "layout", "given", "size"), list(cases(FEWER, full=False, layout=list(LAYOUTS), given=[0, 2]))
)
def test_images_follow_the_joint_distribution_in_any_order(table_model, decoding, layout, given, size):
    """The first tokens of the order may be given."""
    settings = dict(LAYOUTS[layout])
    if "order" in settings:
        settings["order"] = some_order(settings["order"], settings["grid"], size)
    model = table_model(**settings, vocab_size=2)
    forced = [1, 0][:given] + [-1] * (model.num_tokens - given)
    sampling = Sampling(top_p=0.95, forced=torch.tensor(forced).expand(size, -1))
    tokens = sample_images(model, decoding, sampling, size, f"{layout} {given}")
    assert_follows(tokens, model.joint_given(Sampling(top_p=0.95), forced), model.vocab_size)


# Drafts from the frame before, of which there is none in an image.
FROM_BEFORE = [
    SpeculativeJacobiDecoding(2, "coupled", "previous"),
    SpeculativeJacobiDecoding(4, "gumbel", "previous"),
    SpeculativeJacobiDecoding(7, "independent", "previous"),
    TreeJacobiDecoding(4, 2, 2, "previous"),
    LazyJacobiDecoding(6, "auto", 4, "previous"),
]


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("decoding", "order", "given"),
    [
        pytest.param(*choice.values(), id="-".join([name(choice["decoding"]), choice["order"], str(choice["given"])]))
        for choice in each_once({"decoding": FROM_BEFORE, "order": ["none", "random"], "given": [False, True]})
    ],
)
def test_videos_follow_the_joint_distribution_with_drafts_from_the_frame_before(table_model, decoding, order, given):
    shape, size = (2, 2, 2), FEWER
    context = torch.randint(2, (size, 4), generator=torch.Generator().manual_seed(4)) if given else None
    model = table_model(grid=shape, vocab_size=2, order=some_order(order, shape, size), context=context)
    tokens = sample_images(model, decoding, Sampling(), size, f"{order} {given}")
    assert_follows(tokens, model.joint(Sampling()), model.vocab_size)


# Models that predict blocks of tokens: three blocks of 2 and of 3.
BLOCKS = {2: {"grid": (2, 3), "vocab_size": 3}, 3: {"grid": (3, 3), "vocab_size": 2}}
BLOCK_SETTINGS = {
    "window": [1, 4, 5],
    "refresh": ["independent", "coupled", "gumbel"],
    "init": INITS,
    "levels": [0, 2],
    "block": list(BLOCKS),
    "sampling": ["plain", "top-k", "guidance"],
}


def block_cases():
    for choice in each_once(BLOCK_SETTINGS):
        block, sampling = choice.pop("block"), choice.pop("sampling")
        yield SpeculativeJacobiDecoding(**choice), block, sampling
    for block, sampling in itertools.product(BLOCKS, ["plain", "everything"]):
        yield AutoregressiveDecoding(), block, sampling
    # A relaxed test, where it is exact.
    yield SpeculativeJacobiDecoding(4, acceptance=GroupAcceptance(size=1)), 2, "plain"


@pytest.mark.every(3)
@pytest.mark.parametrize(("decoding", "block", "sampling"), list(block_cases()))
def test_images_of_blocks_follow_the_joint_distribution(table_model, decoding, block, sampling):
    case, sampling = f"{block} {sampling}", SAMPLINGS[sampling]
    model = table_model(**BLOCKS[block], branches=1 if sampling.guidance_scale == 1 else 2, block=block)
    before = model.forward_passes
    tokens = sample_images(model, decoding, sampling, FEWER, case)
    passes = model.forward_passes - before
    assert passes == 3 if isinstance(decoding, AutoregressiveDecoding) else passes <= 3
    assert_follows(tokens, model.joint(sampling), model.vocab_size)
    assert torch.equal(sample_images(model, decoding, sampling, 5, case), tokens[:5])


def test_known_tokens_of_blocks_are_kept(table_model):
    forced = [1, -1, -1, 0, -1, -1]
    model = table_model(**BLOCKS[2], block=2)
    sampling = Sampling(forced=torch.tensor(forced).expand(FEWER, -1))
    for decoding in (AutoregressiveDecoding(), SpeculativeJacobiDecoding(4)):
        tokens = sample_images(model, decoding, sampling, FEWER)
        assert_follows(tokens, model.joint_given(Sampling(), forced), model.vocab_size)


def test_the_check_rejects_a_block_that_was_not_verified(table_model, monkeypatch):
    def one_too_far(positions, kept, *arguments):
        rejected = torch.where(kept, 6, positions).amin(1, keepdim=True)
        return close_window(positions, kept | (positions < rejected - rejected % 2 + 2), *arguments)

    monkeypatch.setattr(speculative_jacobi.kernel, "close_window", one_too_far)
    model = table_model(**BLOCKS[2], block=2)
    tokens = sample_images(model, SpeculativeJacobiDecoding(4), Sampling(), FEWER)
    with pytest.raises(AssertionError, match="chi-square|total variation"):
        assert_follows(tokens, model.joint(Sampling()), 3)


BY_ROWS = [ZipARDecoding(1), ZipARDecoding(1, True), ParallelJacobiDecoding(2, 1)]
WITHOUT_BLOCKS = [
    TreeJacobiDecoding(),
    LazyJacobiDecoding(),
    DraftTreeDecoding(),
    FlowDecoding(guesses="random"),
    GroupDecoding(),
]
REFUSED = {
    "frame before": ({"grid": (2, 2)}, FROM_BEFORE),
    "order": ({"grid": (2, 2, 2), "vocab_size": 2, "order": some_order("random", (2, 2, 2), 2)}, BY_ROWS),
    "several grids": ({"grid": (2, 2), "before": [(1, 2)], "vocab_size": 2}, [*BY_ROWS, LineCacheDecoding(2)]),
    "predicts whole blocks of tokens": (
        {**BLOCKS[2], "block": 2},
        [*WITHOUT_BLOCKS, *BY_ROWS, LineCacheDecoding(), SpeculativeJacobiDecoding("auto")],
    ),
}


@pytest.mark.parametrize(
    ("reason", "decoding"), [(reason, one) for reason, (_, several) in REFUSED.items() for one in several], ids=str
)
def test_models_that_do_not_fit_are_refused(table_model, reason, decoding):
    model = table_model(**REFUSED[reason][0], truncated=True)
    assert reason in decoding.supports(model)
    with pytest.raises(ValueError, match=f"{type(decoding).__name__}.*{reason}"):
        decode(model, decoding, Sampling(), torch.arange(2))


@pytest.mark.parametrize("preset", FOR_TOKENS)
def test_every_exact_preset_has_its_row(preset):
    decoding = decoding_from_name(preset)
    rows = [settings for method, settings in ROWS if method is type(decoding)]
    assert rows or not decoding.exact
    for settings in rows:
        for setting, values in settings.items():
            # Sizes are those of images small enough to enumerate.
            value = getattr(decoding, setting)
            assert isinstance(value, int) or value in values


@pytest.mark.parametrize("order", ["none", "random"])
def test_corrections_see_earlier_tokens_only(table_model, order):
    shape = (2, 2, 2)
    model = table_model(grid=shape, vocab_size=2, order=some_order(order, shape, 3))
    around = ranks_around(model, 3, 10)
    assert around.shape == (3, 10, 3) and (around < torch.arange(10)[:, None]).all()
    assert (around[:, 8:] == -1).all() and (around >= 0).any()


# Decodings that are wrong in ways in which published code is wrong: the check above has to reject them.


def sample_again_from_the_target(p, q, x, *place):
    _, kept, noise = couple_at(p, q, x, *place)
    return torch.where(kept, x, sample(p, noise[..., 1])), kept, noise


def accept_generously(p, q, x, *place):
    return couple_at(1.3 * p, q, x, *place)


def keep_survivors(rule):
    """Verifies correctly, but `rule` says which of the other drafts stay."""

    class Broken(SpeculativeJacobiDecoding):
        def _refresh(self, state, positions, drafts, verified, p, q):
            noise = uniforms(state.seeds, positions, state.steps, Purpose.VERIFY, 2)
            p_x, q_x = (values.gather(-1, drafts[..., None]).squeeze(-1) for values in (p, q))
            return torch.where(rule(p_x / q_x, noise[..., 0]), drafts, sample(p, noise[..., 1]))

    return Broken


class StaleProbabilities(SpeculativeJacobiDecoding):
    """Samples the drafts again and verifies them against the probabilities of those before them."""

    def step(self, state):
        stale = state.draft_probabilities.clone()
        super().step(state)
        state.draft_probabilities.copy_(torch.where(state.fresh[..., None], state.draft_probabilities, stale))


class TrustsNoise(SpeculativeJacobiDecoding):
    """Decides drafts after one that was noise to the model."""

    def start(self, model, sampling, seeds):
        state = super().start(model, sampling, seeds)
        state.is_token = lambda positions: torch.ones_like(positions, dtype=torch.bool)
        return state


def correct_secretly(*arguments):
    """Corrects the drafts, and records the probabilities from before."""
    correct(*arguments)
    return arguments[6]


def siblings_of_another_distribution(q, noise, first):
    return sample_siblings((q > 0).float(), noise, first)


def same_noise_at_every_step(p, q, x, seeds, positions, steps, purpose):
    return couple_at(p, q, x, seeds, positions, None, purpose)


COUPLED, INDEPENDENT = ({"window": 3, "refresh": refresh} for refresh in ("coupled", "independent"))
BROKEN = {
    "a rejected draft is sampled again from the target": (COUPLED, {"couple_at": sample_again_from_the_target}),
    "drafts are accepted generously": (INDEPENDENT, {"couple_at": accept_generously}),
    "survivors above a threshold stay": ({**COUPLED, "method": keep_survivors(lambda ratio, u: ratio > 0.8)}, {}),
    "survivors stay without a residual": ({**COUPLED, "method": keep_survivors(lambda ratio, u: ratio > u)}, {}),
    "every survivor stays": ({**COUPLED, "method": keep_survivors(lambda ratio, u: ratio >= 0)}, {}),
    "steps share their noise": (COUPLED, {"couple_at": same_noise_at_every_step}),
    "stale probabilities, coupled": ({**COUPLED, "method": StaleProbabilities}, {}),
    "stale probabilities, independent": ({**INDEPENDENT, "method": StaleProbabilities}, {}),
    "drafts after noise are decided": ({**COUPLED, "method": TrustsNoise, "levels": 1}, {}),
    "the draft comes from one denoising step, its probabilities from the one before": (
        {**COUPLED, "method": StaleProbabilities, "levels": 2},
        {},
    ),
    "corrections are not recorded": ({"window": 4, "corrections": 2}, {"correct": correct_secretly}),
    "siblings follow another distribution": (
        {"method": TreeJacobiDecoding, "window": 4, "width": 2, "depth": 3},
        {"sample_siblings": siblings_of_another_distribution},
    ),
}

SUBTLE = ("steps share their noise", "siblings follow another distribution")


@pytest.mark.parametrize("flaw", [pytest.param(f, marks=pytest.mark.slow) if f in SUBTLE else f for f in BROKEN])
def test_the_check_rejects_a_decoding_in_which(flaw, table_model, monkeypatch):
    settings, patches = BROKEN[flaw]
    decoding = {"method": SpeculativeJacobiDecoding, **settings}
    decoding = decoding.pop("method")(**decoding)
    # Distributions so sharp that siblings are tried often.
    model, sampling = table_model(sharpness=2.5), Sampling()
    for attribute, value in patches.items():
        monkeypatch.setattr(sys.modules[type(decoding).__mro__[-3].__module__], attribute, value)
    tokens = sample_images(model, decoding, sampling, 50_000 if flaw in SUBTLE else IMAGES)
    with pytest.raises(AssertionError, match="chi-square|total variation"):
        assert_follows(tokens, model.joint(sampling), 3)
