"""What the commands refuse: each mistake in one sentence, before work is done or a file is written."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from pipelines.chameleon import tiny as tiny_chameleon
from pipelines.llamagen import tiny as tiny_llamagen

from arimage.auto import decodings_of, packaged_folders
from arimage.cli import generate as generating


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    tiny_llamagen.text_pipeline().save_pretrained(root / "text")
    tiny_llamagen.class_pipeline().save_pretrained(root / "class")
    return root


@pytest.fixture
def unloaded(monkeypatch):
    """No model may be loaded."""
    monkeypatch.setattr(generating, "load_pipeline", lambda *_, **__: pytest.fail("the model was loaded"))


@pytest.mark.every(4)
@pytest.mark.parametrize(
    "kind, arguments, sentence",
    [
        ("text", ["x", "--top-p", "2"], "top_p is 2.0: give a probability"),
        ("text", ["x", "--temperature", "0"], "temperature is 0.0"),
        ("text", ["x", "--temperature", "1e30"], "temperature is 1e+30"),
        ("text", ["x", "--temperature", "inf"], "temperature is inf"),
        ("text", ["x", "--guidance-scale", "1e308"], "guidance_scale is 1e+308"),
        ("text", ["x", "--guidance-scale", "nan"], "guidance_scale is nan"),
        ("text", ["x", "-n", "0"], "--per-prompt is 0"),
        ("text", ["x", "--height", "0"], "--height is 0"),
        ("text", ["--class-label", "3"], ""),
        ("text", ["x", "--task", "canny_pred"], ""),
        ("text", ["x", "--decoder-guidance-scale", "2"], ""),
        ("class", ["x"], "this checkpoint generates classes and does not name them: give class_labels"),
        ("class", ["--class-label", "99"], "class_labels are [99]: give one or more ids from 0 to 9"),
        ("class", [], "give prompts"),
        ("class", ["x", "--class-label", "3"], "give prompts"),
        ("text", ["--prompts", "absent.txt"], "[Errno 2] No such file or directory: 'absent.txt'"),
        ("text", ["x", "--out", "x.gif"], "--out is x.gif, but "),
        ("text", ["x", "--trace", "x"], "--trace is x: end it in one of .webp, .gif, .png"),
    ],
)
def test_what_cannot_be_generated_is_refused_in_one_sentence(refused, models, kind, arguments, sentence):
    assert refused("generate", *arguments, "--model", models / kind).startswith(f"arimage: {sentence}")
    assert not list(Path.cwd().iterdir())


@pytest.mark.parametrize(
    "command", ["generate x", "bench", "eval generate --out run", "train lora --out run --data x"]
)
def test_a_misspelt_decoding_is_answered_with_those_that_the_model_runs(refused, command):
    said = refused(*command.split(), "--decoding", "sdj:window=4", "--model", "emoji-arpg")
    # It has no denoiser, for sjd2.
    assert said == "arimage: unknown decoding 'sdj': try sjd, gsd, sjd++, which emoji-arpg runs"
    assert not list(Path.cwd().iterdir())


def test_the_decodings_of_a_model_are_known_without_its_weights(refused, models):
    assert decodings_of(models / "text") == tiny_llamagen.text_pipeline().decoding_names
    folders = packaged_folders()
    assert decodings_of(folders["emoji-llamagen-dd"]) == ["few-step", "flow"]
    # None of its own is like it.
    assert "try next-scale, fastvar" in refused("generate", "x", "--decoding", "sdj", "--model", "emoji-var")


@pytest.mark.every(3)
@pytest.mark.parametrize(
    "option, value",
    [
        *(("--trace", value) for value in ("file/x.webp", "folder.webp", "file/deep/x.png", "folder.png")),
        *(("--out", value) for value in ("file", "file/deep", "folder.png")),
        *(("--per-prompt", value) for value in (10**9, 10**23, -1)),
        ("--device", "meta"),
    ],
)
def test_bad_options_are_refused_before_the_model_is_loaded_or_a_file_written(refused, request, option, value):
    for name in ("folder.png", "folder.webp"):
        Path(name).mkdir()
    Path("file").write_text("kept")
    if option != "--device":
        request.getfixturevalue("unloaded")
    assert option in refused("generate", "x", option, value)
    assert sorted(path.name for path in Path.cwd().rglob("*")) == ["file", "folder.png", "folder.webp"]


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        ("eval generate --classes 2", "folder"),
        ("eval report run --baseline run", "folder"),
        ("eval export run --format geneval", "folder"),
        ("bench", "folder"),
        ("reproduce var-d16-256", "folder"),
        ("train model --tokens run --recipe first.toml", "folder"),
        ("eval score run --metrics kid", ".json"),
        ("eval tokenizer run", ".json"),
        ("eval make-stats run", ".npz"),
        ("eval export run --format adm-npz", ".npz"),
    ],
)
def test_what_cannot_be_written_is_refused_before_any_work(refused, command, kind):
    Path("file").write_text("kept")
    reason = ", which is a file: give another path" if kind == "folder" else f": end it in one of {kind}"
    assert refused(*command.split(), "--out", "file") == f"arimage: --out is file{reason}"
    assert Path("file").read_text() == "kept"


def test_servers_are_refused_ports_out_of_range_and_visitors_without_a_password(refused):
    for command, port in (("serve", -1), ("app", 65536)):
        assert "--port" in refused(command, "--port", port)
    assert "--auth" in refused("app", "--host", "0.0.0.0")


@pytest.mark.parametrize("labels", [5, {"0": 5}, {"1": "cat"}, []])
def test_odd_names_of_classes_are_refused(refused, models, labels):
    path = shutil.copytree(models / "class", Path("odd")) / "model_index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"id2label": labels}))
    assert "model_index.json: id2label" in refused("models", "./odd")


@pytest.mark.parametrize("index", ["[]", "null", "5", "{", '{"_class_name": ["a"]}', "[" * 100_000])
def test_a_damaged_model_index_is_refused(refused, tmp_path, index):
    (tmp_path / "model_index.json").write_text(index)
    assert "model_index.json" in refused("generate", "x", "--model", tmp_path)


@pytest.mark.every(2)
@pytest.mark.parametrize(
    "part, damage",
    [
        *(("transformer/config.json", {"num_layers": value}) for value in (10**6, -1, "two")),
        *(("transformer/config.json", {"hidden_size": value}) for value in (-8, "wide")),
        ("transformer/config.json", {"num_attention_heads": 0}),
        ("transformer/config.json", {"vocab_size": 10**9}),
        ("transformer/diffusion_pytorch_model.safetensors", 500),
        *(("text_encoder/model.safetensors", contents) for contents in (b"", b"noise" * 99)),
        *(("vq/diffusion_pytorch_model.safetensors", contents) for contents in (b"", b"noise" * 99)),
        *(("tokenizer/tokenizer.json", contents) for contents in (b"", b"noise" * 99)),
    ],
)
def test_damaged_files_are_refused(refused, models, tmp_path, part, damage):
    """A setting is changed, a file is cut, or all of it is replaced."""
    folder = shutil.copytree(models / "text", tmp_path / "damaged")
    file = folder / part
    if isinstance(damage, dict):
        file.write_text(json.dumps(json.loads(file.read_text()) | damage))
    else:
        file.write_bytes(damage if isinstance(damage, bytes) else file.read_bytes()[:damage])
    assert str(folder) in refused("generate", "x", "--model", folder)


def test_a_bug_is_distinguished_from_a_mistake(run, refused, monkeypatch):
    def bug(*_, **__):
        torch.tensor([1.0]).expand(2, 3).view(torch.Size([-1, -1]))

    def value_error(*_, **__):
        int("x")

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(generating, "load_pipeline", bug)
    with pytest.raises(RuntimeError):
        run("generate", "x")
    # Raised by this test, and so not by arimage.
    monkeypatch.setattr(generating, "load_pipeline", value_error)
    assert "unexpected ValueError" in refused("generate", "x")
    monkeypatch.setenv("ARIMAGE_TRACEBACK", "1")
    with pytest.raises(ValueError, match="invalid literal"):
        run("generate", "x")
    monkeypatch.setattr(generating, "load_pipeline", interrupted)
    assert run("generate", "x")[0] == 130


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nSee the documentation"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes."),
        MemoryError(),
    ],
    ids=["cuda", "cpu", "python"],
)
def test_too_little_memory_names_the_options_that_need_less(refused, models, monkeypatch, error):
    def run(pipe):
        raise error

    monkeypatch.setattr("arimage.pipelines.run.CallRun.run", run)
    sentence = refused("generate", "tree", "--model", models / "text")
    for part in ("out of memory", "--batch-size", "--per-prompt", "--height", "--width", "--dtype"):
        assert part in sentence


def test_a_missing_model_or_device_is_refused_in_one_sentence(refused, tmp_path):
    assert "--device is abacus" in refused("generate", "x", "--device", "abacus")
    assert refused("generate", "x", "--model", "nonesuch").startswith("arimage: nonesuch is neither a local folder")
    assert "has no model_index.json" in refused("generate", "x", "--model", tmp_path)
    assert "owner/nothing" in refused("generate", "x", "--model", "owner/nothing")


@pytest.mark.every(4)
@pytest.mark.parametrize("name", ["~/nothing", "./nothing", "../nothing", "/nothing"])
@pytest.mark.parametrize(
    "command",
    [
        ["generate", "x", "--model"],
        ["models"],
        ["bench", "--model"],
        ["serve", "--model"],
        ["app", "--model"],
        ["eval", "generate", "--out", "run", "--model"],
        ["train", "drafter", "--out", "run", "--tokens", "x", "--model"],
    ],
)
def test_a_path_that_does_not_exist_is_reported_by_every_command(refused, command, name):
    assert f"{name} is not a folder" in refused(*command, name)


def test_missing_files_of_training_and_converters_are_refused(refused):
    data = ["--data", "absent.parquet", "--heldout", "absent.parquet", "--out", "run"]
    files = ["--transformer", "absent.pt", "--tokenizer", "absent.pt", "--out", "made"]
    for command, sentence in (
        (["train", "tokenizer", *data, "--recipe", "imagenet-vq-16"], "absent.parquet"),
        (["train", "tokenizer", *data, "--recipe", "nonesuch"], "unknown recipe nonesuch"),
        (
            ["train", "drafter", "--model", "emoji-llamagen", "--tokens", "absent", "--out", "run"],
            "absent has no tokens.json",
        ),
        (["convert", "llamagen", "--image-size", "16", *files], "absent.pt is not a file"),
        (["convert", "var", *files], "absent.pt is not a file"),
        (["convert", "anole", tiny_chameleon.FIXTURE, "--out", "made"], "holds no image decoder"),
    ):
        assert sentence in refused(*command)
    assert not Path("made").exists()


@pytest.mark.parametrize("option", [["--seed", 2**64], ["--nonesuch"]])
def test_wrong_options_are_usage_errors(run, option):
    code, out, err = run("generate", "x", *option)
    assert code == 2 and out == "" and option[0] in err and "Traceback" not in err
