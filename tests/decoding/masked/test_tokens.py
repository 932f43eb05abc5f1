"""Decodings of masked tokens: the distribution of their images, orders, counts, given tokens, batches."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from decoding.test_exactness import assert_follows

from arimage.decoding import (
    ConfidenceDecoding,
    HaltonDecoding,
    Layout,
    Sampling,
    decode,
    decoding_to_text,
    halton_order,
)
from arimage.decoding.contract.models import ConfidenceSettings
from arimage.decoding.masked import confidence, halton
from arimage.decoding.masked.confidence import _counts as confidence_counts
from arimage.decoding.masked.halton import _counts as halton_counts


IMAGES, CODES = 40_000, 3
PUBLISHED = ConfidenceSettings(2, "arccos", 1.0, "linear", "linear")


class Context:
    """The tokens that each row was last evaluated with."""

    def __init__(self, rows):
        self.rows = rows

    def allocate(self):
        pass

    def expand(self, images):
        self.rows = self.rows[images]

    def put(self, images, other):
        self.rows[images] = other.rows


class MaskedTable:
    """A `MaskedTokenModel` whose logits at a place depend on the tokens of all other places, -1 included, and on a row
    of its own."""

    kind, published, network, put_key, compact = "masked_tokens", PUBLISHED, None, None, False
    device = torch.device("cpu")

    def __init__(self, branches=1, grid=(2, 2), strength=1.0):
        self.layout = Layout(grid)
        self.num_tokens, self.num_rows, self.vocab_size = math.prod(grid), math.prod(grid) + 1, CODES
        generator = torch.Generator().manual_seed(3)
        shape = branches, self.num_tokens, self.num_rows, CODES + 1, CODES
        self.pairs = strength * torch.randn(shape, generator=generator)
        self.evaluated = []

    def open_context(self, batch_size, *, logits=False):
        return Context(torch.full((batch_size, self.num_rows + 1), -9))

    def forward(self, tokens, places, *, rows=None, context=None):
        of_rows = torch.nn.functional.pad(tokens, (0, 2))
        if rows is None:
            seen = of_rows
            if context is not None:
                context.rows.copy_(of_rows)
            self.evaluated.append(self.num_rows)
        else:
            context.rows.scatter_(1, rows, of_rows.gather(1, rows))
            seen = context.rows
            assert ((rows[:, :, None] == places[:, None]).any(1) | (places == self.num_tokens)).all()
            self.evaluated.append(int((rows < self.num_rows).sum(1).max()))
        logits = self.all_logits(seen[:, : self.num_rows])
        logits = torch.nn.functional.pad(logits, (0, 0, 0, 1), value=math.nan)
        return logits[:, torch.arange(len(tokens))[:, None], places]

    def all_logits(self, seen):
        """[G, B, N, V] for the tokens [B, R] of the rows, -1 where there is none."""
        assert (seen >= -1).all()
        hot = torch.nn.functional.one_hot(seen + 1, CODES + 1).float()
        return torch.einsum("gprcv,brc->gbpv", self.pairs, hot)

    def take(self, images):
        return self


def probabilities(model, tokens, sampling, factor, share=None, plain=False):
    """What each place is sampled from [N, V], given the tokens of an image; `share` of the linear guidance."""
    seen = torch.tensor([*tokens, 0])[None]
    logits = model.all_logits(seen)[:, 0].double()
    scale = sampling.guidance_scale if share is None else 1 + (sampling.guidance_scale - 1) * share
    logits = logits[0] if len(logits) == 1 else logits[1] + scale * (logits[0] - logits[1])
    if plain:
        return (factor * logits).softmax(-1)
    logits = factor * logits / sampling.temperature
    if sampling.top_k:
        logits = logits.masked_fill(logits < logits.topk(sampling.top_k).values[..., -1:], -math.inf)
    return logits.softmax(-1)


def add(chances, tokens, chance):
    chances[tokens] = chances.get(tokens, 0.0) + chance


def joint_of(chances):
    joint = torch.zeros(CODES**4, dtype=torch.float64)
    for tokens, chance in chances.items():
        joint[int("".join(map(str, tokens)), CODES)] += chance
    assert abs(joint.sum() - 1) < 1e-9
    return joint


def halton_joint(model, decoding, sampling, given=()):
    """The exact distribution of images: a product over the sets, averaged over where the order may begin."""
    order = halton_order(2).tolist()
    start = tuple(given) or (-1,) * 4
    unknown = [place for place in range(4) if start[place] < 0]
    counts = halton_counts(len(unknown), decoding.steps)
    chances = {}
    for offset in range(4 if decoding.randomize else 1):
        ranked = [order[(rank - offset) % 4] for rank in range(4)]
        ranked, images = [place for place in ranked if place in unknown], {start: 1.0}
        for step, (before, after) in enumerate(itertools.pairwise(counts)):
            first, last = decoding.sharpness
            factor = (first + (last - first) * step / max(decoding.steps - 1, 1)) ** decoding.sharpness_power
            factor = factor / 2 if step < decoding.warmup_steps else factor
            places, longer = ranked[len(unknown) - before : len(unknown) - after], {}
            for tokens, chance in images.items():
                p = probabilities(model, tokens, sampling, factor)
                for chosen in itertools.product(range(CODES), repeat=len(places)):
                    image = list(tokens)
                    for place, token in zip(places, chosen, strict=True):
                        image[place] = token
                    add(
                        longer,
                        tuple(image),
                        chance * math.prod(float(p[i, t]) for i, t in zip(places, chosen, strict=True)),
                    )
            images = longer
        for tokens, chance in images.items():
            add(chances, tokens, chance / (4 if decoding.randomize else 1))
    return joint_of(chances)


def chosen_sets(weights, count):
    """The chance of each set of `count` places that win when Gumbel noise is added to the logarithms of `weights`."""
    found = {}
    for picks in itertools.permutations(weights, count):
        left, chance = sum(weights.values()), 1.0
        for place in picks:
            chance *= weights[place] / left
            left -= weights[place]
        add(found, frozenset(picks), chance)
    return found


def confidence_joint(model, decoding, sampling, given=()):
    """The exact distribution of images: all tokens of a step, then the chance of each set to be decided."""
    start = tuple(given) or (-1,) * 4
    steps = decoding.steps
    counts = confidence_counts(start.count(-1), steps, decoding.schedule or PUBLISHED.schedule)
    images = {start: 1.0}
    for step, (before, after) in enumerate(itertools.pairwise(counts)):
        share, longer = step / max(steps - 1, 1), {}
        noise = PUBLISHED.noise if decoding.noise is None else decoding.noise
        fades = (decoding.noise_schedule or PUBLISHED.noise_schedule) == "linear"
        grows = (decoding.guidance_schedule or PUBLISHED.guidance_schedule) == "linear"
        noise *= sampling.temperature * (1 - share if fades else 1)
        for tokens, chance in images.items():
            settings = model, tokens, sampling, decoding.sharpness, share if grows else None
            p, plain = probabilities(*settings), probabilities(*settings, plain=True)
            masked = [place for place in range(4) if tokens[place] < 0]
            again = [i for i in range(4) if tokens[i] >= 0 and start[i] < 0] if decoding.redraw_known else []
            sampled_at = [*masked, *again]
            for chosen in itertools.product(range(CODES), repeat=len(sampled_at)):
                of_place = dict(zip(sampled_at, chosen, strict=True))
                sampled = chance * math.prod(float(p[i, t]) for i, t in of_place.items())
                if not sampled:
                    continue
                ratings = {i: float(plain[i, of_place[i]]) for i in masked}
                if noise > 1e-6:
                    sets_of = chosen_sets({i: rating ** (1 / noise) for i, rating in ratings.items()}, before - after)
                else:
                    sets_of = {frozenset(sorted(masked, key=ratings.get)[after:]): 1.0}
                for places, share_of in sets_of.items():
                    image = [of_place[i] if i in places or i in again else tokens[i] for i in range(4)]
                    add(longer, tuple(image), sampled * share_of)
        images = longer
    return joint_of(images)


SAMPLINGS = {
    "plain": Sampling(),
    "guided": Sampling(guidance_scale=2.5),
    "temperature, top-k, guided": Sampling(guidance_scale=1.7, temperature=1.4, top_k=2),
}


def images_of(model, decoding, sampling, count=IMAGES):
    state = decode(model, decoding, sampling, torch.arange(count))
    assert state.decided.all() and state.finished.all()
    return state


@pytest.mark.every(2)
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize(
    "decoding",
    [
        *(HaltonDecoding(steps) for steps in (1, 2, 3, 4)),
        HaltonDecoding(3, randomize=False, sharpness=(0.7, 1.9), sharpness_power=2.0, warmup_steps=1),
    ],
    ids=decoding_to_text,
)
def test_images_follow_the_distribution_of_halton_decoding(decoding, sampling):
    sampling = SAMPLINGS[sampling]
    model = MaskedTable(1 + sampling.guided)
    state = images_of(model, decoding, sampling)
    assert state.forward_passes == decoding.steps
    assert_follows(state.tokens, halton_joint(model, decoding, sampling), CODES)


@pytest.mark.every(5)
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize(
    "decoding",
    [
        *(ConfidenceDecoding(steps, schedule="linear") for steps in (1, 2, 3, 4)),
        ConfidenceDecoding(2, "maskgit", 1.0, "constant", "constant"),
        ConfidenceDecoding(3, "square", noise=0.0, sharpness=1.3),
        ConfidenceDecoding(3, "cosine", redraw_known=True, noise=2.0),
    ],
    ids=decoding_to_text,
)
@pytest.mark.parametrize("gumbel", [False, True], ids=["", "gumbel"])
def test_images_follow_the_distribution_of_confidence_decoding(decoding, sampling, gumbel):
    sampling = SAMPLINGS[sampling]
    model = MaskedTable(1 + sampling.guided)
    model.published = replace(PUBLISHED, gumbel=gumbel)
    state = images_of(model, decoding, sampling)
    assert state.forward_passes == decoding.steps
    assert_follows(state.tokens, confidence_joint(model, decoding, sampling), CODES)


@pytest.mark.parametrize(
    "decoding",
    [HaltonDecoding(2), ConfidenceDecoding(2), ConfidenceDecoding(2, redraw_known=True)],
    ids=decoding_to_text,
)
def test_given_tokens_stay_and_the_others_follow_the_distribution(decoding):
    model, given = MaskedTable(), (-1, 2, -1, -1)
    forced = torch.tensor([given]).repeat(IMAGES, 1)
    state = images_of(model, decoding, Sampling(forced=forced))
    assert (state.tokens[:, 1] == 2).all()
    joint = halton_joint if isinstance(decoding, HaltonDecoding) else confidence_joint
    assert_follows(state.tokens, joint(model, decoding, Sampling(), given), CODES)
    whole = decode(model, decoding, Sampling(forced=torch.tensor([[0, 1, 2, 0]])), torch.arange(1))
    assert whole.tokens.tolist() == [[0, 1, 2, 0]]


def test_a_cut_of_the_noise_makes_probable_tokens_more_probable():
    """A token of probability 0.5 over a flat rest, as in a vocabulary of 8,192."""

    class Peak(MaskedTable):
        def __init__(self):
            super().__init__(grid=(1, 1))
            self.vocab_size = 8192

        def forward(self, tokens, places, **_):
            logits = torch.zeros(1, *places.shape, self.vocab_size)
            logits[..., 7] = math.log(self.vocab_size - 1)
            return logits

    def share(**settings):
        decoding = ConfidenceDecoding(1, noise=0.0, **settings)
        return float((decode(Peak(), decoding, Sampling(), torch.arange(400)).tokens == 7).float().mean())

    assert 0.4 < share() < 0.6 and share(max_gumbel=5.54) > 0.98
    assert ConfidenceDecoding().exact and not ConfidenceDecoding(max_gumbel=5.54).exact
    with pytest.raises(ValueError, match="max_gumbel"):
        ConfidenceDecoding(max_gumbel=-1)


@pytest.mark.parametrize("flaw", ["order", "rating"])
def test_the_check_rejects_another_order(flaw, monkeypatch):
    model = MaskedTable(strength=2.0)
    if flaw == "order":
        decoding, expected = HaltonDecoding(2, randomize=False), halton_joint
        monkeypatch.setattr(halton, "halton_order", lambda *shape: torch.arange(4))
    else:
        decoding, expected = ConfidenceDecoding(2, noise=0.5), confidence_joint
        monkeypatch.setattr(confidence, "exponentials", lambda *key: torch.ones(IMAGES, key[1].shape[1], 1))
    joint = expected(model, decoding, Sampling())
    with pytest.raises(AssertionError):
        assert_follows(images_of(model, decoding, Sampling()).tokens, joint, CODES)
