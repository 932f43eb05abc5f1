"""Animations and maps show how an image was decoded, frame by frame and cell by cell."""

import functools

import numpy as np
import pytest
import torch
from PIL import Image
from pipelines.llamagen import tiny as tiny_llamagen
from presets import FOR_TOKENS, quick

from arimage.decoding import Layout
from arimage.media import trace
from arimage.media.trace import (
    ACCEPTED,
    DRAFT,
    NOTHING,
    REJECTED,
    Trace,
    animate,
    deciding_passes,
    draw_acceptance_map,
)


CELL = 192  # two tokens per row make an image of at least 384 pixels


def grey(tokens):
    """Images of 2x2 pixels, each in the grey of its token."""
    return (tokens.view(-1, 1, 2, 2).expand(-1, 3, -1, -1) / 20).float()


@pytest.fixture
def frames(tmp_path, monkeypatch):
    """The marks of every frame of three steps over a grid of 2x2, and the file."""
    marks = []
    mark_cells = trace._mark
    monkeypatch.setattr(trace, "_mark", lambda picture, mark: marks.append(mark) or mark_cells(picture, mark))
    tokens = torch.tensor([[5, 0, 9, -1], [5, 8, 9, 4], [5, 8, 9, 4]])
    decided = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1]]).bool()
    animate(tokens, decided, Layout((2, 2)), grey, "a title", tmp_path / "x.gif")
    return marks, tmp_path / "x.gif"


def test_cells_are_marked_by_what_happened_to_them(frames):
    marks, _ = frames
    expected = [
        {ACCEPTED: [1, 0, 0, 0], REJECTED: [0] * 4, DRAFT: [0, 1, 1, 0], NOTHING: [0, 0, 0, 1]},
        {ACCEPTED: [0] * 4, REJECTED: [0, 1, 0, 0], DRAFT: [0, 0, 1, 1], NOTHING: [0] * 4},
        {ACCEPTED: [0, 0, 1, 1], REJECTED: [0] * 4, DRAFT: [0] * 4, NOTHING: [0] * 4},
    ]
    assert [
        {colour: mark.flatten().astype(int).tolist() for colour, mark in frame.items()} for frame in marks
    ] == expected


def test_an_animation_has_one_frame_per_step_and_rests_on_the_image(frames):
    _, path = frames
    with Image.open(path) as animation:
        assert animation.n_frames == 4
        assert min(animation.size) >= 384
        durations = []
        for number in range(4):
            animation.seek(number)
            durations.append(animation.info["duration"])
        last = np.asarray(animation.convert("RGB")).astype(int)
    assert durations == [400, 400, 400, 2500]
    # The finished image has no marks.
    corner = last[52 + CELL // 2, 10 + CELL // 2]
    assert np.abs(corner - round((5 / 20 + 1) * 127.5)).max() <= 8


def test_the_scales_of_a_next_scale_model_are_frames_without_marks(tmp_path):
    tokens = torch.tensor([[3, -1, -1, -1, -1], [3, 5, 7, 9, 4]])
    decided = torch.tensor([[1, 0, 0, 0, 0], [1, 1, 1, 1, 1]]).bool()

    def decode_tokens(tokens):
        return torch.full((1, 3, 8, 8), int((tokens >= 0).sum()) / 5 - 0.5)

    animate(tokens, decided, None, decode_tokens, "a title", tmp_path / "x.gif")
    with Image.open(tmp_path / "x.gif") as animation:
        assert animation.n_frames == 3 and animation.size[0] == 384 + 20
        for frame, grey in ((0, 0.2 - 0.5), (1, 0.5), (2, 0.5)):
            animation.seek(frame)
            pixels = np.asarray(animation.convert("RGB")).astype(int)[60:420, 20:380]
            assert np.abs(pixels - (grey + 1) * 127.5).max() <= 8


@pytest.mark.every(4)
@pytest.mark.parametrize("decoding", quick(FOR_TOKENS))
def test_a_trace_follows_every_decoding(decoding, tmp_path):
    pipe = tiny_llamagen.text_pipeline()
    recorder = Trace()
    try:
        output = pipe(
            ["a red heart", "tree"],
            decoding=decoding,
            generator=torch.Generator().manual_seed(0),
            callback_on_step_end=recorder,
            callback_on_step_end_tensor_inputs=Trace.inputs,
        )
    except ValueError as error:
        pytest.skip(str(error))
    for image in range(2):
        tokens, decided = recorder.of_image(image)
        assert torch.equal(tokens[-1], output.tokens[image].flatten())
        assert decided[-1].all() and (len(decided) == 1 or not decided[-2].all())
        counts = torch.bincount(deciding_passes(decided) - 1, minlength=len(decided))
        assert torch.equal(counts, output.stats.accepted[: len(decided), image])
    # An animation knows tokens and not decodings.
    if decoding != "sjd":
        return
    decode_tokens = functools.partial(pipe.decode_tokens, recorder.call.select(slice(1, 2)))
    animate(tokens, decided, Layout((4, 4)), decode_tokens, decoding, tmp_path / "x.webp")
    with Image.open(tmp_path / "x.webp") as animation:
        assert animation.n_frames == len(tokens) + 1


def test_the_map_shows_early_and_late_next_to_the_image(tmp_path):
    decided = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1]]).bool()
    assert deciding_passes(decided).tolist() == [1, 2, 3, 3]
    image = Image.new("RGB", (4, 4), (10, 200, 30))
    draw_acceptance_map(decided, Layout((2, 2)), image, "a title", tmp_path / "map.png")
    pixels = np.asarray(Image.open(tmp_path / "map.png").convert("RGB"))
    top, left = 54, 10
    first, middle, last = (
        pixels[top + 5 + row * CELL, left + 5 + column * CELL] for row, column in ((0, 0), (0, 1), (1, 1))
    )
    assert tuple(first) == (68, 1, 84) and tuple(last) == (253, 231, 37)
    assert tuple(middle) == (33, 145, 140)
    assert tuple(pixels[top + CELL, 2 * left + 3 * CELL]) == (10, 200, 30)
