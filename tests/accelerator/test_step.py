"""Steps by the kernels of `arimage.kernels.step`, by their definitions in torch, are captured, and give the tokens of
the layers in torch."""

import card
import pytest
import torch
from accelerator.runs import call, differences, expected, pipeline, refilled
from pipelines.llamagen import tiny as tiny_llamagen
from steps import allow_steps, count_layers

import arimage.kernels.step
from arimage.kernels.step import MOST_ROWS


CASES = [
    ("llamagen-text", "ar"),
    ("llamagen-text", "zipar:window=2"),
    ("arpg-places", "sjd-coupled:window=4"),
    ("randar", "groups:groups=4"),
    ("var-text", "next-scale"),
    ("infinity", "fastvar"),
    ("mar", "mar"),
    ("latent-llama", "ar"),
    ("janus", "sjd-coupled:window=4"),
    ("emu3", "sjd-coupled:window=4"),
    ("glm-image", "sjd-coupled:window=4"),
    ("cosmos-text", "sjd-coupled:window=4"),
    ("rar-class", "sjd-coupled:window=4"),
]
MANY = [("llamagen-text", "sjd2"), ("arpg-places", "groups:groups=4"), ("randar", "sjd-coupled:window=4")]
# Families, decodings and `MOST_ROWS`.
SLOW = [
    *(("llamagen-text", text, MOST_ROWS) for text in ("eagle", "line-cache:lines=2", "sjd2")),
    *(
        ("arpg", "groups:groups=4", MOST_ROWS),
        ("randar", "sjd-coupled:window=4", MOST_ROWS),
        ("mar", "recap", MOST_ROWS),
    ),
    *((family, "sjd-coupled:window=4", MOST_ROWS) for family in ("emu3.5", "lumina", "mammothmoda2", "x-omni")),
    *((family, "ar", MOST_ROWS) for family in ("cosmos", "cosmos-blocks", "mammothmoda2-dev", "anole")),
    *(
        *((family, "sjd-tree:width=2", MOST_ROWS) for family in ("janus", "emu3")),
        ("nextstep", "ar", MOST_ROWS),
        ("emu3", "sjd-coupled:window=4", 1),
    ),
    *(("llamagen-text", "sjd-tree:width=2", 1), ("llamagen-text", "eagle", 1), ("latent-llama", "ar", 1)),
]


@pytest.mark.every(6)
@pytest.mark.parametrize(
    ("family", "decoding", "most"),
    [(*case, MOST_ROWS) for case in CASES]
    + [(*case, 1) for case in MANY]
    + [pytest.param(*case, marks=pytest.mark.slow) for case in SLOW],
)
def test_captured_steps_give_the_tokens_of_torch(monkeypatch, family, decoding, most):
    monkeypatch.setattr(arimage.kernels.step, "MOST_ROWS", most)
    on_cpu = [expected(family, run, decoding) for run in (call, refilled)]
    allow_steps(monkeypatch)
    rows, pipe = count_layers(monkeypatch), pipeline(family, "replayed")
    pipe._compiled.clear()
    with card.card() as device:
        found = [run(pipe, decoding) for run in (call, refilled)]
        replays = device.replays
    pipe._compiled.clear()
    assert [differences(one, other) for one, other in zip(on_cpu, found, strict=True)] == [[], []]
    assert rows and replays > 0


def test_one_graph_serves_a_whole_image(monkeypatch):
    with torch.no_grad():
        pipe = tiny_llamagen.text_pipeline(grid=10)
    on_cpu = call(pipe, "ar", 1)
    card.move(pipe)
    captures = []
    for allowed in (False, True):
        if allowed:
            allow_steps(monkeypatch)
        with card.card() as device:
            pipe.compile()
            assert differences(on_cpu, call(pipe, "ar", 1)) == []
            captures.append(device.captures)
            call(pipe, "ar", 1, first=1)
            captures.append(device.captures)
    # In torch, attention is limited to 64 and to all of the tokens. A further call captures nothing.
    assert captures == [2, 2, 1, 1]
