"""Masked decodings that reuse what earlier forward passes computed: where they are those of `MaskedDecoding`, how far
off they are, batches, known tokens, refusals."""

import pytest
import torch
from pipelines.mar import tiny as tiny_mar

from arimage.decoding import (
    LatentSampling,
    Layout,
    LazyMAR,
    MaskedDecoding,
    ReCAP,
    decode,
    decoding_from_text,
    decoding_to_text,
)
from arimage.decoding.masked import latents, lazy_mar, recap, sets
from arimage.pipelines.mar.transformer_mar import MARLatentModel


SEEDS = torch.tensor([5, 6, 7])
RECAPS = [ReCAP(full_steps=2, partial_steps=2), ReCAP(full_steps=0, keep_buffers=True)]
LAZY = [LazyMAR(1, 3, head_every=3, extra=1, fractions=(0.3,) * 8), LazyMAR(2, 9, layer=0, extra=0)]


def mar(guided=True):
    labels = torch.arange(3)
    return MARLatentModel(tiny_mar.transformer(), tiny_mar.head(), labels, Layout((4, 4)), guided=guided)


def sampling(**changes):
    settings = {"guidance_scale": 2.0, "num_inference_steps": 8, "num_diffusion_steps": (4, 2, 1)}
    return LatentSampling(**settings | changes)


@torch.no_grad()
def tokens_of(decoding, model=None, seeds=SEEDS, **changes):
    return decode(model or mar(), decoding, sampling(**changes), seeds).tokens


def assert_close(found, expected):
    """Up to rounding, which an untrained head multiplies."""
    assert (found - expected).abs().max() < 1e-3 * expected.abs().max()


def forced_tokens():
    """Known tokens of three images: none, five, and all."""
    forced = torch.randn(3, 16, 12, generator=torch.Generator().manual_seed(0))
    forced[0] = torch.nan
    forced[1, 5:] = torch.nan
    return forced


@pytest.mark.parametrize("changes", [{"guidance_schedule": "constant"}, {"guidance_scale": 1.0}], ids=str)
def test_recap_without_partial_steps_is_masked_decoding(changes):
    model = mar(guided=len(changes) == 1 and "guidance_schedule" in changes)
    for forced in (None, forced_tokens()):
        expected = tokens_of(MaskedDecoding(), model, forced=forced, **changes)
        assert torch.equal(tokens_of(ReCAP(full_steps=8), model, forced=forced, **changes), expected)


def test_guidance_of_recap_is_full_in_the_last_step():
    one, other = tokens_of(ReCAP(full_steps=8)), tokens_of(MaskedDecoding())
    last = latents.random_orders(SEEDS, 16)[:, : sets.masked_counts(16, 8)[7]]
    alike = (one == other).all(-1)
    assert torch.equal(alike, torch.ones_like(alike).scatter(1, last, False))


def test_lazy_mar_that_refreshes_everything_is_masked_decoding():
    assert torch.equal(tokens_of(LazyMAR(every=1, head_every=1)), tokens_of(MaskedDecoding()))


@torch.no_grad()
def test_a_partial_pass_over_all_places_is_a_full_one():
    model, tokens = mar(), torch.randn(3, 16, 12, generator=torch.Generator().manual_seed(0))
    context, visible = model.open_context(3), torch.zeros(3, 16, dtype=torch.bool)
    model.forward(tokens, visible, 0, context=context)
    visible[:, :5] = True
    places = torch.arange(16).expand(3, -1)
    expected = model.forward(tokens, visible, 5)
    assert torch.equal(model.forward_places(tokens, visible, 5, places, 5, context), expected)
    model.forward(tokens, visible & False, 0, context=context)
    kept = model.forward_places(tokens, visible, 5, places, 5, context, keep_buffers=True)
    assert not torch.allclose(kept, expected, atol=1e-3)


@pytest.mark.every(4)
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("guided", [False, True])
@pytest.mark.parametrize("decoding", [MaskedDecoding(), *RECAPS, *LAZY], ids=decoding_to_text)
def test_an_image_does_not_depend_on_its_batch(decoding, guided, known, monkeypatch):
    model, forced = mar(guided), forced_tokens() if known else None
    changes = {"guidance_scale": 2.0 if guided else 1.0}
    together = tokens_of(decoding, model, forced=forced, **changes)
    for image in range(3):
        some = None if forced is None else forced[[image]]
        one = model.take(torch.tensor([image]))
        assert_close(tokens_of(decoding, one, SEEDS[[image]], forced=some, **changes)[0], together[image])
    # Nor on how sets and rows are padded where steps are captured.
    for module in (recap, lazy_mar):
        monkeypatch.setattr(module, "has_few_sizes", lambda seeds: True)
    for module in (latents, lazy_mar):
        monkeypatch.setattr(module, "MULTIPLE", 3)
    assert_close(tokens_of(decoding, model, forced=forced, **changes), together)


