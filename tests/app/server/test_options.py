"""What operators allow: adapters that requests load, how much each client may ask for, and a file of options."""

import threading
from types import SimpleNamespace

import httpx
import pytest
from adapters import adapter
from app.server.server_kit import picture, same, serving, wait_for
from pipelines.llamagen import tiny as tiny_llamagen
from safetensors.torch import save_file
from starlette.testclient import TestClient
from typer.testing import CliRunner

from arimage.app.engine.engine import Engine
from arimage.app.engine.types import Limits
from arimage.app.server import quotas as quotas_module
from arimage.app.server.app import build_server
from arimage.app.server.quotas import Quotas
from arimage.cli import main as cli


GENERATIONS, BODY = "/v1/images/generations", {"prompt": "a red heart", "seed": 1}


# Adapters


@pytest.fixture
def root(tmp_path):
    """A folder with an adapter, next to one that is outside of it, and a link to that."""
    pytest.importorskip("peft", reason="the extra `lora` is not installed")
    (tmp_path / "root" / "styles").mkdir(parents=True)
    for place in ("root/styles/red.safetensors", "outside.safetensors"):
        save_file(adapter(tiny_llamagen.text_pipeline()), tmp_path / place)
    (tmp_path / "root" / "link.safetensors").symlink_to(tmp_path / "outside.safetensors")
    return tmp_path / "root"


def test_adapters_are_loaded_and_freed_by_requests(root):
    engine = Engine({"text": tiny_llamagen.text_pipeline()})
    client = TestClient(build_server(engine, lora_root=root), base_url="http://127.0.0.1")

    def image(**fields):
        return picture(client.post(GENERATIONS, json=BODY | fields).raise_for_status().json()["data"][0]["b64_json"])

    own = image()
    given = {"lora_name": "red", "lora_path": "styles/red.safetensors", "scale": 2.0}
    answer = client.post("/v1/load_lora_adapter", json=given)
    assert answer.status_code == 200 and answer.json()["id"] == "text:red"
    assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["text", "text:red", "red"]
    assert same(image(model="red"), image(model="text:red")) and not same(image(model="red"), own)
    # The whole path may be given too.
    whole = {"lora_name": "too", "lora_path": str(root / "styles" / "red.safetensors")}
    assert client.post("/v1/load_lora_adapter", json=whole).status_code == 200
    assert client.post("/v1/load_lora_adapter", json=given).json()["error"]["param"] == "lora_name"
    for path in ("../outside.safetensors", str(root.parent / "outside.safetensors"), "link.safetensors", "none", "\0"):
        error = client.post("/v1/load_lora_adapter", json={"lora_name": "blue", "lora_path": path}).json()["error"]
        assert error["param"] == "lora_path" and "--lora-root" in error["message"]
    answer = client.post("/v1/unload_lora_adapter", json={"lora_name": "red"})
    assert answer.json() == {"id": "text:red", "object": "model", "deleted": True}
    assert client.post(GENERATIONS, json=BODY | {"model": "red"}).status_code == 404
    assert client.post("/v1/unload_lora_adapter", json={"lora_name": "red"}).status_code == 400
    assert client.post("/v1/unload_lora_adapter", json={"lora_name": "text"}).status_code == 400
    # While one is being unloaded, the engine forgets it first.
    engine.unload_adapter("text:too")
    assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["text"]
    assert same(image(), own)
    engine.close()


def test_adapters_are_loaded_only_where_an_option_allows_it():
    engine = Engine({"text": tiny_llamagen.text_pipeline()})
    with TestClient(build_server(engine), base_url="http://127.0.0.1") as client:
        for route, body in (("load", {"lora_name": "a", "lora_path": "b"}), ("unload", {"lora_name": "a"})):
            answer = client.post(f"/v1/{route}_lora_adapter", json=body)
            assert answer.status_code == 403 and "--lora-root" in answer.json()["error"]["message"]
    engine.close()


# Quotas


