"""Calls on accelerators give what they give on the CPU: the same tokens, in as many passes."""

from pathlib import Path

import card
import pytest
from accelerator.runs import FAMILIES, QUICK, call, compare, families, pipeline, small

from arimage import pipelines
from arimage.decoding import PRESETS


def names(family):
    return pipeline(family, "cpu").decoding_names


def check(family, kind, texts, count=3, guidance=3.0):
    """Compare calls, and return how many steps of each were replayed. Steps of which an image has only one are
    replayed in a second call."""
    found, replays = {}, {}
    for text in texts:
        for _ in range(2 if kind == "replayed" else 1):
            found[text] = compare(family, kind, call, text, count, guidance)
            replays[text] = card.DEVICE.replays
            if found[text] or replays[text]:
                break
    assert {text: differences for text, differences in found.items() if differences} == {}
    return replays


def texts(family, every):
    """The presets of a family, or one. Acceptances differ in a few operators: one of them stands for all."""
    if every:
        return [
            small(name) for name in names(family) if name == "lantern" or "acceptance" not in PRESETS[name].settings
        ]
    return [small("sjd-coupled" if "sjd-coupled" in names(family) else names(family)[0])]


def test_every_pipeline_has_a_family():
    files = {path.stem for path in Path(pipelines.__file__).parent.rglob("pipeline_*.py")}
    # Some are subclasses with a small default size.
    classes = {kind for family in FAMILIES for kind in type(pipeline(family, "cpu")).__mro__}
    assert {kind.__module__.rpartition(".")[2] for kind in classes} & files == files


# What reads the device in its steps, or allocates there.
EAGER = ["code", "cspd", "path-jacobi:window=4", "path-speculative:window=3"]


# Take every preset, and of the others one shows what is their own. Films of infinitystar have tests of their own.
EVERY_PRESET = ["llamagen-text", "var-text", "llamagen-dd"]
CASES = [(family, family in EVERY_PRESET) for family in QUICK if family != "infinitystar"]
SLOW = [pytest.param(family, True, marks=pytest.mark.slow) for family in FAMILIES if family not in EVERY_PRESET]


@pytest.mark.every(6)
@pytest.mark.parametrize(("family", "every"), CASES + SLOW)
def test_replayed_steps_of_every_preset(family, every):
    replays = check(family, "replayed", texts(family, every))
    assert [text for text in replays if not replays[text]] == [text for text in replays if text in EAGER]


def test_replayed_steps_of_two_grids():
    check("glm-image", "replayed", ["sjd-coupled:window=4"])


# One of each kind of model.
KINDS = ["llamagen-text", "var-text", "mar", "halton-maskgit-class", "llamagen-dd", "latent-llama"]


# Steps that are replayed were eager before.
@pytest.mark.every(3)
@families([*KINDS, "arpg"])
def test_eager_steps_of_one_image(family):
    check(family, "eager", texts(family, every=False), 1, 1.0)


@pytest.mark.every(5)
@families(KINDS)
def test_steps_on_another_accelerator(family):
    check(family, "xpu", texts(family, every=False))


# Those of text from left to right, in any order, from coarse to fine, of videos, and of students.
VARIANTS = {
    "llamagen-text": [
        "sjd-coupled",
        "sjd-coupled:window=auto",
        "sjd-coupled:window=4,init=left",
        "sjd-coupled:window=4,relax=1.5",
        "sjd-coupled:window=4,corrections=2",
        "sjd2:window=4,levels=2",
        "eagle:tree=static",
        "zipar:window=2,adaptive=true",
    ],
    "llamagen-class": ["sjd-coupled:window=4,corrections=2"],
    "janus": ["sjd-coupled:window=4,corrections=2"],
    "arpg": ["groups", "groups:groups=1+3+12,guidance_schedule=constant,attention=causal"],
    "var-text": ["next-scale:more_smooth=true"],
    "cosmos-text": ["sjd-coupled:window=4,init=previous"],
    "llamagen-dd": ["few-step", "few-step:starts=0+3,teacher_start=1", "few-step:starts=0+3,teacher_start=0"],
    "mar": [
        "mar-disa:diffusion_steps=6+3",
        "recap:steps=7,full_steps=2,partial_steps=2,denoising_steps=4+2,partial_denoising_steps=3",
        "recap:full_steps=0,keep_buffers=true",
        "lazy-mar:first=1,every=3,extra=1,head_every=3,fractions=0.5+0.5+0.5+0.2",
    ],
    "halton-maskgit-class": [
        "halton:steps=4,randomize=false,sharpness=0.5+2.0,warmup_steps=1",
        "confidence:steps=6,schedule=linear,redraw_known=true",
        "recap:steps=7,full_steps=2,partial_steps=2",
        "recap:steps=6,sampler=ConfidenceDecoding,keep_buffers=true",
        "ml-cache:steps=7,warmup=0.2,interval=3,ratio=0.5,sampler=HaltonDecoding",
    ],
}


@pytest.mark.every(2)
@pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=pytest.mark.slow) if f in ("arpg", "llamagen-text") else f for f in VARIANTS],
)
def test_replayed_steps_with_other_settings(family):
    check(family, "replayed", VARIANTS[family])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eager", "replayed", "xpu"])
@pytest.mark.parametrize(("count", "guidance"), [(1, 1.0), (1, 3.0), (3, 1.0), (3, 3.0)])
@pytest.mark.parametrize("family", FAMILIES)
def test_everything(family, count, guidance, kind):
    texts = [small(name) for name in names(family)]
    check(family, kind, texts + VARIANTS.get(family, []), count, guidance)
