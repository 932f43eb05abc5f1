"""The console commands with models of masked and of continuous tokens, students of Distilled Decoding, and videos."""

import json

import numpy as np
import pytest
from families import OTHERS, seeded
from PIL import Image
from pipelines.latent_llama import tiny as tiny_latent_llama

from arimage.app.demo import markup
from arimage.app.engine.engine import Engine
from arimage.app.engine.types import Request
from arimage.decoding import decoding_from_text
from arimage.eval.bench.judge import judge


PIPELINES = {**OTHERS, "latent-llama": tiny_latent_llama.pipeline}
IMAGES = ("mar", "llamagen-dd", "var-dd")
SERVED = ("llamagen-dd", "var-dd", "mar", "halton-maskgit-class", "latent-llama")
EDITING = ("mar", "halton-maskgit-class")
DECODINGS = {"mar": "mar", "llamagen-dd": "few-step", "var-dd": "few-step"}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    for name in (*IMAGES, "halton-maskgit-class", "latent-llama", "cosmos"):
        PIPELINES[name]().save_pretrained(root / name)
    return root


def near(one, other) -> bool:
    """Images of a batch differ by rounding."""
    return np.abs(np.asarray(one).astype(int) - np.asarray(other)).max() <= 1


def alone(model, seed, decoding=None, **options):
    """The image of a call of the pipeline."""
    decoding = decoding and decoding_from_text(decoding)
    return PIPELINES[model]()(generator=seeded(seed), decoding=decoding, **options).images[0]


@pytest.fixture
def words(models):
    """The words of a command on one of the models."""
    return lambda command, model, *options: [*command.split(), *options, "--model", models / model, "--device", "cpu"]


@pytest.fixture
def printed(run, words):
    """Run a command on one of the models; returns what it printed."""

    def printed(*arguments):
        code, out, err = run(*words(*arguments))
        assert code == 0, err
        return out, err

    return printed


@pytest.mark.every(2)
@pytest.mark.parametrize("model", IMAGES)
def test_images_are_measured_but_not_compared_with_a_distribution(printed, model, tmp_path):
    out, err = printed("bench", model, "--class-label", 1, "--per-prompt", 1, "--out", "runs")
    assert f"| {DECODINGS[model]} | " in out and "lower bound" not in out
    assert "not compared with the model's distribution, since" in err
    assert ("guidance_schedule linear" in out) == (model == "mar")
    report = json.loads((tmp_path / "runs" / "report.json").read_text())
    pipe = PIPELINES[model]()
    assert {row["decoding"] for row in report["rows"]} == set(pipe.decoding_names) - {"cspd"}
    with pytest.raises(ValueError, match="cannot be compared with its distribution"):
        judge(pipe, {"class_labels": [1]}, pipe.decoding, images=1, seed=0)


@pytest.mark.parametrize(
    ("command", "model", "message"),
    [
        ("bench --class-label 1 --top-k 5", "mar", "mar takes no top_k: leave out --top-k"),
        ("eval generate --classes 1 --out x --top-k 5", "mar", "mar takes no top_k: leave out --top-k"),
        ("generate --class-label 1 --top-k 5", "mar", "mar takes no top_k: leave out --top-k"),
        ("generate --class-label 1 --image i.png --mask-image i.png", "var-dd", "takes no image: leave out --image"),
        *((command, "cosmos", "use `arimage generate`") for command in ("bench", "serve", "app")),
        ("eval generate --classes 1 --out x", "cosmos", "use `arimage generate`"),
    ],
)
def test_what_a_model_does_not_have_is_refused(run, words, command, model, message, tmp_path):
    Image.new("RGB", (8, 8), "white").save(tmp_path / "i.png")
    code, _, err = run(*words(command, model))
    assert code == 2 and message in err.splitlines()[-1]
    assert [path.name for path in tmp_path.iterdir()] == ["i.png"]


@pytest.fixture(scope="module")
def engine():
    engine = Engine({name: PIPELINES[name]() for name in SERVED})
    yield engine
    engine.close()


SLOW = pytest.mark.slow


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("model", "options", "others"),
    [
        pytest.param("llamagen-dd", {"decoding": "few-step"}, {}, marks=SLOW),
        ("llamagen-dd", {"decoding": "few-step:starts=0+2,teacher_start=0"}, {}),
        ("var-dd", {"decoding": "few-step"}, {}),
        pytest.param("var-dd", {"decoding": "few-step:starts=0+2,teacher_start=0"}, {}, marks=SLOW),
        # Settings that differ wait for the first request.
        ("mar", {"decoding": "mar", "temperature": 0.9}, {"temperature": 0.5}),
        pytest.param("mar", {"decoding": "mar-disa", "temperature": 0.9}, {"temperature": 0.5}, marks=SLOW),
        pytest.param("latent-llama", {"decoding": "ar", "temperature": 0.9}, {"temperature": 0.5}, marks=SLOW),
        ("latent-llama", {"decoding": "sjd-coupled", "temperature": 0.9}, {"temperature": 0.5}),
        ("halton-maskgit-class", {"decoding": "halton:steps=5", "temperature": 0.9, "top_k": 7}, {}),
        ("halton-maskgit-class", {"decoding": "confidence:steps=4", "temperature": 0.9, "top_k": 7}, {}),
        ("halton-maskgit-class", {"decoding": "recap:steps=6,full_steps=2", "temperature": 0.9, "top_k": 7}, {}),
    ],
)
def test_every_kind_of_model_is_served(engine, model, options, others):
    info, continuous = engine.models[model], model in ("mar", "latent-llama")
    name = options["decoding"].partition(":")[0]
    assert name in info.decodings and info.edits == (model in EDITING)
    asked = [options, options | others]
    seen = [[], []]
    tickets = [
        engine.submit(Request(model, class_label=1 + i, count=2, seed=i, preview_every=1, film=True, **one), to.append)
        for i, (one, to) in enumerate(zip(asked, seen, strict=True))
    ]
    for i, (ticket, one) in enumerate(zip(tickets, asked, strict=True)):
        result = ticket.result(60)
        assert result.film is not None and len(result.film.frames) >= 2
        assert result.exact == (name not in ("few-step", "mar-disa", "recap"))
        assert any(now.previews for now in seen[i]) or model.endswith("-dd")
        if info.grid is not None:
            assert result.deciding_pass.max() == result.passes and result.deciding_pass.shape[1:] == info.grid
        if continuous:
            assert result.head_calls > result.passes and f"{result.head_calls} calls of" in markup.finished(result)
        for seed, image in zip(result.seeds, result.images, strict=True):
            assert near(image, alone(model, seed, class_labels=1 + i, **one))


def test_masked_tokens_are_generated_traced_and_measured(printed, tmp_path):
    model, condition = "halton-maskgit-class", ("--class-label", 1)
    steps = ("--decoding", "halton:steps=4")
    printed("generate", model, *condition, *steps, "--trace", "trace.webp", "--out", "x.png")
    with Image.open(tmp_path / "trace.webp") as film, Image.open(tmp_path / "x.png") as picture:
        assert film.n_frames > 2 and picture.size == (8, 8)
    reuse = ("--decoding", "recap:steps=4,full_steps=1")
    printed("bench", model, *condition, "--per-prompt", 1, *steps, *reuse, "--out", "runs")
    rows = json.loads((tmp_path / "runs" / "report.json").read_text())["rows"]
    assert [row["decoding"] for row in rows] == [steps[1], reuse[1]]
