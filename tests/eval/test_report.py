"""What a report says of runs, and which runs it refuses to set side by side."""

import json
import shutil

import numpy as np
import pytest
from pipelines.llamagen import tiny as tiny_llamagen

from arimage.eval.job import entry, write_scores
from arimage.eval.metrics.standard_errors import Estimate, estimate_text, paired_difference, paired_ratio
from arimage.eval.metrics.wavelets import WaveletExtractor
from arimage.eval.report import make_report, to_markdown, write_report
from arimage.eval.runs.files import to_lines
from arimage.eval.runs.generate import generate, make_config, prepare
from arimage.eval.runs.manifest import prompt_rows
from arimage.eval.runs.run_folder import manifest_digest, read_config, read_results
from arimage.eval.score import METRICS_FILE


SECONDS = {"ar": [9.0, 2.0, 4.0, 8.0, 1.0], "sjd": [9.0, 1.0, 1.0, 2.0, 1.0]}
VALUES = {"ar": [0, 1, 0, 1, 1, 0, 1, 1, 0], "sjd": [1, 1, 0, 1, 1, 1, 1, 1, 0]}


@pytest.fixture(scope="module")
def generated(tmp_path_factory):
    """Nine images of two decodings in batches of two, with known seconds and scores."""
    root, pipe = tmp_path_factory.mktemp("runs"), tiny_llamagen.text_pipeline()
    rows = prompt_rows([{"prompt": text} for text in ("a red heart", "tree", "a blue book")], 0, 3)
    for name in ("ar", "sjd"):
        source = {"prompts": "some.txt", "sha256": "0", "per_prompt": 3}
        config = make_config(pipe, rows, model="tiny", source=source, seed=0, batch_size=2, decoding=name)
        generate(prepare(config, rows, root / name), pipe)
        results = [
            {**row, "seconds": SECONDS[name][row["batch"]], "peak_memory": 100.0 + row["id"]}
            for row in read_results(root / name).values()
        ]
        (root / name / "results" / "rank-00000.jsonl").write_bytes(to_lines(results))
        write_scores(root / name, "retrieval", np.array(VALUES[name]))
        metrics = {
            "retrieval": entry(Estimate(sum(VALUES[name]) / 9, 0.16), 9, "gallery", None),
            "emoji-kid": entry(Estimate(0.01234, 0.00056), 9, "reference", WaveletExtractor.space),
        }
        (root / name / METRICS_FILE).write_text(json.dumps(metrics))
    return root


@pytest.fixture
def runs(generated, tmp_path):
    """Copies that a test may spoil."""
    shutil.copytree(generated, tmp_path / "runs")
    return [tmp_path / "runs" / name for name in ("ar", "sjd")]


def test_whole_warm_calls_are_timed(runs):
    ar, sjd = make_report(runs, "ar")["rows"]
    # The first call of the process and the last, which has one image, do not count.
    assert ar["cost"]["timed_calls"] == 3 and ar["cost"]["seconds"] == [2, 4, 8]
    assert ar["cost"]["images_per_second"] == pytest.approx(6 / 14) and ar["cost"]["speedup"] == 1
    assert sjd["cost"]["speedup"] == pytest.approx(14 / 4) and sjd["cost"]["peak_memory"] == 108
    assert make_report(runs, "sjd")["rows"][0]["cost"]["speedup"] == pytest.approx(4 / 14)


def test_passes_and_tokens_are_those_of_the_images(runs):
    ar, sjd = make_report(runs, "ar")["rows"]
    assert (ar["cost"]["passes"], ar["cost"]["tokens_per_pass"]) == (16, 1)
    assert 2 < sjd["cost"]["passes"] < 16
    assert sjd["cost"]["passes"] * sjd["cost"]["tokens_per_pass"] == pytest.approx(16)
    assert ar["exact"] and sjd["exact"] and sjd["settings"]["window"] == 32


def test_passes_are_a_share_of_those_of_the_baseline_with_errors_over_prompts(runs):
    report = make_report(runs, "ar")
    passes = np.array([row["passes"] for row in read_results(runs[1]).values()])
    means = passes.reshape(3, 3).mean(1)
    error = means.std(ddof=1) / 3**0.5
    _, sjd = (row["cost"] for row in report["rows"])
    assert sjd["passes_error"] == pytest.approx(error)
    assert sjd["passes_ratio"]["value"] == pytest.approx(passes.mean() / 16)
    assert sjd["passes_ratio"]["standard_error"] == pytest.approx(error / 16)
    cells = to_markdown(report).splitlines()[3].split(" | ")
    assert cells[2:4] == [
        estimate_text(value, error, None) for value, error in ((means.mean(), error), (means.mean() / 16, error / 16))
    ]
    # The baseline itself has no error, and both vary together.
    values = np.array([20.0, 30, 40, 50])
    assert paired_ratio(values / 2, values) == Estimate(0.5)
    assert paired_ratio(values / 2 + [1, -1, 1, -1], values).standard_error == pytest.approx(1 / 35 / 3**0.5)


