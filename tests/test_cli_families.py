"""The console commands with models of masked and of continuous tokens, students of Distilled Decoding, and videos."""

import json

import numpy as np
import pytest
import typer
from families import OTHERS, seeded
from PIL import Image
from pipelines.latent_llama import tiny as tiny_latent_llama

from arimage.app.demo import markup
from arimage.app.engine.engine import Engine
from arimage.app.engine.types import Refused, Request
from arimage.cli import main as cli
from arimage.decoding import decoding_from_text
from arimage.eval.bench.judge import judge


PIPELINES = {**OTHERS, "latent-llama": tiny_latent_llama.pipeline}
IMAGES = ("mar", "llamagen-dd", "var-dd")
SERVED = ("llamagen-dd", "var-dd", "mar", "halton-maskgit-class", "latent-llama")
DECODINGS = {"mar": "mar", "llamagen-dd": "few-step", "var-dd": "few-step"}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    for name in (*IMAGES, "halton-maskgit-class", "latent-llama", "cosmos"):
        PIPELINES[name]().save_pretrained(root / name)
    return root


@pytest.fixture
def run(models, tmp_path, monkeypatch, capsys):
    """Run a command on one of the models in an empty folder; return what it printed."""
    monkeypatch.chdir(tmp_path)

    def run(command, model, *options):
        words = [*command.split(), *map(str, options), "--model", str(models / model), "--device", "cpu"]
        typer.main.get_command(cli.app).main(words, standalone_mode=False)
        return capsys.readouterr()

    return run


@pytest.mark.every(2)
@pytest.mark.parametrize("model", IMAGES)
def test_images_are_measured_but_not_compared_with_a_distribution(run, model, tmp_path):
    printed = run("bench", model, "--class-label", 1, "--per-prompt", 1, "--out", "runs")
    assert f"| {DECODINGS[model]} | " in printed.out and "lower bound" not in printed.out
    assert "not compared with the model's distribution, since" in printed.err
    assert ("guidance_schedule linear" in printed.out) == (model == "mar")
    report = json.loads((tmp_path / "runs" / "report.json").read_text())
    assert {row["decoding"] for row in report["rows"]} == set(PIPELINES[model]().decoding_names) - {"cspd"}


@pytest.mark.parametrize("model", IMAGES)
def test_a_python_call_that_compares_them_is_refused(model):
    pipe = PIPELINES[model]()
    with pytest.raises(ValueError, match="Pipeline cannot be compared with its distribution"):
        judge(pipe, {"class_labels": [1]}, pipe.decoding, images=1, seed=0)


@pytest.mark.every(2)
@pytest.mark.parametrize("model", IMAGES)
def test_a_run_of_many_images_is_finished_and_reported(run, model, models, tmp_path):
    options = ("--classes", 3, "--batch-size", 2, "--dtype", "float32")
    assert "images: 3 of" in run("eval generate", model, *options, "--out", "run", "--dry-run").out
    assert run("eval generate", model, *options, "--out", "run").out == "run\n"
    pipe, row = PIPELINES[model](), json.loads((tmp_path / "run/manifest.jsonl").read_text().splitlines()[2])
    alone = pipe(class_labels=2, generator=seeded(row["seed"])).images[0]
    with Image.open(tmp_path / "run" / row["path"]) as picture:
        assert np.abs(np.asarray(picture).astype(int) - np.asarray(alone)).max() <= 1


@pytest.mark.parametrize(
    "command", ["bench --class-label 1", "eval generate --classes 1 --out x", "generate --class-label 1"]
)
def test_a_setting_that_a_model_does_not_have_is_refused(run, command, tmp_path):
    with pytest.raises(ValueError, match="mar takes no top_k: leave out --top-k"):
        run(command, "mar", "--top-k", 5)
    assert not any(tmp_path.iterdir())


def test_students_edit_no_images(run, tmp_path):
    Image.new("RGB", (8, 8), "white").save(tmp_path / "heart.png")
    with pytest.raises(ValueError, match="var-dd takes no image: leave out --image"):
        run("generate", "var-dd", "--class-label", 1, "--image", "heart.png", "--mask-image", "heart.png")


@pytest.mark.every(2)
@pytest.mark.parametrize("command", ["bench", "eval generate --classes 1 --out x", "serve", "app"])
def test_videos_are_refused_with_the_command_that_generates_them(run, command, tmp_path):
    with pytest.raises(ValueError, match="cosmos (generates|continues images or) videos, .* use `arimage generate`"):
        run(command, "cosmos")
    assert not any(tmp_path.iterdir())


