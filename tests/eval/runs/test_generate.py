"""Runs of many images: whatever happens to the processes that generate them, the files are the same."""

import io
import json
import multiprocessing
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tiny
import tiny_emu3
import torch
from accelerate import PartialState
from PIL import Image

from arimage import cli
from arimage.decoding import SpeculativeJacobiDecoding
from arimage.eval.runs import estimate
from arimage.eval.runs.generate import generate, generate_batch, make_config, missing_batches, open_run, prepare
from arimage.eval.runs.manifest import class_rows, prompt_rows
from arimage.eval.runs.run_folder import read_config, read_results, read_rows
from arimage.pipelines import base
from arimage.pipelines.known import KnownCaptions


ROOT = Path(cli.__file__).parents[1]
COUNT, BATCH = 22, 4
TIMED = ("seconds", "peak_memory", "warm")
PRELOAD = [
    "arimage.eval.runs.generate",
    "arimage.pipelines.pipeline_llamagen",
    "arimage.pipelines.pipeline_var",
    "arimage.cli",
]
# Runs the command in a process that has imported everything: {0} environment, {1} arguments, {2} code to run first.
# The output goes to a pipe, since the size of files may be limited.
FORKED = """
import os, resource, sys
os.environ.update({0!r})
sys.argv = ["arimage", "eval", "generate", *{1!r}]
sys.stdout = sys.stderr = os.fdopen(os.dup(pipe.fileno()), "w")
{2}
from arimage.cli import main
main()
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of tiny pipelines, and a file of prompts, by their names."""
    root = tmp_path_factory.mktemp("models")
    tiny.text_pipeline().save_pretrained(root / "text")
    tiny.class_pipeline().save_pretrained(root / "class")
    tiny.scale_pipeline("text").save_pretrained(root / "scales")
    prompts = root / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"a red heart {i}", "tag": i}) + "\n" for i in range(COUNT)))
    return {name: str(root / name) for name in ("text", "class", "scales", "prompts.jsonl")}


def options(models, out, *more, model="text"):
    words = ["--model", models[model], "--prompts", models["prompts.jsonl"], "--batch-size", BATCH]
    return [*map(str, [*words, "--device", "cpu", "--dtype", "float32", "--out", out, *more])]


def without_progress(said: str) -> str:
    """The output without the progress bar."""
    return re.sub(r"([\r\n][^\r\n]*image/s\])+\n?", "", said)


