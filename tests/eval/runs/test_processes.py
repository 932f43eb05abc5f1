"""Several processes generate one run: those of torchrun, accelerate and Ray."""

import socket
from functools import partial
from pathlib import Path

import pytest
from accelerate import PartialState
from eval.runs.run_kit import contents, options, part_of
from pipelines.cosmos import tiny as tiny_cosmos
from pipelines.llamagen import tiny as tiny_llamagen

from arimage.cli import main as cli
from arimage.eval.runs.generate import generate_batch, make_config, prepare
from arimage.eval.runs.manifest import prompt_rows
from arimage.eval.runs.ray_engine import Worker
from arimage.eval.runs.run_folder import read_config, read_rows


# For new processes.
ENVIRONMENT = {"PYTHONPATH": str(Path(cli.__file__).parents[2]), "OMP_NUM_THREADS": "1", "RAY_worker_niceness": "0"}


@pytest.mark.slow
def test_two_processes_of_torchrun_generate_the_same_images(models, finish, undisturbed, tmp_path):
    run = tmp_path / "run"
    launcher = ["torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    code, said = finish(options(models, run), ENVIRONMENT, launcher=launcher)
    assert code == 0 and said.count(f"{run}\n") == 1, said
    assert contents(run) == contents(undisturbed)
    ranks = [len(path.read_text().splitlines()) for path in sorted((run / "results").iterdir())]
    assert ranks == [12, 10]


@pytest.mark.parametrize(
    "build", [tiny_llamagen.text_pipeline, partial(tiny_cosmos.pipeline, "text", begins_with_text=True)]
)
def test_a_worker_of_ray_generates_what_the_process_would(build, tmp_path):
    pipe = build()
    pipe.save_pretrained(tmp_path / "model")
    rows = prompt_rows([{"prompt": "a tree"}], 0)
    config = make_config(pipe, rows, model=str(tmp_path / "model"), source={}, seed=0, batch_size=1)
    files = []
    for name in ("here", "ray"):
        run = prepare(config, rows, tmp_path / name)
        if name == "here":
            generate_batch(run, pipe, 0)
        else:
            worker = Worker(run.folder, config["model"], "cpu", "float32", "captured")
            assert worker({"index": [0]})["error"] == [""]
        files.append([path.read_bytes() for path in sorted((run.folder / "images").rglob("*")) if path.is_file()])
    assert files[0] and files[0] == files[1]


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


@pytest.mark.slow
def test_workers_of_ray_generate_the_same_images(models, finish, undisturbed, tmp_path):
    run = part_of(undisturbed, tmp_path / "run", 1)
    code, said = finish(options(models, run, "--engine", "ray", "--workers", "2"), ENVIRONMENT)
    assert code == 0 and said.endswith(f"{run}\n"), said
    assert contents(run) == contents(undisturbed)


def test_without_ray_its_engine_is_refused(command, models, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert command(*options(models, tmp_path / "run"), "--engine", "ray") == (
        2,
        "arimage: --engine ray needs Ray: pip install 'arimage[ray]'\n",
    )


def test_processes_that_do_not_find_each_other_are_refused(command, finish, models, tmp_path, monkeypatch):
    for launched in ({"WORLD_SIZE": "2"}, {"WORLD_SIZE": "2", "RANK": "0"}, {"WORLD_SIZE": "two"}):
        code, said = finish(options(models, tmp_path / "run"), environment=launched)
        assert code == 2 and said.startswith(f"arimage: the launcher says WORLD_SIZE={launched['WORLD_SIZE']}, but")
        assert "torchrun" in said and said.count("\n") == 1
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