def test_a_client_sends_so_many_requests_per_minute(monkeypatch):
    now = [1000.0]
    # Not `time.monotonic` itself: the loops of running servers read it.
    monkeypatch.setattr(quotas_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    engine = Engine({"text": tiny_llamagen.text_pipeline()})
    app = build_server(engine, tokens=["one", "two"], quotas=Quotas(requests=2))
    with TestClient(app) as client:

        def ask(token="one", path=GENERATIONS, body=None):
            return client.post(path, json=body or BODY, headers={"Authorization": f"Bearer {token}"})

        assert ask().status_code == 200
        now[0] += 20
        assert ask(path="/v1/responses", body={"input": "a"}).status_code == 200
        refused = ask(path="/v1/chat/completions")
        assert refused.status_code == 429 and refused.headers["retry-after"] == "40"
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert ask("two").status_code == 200
        assert client.get("/v1/models", headers={"Authorization": "Bearer one"}).status_code == 200
        now[0] += 41
        assert [ask().status_code for _ in range(2)] == [200, 429]
        now[0] += 61
        assert ask("two").status_code == 200 and list(app.state.server.quotas._times) == ["token 1"]
    engine.close()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_has_so_many_images_at_a_time(held, stream):
    engine = Engine({"text": held}, Limits(images=4))
    with serving(engine, tokens=["one", "two"], quotas=Quotas(images=3)) as address:

        def ask(count, token="one", **fields):
            headers = {"Authorization": f"Bearer {token}"}
            return httpx.post(address + GENERATIONS, json=BODY | {"n": count} | fields, headers=headers, timeout=60)

        def first():
            status.append(ask(1 if stream else 2, stream=stream).status_code)

        status = []
        thread = threading.Thread(target=first)
        thread.start()
        wait_for(held.entered.is_set)
        refused = ask(3 if stream else 2)
        assert refused.status_code == 429 and refused.json()["error"]["code"] == "rate_limit_exceeded"
        # Nothing is held by what was refused, nor freed.
        for count in (4, -4):
            never = ask(count, "two")
            assert never.status_code == 400 and never.json()["error"]["param"] == "n"
        assert ask(3 if stream else 2).status_code == 429
        held.go.set()
        assert ask(3, "two").status_code == 200 and ask(1).status_code == 200
        thread.join(60)
        assert status == [200] and ask(3).status_code == 200 and ask(3).status_code == 200


# A file of options


@pytest.fixture
def served(monkeypatch):
    """The arguments of the server and of its limits, in place of a server."""
    given = {}

    def build(engine, **options):
        given.update(options, limits=engine)
        raise SystemExit

    monkeypatch.setattr("arimage.app.engine.models.load_models", lambda *_: {})
    monkeypatch.setattr("arimage.app.engine.start.start_engines", lambda pipelines, limits, lora: (limits, None))
    monkeypatch.setattr("arimage.app.server.app.build_server", build)
    monkeypatch.delenv("ARIMAGE_TOKEN", raising=False)
    return given


TOML = """
model = ["emoji-llamagen"]
port = 0
batch-size = 3
lenient = true
max-pixels = 65536
alias = ["a=emoji-llamagen"]
"""
YAML = TOML.replace(" =", ":")


@pytest.mark.parametrize(("name", "text"), [("a.toml", TOML), ("a.yaml", YAML)])
def test_a_file_holds_options(served, tmp_path, name, text):
    (tmp_path / name).write_text(text)
    CliRunner().invoke(
        cli.app, ["serve", "--config", str(tmp_path / name), "--batch-size", "5"], catch_exceptions=False
    )
    assert served["aliases"] == {"a": "emoji-llamagen"} and served["lenient"] is True
    # What is given replaces what the file holds.
    assert (served["limits"].batch, served["limits"].output_pixels) == (5, 65536)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.toml", "prt = 1", "prt is not a setting"),
        ("a.toml", "max_pixels = 1", "max_pixels is not a setting"),
        ("a.toml", 'config = "b.toml"', "config is not a setting"),
        ("a.toml", 'port = "8000"', "port is '8000'"),
        ("a.toml", "lenient = 1", "lenient is 1"),
        ("a.toml", 'model = "emoji-llamagen"', "model is"),
        ("a.toml", 'log-level = "loud"', "log-level is 'loud'"),
        ("a.toml", "port = 99999", "--port is 99999"),
        ("a.toml", 'lora-root = ""', "lora-root is ''"),
        ("a.toml", "port = ", "cannot be read"),
        ("a.yaml", "- port", "a table of settings"),
        ("a.yaml", "port: [", "cannot be read"),
        ("a.yaml", "port: " + "[" * 2000, "cannot be read"),
        ("a.json", "{}", "TOML or YAML"),
    ],
)
def test_a_file_of_other_options_is_refused(served, tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    result = CliRunner().invoke(cli.app, ["serve", "--config", str(tmp_path / name)])
    assert isinstance(result.exception, ValueError) and message in str(result.exception)


def test_the_folder_of_adapters_is_checked_before_loading(tmp_path, monkeypatch):
    monkeypatch.setattr("arimage.app.engine.models.load_models", lambda *_: pytest.fail("a model was loaded"))
    for options, message in (
        (["--lora-root", str(tmp_path / "none")], "--lora-root"),
        (["--lora-root", str(tmp_path), "--replicas", "1"], "--replicas"),
    ):
        result = CliRunner().invoke(cli.app, ["serve", "--model", "emoji-llamagen", *options])
        assert isinstance(result.exception, ValueError) and message in str(result.exception)