@pytest.fixture(scope="module")
def fork():
    """Start the command in a process of its own; `process.end()` waits for its exit code and output."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)

    def fork(arguments, environment=(), before=""):
        reader, writer = context.Pipe(duplex=False)
        code = FORKED.format(dict(environment), arguments, before)
        process = context.Process(target=exec, args=(code, {"pipe": writer}))
        process.start()
        writer.close()

        def end():
            process.join(120)
            with os.fdopen(os.dup(reader.fileno())) as said:
                return process.exitcode, without_progress(said.read())

        process.end = end
        return process

    return fork


@pytest.fixture(scope="module")
def finish(fork):
    """Run the command to its end in a process of its own; returns its exit code and what it said."""
    return lambda *arguments, **options: fork(*arguments, **options).end()


@pytest.fixture(scope="module")
def undisturbed(models, finish, tmp_path_factory):
    """A run of one process that nothing happened to."""
    folder = tmp_path_factory.mktemp("runs") / "undisturbed"
    assert finish(options(models, folder)) == (0, f"{folder}\n")
    return folder


@pytest.fixture
def command(monkeypatch, capsys):
    """Run the command in this process; returns its exit code and what it said."""

    def command(*arguments):
        monkeypatch.setattr(sys, "argv", ["arimage", "eval", "generate", *map(str, arguments)])
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = end.code or 0
        return code, without_progress("".join(capsys.readouterr()))

    return command


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


# What is generated


def test_a_run_has_what_was_asked_and_what_it_cost(models, undisturbed):
    config = read_config(undisturbed)
    assert config["model"] == models["text"] and config["decoding_name"] == "ar" and config["images"] == COUNT
    assert config["source"]["prompts"] == "prompts.jsonl" and len(config["source"]["sha256"]) == 64
    assert config["sampling"] == {"guidance_scale": 1.0, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    rows = read_rows(undisturbed)
    assert [(row["id"], row["prompt"], row["metadata"]) for row in rows] == [
        (i, f"a red heart {i}", {"tag": i}) for i in range(COUNT)
    ]
    results = read_results(undisturbed)
    assert list(results) == list(range(COUNT))
    for id, row in results.items():
        assert row["batch"] == id // BATCH and row["batch_size"] == (2 if id >= 20 else 4)
        assert (row["passes"], row["batch_passes"], row["tokens_per_pass"], row["exact"]) == (16, 16, 1.0, True)
        assert row["seconds"] > 0 and row["warm"] == (id >= BATCH)
    assert len({path.read_bytes() for path in (undisturbed / "images").iterdir()}) == COUNT


@pytest.mark.parametrize(
    ("kind", "text", "decoding", "sampling"),
    [
        ("text", "sjd-coupled:window=6", SpeculativeJacobiDecoding(window=6), {"guidance_scale": 3.0, "top_k": 9}),
        ("text", "eagle", "eagle", {"temperature": 0.5}),
        ("text", None, None, {}),
        ("class", "zipar", "zipar", {"top_p": 0.9}),
        ("scales", "next-scale", "next-scale", {"guidance_scale": 2.0}),
        ("scales", "code", "code", {}),
    ],
)
def test_images_and_costs_are_those_of_the_pipeline(tmp_path, kind, text, decoding, sampling):
    pipe = {"text": tiny.text_pipeline, "class": tiny.class_pipeline}.get(kind, lambda: tiny.scale_pipeline("text"))()
    rows = class_rows(3, 1, 2) if kind == "class" else prompt_rows([{"prompt": f"tree {i}"} for i in range(3)], 1, 2)
    config = make_config(pipe, rows, model=kind, source={}, seed=1, batch_size=4, decoding=text, sampling=sampling)
    run = prepare(config, rows, tmp_path)
    for index in reversed(missing_batches(run)):
        generate_batch(run, pipe, index)
    results = read_results(tmp_path)
    assert missing_batches(run) == [] and len(results) == 6
    for some in (rows[:4], rows[4:]):
        key, name = ("class_labels", "class_label") if kind == "class" else ("prompt", "prompt")
        expected = pipe(
            **{key: [row[name] for row in some]},
            generator=[torch.Generator().manual_seed(row["seed"]) for row in some],
            decoding=decoding,
            **sampling,
        )
        passes = (expected.stats.accepted > 0).sum(0)
        tokens = expected.stats.accepted.sum(0)
        for i, row in enumerate(some):
            np.testing.assert_array_equal(Image.open(tmp_path / row["path"]), np.asarray(expected.images[i]))
            result = results[row["id"]]
            assert result["passes"] == passes[i] and result["batch_passes"] == expected.stats.forward_passes
            assert result["tokens_per_pass"] == pytest.approx(float(tokens[i] / passes[i]))
            assert result["exact"] == expected.stats.exact


def test_the_size_reaches_the_model(tmp_path):
    pipe = tiny_emu3.pipeline()
    pipe.save_pretrained(tmp_path / "model")
    rows = prompt_rows([{"prompt": "a tree"}], 0)
    config = make_config(pipe, rows, model="m", source={}, seed=0, batch_size=1, height=16, width=40)
    generate_batch(prepare(config, rows, tmp_path / "run"), pipe, 0)
    assert Image.open(tmp_path / "run/images/000000.png").size == (40, 16)


def test_the_pipeline_and_the_process_stay_as_they_are(tmp_path, monkeypatch):
    pipe, rows = tiny.text_pipeline(), prompt_rows([{"prompt": "a tree"}], 0)
    pipe.set_progress_bar_config(desc="mine")
    pipe.known_captions = known = KnownCaptions({"red heart": []})
    seen, warned, threads = [], [], torch.get_num_threads()
    monkeypatch.setattr(base, "_warn_once", warned.append)
    decode_tokens = pipe.decode_tokens
    monkeypatch.setattr(
        type(pipe), "decode_tokens", lambda _, *given: seen.append(torch.get_num_threads()) or decode_tokens(*given)
    )
    config = make_config(pipe, rows, model="m", source={}, seed=0, batch_size=1, decoding="ar")
    config["machine"]["threads"] = threads + 1
    run = prepare(config, rows, tmp_path)
    assert torch.get_num_threads() == threads
    generate_batch(run, pipe, 0)
    estimate.measure_batch(pipe, config, rows)
    assert seen[0] == threads + 1 and torch.get_num_threads() == threads and not warned
    assert pipe.known_captions is known and pipe._progress_bar_config == {"desc": "mine"}
    with pytest.raises(RuntimeError):
        monkeypatch.setattr(type(pipe), "decode_tokens", None)
        monkeypatch.setattr(type(pipe), "__call__", fail)
        generate_batch(run, pipe, 0)
    assert torch.get_num_threads() == threads


def fail(*arguments, **options):
    raise RuntimeError


def test_the_negative_prompt_reaches_the_model(tmp_path):
    pipe = tiny_emu3.pipeline()
    rows = prompt_rows([{"prompt": "a tree"}] * 2, 0)
    asked = {"model": "m", "source": {}, "seed": 0, "batch_size": 2, "height": 16, "width": 16}
    asked["sampling"] = {"guidance_scale": 4.0}
    images = {}
    for name in (None, "lowres", "bright red"):
        config = make_config(pipe, rows, **asked, negative_prompt=name)
        assert config.get("negative_prompt") == name
        run = prepare(config, rows, tmp_path / str(name))
        generate_batch(run, pipe, 0)
        images[name] = [(run.folder / row["path"]).read_bytes() for row in rows]
    generators = [torch.Generator().manual_seed(row["seed"]) for row in rows]
    expected = pipe(
        ["a tree"] * 2, negative_prompt="lowres", guidance_scale=4.0, height=16, width=16, generator=generators
    ).images
    for row, image in zip(rows, expected, strict=True):
        assert np.array_equal(np.asarray(image), np.asarray(Image.open(tmp_path / "lowres" / row["path"])))
    assert images["lowres"] != images["bright red"] != images[None]
    with pytest.raises(ValueError, match="says negative_prompt = 'lowres' and you ask for 'bright red'"):
        prepare(make_config(pipe, rows, **asked, negative_prompt="bright red"), rows, tmp_path / "lowres")


def test_a_negative_prompt_for_a_model_without_is_refused(command, models, tmp_path):
    code, said = command(*options(models, tmp_path / "run", "--negative-prompt", "bird"))
    assert code == 2 and "takes no negative_prompt: leave out --negative-prompt" in said
    assert not (tmp_path / "run").exists()


# Estimates


@pytest.mark.parametrize(("model", "passes"), [("text", 16), ("scales", 4)])
def test_a_dry_run_says_what_a_run_does_and_writes_nothing(command, models, tmp_path, model, passes):
    decoding = [] if model == "scales" else ["--decoding", "ar"]
    code, said = command(*options(models, tmp_path / "run", "--dry-run", *decoding, model=model))
    assert code == 0 and not (tmp_path / "run").exists()
    assert f"images: {COUNT} of 8x8 pixels, of which 0 are finished" in said
    assert f"steps: {passes}.0 forward passes per image" in said and "(all)" in said
    assert f"{COUNT} PNG files" in said and "hours with 1 process\n" in said


def test_a_dry_run_estimates_the_steps_that_it_does_not_take(monkeypatch):
    pipe = tiny.text_pipeline(grid=8)
    rows = prompt_rows([{"prompt": "a red heart"}] * 6, 0)
    config = make_config(pipe, rows, model="m", source={}, seed=0, batch_size=2, decoding="ar")
    monkeypatch.setattr(estimate, "PASSES", 9)
    cost = estimate.measure_batch(pipe, config, rows)
    assert (cost.measured, cost.finished, cost.passes, cost.size) == (9, False, 64.0, (16, 16))
    assert cost.seconds == pytest.approx(cost.other_seconds + 63 * cost.pass_seconds) and cost.pass_seconds > 0


def test_a_dry_run_of_a_run_that_has_begun_counts_what_is_left(command, models, undisturbed, tmp_path):
    run = part_of(undisturbed, tmp_path / "run", 2)
    code, said = command(*options(models, run, "--dry-run"))
    assert code == 0 and "of which 8 are finished" in said
    code, said = command(*options(models, run, "--dry-run", "--seed", 1))
    assert code == 2 and "and you ask for" in said


def test_progress_counts_the_images_of_all_processes(command, models, undisturbed, tmp_path, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    run = part_of(undisturbed, tmp_path / "run", 2)
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert command(*options(models, run))[0] == 0
    first, last = (sys.stderr.getvalue().split("\r")[i] for i in (1, -1))
    assert "8/22" in first and "22/22" in last and "image/s" in last


# Interruptions


def test_a_run_that_is_killed_again_and_again_ends_like_an_undisturbed_one(
    models, fork, finish, undisturbed, tmp_path
):
    run = tmp_path / "run"
    # As soon as there are so many pictures, most of which begin or divide a batch, and a moment later.
    moments = [(0, 0.02), (1, 0), (6, 0), (9, 0.03), (15, 0), (18, 0)]
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


def test_a_call_whose_images_take_the_rows_of_finished_ones_is_repeated_as_a_whole(tmp_path):
    """Five calls of three images, generated one at a time, of which the second image of the second call is lost."""
    pipe = tiny.class_pipeline()
    rows = class_rows(tiny.NUM_CLASSES, 1, 3)[:25]
    config = make_config(pipe, rows, model="m", source={}, seed=1, batch_size=1, decoding="sjd-coupled")
    run = prepare(config, rows, tmp_path / "run")
    assert run.call_size == 3 and len(missing_batches(run)) == 9
    generate(run, pipe)
    results = read_results(run.folder)
    before = {path.name: path.read_bytes() for path in (run.folder / "images").iterdir()}
    assert {row["batch_size"] for row in results.values()} == {3, 1}
    alone = pipe(
        class_labels=rows[4]["class_label"],
        generator=torch.Generator().manual_seed(rows[4]["seed"]),
        decoding="sjd-coupled",
    )
    assert results[4]["passes"] == int((alone.stats.accepted > 0).sum())
    (run.folder / rows[4]["path"]).unlink()
    assert missing_batches(run) == [1]
    generate(run, pipe)
    assert missing_batches(run) == []
    assert before == {path.name: path.read_bytes() for path in (run.folder / "images").iterdir()}


def test_a_run_of_an_earlier_version_is_continued_as_it_was_begun(tmp_path):
    pipe, rows = tiny.class_pipeline(), class_rows(tiny.NUM_CLASSES, 1, 3)
    config = make_config(pipe, rows, model="m", source={}, seed=1, batch_size=1)
    prepare({name: value for name, value in config.items() if name != "call_size"}, rows, tmp_path / "run")
    run = prepare(config, rows, tmp_path / "run")
    assert config["call_size"] == 3 and run.call_size == 1 and len(missing_batches(run)) == 30


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


# Several processes


def launched(*words):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "RAY_worker_niceness": "0"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_two_processes_of_torchrun_generate_the_same_images(models, undisturbed, tmp_path):
    run = tmp_path / "run"
    words = ["torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "arimage", "eval", "generate"]
    assert launched(*words, *options(models, run)) == f"{run}\n"
    assert contents(run) == contents(undisturbed)
    ranks = [len(path.read_text().splitlines()) for path in sorted((run / "results").iterdir())]
    assert ranks == [12, 10]


def test_three_processes_finish_what_one_began(models, fork, undisturbed, tmp_path):
    run = part_of(undisturbed, tmp_path / "run", 1)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "3"}
    ranks = [fork(options(models, run), {**group, "RANK": str(r), "LOCAL_RANK": str(r)}) for r in range(3)]
    for process in ranks:
        assert process.end()[0] == 0
    assert contents(run) == contents(undisturbed)
    ranks = [len(path.read_text().splitlines()) for path in sorted((run / "results").iterdir())]
    assert ranks == [12, 6, 4]


def test_two_processes_of_accelerate_generate_the_same_images(models, undisturbed, tmp_path):
    run = tmp_path / "run"
    words = ["accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "-m", "arimage", "eval", "generate"]
    assert launched(*words, *options(models, run)) == f"{run}\n"
    assert contents(run) == contents(undisturbed)
    assert len(list((run / "results").iterdir())) == 2


def test_workers_of_ray_generate_the_same_images(models, undisturbed, tmp_path):
    run = part_of(undisturbed, tmp_path / "run", 1)
    words = ["arimage", "eval", "generate", *options(models, run), "--engine", "ray", "--workers", "2"]
    assert launched(*words) == f"{run}\n"
    assert contents(run) == contents(undisturbed)


def test_without_ray_its_engine_is_refused(command, models, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert command(*options(models, tmp_path / "run"), "--engine", "ray") == (
        2,
        "arimage: --engine ray needs Ray: pip install 'arimage[ray]'\n",
    )


def test_processes_that_do_not_find_each_other_are_refused(command, finish, models, tmp_path, monkeypatch):
    code, said = finish(options(models, tmp_path / "run"), environment={"WORLD_SIZE": "2"})
    assert code == 2 and said.startswith("arimage: ") and "MASTER_ADDR" in said and said.count("\n") == 1
    # This process is alone, but the environment says that it is one of two.
    PartialState(cpu=True)
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, said = command(*options(models, tmp_path / "run"))
    assert code == 2 and "the launcher says WORLD_SIZE=2, but this process has joined a group of 1" in said
    assert not (tmp_path / "run").exists()


def test_a_second_command_into_the_same_run_is_refused(models, finish, undisturbed, tmp_path):
    run = part_of(undisturbed, tmp_path / "run", 5)
    config = read_config(run)
    held = prepare(config, read_rows(run), run)
    code, said = finish(options(models, run))
    assert code == 2 and said == f"arimage: another command uses {run}: wait for it, or give another --out\n"
    del held
    assert finish(options(models, run))[0] == 0


# Refusals


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--seed", "1"], "seed = 0 and you ask for 1"),
        (["--batch-size", "5"], "batch_size = 4 and you ask for 5"),
        (["--top-k", "3"], "sampling.top_k = 0 and you ask for 3"),
        (["--per-prompt", "2"], "source.per_prompt = 1 and you ask for 2"),
        (["--decoding", "sjd:window=4"], "decoding_name = 'ar' and you ask for 'sjd:window=4'"),
        (["--dtype", "bfloat16"], "weights = "),
    ],
)
def test_another_run_in_the_same_folder_is_refused(command, models, undisturbed, more, sentence):
    before = contents(undisturbed)
    code, said = command(*options(models, undisturbed), *more)
    assert code == 2 and said.startswith(f"arimage: {undisturbed / 'config.json'} says ") and sentence in said
    assert said.count("\n") == 1 and said.endswith(": ask for the same, or give another --out\n")
    assert contents(undisturbed) == before


def test_another_model_or_manifest_in_the_same_place_is_refused(command, models, undisturbed, tmp_path):
    run = shutil.copytree(undisturbed, tmp_path / "run")
    path = run / "manifest.jsonl"
    path.write_text(path.read_text().replace("heart 7", "book 7"))
    code, said = command(*options(models, run))
    assert code == 2 and str(path) in said
    path.write_text("".join(path.read_text().replace("book 7", "heart 7").splitlines(keepends=True)[:-1]))
    assert str(path) in command(*options(models, run))[1]
    path.write_bytes((undisturbed / "manifest.jsonl").read_bytes())
    config = read_config(run)
    (run / "config.json").write_text(json.dumps({**config, "machine": {**config["machine"], "device": "abacus"}}))
    assert "machine.device = 'abacus' and you ask for" in command(*options(models, run))[1]
    # Trained on, it generates something else.
    trained = shutil.copytree(models["text"], tmp_path / "trained")
    assert command("--model", trained, "--prompts", models["prompts.jsonl"], "--out", tmp_path / "new")[0] == 0
    tiny.text_pipeline(seed=1).save_pretrained(trained)
    code, said = command("--model", trained, "--prompts", models["prompts.jsonl"], "--out", tmp_path / "new")
    assert code == 2 and "config.json says weights = " in said


def test_what_cannot_be_generated_leaves_no_folder(command, models, tmp_path):
    out, prompts = tmp_path / "run", models["prompts.jsonl"]
    for arguments, sentence in (
        (["--model", models["text"]], "give either --prompts or --classes"),
        (["--model", models["text"], "--prompts", prompts, "--classes", 3], "give either --prompts or --classes"),
        (["--model", models["text"], "--classes", 3], "class_labels"),
        (["--model", models["class"], "--prompts", prompts], "class_labels"),
        (["--model", models["class"], "--classes", 11], "ids from 0 to 9"),
        (["--model", models["text"], "--prompts", tmp_path / "absent.txt"], "No such file"),
        (["--model", models["text"], "--prompts", prompts, "--batch-size", 0], "--batch-size is 0"),
        (["--model", models["text"], "--prompts", prompts, "--decoding", "next-scale"], "next-scale"),
        (["--model", models["text"], "--prompts", prompts, "--top-p", 2], "top_p"),
        (["--model", models["text"], "--prompts", prompts, "--height", 7], "height"),
        (["--model", models["text"], "--prompts", prompts, "--width", 0], "--width"),
    ):
        code, said = command(*arguments, "--out", out)
        assert code == 2 and sentence in said and said.count("\n") == 1
    assert not out.exists()


def test_images_without_a_run_are_left_alone(command, models, tmp_path):
    (tmp_path / "run/images").mkdir(parents=True)
    (tmp_path / "run/images/000000.png").write_bytes(b"mine")
    code, said = command(*options(models, tmp_path / "run"))
    assert code == 2 and "images holds pictures" in said
    assert (tmp_path / "run/images/000000.png").read_bytes() == b"mine"


# A full disk


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


def test_a_full_disk_is_one_sentence_and_the_run_resumes_when_there_is_room(command, models, undisturbed, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=60k", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("may not mount a small disk")
    try:
        run = disk / "run"
        code, said = command(*options(models, run))
        assert code == 2 and said == (
            f"arimage: no space is left in {run} (No space left on device): make room and repeat the command, which "
            "resumes the run\n"
        )
        assert 0 < pictures(run) < COUNT and not list(run.rglob("*.tmp"))
        subprocess.run(["mount", "-o", "remount,size=10m", disk], check=True)
        assert command(*options(models, run))[0] == 0
        assert contents(run) == contents(undisturbed)
    finally:
        subprocess.run(["umount", disk], check=True)
