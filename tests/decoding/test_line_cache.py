"""Generation with a cache of a few rows: what it holds, and the images that follow from it."""

import pytest
import torch
from families import EVERY, condition_of, flat, having, quick, seeded

from arimage.decoding import LineCacheDecoding, Sampling, decode


class Checked(LineCacheDecoding):
    """Compares every forward pass with one that has the keys and values of all tokens, and sees those that are
    kept."""

    def start(self, model, sampling, seeds):
        state, forward = super().start(model, sampling, seeds), model.forward
        everything, _ = model.prefill(len(seeds))
        held = seeds.new_full((len(seeds), state.cache.slots), -1)
        state.checked = 0

        def checked(tokens, positions, cache, *, visible, slots):
            logits = forward(tokens, positions, cache, visible=visible, slots=slots)
            held.scatter_(1, slots, positions)
            kept = (held[..., None] == torch.arange(model.num_tokens)).any(1)
            assert kept.sum(1).tolist() == (positions[:, 0] + 1).clamp(max=held.shape[1]).tolist()
            expected = forward(tokens, positions, everything, visible=kept[:, None])
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
            state.checked += 1
            assert state.checked < model.num_tokens
            return logits

        model.forward = checked
        return state


def generate(pipe, decoding, seeds=(0, 1, 2), guidance=3.0, **settings):
    """The tokens [B, N] of one prompt or class under several seeds."""
    video = pipe.abilities.generates_video
    settings |= {"num_videos_per_prompt" if video else "num_images_per_prompt": len(seeds)}
    settings |= {} if video else {"guidance_scale": guidance}
    generator = [seeded(seed) for seed in seeds]
    out = pipe(**condition_of(pipe), decoding=decoding, generator=generator, output_type="latent", **settings)
    assert out.stats.exact == (decoding == "ar")
    return flat(out.tokens)


@pytest.mark.every(3)
@pytest.mark.parametrize("guidance", [3.0, pytest.param(1.0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", quick(having("lines"), ("anole", "cosmos-text")))
def test_a_token_sees_the_tokens_that_are_kept(family, guidance):
    pipe, video = EVERY[family](), family in having("videos")
    tokens = generate(pipe, Checked(4 if video else 3), guidance=guidance)
    # Nothing is replaced before the cache is full: 4 of 6 rows of a video, 3 of 4 rows of an image.
    full = tokens.shape[1] * (4 if video else 3) // (6 if video else 4)
    assert torch.equal(tokens[:, :full], generate(pipe, "ar", guidance=guidance)[:, :full])


def replaced_by_hand(tokens, shape, lines):
    """The row of the token in each slot [B][lines * columns] after all tokens [B, N] but the last were fed."""
    columns, recent = shape[-1], min(shape[-2] if len(shape) == 3 else 1, lines - 1)
    images = []
    for image in tokens.tolist():
        held = [[] for _ in range(columns)]
        for rank, token in enumerate(image[:-1]):
            row, column = divmod(rank, columns)
            own = held[column]
            if len(own) < lines:
                own.append((row, token))
            else:
                alike = [sum(token == other for _, other in own) for _, token in own]
                old = [i for i in range(lines) if own[i][0] < row - recent]
                own[max(old, key=lambda i: (alike[i], -i))] = row, token
        images.append([held[column][line][0] for line in range(lines) for column in range(columns)])
    return images


@pytest.mark.parametrize(("shape", "lines"), [((6, 3), 2), ((7, 2), 4), ((3, 2, 2), 3), ((4, 2, 2), 4)])
def test_the_token_most_like_its_column_is_replaced(table_model, shape, lines):
    model = table_model(grid=shape, vocab_size=2, truncated=True)
    state = decode(model, LineCacheDecoding(lines), Sampling(), torch.arange(20))
    assert state.rows.tolist() == replaced_by_hand(state.tokens, shape, lines)
    # Where there is a choice, images differ in it.
    assert (len(set(map(tuple, state.rows.tolist()))) > 1) == (lines == 4)
