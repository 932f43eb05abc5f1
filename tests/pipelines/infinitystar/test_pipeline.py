"""Calls of InfinityStar: batches, given frames, settings per pass, and what is refused."""

import numpy as np
import pytest
import torch
from families import LATENT
from PIL import Image
from pipelines.infinitystar import tiny

from arimage import NextScaleDecoding
from arimage.decoding.run.batch import decode
from arimage.pipelines.infinitystar.pyramid import add_bits, bits_of, frames_of
from arimage.pipelines.infinitystar.scale_model import fed_passes


@pytest.fixture(scope="module")
def pipe():
    return tiny.pipeline()


def call(pipe, prompt="a red heart", seeds=(0,), frames=17, **settings):
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    return pipe(prompt, num_frames=frames, generator=generators, **LATENT | settings)


def same(ours, theirs):
    return all(torch.equal(*maps) for maps in zip(ours, theirs, strict=True))


def picture(seed=0, size=tiny.SIZE):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8))


def test_the_length_and_the_suffix_are_part_of_the_text(pipe, monkeypatch):
    seen = []
    encode = pipe.encode_texts
    monkeypatch.setattr(pipe, "encode_texts", lambda texts: seen.extend(texts) or encode(texts))
    call(pipe, "a fox")
    call(pipe, "a fox", prompt_suffix="", negative_prompt="a dog")
    call(pipe, "a fox", frames=1)
    assert seen == [
        "<<<t=1s>>>a fox, Close-up on big objects, emphasize scale and detail",
        "<<<t=1s>>>a fox",
        "a dog",
        "a fox",
    ]


def test_a_given_image_stays_and_only_what_is_read_later_is_fed(pipe):
    image = picture()
    out = call(pipe, ["a fox", "a red heart"], (0, 1), image=image, guidance_scale=3.0)
    film = pipe.film(tiny.SIZE, 17)
    known = [one.clip == 0 for one in film]
    assert out.stats.forward_passes == known.count(False) + 1 and len(out.tokens) == len(film)
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None, :, None] / 127.5 - 1
    with torch.no_grad():
        latents = pipe.vq.encode_latents(pixels)
    total = torch.zeros_like(latents)
    for one, maps, given in zip(film, out.tokens, known, strict=True):
        if given:
            expected = bits_of(latents - frames_of(one, total), one.bits, one.shape[1:])
            assert torch.equal(maps, expected.expand(2, -1, -1, -1, -1))
            add_bits(one, total, expected)
    # Different prompts go on differently.
    assert not torch.equal(out.tokens[-1][0], out.tokens[-1][1])


def test_skipping_given_passes_changes_nothing(pipe):
    """As if all of them were fed, with the same bits forced."""
    model = pipe.prepare("a fox", image=picture(), num_frames=17, guidance_scale=3.0).model
    assert fed_passes(model.film, 11) == (10, *range(11, 22)) == model.fed
    out = call(pipe, "a fox", image=picture(), top_k=1, guidance_scale=3.0)
    free = pipe.prepare("a fox", num_frames=17, guidance_scale=3.0, generator=torch.Generator().manual_seed(0))
    tokens = torch.cat([maps.flatten(1) for maps in out.tokens], dim=1)
    tokens[:, sum(maps[0].numel() for maps in out.tokens[:11]) :] = -1
    sampling = free.sampling.replaced(forced=tokens, top_k=1)
    with torch.no_grad():
        state = decode(free.model, NextScaleDecoding(), sampling, free.seeds)
    assert same(pipe.whole_tokens(free, state.tokens), out.tokens)


def test_one_image_or_video_for_all_prompts_or_one_each(pipe):
    images = [picture(0), picture(1)]
    out = call(pipe, "a fox", (0, 1), image=images)
    assert same([maps[1:] for maps in out.tokens], call(pipe, "a fox", (1,), image=images[1]).tokens)
    with pytest.raises(ValueError, match="image or video holds 2 for 3 videos: give one for all, or one for each"):
        call(pipe, ["a", "b", "c"], image=images)


def test_an_empty_negative_prompt_is_no_text_next_to_others(pipe):
    prompts, negatives = ["a red heart", "a blue book, flat style"], ["", "a dog"]
    out = call(pipe, prompts, (0, 1), 1, negative_prompt=negatives)
    for number, seed in enumerate((0, 1)):
        alone = call(pipe, prompts[number], (seed,), 1, negative_prompt=negatives[number])
        assert same([maps[number : number + 1] for maps in out.tokens], alone.tokens)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["guidance_scale", "temperature"])
