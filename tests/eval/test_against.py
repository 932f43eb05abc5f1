"""Two reports side by side, and what is refused."""

import copy
import json

import pytest

from arimage.eval.against import check_against, compare, read_report


MACHINE = {"device": "a processor", "threads": 2, "torch": "2", "python": "3", "arimage": "0"}
REPORT = {
    "baseline": "ar",
    "settings": {"model": "tiny", "seed": 0, "sampling": {"top_k": 2}},
    "machine": MACHINE,
    "rows": [
        {
            "name": name,
            "settings": {"window": 32},
            "exact": True,
            "steps": "eager",
            "cost": {"passes": 16.0, "seconds": [1.0, 2.0, 4.0]},
            "deviation": None,
        }
        for name in ("ar", "sjd")
    ],
}


def changed(change):
    other = copy.deepcopy(REPORT)
    change(other)
    return other


def test_a_ratio_above_one_means_fewer_passes_and_seconds():
    new = changed(lambda other: other["rows"][1]["cost"].update(passes=8.0, seconds=[0.5, 0.5, 0.5]))
    assert compare(REPORT, new).splitlines()[2:] == [
        "| ar | 16.0 | 16.0 | 1.00 | 2.00 (1.00 to 4.00) | 2.00 (1.00 to 4.00) | 1.00 | exact | exact |",
        "| sjd | 16.0 | 8.0 | 2.00 | 2.00 (1.00 to 4.00) | 0.50 | 4.00 | exact | exact |",
    ]


def test_what_has_changed_is_said():
    def change(other):
        other["rows"][0]["settings"]["window"] = 8
        other["rows"][0]["steps"] = "captured"
        other["machine"]["torch"] = "3"
        del other["rows"][1]

    assert compare(REPORT, changed(change)).splitlines()[-2:] == [
        "Changed: window of ar was 32 and is 8; the steps of ar were eager and are captured; torch was 2 and is 3.",
        "Only in one of the two: sjd.",
    ]


@pytest.mark.parametrize(
    ("settings", "machine", "name"),
    [
        ({"model": "other"}, {}, "model"),
        ({"sampling": {}}, {}, "sampling"),
        ({}, {"device": "another"}, "device"),
        ({}, {"threads": 99}, "threads"),
    ],
)
def test_other_settings_are_not_compared(settings, machine, name):
    check_against(REPORT, REPORT["settings"] | {"machine": MACHINE | {"torch": "3"}})
    with pytest.raises(ValueError, match=f"another {name} "):
        check_against(REPORT, REPORT["settings"] | settings | {"machine": MACHINE | machine})


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda report: report.update(rows=[]), "rows"),
        (lambda report: report["rows"].append(None), r"rows\[2\]"),
        (lambda report: report["rows"][0]["cost"].update(passes=0.0), r"rows\[0\].cost.passes"),
        (lambda report: report["rows"][0]["cost"].update(seconds=[1.0]), r"rows\[0\].cost.seconds"),
        (lambda report: report.update(settings=3), "settings"),
    ],
)
def test_damaged_reports_are_refused(change, name, tmp_path):
    (tmp_path / "x.json").write_text(json.dumps(changed(change)))
    with pytest.raises(ValueError, match=f"--against is .*x.json, .*{name}"):
        read_report(tmp_path / "x.json")
    (tmp_path / "x.json").write_text(json.dumps(REPORT))
    assert read_report(tmp_path / "x.json") == REPORT
    (tmp_path / "y.json").write_text("[]")
    for other in ("y.json", "none.json"):
        with pytest.raises(ValueError, match=f"{other}.*arimage bench --out"):
            read_report(tmp_path / other)