@torch.no_grad()
@pytest.mark.parametrize("decoding", [RECAPS[1], LAZY[0]], ids=decoding_to_text)
def test_images_may_be_dropped_between_steps(decoding):
    expected, images = tokens_of(decoding), torch.tensor([2, 0])
    state = decoding.start(mar(), sampling(), SEEDS)
    decoding.step(state)
    state.select(images)
    while not state.over:
        decoding.step(state)
    assert_close(state.tokens, expected[images])


@torch.no_grad()
@pytest.mark.parametrize("decoding", [MaskedDecoding(), RECAPS[0], LAZY[0]], ids=decoding_to_text)
def test_known_tokens_stay_and_the_others_see_them(decoding):
    forced = forced_tokens()
    state = decode(mar(), decoding, sampling(forced=forced), SEEDS)
    assert torch.equal(state.tokens[~forced.isnan()], forced[~forced.isnan()])
    assert state.decided.all() and state.finished.all() and state.accepted.sum(0).tolist() == [16, 11, 0]
    free = tokens_of(decoding)
    assert_close(state.tokens[0], free[0])
    assert not torch.allclose(state.tokens[1, 5:], free[1, 5:], rtol=1e-2)


class MemoryModel:
    """Three tokens [1]. The mean of a token is the sum of those that are visible, and OTHERS times what each other
    place has seen: the sum of those that were visible when it was evaluated. The variance is 1."""

    kind, num_tokens, dim, num_rows, num_layers = "masked_latents", 3, 1, 3, 1
    device, network, drafter, OTHERS = torch.device("cpu"), None, None, 0.4

    def open_context(self, batch_size, *, lazy=False):
        return None

    def forward(self, tokens, visible, count, *, padded=False, context=None):
        self.seen = self._sum(tokens, visible).expand(-1, 3, -1)
        return self._means(tokens, visible, self.seen)

    def forward_places(self, tokens, visible, count, places, known, context, *, padded=False, keep_buffers=False):
        inside = torch.zeros(len(places), 4, dtype=torch.bool).scatter(1, places, True)[:, :3, None]
        seen = torch.where(inside, self._sum(tokens, visible), self.seen)
        return self._means(tokens, visible, seen).gather(2, places.clamp(max=2)[None, ..., None])

    def _sum(self, tokens, visible):
        return torch.where(visible[..., None], tokens, 0).sum(1, keepdim=True)

    def _means(self, tokens, visible, seen):
        return (self._sum(tokens, visible) + self.OTHERS * (seen.sum(1, keepdim=True) - seen))[None]

    def denoise(self, step, tokens, conditions, guidance, num_diffusion_steps):
        return conditions[0] if step else tokens, torch.ones_like(tokens)


@pytest.mark.parametrize(("full_steps", "slope"), [(3, 1.8), (1, 1.4)])
def test_how_far_off_recap_is(full_steps, slope):
    """The last token depends on the second less than it should, if both are in one group: the place of the first one
    has not seen the second."""
    state = decode(MemoryModel(), ReCAP(3, full_steps), LatentSampling(num_diffusion_steps=2), torch.arange(20_000))
    first, second, last = state.tokens[..., 0].gather(1, state.order.flip(1)).T
    slopes = torch.linalg.lstsq(torch.stack([first, second], dim=1), last[:, None]).solution
    torch.testing.assert_close(slopes[:, 0], torch.tensor([1.8, slope]), atol=0.05, rtol=0)


@pytest.mark.parametrize(
    ("decoding", "changes", "name"),
    [
        (ReCAP(steps=17), {}, "steps is 17"),
        (ReCAP(), {"num_inference_steps": 17}, "num_inference_steps is 17"),
        (ReCAP(full_steps=9), {}, "full_steps is 9"),
        (ReCAP(denoising_steps=1001), {}, "num_diffusion_steps is 1001"),
        (LazyMAR(layer=5), {}, "layer is 5"),
        (LazyMAR(fractions=(1.0,) * 7), {}, "fractions has 7 numbers"),
        (LazyMAR(), {"num_inference_steps": 17}, "num_inference_steps is 17"),
    ],
    ids=str,
)
def test_settings_that_do_not_fit_the_model_or_the_call_are_refused(decoding, changes, name):
    with pytest.raises(ValueError, match=name):
        tokens_of(decoding, **changes)


@torch.no_grad()
def test_a_call_counts_full_and_partial_steps():
    state = decode(mar(), ReCAP(7, 2, 2, 6), sampling(), SEEDS)
    # Two full steps, then a full one and two partial ones, then a full one and a partial one.
    assert state.forward_passes == 7 and state.head_calls == 4 * 6 + 3 * 3
    assert ReCAP(7, 2, 2, 6) == decoding_from_text("recap:steps=7,full_steps=2,partial_steps=2,denoising_steps=6")
    state = decode(mar(), LazyMAR(first=1), sampling(), SEEDS)
    assert state.forward_passes == 8 and state.head_calls == 8 * 7
