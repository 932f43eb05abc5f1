"""Which decodings are measured, and how far they are from the model's distribution."""

import pytest
from pipelines.llamagen import tiny as tiny_llamagen
from pipelines.var import tiny as tiny_var

from arimage.decoding import decoding_from_name
from arimage.eval.bench.judge import judge
from arimage.eval.bench.measure import choose_decodings


LABELS = {"class_labels": [3, 1]}


@pytest.fixture(scope="module")
def pipe():
    return tiny_llamagen.class_pipeline()


@pytest.fixture(scope="module")
def judged(pipe):
    return {name: judge(pipe, LABELS, decoding_from_name(name), images=20, seed=0) for name in ("ar", "sjd")}


def test_tokens_fed_are_counted_without_padding(pipe, judged):
    assert judged["ar"]["tokens_fed"] == 1
    # The window of 32 reaches beyond the end of 16 tokens from the start.
    assert 1 < judged["sjd"]["tokens_fed"] < 15
    narrow = judge(pipe, LABELS, decoding_from_name("sjd", window=2), images=3, seed=0)
    assert 1 < narrow["tokens_fed"] <= 2


def test_what_names_a_decoding_can_be_typed_in_again(pipe):
    chosen, left_out = choose_decodings(pipe, LABELS, ["ar", "sjd", "sjd:window=5"], {})
    assert left_out == {}
    assert {name: getattr(decoding, "window", None) for name, decoding in chosen.items()} == {
        "ar": None,
        "sjd": 32,
        "sjd:window=5": 5,
    }
    assert choose_decodings(pipe, LABELS, list(chosen), {})[0] == chosen


def test_presets_that_do_not_run_are_left_out_with_their_reason():
    without_drafter = tiny_llamagen.class_pipeline()
    without_drafter.drafter = without_drafter.denoiser = None
    chosen, left_out = choose_decodings(without_drafter, LABELS, [], {})
    assert {"ar", "sjd"} <= chosen.keys()
    assert left_out.keys() == {"eagle", "eagle-lantern", "flow", "groups", "sjd2"}
    assert "drafter" in left_out["eagle"] and "denoiser" in left_out["sjd2"]
    for name, message in (("eagle", "eagle: .*drafter"), ("none-such", "none-such")):
        with pytest.raises(ValueError, match=message):
            choose_decodings(without_drafter, LABELS, [name], {})


def test_next_scale_decodings_are_judged_alike():
    pipe = tiny_var.pipeline("class")
    chosen, left_out = choose_decodings(pipe, LABELS, [], {})
    assert list(chosen) == ["next-scale", "fastvar", "code"] and not left_out
    for decoding in chosen.values():
        found = judge(pipe, LABELS, decoding, images=20, seed=0)
        assert found["deviation"]["codes"] == 20 * 30 and "tokens_fed" not in found
    without = tiny_var.pipeline("class", refiner=False)
    assert "refiner" in choose_decodings(without, LABELS, [], {})[1]["code"]
    with pytest.raises(ValueError, match="sjd: .*next-scale"):
        choose_decodings(pipe, LABELS, ["sjd"], {})