@pytest.fixture(scope="module")
def engine():
    engine = Engine({name: PIPELINES[name]() for name in SERVED})
    yield engine
    engine.close()


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("model", "decoding"),
    [
        pytest.param("llamagen-dd", "few-step", marks=pytest.mark.slow),
        ("llamagen-dd", "few-step:starts=0+2,teacher_start=0"),
        ("var-dd", "few-step"),
        pytest.param("var-dd", "few-step:starts=0+2,teacher_start=0", marks=pytest.mark.slow),
    ],
)
def test_students_are_served(engine, model, decoding):
    assert set(engine.models[model].decodings) - {"flow"} == {"few-step"} and not engine.models[model].edits
    tickets = [
        engine.submit(
            Request(model, class_label=label, count=2, seed=label, decoding=decoding, preview_every=1, film=True)
        )
        for label in (1, 2)
    ]
    results = [ticket.result(60) for ticket in tickets]
    for label, result in enumerate(results, 1):
        assert not result.exact and result.film is not None and len(result.film.frames) >= 2
        for seed, image in zip(result.seeds, result.images, strict=True):
            alone = PIPELINES[model]()(
                class_labels=label, generator=seeded(seed), decoding=decoding_from_text(decoding)
            ).images[0]
            assert np.abs(np.asarray(image).astype(int) - np.asarray(alone)).max() <= 1


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("model", "decoding"),
    [
        ("mar", "mar"),
        pytest.param("mar", "mar-disa", marks=pytest.mark.slow),
        pytest.param("latent-llama", "ar", marks=pytest.mark.slow),
        ("latent-llama", "sjd-coupled"),
    ],
)
def test_continuous_tokens_are_served(engine, model, decoding):
    info = engine.models[model]
    assert decoding in info.decodings and info.edits == (model == "mar")
    # Settings differ, so that the second request waits for the first.
    asked = [
        Request(model, class_label=1, count=2, decoding=decoding, temperature=t, preview_every=1, film=True)
        for t in (0.9, 0.5)
    ]
    progress = [[], []]
    tickets = [engine.submit(request, seen.append) for request, seen in zip(asked, progress, strict=True)]
    for request, ticket, seen in zip(asked, tickets, progress, strict=True):
        result = ticket.result(60)
        assert result.head_calls > result.passes and f"{result.head_calls} calls of" in markup.finished(result)
        assert result.film is not None and any(now.previews for now in seen)
        assert result.deciding_pass.max() == result.passes and result.deciding_pass.shape[1:] == info.grid
        for seed, image in zip(result.seeds, result.images, strict=True):
            alone = PIPELINES[model]()(
                class_labels=1, generator=seeded(seed), decoding=decoding, temperature=request.temperature
            ).images[0]
            assert np.abs(np.asarray(image).astype(int) - np.asarray(alone)).max() <= 1


@pytest.mark.every(2)
@pytest.mark.parametrize("decoding", ["halton:steps=5", "confidence:steps=4", "recap:steps=6,full_steps=2"])
def test_masked_tokens_are_served(engine, decoding):
    model, options = "halton-maskgit-class", {"decoding": decoding, "temperature": 0.9, "top_k": 7}
    request = Request(model, class_label=1, count=2, preview_every=1, film=True, **options)
    seen = []
    result = engine.submit(request, seen.append).result(60)
    assert result.film is not None and any(now.previews for now in seen)
    assert result.deciding_pass.max() == result.passes and result.deciding_pass.shape[1:] == (4, 4)
    for seed, image in zip(result.seeds, result.images, strict=True):
        alone = PIPELINES[model]()(class_labels=1, generator=seeded(seed), **options).images[0]
        assert np.abs(np.asarray(image).astype(int) - np.asarray(alone)).max() <= 1


def test_masked_tokens_are_generated_traced_and_measured(run, tmp_path):
    model, condition = "halton-maskgit-class", ("--class-label", 1)
    steps = ("--decoding", "halton:steps=4")
    run("generate", model, *condition, *steps, "--trace", "trace.webp", "--out", "x.png")
    with Image.open(tmp_path / "trace.webp") as film, Image.open(tmp_path / "x.png") as picture:
        assert film.n_frames > 2 and picture.size == (8, 8)
    reuse = ("--decoding", "recap:steps=4,full_steps=1")
    run("bench", model, *condition, "--per-prompt", 1, *steps, *reuse, "--out", "runs")
    rows = json.loads((tmp_path / "runs" / "report.json").read_text())["rows"]
    assert [row["decoding"] for row in rows] == [steps[1], reuse[1]]


@pytest.mark.every(2)
@pytest.mark.parametrize(("model", "side"), [("mar", 16), ("halton-maskgit-class", 8)])
def test_a_masked_model_edits_and_sees_all_sides(engine, model, side):
    before = np.random.default_rng(0).integers(0, 256, (side, side, 3), dtype=np.uint8)
    mask = np.zeros((side, side), dtype=np.uint8)
    mask[side // 4 : 3 * side // 4, side // 4 : 3 * side // 4] = 255
    request = Request(
        model, class_label=1, image=Image.fromarray(before), mask_image=Image.fromarray(mask), preview_every=1
    )
    after = np.asarray(engine.submit(request).result(60).images[0])
    changed = (after != before).any(-1)
    assert changed.any() and not changed[mask == 0].any()
    assert "on all sides" in markup.about_editing(engine.models[model])


def test_continuous_tokens_have_no_top_k(engine):
    with pytest.raises(Refused, match="top_k is for tokens of a vocabulary"):
        engine.submit(Request("mar", class_label=1, top_k=5))


@pytest.mark.every(2)
@pytest.mark.parametrize("model", ["mar", "latent-llama"])
def test_continuous_tokens_are_traced(run, model, tmp_path):
    options = ("--trace", "trace.webp", "--trace", "map.png", "--out", "x.png")
    printed = run("generate", model, "--class-label", 1, *options)
    assert "calls of the denoising head" in printed.err
    with Image.open(tmp_path / "trace.webp") as film, Image.open(tmp_path / "map.png"):
        assert film.n_frames > 2


def test_a_request_to_edit_with_a_student_is_refused(engine):
    picture = Image.new("RGB", (8, 8))
    request = Request("var-dd", class_label=1, image=picture, mask_image=picture.convert("L"))
    with pytest.raises(Refused, match="var-dd does not edit images"):
        engine.submit(request)
