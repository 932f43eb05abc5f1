"""The figures of benchmarks/notes/report.md: every part of the measurements at a tiny size, and the figures from
their tables."""

import pytest
import report_figures
import report_measure
from markov_mesh import MarkovMesh
from PIL import Image
from pipelines.arpg import tiny as tiny_arpg
from pipelines.llamagen import tiny as tiny_llamagen


COUNTS = {"exactness": 40, "paths": 8, "wrong_paths": 10}
PIPELINES = {"emoji-llamagen": tiny_llamagen.text_pipeline, "emoji-arpg": lambda: tiny_arpg.pipeline("text")}


@pytest.fixture
def measure(tmp_path, monkeypatch):
    """Measures a part with tiny models, and returns the rows of its table."""
    monkeypatch.setattr(report_measure, "load_pipeline", lambda name, *_: PIPELINES[name]())
    monkeypatch.setattr(report_measure, "MarkovMesh", lambda: MarkovMesh((4, 4)))
    monkeypatch.setattr(report_measure, "WINDOWS", [2, 4])

    def rows_of(part: str):
        report_measure.main([part], COUNTS.get(part, 1), tmp_path)
        return report_figures.read(tmp_path, part)

    return rows_of


@pytest.mark.every(4)
@pytest.mark.parametrize("part", report_measure.PARTS)
def test_a_part_is_measured(part, measure):
    rows, kept = measure(part), report_figures.read(report_figures.TABLES, part)
    assert rows and rows[0].keys() == kept[0].keys()
    for row in rows:
        assert float(row.get("passes", 1)) >= 1 and float(row.get("distance", 0)) >= 0


def test_exact_methods_are_nearer_than_faulty_ones():
    rows = report_figures.read(report_figures.TABLES, "exactness")
    exact, faulty = ([float(row["distance"]) for row in rows if row["kind"] == kind] for kind in ("exact", "faulty"))
    assert max(exact) < float(rows[0]["floor"]) < min(faulty) / 2


@pytest.mark.every(2)
@pytest.mark.parametrize("name", report_figures.FIGURES)
def test_a_figure_is_made_from_its_table_and_shown(name, tmp_path):
    report_figures.main([name], out=tmp_path)
    with Image.open(tmp_path / f"report-{name}.png") as image:
        assert image.width == 1120
    shown = report_figures.IMAGES / f"report-{name}.png"
    assert shown.stat().st_size < 150_000
    assert f"images/{shown.name})" in (report_figures.IMAGES.parent / "report.md").read_text(encoding="utf-8")
