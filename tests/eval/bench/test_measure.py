"""What the benchmark counts, and what it refuses to compare."""

import copy
import json

import pytest
import torch
from pipelines.llamagen import tiny as tiny_llamagen
from pipelines.var import tiny as tiny_var

from arimage.decoding import decoding_from_name, parse_decoding
from arimage.eval.bench import tables
from arimage.eval.bench.judge import judge
from arimage.eval.bench.measure import choose_decodings, machine, measure


LABELS = {"class_labels": [3, 1]}


@pytest.fixture(scope="module")
def pipe():
    return tiny_llamagen.class_pipeline()


@pytest.fixture(scope="module")
def results(pipe):
    decodings = {name: decoding_from_name(name) for name in ("ar", "sjd")}
    rows = measure(pipe, LABELS, decodings, batch_size=2, runs=3, seed=0)
    for row, decoding in zip(rows, decodings.values(), strict=True):
        row.update(model="tiny", **judge(pipe, LABELS, decoding, images=20, seed=0))
    settings = {"condition": LABELS, "runs": 3, "images": 20, "seed": 0}
    return {"machine": machine(torch.device("cpu")), "settings": settings, "rows": rows}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ar", ("ar", {})),
        ("sjd-lazy:window=128,tokens=64", ("sjd-lazy", {"window": 128, "tokens": 64})),
        ("x:a=0.5, b=-1,c=true,d=False,e=left", ("x", {"a": 0.5, "b": -1, "c": True, "d": False, "e": "left"})),
    ],
)
def test_a_decoding_is_read_with_its_settings(text, expected):
    name, settings = parse_decoding(text)
    assert (name, settings) == expected
    assert [type(value) for value in settings.values()] == [type(value) for value in expected[1].values()]


def test_every_run_gives_every_figure(results):
    for row in results["rows"]:
        for figure in ("passes", "batch_passes", "tokens_per_pass", "seconds", "images_per_second", "speedup"):
            assert len(row[figure]) == 3 and min(row[figure]) > 0
        for passes, whole, tokens in zip(row["passes"], row["batch_passes"], row["tokens_per_pass"], strict=True):
            # An image ends with its batch or before it.
            assert 2 <= passes <= whole <= 16 and tokens == pytest.approx(16 / passes)
        for seconds, rate in zip(row["seconds"], row["images_per_second"], strict=True):
            assert rate == pytest.approx(2 / seconds)
    ar, sjd = results["rows"]
    assert ar["speedup"] == [1, 1, 1]
    assert sjd["speedup"] == pytest.approx([a / b for a, b in zip(ar["seconds"], sjd["seconds"], strict=True)])


def test_memory_is_the_peak_of_a_call_or_unknown(results):
    for row in results["rows"]:
        assert len(row["peak_memory"]) in (0, 3) and all(10 < peak < 1e5 for peak in row["peak_memory"])


def test_tokens_fed_are_counted_without_padding(pipe, results):
    ar, sjd = results["rows"]
    assert ar["tokens_fed"] == 1
    # The window of 32 reaches beyond the end of 16 tokens from the start.
    assert 1 < sjd["tokens_fed"] < 15
    narrow = judge(pipe, LABELS, decoding_from_name("sjd", window=2), images=3, seed=0)
    assert 1 < narrow["tokens_fed"] <= 2


def test_the_deviation_is_measured_on_as_many_images_as_asked(results):
    for row in results["rows"]:
        assert row["deviation"]["codes"] == 20 * 16
        assert row["deviation"]["chance"] > 1e-4 and row["deviation"]["impossible"] == 0


def test_sampling_settings_reach_the_model(pipe):
    decodings = {"sjd": decoding_from_name("sjd")}
    (flat,) = measure(pipe, LABELS, decodings, batch_size=2, runs=2, seed=0, sampling={"temperature": 5.0})
    (sharp,) = measure(pipe, LABELS, decodings, batch_size=2, runs=2, seed=0)
    # Drafts are uniform, and so is this distribution nearly.
    assert sum(flat["passes"]) < sum(sharp["passes"]) / 2
    assert (flat["sampling"]["temperature"], sharp["sampling"]["temperature"]) == (5.0, 1.0)


def test_a_window_is_given_to_the_decodings_that_have_one(pipe):
    chosen, left_out = choose_decodings(pipe, LABELS, ["ar", "sjd", "sjd:window=5"], [2, 4], {})
    assert left_out == {}
    assert {name: getattr(decoding, "window", None) for name, decoding in chosen.items()} == {
        "ar": None,
        "sjd:window=2": 2,
        "sjd:window=4": 4,
        "sjd:window=5": 5,
    }
    # What is printed can be typed in again.
    assert choose_decodings(pipe, LABELS, list(chosen), [], {})[0] == chosen


def test_presets_that_do_not_run_are_left_out_with_their_reason():
    without_drafter = tiny_llamagen.class_pipeline()
    without_drafter.drafter = without_drafter.denoiser = None
    chosen, left_out = choose_decodings(without_drafter, LABELS, [], [], {})
    assert {"ar", "sjd"} <= chosen.keys() and left_out.keys() == {"eagle", "eagle-lantern", "groups", "sjd2"}
    assert "drafter" in left_out["eagle"] and "denoiser" in left_out["sjd2"]
    with pytest.raises(ValueError, match="eagle: .*drafter"):
        choose_decodings(without_drafter, LABELS, ["eagle"], [], {})


def test_an_unknown_decoding_is_refused(pipe):
    with pytest.raises(ValueError, match="none-such"):
        choose_decodings(pipe, LABELS, ["none-such"], [], {})


