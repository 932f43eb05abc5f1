"""Steps serve images with other sampling settings: nothing is captured or compiled twice."""

import card
import pytest
import torch
from accelerator.runs import FAMILIES, conditions, equal, pipeline, small
from families import flat, seeded
from PIL import Image


# All numbers of the settings of tokens and of continuous tokens. 1 and 0 disable some of them.
SETTINGS = [
    {"guidance_scale": 2.0, "temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "guided_tokens": 9},
    {"guidance_scale": 3.0, "temperature": 0.7, "top_k": 0, "top_p": 0.5, "min_p": 0.1, "guided_tokens": 3},
    {"guidance_scale": 1.5, "temperature": 1.2, "top_k": 5, "top_p": 1.0, "min_p": 0.001, "guided_tokens": 14},
]
# One family of every kind of model, with every decoding, and the families with code of their own for guidance.
KINDS = [
    "llamagen-text",
    "arpg",
    "var-text",
    "infinity",
    "mar",
    "halton-maskgit-class",
    "latent-llama",
    "llamagen-dd",
    "var-dd",
]
QUICK = [
    ("llamagen-text", "sjd-coupled"),
    ("arpg", "groups"),
    ("var-text", "next-scale"),
    ("mar", "mar"),
]
# Where the teacher reads the settings.
TEACHERS = [(family, "few-step:starts=0+3,teacher_start=1") for family in ("llamagen-dd", "var-dd")]

PICTURE = Image.new("RGB", (64, 64), (200, 30, 60))
# Those that allocate memory or read the device in steps.
UNCAPTURED = ["code", "cspd", "path-jacobi", "path-speculative", *(decoding for _, decoding in TEACHERS)]


def every_case():
    for family in KINDS:
        for name in pipeline(family, "cpu").decoding_names:
            yield family, name


def calls(pipe, decoding, settings, after_call=lambda: None):
    """The tokens of a call with each of the `settings`."""
    found = []
    for number, each in enumerate(settings):
        given = {
            name: value for name, value in each.items() if name not in SETTINGS[0] or pipe.abilities.accepts(name)
        }
        generator = [seeded(2 * number + i) for i in range(2)]
        out = pipe(**conditions(pipe, 2), **given, generator=generator, decoding=decoding, output_type="latent")
        found.append(flat(out.tokens))
        after_call()
    return found


def check(family, decoding, settings):
    """Compare calls on the card with those on the CPU; a warm-up captures everything."""
    expected, pipe, captures = calls(pipeline(family, "cpu"), decoding, settings), pipeline(family, "replayed"), []
    with card.card() as device:
        pipe._compiled.clear()
        for _ in pipe.until_captured():
            calls(pipe, decoding, settings[:1])
        warm = device.captures
        found = calls(pipe, decoding, settings, lambda: captures.append(device.captures))
    assert all(map(equal, expected, found))
    assert {*captures} == {warm}
    return warm


CASES = [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in [*every_case(), *TEACHERS]]


@pytest.mark.every(2)
@pytest.mark.parametrize(("family", "decoding"), CASES)
def test_other_settings_capture_nothing(family, decoding):
    captures = check(family, small(decoding) if ":" not in decoding else decoding, SETTINGS)
    assert captures or decoding in UNCAPTURED


@pytest.mark.parametrize("family", ["var-text", pytest.param("infinity", marks=pytest.mark.slow)])
def test_numbers_per_scale_capture_nothing(family):
    """Nor does one number after them. Those scales at the end that are not guided are fed without their rows."""
    count = len(pipeline(family, "cpu").prepare(["a red heart"], guidance_scale=2.0).model.scales)
    falling = [3 - 2 * scale / count for scale in range(count)]
    settings = [{"guidance_scale": 2.0}, {"guidance_scale": falling, "temperature": falling}, {"temperature": 0.5}]
    captures = check(family, "next-scale", [{"guidance_scale": 2.5, "min_p": 0.0} | each for each in settings])
    ends = [[2.0] * (count - 1) + [1.0], [3.0] * (count - 1) + [0.5], [1.5] * (count - 1) + [1.0]]
    assert check(family, "next-scale", [{"guidance_scale": each} for each in ends]) == captures == count - 1


@pytest.mark.slow
def test_guidance_of_hidden_states_captures_nothing():
    settings = [{"guidance_scale": scale, "cfg_insertion_layer": -1} for scale in (2.0, [3.0] * 7, 1.5)]
    assert check("infinity", "next-scale", settings)


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("family", "decoding", "more"),
    [
        ("llamagen-text", "ar", {"min_p": 0.3}),
        ("arpg", "groups:groups=4", {"guided_tokens": 5}),
        ("var-text", "next-scale", {"image": PICTURE}),
        pytest.param("var-text", "next-scale", {"min_p": 0.3}, marks=pytest.mark.slow),
        pytest.param("mar", "mar", {"image": PICTURE}, marks=pytest.mark.slow),
        pytest.param("halton-maskgit-class", "halton:steps=4", {"min_p": 0.3}, marks=pytest.mark.slow),
    ],
)
def test_what_a_call_did_without_is_not_computed_for_it(family, decoding, more):
    """Steps that compute more have graphs of their own."""
    # Steps of which an image has only one are captured in a second call.
    settings, captures = [{}, {}, more, more, {}, more], []
    if "image" in more:
        height, width = pipeline(family, "cpu").image_sizes[0]
        mask = torch.zeros(1, height, width)
        mask[:, height // 2 :] = 1
        settings = [each | {"mask_image": mask} if each else each for each in settings]
    expected, pipe = calls(pipeline(family, "cpu"), decoding, settings), pipeline(family, "replayed")
    with card.card() as device:
        pipe._compiled.clear()
        found = calls(pipe, decoding, settings, lambda: captures.append(device.captures))
    assert all(map(equal, expected, found))
    assert 0 < captures[1] < captures[3] == captures[4] == captures[5]


def test_a_call_that_begins_eagerly_goes_on_with_graphs():
    with torch.no_grad():
        pipe = FAMILIES["llamagen-text"]()
    pipe.set_progress_bar_config(disable=True)
    card.move(pipe)
    pipe.run_eagerly()

    def compile_now(pipe, step, passes, tensors):
        if pipe._compiled is None:
            pipe.compile()

    with card.card() as device:
        found = calls(pipe, "ar", [SETTINGS[0] | {"callback_on_step_end": compile_now}, *SETTINGS[1:]])
        # The state of the first one, which did not begin with graphs, is not kept.
        assert device.captures == 2
    assert all(map(equal, calls(pipeline("llamagen-text", "cpu"), "ar", SETTINGS), found))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "decoding"),
    [("llamagen-text", "ar"), pytest.param("var-text", "next-scale", marks=pytest.mark.slow)],
)
def test_other_settings_compile_nothing(family, decoding):
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    with torch.no_grad():
        pipe = FAMILIES[family]()
    pipe.set_progress_bar_config(disable=True)
    pipe.compile(backend=backend)
    calls(pipe, decoding, SETTINGS[:1])
    frames = len(compiled)
    calls(pipe, decoding, SETTINGS[1:])
    assert len(compiled) == frames > 0 and len(pipe._compiled.kept) == 1
