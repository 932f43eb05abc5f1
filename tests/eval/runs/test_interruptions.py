"""Whatever happens to the processes that generate a run and to its files, the images are the same."""

import json
import os
import shutil
import signal
import time

import pytest
import tiny
from eval.runs.run_kit import BATCH, COUNT, contents, options, part_of, pictures
from pipelines.llamagen import tiny as tiny_llamagen

from arimage.eval.runs.generate import make_config, missing_batches, open_run, prepare
from arimage.eval.runs.manifest import label_rows


def test_a_run_that_is_killed_again_and_again_ends_like_an_undisturbed_one(
    models, fork, finish, undisturbed, tmp_path
):
    run = tmp_path / "run"
    # As soon as there are so many pictures, most of which begin or divide a batch, and a moment later.
    moments = [(0, 0.02), (6, 0), (9, 0.03), (18, 0)]
    for count, delay in moments:
        process = fork(options(models, run))
        while pictures(run) < count or not run.exists():
            assert process.is_alive(), process.end()
            time.sleep(0.001)
        time.sleep(delay)
        process.kill()
        assert process.end()[0] == -signal.SIGKILL
    before = {path: path.stat().st_mtime_ns for path in run.glob("images/*.png")}
    redrawn = missing_batches(open_run(run))
    assert finish(options(models, run))[0] == 0
    assert contents(run) == contents(undisturbed)
    # Nothing else was generated again.
    changed = {int(path.stem) // BATCH for path, then in before.items() if path.stat().st_mtime_ns != then}
    assert changed <= set(redrawn)


def test_a_run_of_an_earlier_version_is_continued_as_it_was_begun(tmp_path):
    pipe, rows = tiny_llamagen.class_pipeline(), label_rows(range(tiny.NUM_CLASSES), 1, 3)
    config = make_config(pipe, rows, model="m", source={}, seed=1, batch_size=1)
    prepare({name: value for name, value in config.items() if name != "call_size"}, rows, tmp_path / "run")
    run = prepare(config, rows, tmp_path / "run")
    assert config["call_size"] == 3 and run.call_size == 1 and len(missing_batches(run)) == 30


@pytest.mark.every(2)
@pytest.mark.parametrize("cut", [1, 60, 200, 700])
def test_results_that_were_cut_short_are_generated_again(command, models, undisturbed, tmp_path, cut):
    run = shutil.copytree(undisturbed, tmp_path / "run")
    path = run / "results/rank-00000.jsonl"
    path.write_bytes(path.read_bytes()[:-cut])
    (run / "images/000006.png").unlink()
    (run / "images/.000007.png.tmp").write_bytes(b"half")
    assert missing_batches(open_run(run)) == ([1, 4, 5] if cut == 700 else [1, 5])
    assert command(*options(models, run))[0] == 0
    assert missing_batches(open_run(run)) == []
    images = {path.name: path.read_bytes() for path in (run / "images").iterdir()}
    assert images == {path.name: path.read_bytes() for path in (undisturbed / "images").iterdir()}
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_damaged_images_are_generated_again(command, models, undisturbed, tmp_path):
    run = shutil.copytree(undisturbed, tmp_path / "run")
    images = [run / f"images/{id:06d}.png" for id in (0, 5, 13)]
    images[0].write_bytes(images[0].read_bytes()[:50])
    images[1].write_bytes((run / "images/000009.png").read_bytes())
    images[2].write_bytes(b"")
    assert missing_batches(open_run(run)) == [0, 1, 3]
    assert command(*options(models, run))[0] == 0
    assert missing_batches(open_run(run)) == []
    files = {path.name: path.read_bytes() for path in (run / "images").iterdir()}
    assert files == {path.name: path.read_bytes() for path in (undisturbed / "images").iterdir()}


def test_a_run_of_an_earlier_version_is_resumed(command, models, undisturbed, tmp_path):
    """Without digests: cut files are found all the same."""
    run = shutil.copytree(undisturbed, tmp_path / "run")
    config = json.loads((run / "config.json").read_text())
    del config["manifest"]
    (run / "config.json").write_text(json.dumps(config))
    path = run / "results/rank-00000.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert all(row.pop("sha256") for row in rows)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    image = run / "images/000006.png"
    image.write_bytes(image.read_bytes()[:-1])
    assert missing_batches(open_run(run)) == [1]
    assert command(*options(models, run))[0] == 0
    assert missing_batches(open_run(run)) == []
    assert image.read_bytes() == (undisturbed / "images/000006.png").read_bytes()


def test_ctrl_c_leaves_whole_files_and_the_same_command_resumes(models, fork, finish, undisturbed, tmp_path):
    # Tests that run in the background of a shell ignore SIGINT, and so would the command.
    heed = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    # A busy machine may let the run finish before it is interrupted.
    for attempt in range(10):
        run = tmp_path / f"run-{attempt}"
        process = fork(options(models, run), before=heed)
        while pictures(run) < 5:
            time.sleep(0.001)
        os.kill(process.pid, signal.SIGINT)
        code, said = process.end()
        if code:
            break
    assert code == 130 and "Traceback" not in said
    assert pictures(run) < COUNT and not list(run.rglob("*.tmp"))
    assert finish(options(models, run))[0] == 0
    assert contents(run) == contents(undisturbed)


# A full disk


@pytest.mark.every(3)
@pytest.mark.parametrize("full", ["config", "pictures", "results"])
def test_a_file_that_cannot_grow_is_one_sentence_and_nothing_half_written(models, finish, undisturbed, tmp_path, full):
    run = tmp_path / "run"
    limit = 50
    if full != "config":
        part_of(undisturbed, run, 3)
    if full == "results":
        # Pictures fit, and half of the next batch's results.
        limit = (run / "results/rank-00000.jsonl").stat().st_size + 300
        assert limit > max(path.stat().st_size for path in (run / "images").iterdir())
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    code, said = finish(
        options(models, run), before=f"resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, resource.RLIM_INFINITY))"
    )
    assert code == 2 and said.startswith(f"arimage: no space is left in {run} (File too large): make room and")
    after = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert {path.parent.name for path in after.keys() - before.keys()} <= (
        {"images"} if full == "results" else {"run"}
    )
    assert all(after[path] == data for path, data in before.items())
    assert not list(run.rglob("*.tmp"))
    assert finish(options(models, run))[0] == 0
    assert contents(run) == contents(undisturbed)