def test_settings_may_be_one_two_or_one_per_pass(pipe, name):
    one, two = call(pipe, **{name: 3.0}), call(pipe, **{name: [3.0, 3.0]})
    each = call(pipe, **{name: [3.0] * 22})
    assert same(one.tokens, two.tokens) and same(one.tokens, each.tokens)
    mixed = call(pipe, **{name: [3.0, 0.9]})
    assert same(one.tokens[:11], mixed.tokens[:11]) and not same(one.tokens[11:], mixed.tokens[11:])
    assert same(call(pipe, **{name: [3.0] * 11 + [0.9] * 11}).tokens, mixed.tokens)
    with pytest.raises(ValueError, match=f"{name} holds 3 numbers: give one, two .* for each of the 22 passes"):
        call(pipe, **{name: [1.0, 2.0, 3.0]})


def test_guidance_that_ends_early_drops_the_rows_without_a_text(pipe):
    ending = call(pipe, guidance_scale=[5.0] * 20 + [1.0] * 2)
    dropped = call(pipe, guidance_scale=5.0, decoding="next-scale:guided_scales=20")
    assert same(ending.tokens, dropped.tokens) and ending.stats.exact and not dropped.stats.exact


def test_a_film_ends_in_its_last_clip_and_is_pruned_there(pipe):
    short, whole = call(pipe, decoding="next-scale:stop_after=20"), call(pipe)
    assert short.stats.forward_passes == 20 and (short.tokens[-1] == -1).all()
    assert same(short.tokens[:20], whole.tokens[:20])
    with pytest.raises(ValueError, match="stop_after is 11, but its last clip begins after 11 scales: give more"):
        call(pipe, decoding="next-scale:stop_after=11")
    pruned = call(pipe, decoding=NextScaleDecoding(pruned=(0.5, 0.75)))
    assert same(pruned.tokens[:20], whole.tokens[:20]) and not pruned.stats.exact
    call(pipe, decoding=NextScaleDecoding(pruned=(0.5,) * 10))
    with pytest.raises(ValueError, match="pruned holds 11 shares: give at most 10"):
        call(pipe, decoding=NextScaleDecoding(pruned=(0.5,) * 11))
    # With a given image, scales are the passes that are fed.
    call(pipe, image=picture(), decoding="next-scale:stop_after=2")
    with pytest.raises(ValueError, match="stop_after is 1, but its last clip begins after 1 scales"):
        call(pipe, image=picture(), decoding="next-scale:stop_after=1")


def test_odd_arguments_are_refused(pipe):
    for given, message in (
        ({"frames": 2}, "num_frames is 2: choose among 1, 17, 33, 49, 65, 81, 161"),
        ({"frames": True}, "num_frames is True: choose among"),
        ({"frames": 1, "image": picture()}, "num_frames is 1: choose among 17, 33, 49, 65, 81, 161"),
        ({"frames": 161, "video": [picture()] * 3}, "video has 3 frames: give at least 81"),
        ({"frames": 161, "video": [picture()], "image": picture()}, "image and video are both given"),
        ({"apg_norm_threshold": 0}, "apg_norm_threshold is 0: give a number above 0, or None"),
        ({"apg_norm_threshold": float("nan")}, "apg_norm_threshold is nan: give a number above 0, or None"),
        ({"prompt_suffix": 3}, "prompt_suffix is 3: give a string"),
        ({"height": 100}, "height and width are 100 and None: this checkpoint generates 192x336 or"),
        ({"negative_prompt": ["a", "b", "c"]}, "negative_prompt holds 3 texts for 1 prompts"),
        ({"decoding": "code"}, "cannot decode this model"),
    ):
        with pytest.raises(ValueError, match=message):
            call(pipe, **given)


def test_lengths_that_were_not_trained_are_generated_with_a_warning(caplog):
    pipe = tiny.pipeline(
        pixels="0.40M", semantic_scales=None, image_scale_repetition=None, video_scale_repetition=None
    )
    assert pipe.image_sizes[0] == (480, 848) and len(pipe.image_sizes) == 15
    for frames, warned in ((17, True), (81, False), (161, False)):
        caplog.clear()
        with caplog.at_level("WARNING"):
            assert pipe._num_frames(frames, 0) == frames
        assert warned == (f"videos of {frames} frames may be poor" in caplog.text)
    assert pipe._num_frames(None, 0) == pipe._num_frames(None, 1) == 81 and pipe._num_frames(None, 81) == 161
