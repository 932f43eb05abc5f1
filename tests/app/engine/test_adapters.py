"""Adapters that requests choose by name."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from adapters import adapter
from app.server.server_kit import same, wait_for
from families import seeded
from pipelines.llamagen import tiny as tiny_llamagen
from safetensors.torch import save_file

from arimage.app.engine.adapters import active_adapters, adapted_names, split_adapters
from arimage.app.engine.engine import Engine
from arimage.app.engine.models import load_models
from arimage.app.engine.types import Cancelled, Refused, Request
from arimage.media.metadata import KEY, from_text


pytest.importorskip("peft", reason="the extra `lora` is not installed")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The folder of a pipeline, and files of three adapters for it."""
    root, pipe = tmp_path_factory.mktemp("lora"), tiny_llamagen.text_pipeline()
    pipe.save_pretrained(root / "model")
    for seed, name in enumerate(("one", "two", "three")):
        save_file(adapter(pipe, seed=seed), root / f"{name}.safetensors")
    return root


def test_names_are_told_apart(tmp_path):
    texts = ["a.safetensors:0.5", "red=b.safetensors:2", "blue=owner/name"]
    assert split_adapters(texts) == (texts[:1], {"red": "b.safetensors:2", "blue": "owner/name"})
    assert adapted_names("m", texts) == ["m:red", "m:blue"]
    assert active_adapters("m", texts) == {
        "m": (["default_0"], [0.5], texts[:1]),
        "m:red": (["default_0", "[red]"], [0.5, 2.0], [texts[0], "b.safetensors:2"]),
        "m:blue": (["default_0", "[blue]"], [0.5, 1.0], [texts[0], "owner/name:1"]),
    }
    assert active_adapters("m", texts[:1]) == {"m": (["default_0"], [0.5], texts[:1])}
    assert active_adapters("m", []) == {}
    (tmp_path / "x=y").mkdir()
    assert split_adapters([f"{tmp_path}/x=y"])[1] == {}
    with pytest.raises(ValueError, match="name of another"):
        split_adapters(["red=a", "red=b"])


def test_each_name_generates_with_its_adapters(files):
    one, two, three = (str(files / f"{name}.safetensors") for name in ("one", "two", "three"))
    texts = [f"{one}:0.5", f"red={two}:3", f"blue={three}:3"]
    pipelines = load_models([str(files / "model")], "cpu", "float32", lora=texts)
    assert list(pipelines) == ["model", "model:red", "model:blue"] and len({id(p) for p in pipelines.values()}) == 1
    expected = {}
    for name, given in (
        ("model", texts[:1]),
        ("model:red", [texts[0], f"{two}:3"]),
        ("model:blue", [texts[0], f"{three}:3"]),
    ):
        [pipe] = load_models([str(files / "model")], "cpu", "float32", lora=given).values()
        [expected[name]] = pipe("a red heart", generator=seeded(1)).images
    assert not same(expected["model"], expected["model:red"]) and not same(
        expected["model:red"], expected["model:blue"]
    )
    engine = Engine(pipelines, adapters=active_adapters("model", texts))
    asked = [*expected, *reversed(expected)]
    tickets = [engine.submit(Request(name, prompt="a red heart", seed=1)) for name in asked]
    for name, ticket in zip(asked, tickets, strict=True):
        result = ticket.result(60)
        assert same(result.images[0], expected[name]) and result.settings["model"] == name
    engine.close()


def test_adapters_come_and_go_while_images_are_generated(files):
    pipelines = load_models([str(files / "model")], "cpu", "float32")
    engine, path = Engine(pipelines), files / "two.safetensors"

    def ask(name="model", **arguments):
        return engine.submit(Request(name, prompt="a red heart", seed=1, **arguments))

    [own] = ask().result(60).images
    running = [ask(count=4) for _ in range(3)]
    assert engine.load_adapter("model", "red", path, 3.0) == "model:red" and "model:red" in engine.models
    [red] = ask("model:red").result(60).images
    [pipe] = load_models([str(files / "model")], "cpu", "float32", lora=[f"{path}:3"]).values()
    assert same(red, pipe("a red heart", generator=seeded(1)).images[0]) and not same(red, own)
    made = from_text("a picture", red.info[KEY])
    assert (made.model, made.lora) == ("model", ["two.safetensors:3"])
    assert from_text("a picture", own.info[KEY]).lora is None
    for ticket in (*running, ask()):
        assert same(ticket.result(60).images[0], own)
    for arguments, parameter in (
        (("model", "red", path, 1.0), "lora_name"),
        (("model", "a.b", path, 1.0), "lora_name"),
        (("model:red", "blue", path, 1.0), "model"),
        (("model", "blue", files / "model", 1.0), "lora_path"),
    ):
        with pytest.raises(Refused) as refused:
            engine.load_adapter(*arguments)
        assert refused.value.parameter == parameter
    go = threading.Event()

    def hold(*_) -> None:
        go.wait(60)

    hook = pipelines["model"].transformer.register_forward_pre_hook(hold)
    waiting = [ask(count=4), ask("model:red")]
    with ThreadPoolExecutor(1) as pool:
        unloading = pool.submit(engine.unload_adapter, "model:red")
        wait_for(lambda: engine._changes)
        go.set()
        unloading.result(60)
    # Its images are decoded to pixels as those of any other model again.
    assert engine._pipelines_of("model") == ["model"]
    hook.remove()
    assert waiting[0].result(60).images
    with pytest.raises(Refused, match="choose"):
        waiting[1].result(60)
    for name in ("model:red", "model"):
        with pytest.raises(Refused):
            engine.unload_adapter(name)
    with pytest.raises(Refused, match="unknown model"):
        ask("model:red")
    assert same(ask().result(60).images[0], own)
    assert not any("lora" in name for name, _ in pipelines["model"].transformer.named_parameters())
    assert engine.load_adapter("model", "red", path, 3.0) == "model:red"
    assert same(ask("model:red").result(60).images[0], red)
    check = engine.check

    def unloaded_meanwhile(request):
        checked = check(request)
        engine.unload_adapter(request.model)
        return checked

    engine.check = unloaded_meanwhile
    with pytest.raises(Refused, match="unknown model"):
        ask("model:red")
    engine.close()
    with pytest.raises(Cancelled):
        engine.load_adapter("model", "blue", path, 1.0)
