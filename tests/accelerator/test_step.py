"""Steps by the kernels of `arimage.kernels.step`, by their definitions in torch, are captured, and give the tokens of
the layers in torch."""

import card
import pytest
import torch
from accelerator.runs import FAMILIES, call, compare, differences, expected, pipeline, refilled, small
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
MANY_SLOW = [("emu3", "sjd-coupled:window=4"), ("llamagen-text", "sjd-tree:width=2"), ("llamagen-text", "eagle")]
MANY_SLOW += [("latent-llama", "ar")]


@pytest.mark.every(6)
@pytest.mark.parametrize(
    ("family", "decoding", "most"),
    [(*case, MOST_ROWS) for case in CASES]
    + [(*case, 1) for case in MANY]
    + [pytest.param(*case, 1, marks=pytest.mark.slow) for case in MANY_SLOW],
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


# Layers of which no step has kernels.
IN_TORCH = {"halton-maskgit-class", "halton-maskgit-text", "lpd", "lumina-dimoo", "var-dd"}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_preset_by_kernels_gives_the_tokens_of_torch(monkeypatch, family):
    texts = [small(name) for name in pipeline(family, "cpu").decoding_names]
    for text in texts:
        expected(family, call, text)
    allow_steps(monkeypatch)
    rows, pipe = count_layers(monkeypatch), pipeline(family, "replayed")
    pipe._compiled.clear()
    found = {text: compare(family, "replayed", call, text) for text in texts}
    pipe._compiled.clear()
    assert {text: differences for text, differences in found.items() if differences} == {}
    assert bool(rows) == (family not in IN_TORCH)


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