def test_scores_are_paired_with_the_baseline(runs):
    ar, sjd = make_report(runs, "ar")["rows"]
    assert ar["paired"] == {} and list(sjd["paired"]) == ["retrieval"]
    found, independent = sjd["paired"]["retrieval"], paired_difference(*map(np.array, (VALUES["sjd"], VALUES["ar"])))
    assert found["value"] == pytest.approx(2 / 9) and found["interval"][0] < 2 / 9 < found["interval"][1]
    # Nine images of three prompts.
    assert found["standard_error"] > 1.5 * independent.standard_error
    scores = json.loads((runs[1] / "scores" / "retrieval.json").read_text())
    (runs[1] / "scores" / "retrieval.json").write_text(json.dumps({**scores, "ids": scores["ids"][::-1]}))
    with pytest.raises(ValueError, match="retrieval.json"):
        make_report(runs, "ar")


def test_the_files_say_the_same(runs, tmp_path):
    text = write_report(make_report(runs, "ar"), tmp_path / "report")
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    assert report["settings"]["images"] == 9 and report["baseline"] == "ar" and "Seconds are missing" not in text
    assert to_markdown(report) == text == (tmp_path / "report" / "report.md").read_text(encoding="utf-8")
    assert (tmp_path / "report" / "report.png").stat().st_size > 5000
    cells = [line.split(" | ") for line in text.splitlines()]
    assert cells[2][0] == "| ar" and cells[2][6:10] == ["4.00 (2.00 to 8.00)", "0.43", "1.00", "108"]
    assert cells[2][10:] == ["0.56 ± 0.16", "0.01234 ± 0.00056 |"]
    assert "retrieval ↑" in cells[0] and "emoji-kid ↓ |" in cells[0]
    assert f"| sjd | {estimate_text(**report['rows'][1]['paired']['retrieval'], sign='+')} |" in text


def test_runs_without_scores_or_timed_calls_are_reported_too(runs, tmp_path):
    for run in runs:
        (run / METRICS_FILE).unlink()
        rows = [{**row, "warm": False} for row in read_results(run).values()]
        (run / "results" / "rank-00000.jsonl").write_bytes(to_lines(rows))
    text = write_report(make_report(runs, "ar"), tmp_path / "report")
    assert "| ar | exact | 16.0 | 1 | 16.0 | 1.00 |  |  |  | 108 |" in text and "\nSeconds are missing" in text
    assert (tmp_path / "report" / "report.png").exists()


def change_config(run, **changes):
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps({**config, **changes}))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"images": 8}, "their images is 9 and 8"),
        ({"weights": "other"}, "their weights is .* and other"),
        ({"source": {"prompts": "other.txt"}}, "their source is"),
        ({"batch_size": 4}, "their batch_size is 2 and 4"),
        ({"seed": 1}, "their seed is 0 and 1"),
        ({"sampling": {"top_k": 3}}, "their sampling is"),
        ({"dtype": "bfloat16"}, "their dtype is float32 and bfloat16"),
        ({"lora": ["best:0.5"]}, r"their lora is None and \['best:0.5'\]"),
        ({"negative_prompt": "blurred"}, "their negative_prompt is None and blurred"),
        ({"height": 64}, "their height is None and 64"),
        ({"machine": {"device": "another"}}, "their device is .* and another"),
        ({"machine": {"arimage": "0.0"}}, "their arimage is .* and 0.0"),
        ({"call_size": 1}, "their call size is 2 and 1"),
    ],
)
def test_runs_with_other_settings_are_not_compared(runs, changes, sentence):
    machine = {**read_config(runs[1])["machine"], **changes.get("machine", {})}
    change_config(runs[1], **{**changes, "machine": machine})
    with pytest.raises(ValueError, match=f"ar and sjd cannot be compared, {sentence}"):
        make_report(runs, "ar")


def test_another_manifest_is_not_compared(runs):
    path = runs[1] / "manifest.jsonl"
    rows = [{**json.loads(line), "metadata": {"tag": 1}} for line in path.read_text().splitlines()]
    path.write_bytes(to_lines(rows))
    change_config(runs[1], manifest=manifest_digest(rows))
    with pytest.raises(ValueError, match="manifest"):
        make_report(runs, "ar")


def test_what_runs_share_and_what_not_is_printed(runs):
    for run in runs:
        change_config(run, lora=["best:0.5"], negative_prompt="blurred", height=32, width=32)
    change_config(runs[1], order="raster", decoding={**read_config(runs[1])["decoding"], "window": 8})
    text = to_markdown(make_report(runs, "ar"))
    assert "-228 no weights, resize 128x128" in text
    assert "tiny with best:0.5, 9 images" in text and "height 32, width 32, negative prompt blurred" in text
    assert "- ar: ar\n" in text and "- sjd: sjd:window=8, order raster\n" in text


def test_an_unknown_baseline_and_unfinished_runs_are_refused(runs, tmp_path):
    with pytest.raises(ValueError, match="--baseline is 'gsd': choose among ar, sjd"):
        make_report(runs, "gsd")
    with pytest.raises(ValueError, match="same name"):
        make_report([*runs, runs[0]], "ar")
    next((runs[1] / "images").iterdir()).unlink()
    with pytest.raises(ValueError, match=r"images/00000\d.png is missing or damaged \(1 of 9"):
        make_report(runs, "ar")