def test_results_survive_their_file(results, tmp_path):
    tables.write_json(results, tmp_path / "x.json")
    assert tables.read_json(tmp_path / "x.json") == results


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda results: results.update(rows=[]), "no rows"),
        (lambda results: results["rows"].append({}), "row 3 of"),
        (lambda results: results["rows"].append(None), "row 3 of"),
        (lambda results: results["rows"][0].update(passes=[]), "passes"),
        (lambda results: results["rows"][0].update(seconds=[0.0]), "seconds"),
        (lambda results: results["machine"].pop("threads"), "threads"),
        (lambda results: results["settings"].update(condition=3), "condition"),
    ],
)
def test_damaged_results_are_refused(results, change, name, tmp_path):
    tables.write_json(changed(results, change), tmp_path / "x.json")
    with pytest.raises(ValueError, match=rf"(x.json.* {name}|{name} .*x.json).*arimage bench --out"):
        tables.read_json(tmp_path / "x.json")


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_figures_that_are_not_finite_are_neither_written_nor_read(results, number, tmp_path):
    other = changed(results, lambda results: results["rows"][0].update(seconds=[number]))
    with pytest.raises(ValueError, match="not finite"):
        tables.write_json(other, tmp_path / "x.json")
    assert not (tmp_path / "x.json").exists()
    (tmp_path / "x.json").write_text(json.dumps(other))
    with pytest.raises(ValueError, match="row 1 of .* has a wrong seconds"):
        tables.read_json(tmp_path / "x.json")


def test_the_pipeline_stays_as_it_is():
    pipe = tiny_llamagen.class_pipeline()
    pipe.set_progress_bar_config(desc="mine")
    measure(pipe, LABELS, {"ar": decoding_from_name("ar")}, batch_size=1, runs=1, seed=0)
    assert pipe._progress_bar_config == {"desc": "mine"}


@pytest.mark.parametrize("text", ["[]", "3", "{", "[" * 100_000, "{}"])
def test_a_file_of_something_else_is_refused(text, tmp_path):
    (tmp_path / "y.json").write_text(text)
    with pytest.raises(ValueError, match="y.json .*arimage bench --out"):
        tables.read_json(tmp_path / "y.json")


@pytest.mark.parametrize("name", ["x", "x.", "x.nonsense"])
def test_a_plot_without_a_known_suffix_is_refused(results, name, tmp_path):
    with pytest.raises(ValueError, match="--plot"):
        tables.plot(results, tmp_path / name)
    assert not list(tmp_path.iterdir())
    tables.plot(results, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 1000


def changed(results, change):
    other = copy.deepcopy(results)
    change(other)
    return other


def halve(results):
    results["rows"][1]["passes"] = [value / 2 for value in results["rows"][1]["passes"]]


def test_a_ratio_above_one_means_fewer_passes(results):
    lines = tables.compare(results, changed(results, halve)).splitlines()
    assert [line.split("|")[4].strip() for line in lines if line.startswith("| ar") or line.startswith("| sjd")] == [
        "1.00",
        "2.00",
    ]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda r: r["machine"].update(device="another"), "differ in their device"),
        (lambda r: r["machine"].update(threads=99), "differ in their threads"),
        (lambda r: r["settings"].update(condition={"class_labels": [0]}), "differ in their condition"),
        (lambda r: [row.update(model="other") for row in r["rows"]], "of tiny at batch 2 and of other at batch 2"),
        (lambda r: [row.update(batch_size=4) for row in r["rows"]], "of tiny at batch 2 and of tiny at batch 4"),
        (lambda r: [row["sampling"].update(top_k=3) for row in r["rows"]], "differ in their sampling"),
    ],
)
def test_results_with_other_settings_are_not_compared(results, change, sentence):
    with pytest.raises(ValueError, match=sentence):
        tables.compare(results, changed(results, change))


def test_a_deviation_is_shown_next_to_what_is_claimed(results):
    text = tables.to_markdown(results)
    exact = results["rows"][0]["deviation"]
    assert f"exact ({exact['total_variation']:.4f}, floor {exact['floor']:.4f})" in text

    def relax(other):
        other["rows"][1]["exact"] = False
        other["rows"][1]["deviation"] = {"total_variation": 0.25, "floor": 0.01, "impossible": 0.031}

    assert "| 0.2500, floor 0.0100, 3.10% impossible |" in tables.to_markdown(changed(results, relax))


def test_next_scale_decodings_are_measured_alike():
    pipe = tiny_var.pipeline("class")
    chosen, left_out = choose_decodings(pipe, LABELS, [], [], {})
    assert list(chosen) == ["next-scale", "fastvar", "code"] and not left_out
    rows = measure(pipe, LABELS, chosen, batch_size=2, runs=1, seed=0)
    for row, decoding in zip(rows, chosen.values(), strict=True):
        assert row["passes"] == row["batch_passes"] == [4] and row["tokens_per_pass"] == [30 / 4]
        row.update(model="tiny", **judge(pipe, LABELS, decoding, images=20, seed=0))
    settings = {"condition": LABELS, "runs": 1, "images": 20, "seed": 0}
    table = tables.to_markdown({"machine": machine(torch.device("cpu")), "settings": settings, "rows": rows})
    assert "| next-scale | exact (" in table and "| code | 0." in table
    without = tiny_var.pipeline("class", refiner=False)
    assert "refiner" in choose_decodings(without, LABELS, [], [], {})[1]["code"]
    with pytest.raises(ValueError, match="sjd: .*next-scale"):
        choose_decodings(pipe, LABELS, ["sjd"], [], {})
