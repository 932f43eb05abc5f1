"""The console commands with models of continuous tokens, students of Distilled Decoding, and videos."""

import json

import numpy as np
import pytest
import typer
from families import OTHERS, seeded
from PIL import Image

from arimage import cli
from arimage.app.engine import Engine
from arimage.app.protocol import Refused, Request
from arimage.decoding import decoding_from_text
from arimage.eval import tables
from arimage.eval.judge import judge


IMAGES = ("mar", "llamagen-dd", "var-dd")
DECODINGS = {"mar": "mar", "llamagen-dd": "few-step", "var-dd": "few-step"}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    for name in (*IMAGES, "cosmos"):
        OTHERS[name]().save_pretrained(root / name)
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


@pytest.mark.parametrize("model", IMAGES)
def test_images_are_measured_but_not_compared_with_a_distribution(run, model, tmp_path):
    printed = run("bench", model, "--class-label", 1, "--runs", 1, "--images", 2, "--out", "rows.json")
    assert f"| {DECODINGS[model]} |" in printed.out and "lower bound" not in printed.out
    assert "not compared with the model's distribution, since" in printed.err
    rows = tables.read_json(tmp_path / "rows.json")
    measured = {row["decoding"] for row in rows["rows"]}
    assert measured == set(OTHERS[model]().decoding_names) - {"cspd"}
    assert DECODINGS[model] in tables.compare(rows, rows)


@pytest.mark.parametrize("model", IMAGES)
def test_a_python_call_that_compares_them_is_refused(model):
    pipe = OTHERS[model]()
    with pytest.raises(ValueError, match="Pipeline cannot be compared with its distribution"):
        judge(pipe, {"class_labels": [1]}, pipe.decoding, images=1, seed=0)


@pytest.mark.parametrize("model", IMAGES)
def test_a_run_of_many_images_is_finished_and_reported(run, model, models, tmp_path):
    options = ("--classes", 3, "--batch-size", 2, "--dtype", "float32")
    assert "images: 3 of" in run("eval generate", model, *options, "--out", "run", "--dry-run").out
    assert run("eval generate", model, *options, "--out", "run").out == "run\n"
    pipe, row = OTHERS[model](), json.loads((tmp_path / "run/manifest.jsonl").read_text().splitlines()[2])
    alone = pipe(class_labels=2, generator=seeded(row["seed"])).images[0]
    with Image.open(tmp_path / "run" / row["path"]) as picture:
        assert np.abs(np.asarray(picture).astype(int) - np.asarray(alone)).max() <= 1
    name = DECODINGS[model]
    report = run("eval compare", model, *options, "--out", "runs").out
    assert name in report and ("guidance_schedule linear" in report) == (model == "mar")


@pytest.mark.parametrize(
    "command", ["bench --class-label 1", "eval generate --classes 1 --out x", "generate --class-label 1"]
)
def test_a_setting_that_a_model_does_not_have_is_refused(run, command, tmp_path):
    with pytest.raises(ValueError, match="mar takes no top_k: leave out --top-k"):
        run(command, "mar", "--top-k", 5)
    assert not any(tmp_path.iterdir())


def test_students_edit_no_images(run, tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "heart.png")
    with pytest.raises(ValueError, match="var-dd takes no image: leave out --image"):
        run("generate", "var-dd", "--class-label", 1, "--image", "heart.png", "--mask-image", "heart.png")


@pytest.mark.parametrize(
    "command", ["bench", "eval generate --classes 1 --out x", "eval compare --out x", "serve", "app"]
)
def test_videos_are_refused_with_the_command_that_generates_them(run, command, tmp_path):
    with pytest.raises(ValueError, match="cosmos (generates|continues images or) videos, .* use `arimage generate`"):
        run(command, "cosmos")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["serve", "app"])
def test_continuous_tokens_are_not_served(run, command):
    with pytest.raises(ValueError, match="mar has continuous tokens, .* use `arimage generate`"):
        run(command, "mar")


@pytest.fixture(scope="module")
def engine():
    engine = Engine({name: OTHERS[name]() for name in ("llamagen-dd", "var-dd")})
    yield engine
    engine.close()


@pytest.mark.parametrize("model", ["llamagen-dd", "var-dd"])
@pytest.mark.parametrize("decoding", ["few-step", "few-step:starts=0+2,teacher_start=0"])
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
            alone = OTHERS[model]()(
                class_labels=label, generator=seeded(seed), decoding=decoding_from_text(decoding)
            ).images[0]
            assert np.abs(np.asarray(image).astype(int) - np.asarray(alone)).max() <= 1


def test_a_request_to_edit_with_a_student_is_refused(engine):
    picture = Image.new("RGB", (8, 8))
    request = Request("var-dd", class_label=1, image=picture, mask_image=picture.convert("L"))
    with pytest.raises(Refused, match="var-dd does not edit images"):
        engine.submit(request)
