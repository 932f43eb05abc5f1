"""What `measure` counts in every call."""

import pytest
from measured_calls import measure
from pipelines.llamagen import tiny as tiny_llamagen

from arimage.decoding import decoding_from_name


LABELS = {"class_labels": [3, 1]}


def test_every_run_gives_every_figure():
    pipe = tiny_llamagen.class_pipeline()
    pipe.set_progress_bar_config(desc="mine")
    decodings = {name: decoding_from_name(name) for name in ("ar", "sjd")}
    rows = measure(pipe, LABELS, decodings, batch_size=2, runs=3, seed=0)
    assert [row["decoding"] for row in rows] == ["ar", "sjd"] and pipe._progress_bar_config == {"desc": "mine"}
    for row in rows:
        assert len(row["seconds"]) == 3 and min(row["seconds"]) > 0
        assert len(row["peak_memory"]) in (0, 3) and all(10 < peak < 1e5 for peak in row["peak_memory"])
        for passes, whole, tokens in zip(row["passes"], row["batch_passes"], row["tokens_per_pass"], strict=True):
            # An image ends with its batch or before it.
            assert 2 <= passes <= whole <= 16 and tokens == pytest.approx(16 / passes)
