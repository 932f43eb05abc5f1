"""Graphs that outlive a call: further calls of the same kind replay them for other images."""

import gc
import weakref

import card
import pytest
from accelerator.runs import PROMPTS, call, differences, equal, fresh, pipeline
from families import EVERY, flat, seeded

from arimage.decoding import AutoregressiveDecoding


# One decoding of every kind of state.
QUICK = [
    ("llamagen-text", "ar"),
    ("arpg", "groups:groups=4"),
    ("var-text", "next-scale"),
    ("mar", "mar"),
    ("halton-maskgit-class", "halton:steps=4"),
    ("latent-llama", "ar"),
    ("llamagen-dd", "few-step:starts=0+3"),
]
SLOW = {
    "llamagen-text": ["eagle", "sjd-coupled:window=4", "zipar:window=2"],
    "emu3": ["sjd-coupled:window=4"],
    "arpg": ["sjd-coupled:window=4"],
    "lpd": ["groups:groups=4"],
    "randar": ["ar"],
    "var-class": ["next-scale"],
    "janus": ["ar"],
    "glm-image": ["sjd-coupled:window=4"],
    "emu3.5": ["sjd-coupled:window=4"],
    "lumina": ["ar"],
    "mammothmoda2": ["sjd-coupled:window=4"],
    "cosmos-text": ["sjd-coupled:window=4"],
    "mar": ["mar-disa:diffusion_steps=3+2", "recap", "lazy-mar:first=1"],
    "halton-maskgit-text": ["confidence:steps=4"],
    "halton-maskgit-class": ["recap:steps=6,full_steps=2"],
    "llamagen-dd": ["flow:window=4"],
    "var-dd": ["few-step:starts=0+2"],
}
ONCE = ("groups", "next-scale", "few-step", "mar", "mar-disa", "recap", "lazy-mar", "halton", "confidence")
CASES = [*QUICK, *(pytest.param(name, text, marks=pytest.mark.slow) for name in SLOW for text in SLOW[name])]


def three_calls(pipe, decoding, after_call=lambda: None):
    """Calls for other images each: other prompts, classes or frames, and other seeds."""
    found = {}
    for number in range(3):
        given = call(pipe, decoding, 3, first=2 * number)
        found.update({f"{name} of call {number}": value for name, value in given.items()})
        after_call()
    return found


@pytest.mark.every(3)
@pytest.mark.parametrize(("family", "decoding"), CASES)
def test_further_calls_capture_nothing(family, decoding):
    expected, pipe, captures = three_calls(pipeline(family, "cpu"), decoding), pipeline(family, "replayed"), []
    with card.card() as device:
        pipe._compiled.clear()
        found = three_calls(pipe, decoding, lambda: captures.append(device.captures))
        replays = device.replays
    assert differences(expected, found) == []
    # Steps of which an image has only one are captured in a second call, and those of shorter prompts once more.
    assert (captures[0] < captures[1]) == (decoding.partition(":")[0] in ONCE or family == "glm-image")
    assert 0 < captures[1] == captures[2] < replays


def test_images_join_and_leave_kept_rows_without_a_capture():
    expected = [call(pipeline("llamagen-text", "cpu"), "ar", 7, batch_size=3, first=first) for first in (0, 7)]
    pipe, captures = pipeline("llamagen-text", "replayed"), []
    with card.card() as device:
        pipe._compiled.clear()
        for first, one in zip((0, 7), expected, strict=True):
            found = call(pipe, "ar", 7, batch_size=3, first=first)
            assert equal(one["tokens"], found["tokens"])
            captures.append(device.captures)
    assert captures == [1, 1]


@pytest.mark.slow
def test_sizes_have_graphs_of_their_own():
    def sizes(pipe):
        side = pipe.image_sizes[0][0]
        return [
            flat(pipe(PROMPTS[:2], height=size, width=side, generator=seeded(i), output_type="latent").tokens)
            for i, size in enumerate((side, 2 * side, side, 2 * side))
        ]

    expected, pipe = sizes(pipeline("emu3", "cpu")), pipeline("emu3", "replayed")
    with card.card() as device:
        pipe._compiled.clear()
        found = sizes(pipe)
        assert device.captures == 2
    assert all(map(equal, expected, found))


@pytest.mark.slow
def test_what_is_kept_has_a_limit():
    pipe = pipeline("llamagen-text", "cpu")
    pipe.compile(backend="eager", kept_bytes=100_000)
    try:
        for count in (1, 2, 3):
            call(pipe, "ar", count)
        kept = pipe._compiled.kept
        assert 0 < sum(each.state.nbytes for each in kept) <= 100_000 and len(kept) < 3
    finally:
        pipe.capture()


def test_what_is_not_kept_is_free_before_tokens_become_pixels(monkeypatch):
    pipe, states, left = fresh(), [], []
    start, decode = AutoregressiveDecoding.start, pipe.decode_result

    def starting(*given):
        state = start(*given)
        states.append(weakref.ref(state))
        return state

    def decoding(*given):
        gc.collect()
        left.append([each() for each in states])
        return decode(*given)

    monkeypatch.setattr(AutoregressiveDecoding, "start", starting)
    monkeypatch.setattr(pipe, "decode_result", decoding)
    with card.card():
        for kept_bytes in (0, 2**30):
            pipe.capture(kept_bytes=kept_bytes)
            pipe("a red heart", decoding="ar", output_type="pt", generator=seeded(0))
    assert left == [[None], [None, states[1]()]] and states[1]() is not None


@pytest.mark.parametrize("kept_bytes", ["8GB", -1, 1.5, True, None])
@pytest.mark.parametrize("method", ["capture", "compile"])
def test_what_is_no_number_of_bytes_is_refused(method, kept_bytes):
    pipe = EVERY["llamagen-class"]()
    before = pipe._compiled
    with pytest.raises(ValueError, match="kept_bytes"):
        getattr(pipe, method)(kept_bytes=kept_bytes)
    assert pipe._compiled is before
