"""What the tests of runs share: the arguments of the command, and the contents of a run."""

import json
import shutil

from arimage.eval.runs.run_folder import read_config, read_rows


COUNT, BATCH = 22, 4
TIMED = ("seconds", "peak_memory", "warm")


def options(models, out, *more, model="text"):
    words = ["--model", models[model], "--prompts", models["prompts.jsonl"], "--batch-size", BATCH]
    return [*map(str, [*words, "--device", "cpu", "--dtype", "float32", "--out", out, *more])]


def contents(run):
    """All of a finished run but times and threads. Nothing may be there twice, and no other file."""
    config = read_config(run)
    del config["machine"]["threads"]
    rows = [json.loads(line) for path in (run / "results").iterdir() for line in path.read_text().splitlines()]
    assert len(rows) == COUNT
    results = {row["id"]: {name: row[name] for name in row if name not in TIMED} for row in rows}
    assert sorted(path.name for path in run.iterdir() if path.name != ".lock") == [
        "config.json",
        "images",
        "manifest.jsonl",
        "results",
    ]
    files = {path.name: path.read_bytes() for path in (run / "images").iterdir()}
    return {"config": config, "manifest": (run / "manifest.jsonl").read_text(), "results": results, **files}


def pictures(run):
    return len(list((run / "images").glob("*.png"))) if run.exists() else 0


def part_of(run, folder, batches):
    """A copy of a run of which only so many batches are generated."""
    shutil.copytree(run, folder)
    for row in read_rows(folder)[batches * BATCH :]:
        (folder / row["path"]).unlink()
    lines = (folder / "results/rank-00000.jsonl").read_text().splitlines(keepends=True)
    (folder / "results/rank-00000.jsonl").write_text("".join(lines[: batches * BATCH]))
    return folder
