"""`--lora`: on the command line, in the server and in the demo."""

import pytest
from adapters import adapter
from PIL import Image
from pipelines.llamagen import tiny as tiny_llamagen
from safetensors.torch import save_file

from arimage.cli.options import parse_lora


pytest.importorskip("peft", reason="the extra `lora` is not installed")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The folder of a pipeline, and files of two adapters for it."""
    root, pipe = tmp_path_factory.mktemp("lora"), tiny_llamagen.text_pipeline()
    pipe.save_pretrained(root / "model")
    for seed, name in enumerate(("one", "two")):
        save_file(adapter(pipe, seed=seed), root / f"{name}.safetensors")
    return root


def test_file_and_scale_are_told_apart(tmp_path):
    assert parse_lora("style.safetensors") == ("style.safetensors", 1.0)
    assert parse_lora("style.safetensors:0.5") == ("style.safetensors", 0.5)
    assert parse_lora("owner/name:-1") == ("owner/name", -1.0)
    assert parse_lora(r"C:\styles\one") == (r"C:\styles\one", 1.0)
    (tmp_path / "one:2").mkdir()
    assert parse_lora(f"{tmp_path}/one:2") == (f"{tmp_path}/one:2", 1.0)
    with pytest.raises(ValueError, match="not finite"):
        parse_lora("style.safetensors:nan")


def test_commands_use_adapters(files, run):
    def image(*arguments):
        options = ["--model", files / "model", "--out", "image.png", "--device", "cpu", *arguments]
        assert run("generate", "a red heart", *options)[0] == 0
        return Image.open("image.png").tobytes()

    styled = image("--lora", files / "one.safetensors")
    assert styled != image() == image("--lora", f"{files}/one.safetensors:0")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "cat", "--lora", "none.safetensors"], "none.safetensors is neither"),
        (["generate", "cat", "--lora", "none:inf"], "not finite"),
        (["serve", "--lora", "{one}"], "--lora changes one model"),
        (["app", "--lora", "{one}"], "--lora changes one model"),
        (["eval", "generate", "--out", "x", "--prompts", "emoji", "--engine", "ray", "--lora", "{one}"], "ray"),
    ],
)
def test_wrong_adapters_are_refused_before_models_are_loaded(arguments, message, files, refused, monkeypatch):
    monkeypatch.delenv("ARIMAGE_APP_AUTH", raising=False)
    assert message in refused(*[text.format(one=files / "one.safetensors") for text in arguments])


def test_without_peft_the_extra_is_named(files, refused, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *_: None)
    sentence = refused("generate", "cat", "--lora", files / "one.safetensors")
    assert "pip install 'arimage[lora]'" in sentence
    pipe = tiny_llamagen.text_pipeline()
    monkeypatch.setattr("arimage.pipelines.adapters.lora.is_peft_available", lambda: False)
    with pytest.raises(ValueError, match=r"arimage\[lora\]"):
        pipe.load_lora_weights(files / "one.safetensors")
