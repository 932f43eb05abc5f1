"""The console command: what it writes, and how it refuses."""

import json
import os
import re
import resource
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
import typer
from PIL import Image
from pipelines.chameleon import tiny as tiny_chameleon
from pipelines.emu3 import tiny as tiny_emu3
from pipelines.janus import tiny as tiny_janus
from pipelines.llamagen import tiny as tiny_llamagen
from pipelines.var import tiny as tiny_var
from presets import FOR_TOKENS
from safetensors.torch import save_file

from arimage import LlamaGenPipeline
from arimage.auto import packaged_models
from arimage.cli import main as cli
from arimage.cli import options
from arimage.decoding.names import PRESETS
from arimage.pipelines.base import ARPipeline
from arimage.pipelines.text.known import KnownCaptions
from arimage.published.registry import PUBLISHED, size_text


ROOT = Path(cli.__file__).parents[2]
SIZE = 4 * tiny.SCALE_FACTOR
PROMPTS = ["a red heart", "tree", "a blue book"]
CLASSES = ["tench", "retriever", "crane", "otter", "finch", "cock", "tabby", "Eskimo dog", "hen", "sea lion"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of a text-conditional and a class-conditional pipeline, by their conditioning."""
    root = tmp_path_factory.mktemp("models")
    tiny_llamagen.text_pipeline().save_pretrained(root / "text")
    tiny_llamagen.class_pipeline().save_pretrained(root / "class")
    tiny_var.pipeline("text").save_pretrained(root / "scales")
    named = LlamaGenPipeline(**tiny_llamagen.class_pipeline().components, id2label=dict(enumerate(CLASSES)))
    named.save_pretrained(root / "named")
    known = tiny_llamagen.text_pipeline()
    known.known_captions = KnownCaptions({"red heart": ["heart"], "tree": ["fir"]})
    known.save_pretrained(root / "known")
    return {name: str(root / name) for name in ("text", "class", "scales", "named", "known")}


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Run the command in this process, in an empty folder; returns its exit code, output and errors."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["arimage", *map(str, arguments)])
        capsys.readouterr()
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = end.code or 0
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def refused(run):
    """Run a command that must end with exit code 2 and one line on stderr; returns the line."""

    def refused(*arguments):
        code, out, err = run(*arguments)
        assert code == 2
        assert out == ""
        assert "Traceback" not in err
        assert err.count("\n") == 1 and err.endswith("\n"), err
        return err.strip()

    return refused


def expected_images(kind, seed, **arguments):
    """What the pipeline itself generates, uint8 [B, H, W, 3]."""
    pipe = tiny_llamagen.text_pipeline() if kind == "text" else tiny_llamagen.class_pipeline()
    images = pipe(**arguments, generator=torch.Generator().manual_seed(seed)).images
    return np.stack([np.asarray(image) for image in images])


def pixels(path):
    return np.asarray(Image.open(path).convert("RGB"))


def python(*arguments):
    """Run Python on the checkout; returns its result and the CPU seconds that it spent itself."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": path, "COLUMNS": "100"},
    )
    return done, resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before


# Help


def test_help_comes_at_once_and_without_heavy_imports():
    python("-m", "arimage", "--help")
    done, seconds = python("-X", "importtime", "-m", "arimage", "--help")
    assert done.returncode == 0
    for command in ("generate", "convert", "train", "eval", "app", "serve", "models", "decodings", "bench"):
        assert command in done.stdout
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "typer" in imported
    assert imported & {"torch", "diffusers", "transformers", "numpy", "PIL", "huggingface_hub"} == set()
    assert seconds < 1.5


@pytest.mark.every(3)
@pytest.mark.parametrize(
    "command, option",
    [
        (["generate"], "--decoding"),
        (["bench"], "--against"),
        (["decodings"], "settings"),
        (["convert", "llamagen"], "--image-size"),
        (["convert", "var"], "--tokenizer"),
        (["convert", "janus"], "--template"),
        (["convert", "emu3"], "--vision-tokenizer"),
        (["convert", "lumina-mgpt"], "--image-size"),
        (["convert", "anole"], "--tokenizer"),
        (["train", "tokenizer"], "--recipe"),
        (["train", "transformer"], "--heldout"),
        (["train", "all"], "--data"),
        (["models"], "have a name"),
    ],
)
def test_every_command_explains_itself(run, command, option):
    code, out, err = run(*command, "--help")
    assert code == 0 and option in out and err == ""


def options_by_panel(help: str) -> dict[str, list[str]]:
    panels: dict[str, list[str]] = {}
    for line in help.splitlines():
        if title := re.match(r"╭─ ([A-Za-z ]+) ─", line):
            panels[title[1]] = []
        elif option := re.match(r"│ [* ]? *(--[a-z-]+)", line):
            panels[[*panels][-1]].append(option[1])
    return panels


def test_help_groups_the_options_of_a_command(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    panels = options_by_panel(run("generate", "--help")[1])
    names = ["Arguments", "Options", "Image", "Sampling", "Decoding", "Editing", "Video", "Output"]
    assert [*panels] == names and panels["Options"] == [
        "--model",
        "--lora",
        "--device",
        "--dtype",
        "--help",
    ]
    assert panels["Sampling"][:2] == ["--guidance-scale", "--temperature"]
    assert panels["Output"] == ["--out", "--trace"]
    every = [option for options in panels.values() for option in options]
    assert len(every) == len(set(every)) and {"--file", "--count", "--order", "--mask-image"} <= set(every)
    # Shared options are in the panels of each command.
    assert "--seed" in panels["Image"]
    assert "--seed" in options_by_panel(run("train", "lora", "--help")[1])["Training"]


@pytest.mark.every(2)
@pytest.mark.parametrize(
    "command",
    ["bench", "reproduce", "serve", "train lora", "eval generate", "eval score"],
)
def test_no_panel_is_long(run, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "120")
    panels = options_by_panel(run(*command.split(), "--help")[1])
    assert len(panels) > 3 and max(map(len, panels.values())) <= 8


@pytest.mark.parametrize("name", ["generate", "bench"])
def test_the_first_commands_have_few_options(name):
    command = typer.main.get_command(cli.app).commands[name]
    assert sum(parameter.param_type_name == "option" for parameter in command.params) <= 25


def test_the_module_refuses_like_the_command():
    done, _ = python("-m", "arimage", "generate")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("arimage: give prompts") and done.stderr.count("\n") == 1


def test_importing_the_module_runs_nothing():
    done, _ = python("-c", "import sys; sys.argv = ['x', '--help']; import arimage.__main__; print('imported')")
    assert done.stdout == "imported\n"


@pytest.mark.parametrize(
    "action, code, error",
    [("sys.exit(0)", 0, ""), ("sys.exit(3)", 3, ""), ("raise KeyError('lost')", 1, "KeyError: 'lost'")],
)
def test_the_process_ends_with_its_handlers_but_takes_nothing_down(action, code, error):
    done, _ = python(
        "-c",
        f"""
import atexit, sys
from arimage.cli import main as cli

class Framework:
    def __del__(self):
        print("taken down")

def main(app):
    atexit.register(print, "handled")
    {action}

kept = Framework()
cli.main = main
cli.run()
""",
    )
    assert (done.stdout, done.returncode) == ("handled\n", code)
    assert error in done.stderr


# Images


def test_one_prompt_to_a_file(run, models, tmp_path):
    out = tmp_path / "new" / "heart.png"
    code, output, err = run("generate", PROMPTS[0], "--model", models["text"], "--out", out, "--seed", 3)
    assert code == 0
    assert output.splitlines() == [str(out)]
    assert err.splitlines()[-1].startswith("1 image, 16 forward passes, 1.0 tokens per pass, ")
    np.testing.assert_array_equal(pixels(out), expected_images("text", 3, prompt=PROMPTS[0])[0])


def test_sampling_settings_and_decoding_reach_the_model(run, models):
    settings = {"guidance_scale": 3.0, "temperature": 0.7, "top_k": 5, "top_p": 0.9}
    settings |= {"decoding": "sjd-gumbel"}
    options = [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", value)]
    code, _, err = run(
        "generate", PROMPTS[0], "--model", models["text"], "--out", "x.png", "--device", "cpu", *options
    )
    assert code == 0
    np.testing.assert_array_equal(pixels("x.png"), expected_images("text", 0, prompt=PROMPTS[0], **settings)[0])


def test_images_to_a_folder_one_file_each(run, models):
    code, output, _ = run("generate", *PROMPTS[:2], "-n", 2, "--model", models["text"], "--out", "images")
    assert code == 0
    names = ["a-red-heart-0-0.png", "a-red-heart-0-1.png", "tree-0-2.png", "tree-0-3.png"]
    assert output.splitlines() == [str(Path("images") / name) for name in names]
    assert sorted(path.name for path in Path("images").iterdir()) == names
    expected = expected_images("text", 0, prompt=PROMPTS[:2], num_images_per_prompt=2)
    for name, image in zip(names, expected, strict=True):
        np.testing.assert_array_equal(pixels(Path("images") / name), image)


def test_without_a_place_images_go_to_outputs(run, models):
    code, output, _ = run("generate", "❤", "--model", models["text"], "--seed", 5)
    assert code == 0 and output.splitlines() == [str(Path("outputs") / "image-5-0.png")]
    assert pixels("outputs/image-5-0.png").shape == (SIZE, SIZE, 3)


@pytest.mark.every(2)
@pytest.mark.parametrize(
    "prompts, count, rows, columns",
    [
        (2, 3, 2, 3),
        (3, 1, 1, 3),
        (10, 1, 2, 5),
        (1, 12, 2, 6),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in [(1, 3, 1, 3), (1, 1, 1, 1), (16, 1, 2, 8), (1, 8, 1, 8)]
        ),
    ],
)
def test_a_file_shows_all_images_in_a_grid(run, models, prompts, count, rows, columns):
    texts = [f"tree {i}" for i in range(prompts)]
    code, *_ = run("generate", *texts, "-n", count, "--model", models["text"], "--out", "grid.png")
    assert code == 0
    grid = pixels("grid.png")
    assert grid.shape == (rows * SIZE, columns * SIZE, 3)
    cells = grid.reshape(rows, SIZE, columns, SIZE, 3).swapaxes(1, 2).reshape(-1, SIZE, SIZE, 3)
    np.testing.assert_array_equal(cells, expected_images("text", 0, prompt=texts, num_images_per_prompt=count))


@pytest.mark.parametrize(("prompts", "count"), [(11, 1), (2, 11)])
def test_a_grid_of_an_odd_number_ends_in_white(run, models, prompts, count):
    texts = [f"tree {i}" for i in range(prompts)]
    run("generate", *texts, "-n", count, "--model", models["text"], "--out", "grid.png")
    grid, each = pixels("grid.png"), 11 if count == 1 else count
    cells = grid.reshape(-1, SIZE, 8, SIZE, 3).swapaxes(1, 2).reshape(-1, 16, SIZE, SIZE, 3)
    expected = expected_images("text", 0, prompt=texts, num_images_per_prompt=count)
    np.testing.assert_array_equal(cells[:, :each].reshape(-1, SIZE, SIZE, 3), expected)
    assert (cells[:, each:] == 255).all()


@pytest.mark.parametrize("suffix", [".jpg", ".webp", ".PNG"])
def test_other_image_formats_are_written(run, models, suffix):
    code, *_ = run("generate", "tree", "--model", models["text"], "--out", f"tree{suffix}")
    assert code == 0 and Image.open(f"tree{suffix}").size == (SIZE, SIZE)


def test_prompts_are_read_from_a_file_after_those_given(run, models):
    Path("prompts.txt").write_text(f"{PROMPTS[1]}\n\n  {PROMPTS[2]}  \n")
    code, *_ = run("generate", PROMPTS[0], "--file", "prompts.txt", "--model", models["text"], "--out", "x.png")
    assert code == 0
    images = pixels("x.png").reshape(SIZE, 3, SIZE, 3).swapaxes(0, 1)
    np.testing.assert_array_equal(images, expected_images("text", 0, prompt=PROMPTS))


def test_classes_are_generated_by_their_ids(run, models):
    labels = [3, 0]
    options = [word for label in labels for word in ("--class-label", label)]
    code, output, _ = run("generate", *options, "--model", models["class"], "--out", "classes")
    assert code == 0
    assert output.splitlines() == [str(Path("classes") / name) for name in ("class-3-0-0.png", "class-0-0-1.png")]
    for path, image in zip(output.splitlines(), expected_images("class", 0, class_labels=labels), strict=True):
        np.testing.assert_array_equal(pixels(path), image)


def test_classes_are_generated_by_their_names(run, refused, models):
    code, output, _ = run("generate", "otter", "hen", "--model", models["named"], "--out", "classes")
    assert code == 0 and output.splitlines() == ["classes/otter-0-0.png", "classes/hen-0-1.png"]
    for path, image in zip(output.splitlines(), expected_images("class", 0, class_labels=[3, 8]), strict=True):
        np.testing.assert_array_equal(pixels(path), image)
    options = ["--class-label", "3", "--class-label", "hen", "--model", models["named"]]
    code, output, _ = run("generate", *options, "--out", "classes")
    assert code == 0 and output.splitlines() == ["classes/class-3-0-0.png", "classes/hen-0-1.png"]
    assert refused("generate", "oter", "--model", models["named"]) == (
        'arimage: "oter" is not the name of a class of this checkpoint: the nearest is "otter"'
    )
    code, output, _ = run("bench", *options, "--decoding", "ar", "--per-prompt", "1", "--metrics", "", "--out", "runs")
    assert code == 0 and "| ar |" in output
    rows = [json.loads(line) for line in Path("runs/ar/manifest.jsonl").read_text().splitlines()]
    assert [row["class_label"] for row in rows] == [3, 8]


def test_an_unknown_prompt_is_reported_with_the_nearest_captions(run, models, caplog):
    assert run("generate", "a hart", "a red heart", "a hart", "--model", models["known"])[0] == 0
    sentence = '"a hart" is not among the 2 pictures that known knows; the nearest is "red heart"'
    assert [record.message for record in caplog.records] == [sentence]


@pytest.mark.slow
def test_an_unknown_prompt_is_reported_on_the_standard_error(models):
    done, _ = python("-m", "arimage", "generate", "a hart", "--model", models["known"])
    assert done.returncode == 0 and '"a hart" is not among the 2 pictures' in done.stderr


def test_trace_and_acceptance_map_are_written_next_to_the_images(run, models):
    options = ["--trace", "new/x.webp", "--trace", "new/map.png", "--decoding", "sjd", "--out", "x.png"]
    code, output, _ = run("generate", *PROMPTS[:2], "--model", models["text"], *options)
    assert code == 0 and output.splitlines() == ["x.png", "new/x.webp", "new/map.png"]
    with Image.open("new/x.webp") as animation:
        assert 3 <= animation.n_frames <= 17
    assert min(Image.open("new/map.png").size) >= 384
    # Watching changes nothing.
    expected = expected_images("text", 0, prompt=PROMPTS[:2], decoding="sjd")
    np.testing.assert_array_equal(pixels("x.png"), np.concatenate(list(expected), axis=1))


# Refusals


@pytest.mark.every(4)
@pytest.mark.parametrize(
    "kind, arguments, sentence",
    [
        ("text", ["x", "--decoding", "sdj"], "arimage: "),
        ("text", ["x", "--top-p", "2"], "arimage: top_p is 2.0: give a probability"),
        ("text", ["x", "--temperature", "0"], "arimage: temperature is 0.0"),
        ("text", ["x", "-n", "0"], "arimage: --count makes 0 images"),
        ("text", ["--class-label", "3"], "arimage: "),
        (
            "class",
            ["x"],
            "arimage: this checkpoint generates classes and does not name them: give class_labels, ids from 0 to 9",
        ),
        ("class", ["--class-label", "99"], "arimage: class_labels are [99]: give one or more ids from 0 to 9"),
        ("class", [], "arimage: give prompts"),
        ("class", ["x", "--class-label", "3"], "arimage: give prompts"),
        ("text", ["--file", "absent.txt"], "arimage: [Errno 2] No such file or directory: 'absent.txt'"),
        ("text", ["x", "--out", "x.gif"], "arimage: --out is x.gif, but "),
        ("text", ["x", "--trace", "x"], "arimage: --trace is x: end it in one of .webp, .gif, .png"),
        ("text", ["x", "--device", "abacus"], "arimage: "),
    ],
)
def test_what_cannot_be_generated_is_refused_in_one_sentence(refused, models, kind, arguments, sentence):
    line = refused("generate", *arguments, "--model", models[kind])
    assert line.startswith(sentence)
    assert not list(Path.cwd().iterdir())


@pytest.mark.every(3)
@pytest.mark.parametrize(
    "option, value",
    [
        ("--trace", "file/x.webp"),
        ("--trace", "folder.webp"),
        ("--trace", "file/deep/x.png"),
        ("--trace", "folder.png"),
        ("--out", "file"),
        ("--out", "file/deep"),
        ("--out", "folder.png"),
        ("--count", 10**9),
        ("--count", 10**23),
        ("--count", -1),
        ("--device", "meta"),
    ],
)
def test_bad_options_are_refused_before_the_model_is_loaded_or_a_file_written(refused, monkeypatch, option, value):
    for name in ("folder.png", "folder.webp"):
        Path(name).mkdir()
    Path("file").write_text("kept")
    if option != "--device":
        monkeypatch.setattr(cli, "load_pipeline", lambda *_, **__: pytest.fail("the model was loaded"))
    assert option in refused("generate", "x", option, value)
    assert sorted(path.name for path in Path.cwd().rglob("*")) == ["file", "folder.png", "folder.webp"]


def write_bomb(path):
    """A PNG file whose header says 60000 x 60000."""
    Image.new("1", (8, 8)).save(path)
    data = bytearray(path.read_bytes())
    data[16:24] = (60_000).to_bytes(4) * 2
    data[29:33] = zlib.crc32(data[12:29]).to_bytes(4)
    path.write_bytes(data)


@pytest.mark.parametrize("option", ["--image", "--mask-image"])
def test_images_that_cannot_be_read_are_refused(refused, monkeypatch, tmp_path, option):
    monkeypatch.setattr(cli, "load_pipeline", lambda *_, **__: pytest.fail("the model was loaded"))
    good, bad, cut = (tmp_path / name for name in ("good.png", "bad.png", "cut.png"))
    Image.new("RGB", (64, 64)).save(good)
    write_bomb(bad)
    cut.write_bytes(good.read_bytes()[:60])
    other = {"--image": "--mask-image", "--mask-image": "--image"}[option]
    for path in (bad, cut, tmp_path):
        assert f"{option} is {path}" in refused("generate", "x", option, path, other, good)


@pytest.mark.parametrize("command", ["serve", "app"])
@pytest.mark.parametrize("port", [-1, 65536])
def test_ports_out_of_range_are_refused(refused, command, port):
    assert "--port" in refused(command, "--port", port)


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "::"])
def test_the_demo_lets_nobody_in_without_a_password(refused, host):
    assert "--auth" in refused("app", "--host", host)


@pytest.mark.parametrize(
    "dtype, expected", [(None, torch.float32), ("auto", torch.float32), ("bfloat16", torch.bfloat16)]
)
def test_dtype_reaches_the_weights(models, dtype, expected):
    pipe = options.load_pipeline(models["text"], "cpu", *filter(None, [dtype]))
    assert pipe.transformer.dtype == expected


@pytest.mark.every(2)
@pytest.mark.parametrize("dtype", ["int8", "float8"])
def test_weights_of_8_bits_generate_and_are_recorded(models, run, refused, tmp_path, monkeypatch, dtype):
    monkeypatch.chdir(tmp_path)
    common = "--model", models["text"], "--prompt", "a red heart", "--dtype", dtype, "--device", "cpu"
    run("bench", *common, "--decoding", "ar", "--per-prompt", "1", "--metrics", "", "--out", "rows")
    assert json.loads(Path("rows/report.json").read_text())["settings"]["dtype"] == dtype
    assert "--lora" in refused("generate", "a red heart", "--model", models["text"], "--dtype", dtype, "--lora", "a/b")


def test_weights_of_8_bits_are_never_on_the_device_in_full(models, monkeypatch):
    moved, to = [], ARPipeline.to

    def record(pipe, *args, **kwargs):
        moved.append({name: weight.dtype for name, weight in pipe.transformer.named_parameters()})
        return to(pipe, *args, **kwargs)

    monkeypatch.setattr(ARPipeline, "to", record)
    pipe = options.load_pipeline(models["text"], "cpu", "int8")
    quantised = {name for name, weight in pipe.transformer.named_parameters() if weight.dtype == torch.int8}
    assert quantised and all(weights[name] == torch.int8 for weights in moved for name in quantised)


@pytest.mark.parametrize(
    "device, fast, expected",
    [
        ("cpu", None, "float32"),
        ("cpu", "_is_avx512_bf16_supported", "bfloat16"),
        ("cuda", "is_bf16_supported", "bfloat16"),
        # A T4 or V100, where it is emulated.
        ("cuda", None, "float32"),
    ],
)
def test_the_default_dtype_depends_on_the_device(monkeypatch, device, fast, expected):
    # Not one of the exceptions that mean damaged files.
    class Loaded(BaseException):
        pass

    def load(model, dtype):
        raise Loaded(str(dtype))

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    if fast:
        monkeypatch.setattr(getattr(torch, device), fast, lambda **_: True)
    monkeypatch.setattr(options, "choose_device", lambda name: name)
    monkeypatch.setattr("arimage.auto.AutoPipeline.from_pretrained", load)
    with pytest.raises(Loaded, match=f"torch.{expected}"):
        options.load_pipeline("x", device)


@pytest.mark.every(3)
@pytest.mark.parametrize(
    "command",
    [
        ["generate"],
        ["app"],
        ["serve"],
        ["bench"],
        ["eval", "generate"],
        ["train", "drafter"],
        ["train", "student"],
        ["train", "denoiser"],
        ["train", "neighbours"],
        ["train", "upscaler"],
        ["train", "refiner"],
    ],
)
def test_every_command_that_loads_a_model_has_a_dtype(run, command):
    assert "--dtype" in run(*command, "--help")[1]


@pytest.mark.parametrize(
    ("option", "values"), [("--guidance-scale", ("1e308", "nan")), ("--temperature", ("1e30", "inf"))]
)
def test_settings_that_would_overflow_are_refused(refused, models, option, values):
    for value in values:
        assert option[2:].replace("-", "_") in refused("generate", "x", "--model", models["text"], option, value)


@pytest.mark.parametrize("labels", [5, {"0": 5}, {"1": "cat"}, []])
def test_odd_names_of_classes_are_refused(refused, models, tmp_path, labels):
    path = shutil.copytree(models["class"], tmp_path / "odd") / "model_index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"id2label": labels}))
    assert "model_index.json: id2label" in refused("models", tmp_path / "odd")


@pytest.mark.parametrize("index", ["[]", "null", "5", "{", '{"_class_name": ["a"]}', "[" * 100_000])
def test_a_damaged_model_index_is_refused(refused, tmp_path, index):
    (tmp_path / "model_index.json").write_text(index)
    assert "model_index.json" in refused("generate", "x", "--model", tmp_path)


@pytest.mark.every(2)
@pytest.mark.parametrize(
    "key, value",
    [
        ("num_layers", 10**6),
        ("num_layers", -1),
        ("num_layers", "two"),
        ("hidden_size", -8),
        ("hidden_size", "wide"),
        ("num_attention_heads", 0),
        ("vocab_size", 10**9),
    ],
)
def test_a_damaged_config_is_refused(refused, models, tmp_path, key, value):
    folder = shutil.copytree(models["text"], tmp_path / "damaged")
    path = folder / "transformer" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    assert str(folder) in refused("generate", "x", "--model", folder)


@pytest.mark.every(2)
@pytest.mark.parametrize(
    "part", ["text_encoder/model.safetensors", "vq/diffusion_pytorch_model.safetensors", "tokenizer/tokenizer.json"]
)
@pytest.mark.parametrize("contents", [b"", b"noise" * 99])
def test_damaged_files_are_refused(refused, models, tmp_path, part, contents):
    folder = shutil.copytree(models["text"], tmp_path / "damaged")
    (folder / part).write_bytes(contents)
    assert str(folder) in refused("generate", "x", "--model", folder)


def test_a_file_of_prompts_that_is_no_text_is_refused(refused):
    Path("prompts.txt").write_bytes(b"\xff\xfe\x00")
    assert "--file is prompts.txt" in refused("generate", "--file", "prompts.txt")


def test_a_bug_is_distinguished_from_a_mistake(run, refused, monkeypatch):
    def bug(*_, **__):
        torch.tensor([1.0]).expand(2, 3).view(torch.Size([-1, -1]))

    def value_error(*_, **__):
        int("x")

    monkeypatch.setattr(cli, "load_pipeline", bug)
    with pytest.raises(RuntimeError):
        run("generate", "x")
    # Raised by this test, and so not by arimage.
    monkeypatch.setattr(cli, "load_pipeline", value_error)
    assert "unexpected ValueError" in refused("generate", "x")
    monkeypatch.setenv("ARIMAGE_TRACEBACK", "1")
    with pytest.raises(ValueError, match="invalid literal"):
        run("generate", "x")


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
    sentence = refused("generate", "tree", "--model", models["text"])
    assert "out of memory" in sentence
    assert all(option in sentence for option in ("--batch-size", "--count", "--height", "--width", "--dtype"))


def test_many_images_are_generated_a_batch_at_a_time(run, models, monkeypatch):
    sizes = []
    call = LlamaGenPipeline.__call__

    def noted(pipe, *given, batch_size, **others):
        sizes.append(batch_size)
        return call(pipe, *given, batch_size=batch_size, **others)

    monkeypatch.setattr(LlamaGenPipeline, "__call__", noted)
    for given in (["-n", 3], ["-n", 3, "--batch-size", 2], ["-n", 70]):
        assert run("generate", "tree", *given, "--model", models["text"], "--out", "x.png")[0] == 0
    assert sizes == [3, 2, 64]


@pytest.mark.every(4)
@pytest.mark.parametrize("command", ["models", "decodings"])
@pytest.mark.parametrize("columns", [60, 80, 120, 400])
def test_a_narrow_terminal_cuts_no_names(run, monkeypatch, command, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    shown = re.sub("\x1b\\[[0-9;]*m", "", run(command)[1])
    names = PRESETS if command == "decodings" else [*packaged_models(), *(entry.name for entry in PUBLISHED)]
    assert {*names} <= {line.split("│")[1].strip() for line in shown.splitlines() if line.startswith("│")}
    assert "…" not in shown and max(map(len, shown.splitlines())) <= columns


def test_without_a_terminal_there_are_no_progress_bars(run, models):
    _, _, err = run("generate", "x", "--model", models["text"], "--out", "x.png")
    assert err.count("\n") == 1 and "\r" not in err


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without an accelerator")
def test_a_missing_accelerator_is_refused_in_one_sentence(refused, models):
    assert "cuda" in refused("generate", "x", "--model", models["text"], "--device", "cuda").lower()


def test_a_missing_model_is_refused_in_one_sentence(refused, tmp_path):
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


def test_a_broken_model_is_refused_in_one_sentence(refused, models, tmp_path):
    weights = Path(models["text"]) / "transformer" / "diffusion_pytorch_model.safetensors"
    for path in Path(models["text"]).rglob("*"):
        if path.is_file():
            copy = tmp_path / "broken" / path.relative_to(models["text"])
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes()[:500] if path == weights else path.read_bytes())
    assert "safetensors" in refused("generate", "x", "--model", tmp_path / "broken")


def test_training_without_data_is_refused_in_one_sentence(refused):
    options = ["--data", "absent.parquet", "--heldout", "absent.parquet", "--out", "run"]
    assert "absent.parquet" in refused("train", "tokenizer", *options, "--recipe", "imagenet-vq-16")
    assert "unknown recipe nonesuch" in refused("train", "tokenizer", *options, "--recipe", "nonesuch")
    assert "absent has no tokens.json" in refused(
        "train", "drafter", "--tokens", "absent", "--model", "emoji-llamagen", "--out", "run"
    )


def test_converting_a_missing_file_is_refused_in_one_sentence(refused):
    options = ["--transformer", "absent.pt", "--tokenizer", "absent.pt", "--out", "made"]
    for family in (["llamagen", "--image-size", "16"], ["var"]):
        assert refused("convert", *family, *options).startswith("arimage: absent.pt is not a file")
    assert not Path("made").exists()


def test_converted_files_of_var_generate_images(run, tmp_path):
    files = tiny_var.FOLDER
    options = ["--transformer", files / "var_d2.pth", "--tokenizer", files / "vae_ch32v64z8.pth"]
    code, out, _ = run("convert", "var", *map(str, options), "--out", str(tmp_path / "made"))
    assert code == 0 and out.strip() == str(tmp_path / "made")
    image = tmp_path / "image.png"
    code, _, err = run("generate", "--class-label", "3", "--model", str(tmp_path / "made"), "--out", str(image))
    assert code == 0 and "4 forward passes" in err and pixels(image).shape == (16, 16, 3)


@pytest.mark.slow
def test_a_converted_janus_generates_images_that_can_be_traced(run, tmp_path):
    folder = tiny_janus.write_original(tmp_path / "published")
    made, image = tmp_path / "made", tmp_path / "image.png"
    code, out, _ = run("convert", "janus", str(folder), "--template", "janus", "--out", str(made))
    assert code == 0 and out.strip() == str(made)
    options = ["--trace", str(tmp_path / "trace.webp"), "--trace", str(tmp_path / "map.png")]
    options += ["--model", str(made), "--decoding", "sjd-coupled", "--out", str(image)]
    code, _, err = run("generate", "a red heart", *options)
    assert code == 0 and "forward passes" in err and pixels(image).shape == (64, 64, 3)
    assert (tmp_path / "trace.webp").stat().st_size and (tmp_path / "map.png").stat().st_size


@pytest.mark.slow
def test_a_converted_emu3_generates_images_that_can_be_traced(run, tmp_path):
    folder = tiny_emu3.write_original(tmp_path / "published", image_area=32 * 32)
    vision_tokenizer = tiny_emu3.write_vision_tokenizer(tmp_path / "vision")
    made, image = tmp_path / "made", tmp_path / "image.png"
    options = ["--vision-tokenizer", str(vision_tokenizer), "--out", str(made)]
    code, out, _ = run("convert", "emu3", str(folder), *options)
    assert code == 0 and out.strip() == str(made)
    options = ["--trace", str(tmp_path / "trace.webp"), "--trace", str(tmp_path / "map.png")]
    options += ["--model", str(made), "--decoding", "sjd", "--out", str(image)]
    code, _, err = run("generate", "a red heart", *options)
    assert code == 0 and "forward passes" in err and pixels(image).shape == (32, 32, 3)
    assert (tmp_path / "trace.webp").stat().st_size and (tmp_path / "map.png").stat().st_size


@pytest.mark.slow
def test_a_converted_lumina_mgpt_generates_images_of_any_size_that_can_be_traced(run, tmp_path):
    folder = tiny_chameleon.write_version_2(tmp_path / "published")
    made, image = tmp_path / "made", tmp_path / "image.png"
    options = ["--tokenizer", str(tiny_chameleon.MOVQGAN), "--image-size", "64", "--out", str(made)]
    code, out, _ = run("convert", "lumina-mgpt", str(folder), *options)
    assert code == 0 and out.strip() == str(made)
    options = ["--trace", str(tmp_path / "trace.webp"), "--trace", str(tmp_path / "map.png")]
    options += ["--model", str(made), "--decoding", "sjd", "--height", "32", "--width", "64", "--out", str(image)]
    code, _, err = run("generate", "a red heart", *options)
    assert code == 0 and "forward passes" in err and pixels(image).shape == (32, 64, 3)
    assert (tmp_path / "trace.webp").stat().st_size and (tmp_path / "map.png").stat().st_size


def test_size_and_negative_prompt_reach_the_model(run, refused, models, tmp_path):
    pipe = tiny_emu3.pipeline()
    pipe.save_pretrained(tmp_path / "emu3")
    options = ["generate", "a red heart", "--model", tmp_path / "emu3", "--height", 16, "--width", 40]
    for name, settings in (("away", {"negative_prompt": "lowres"}), ("default", {})):
        words = ["--negative-prompt", "lowres"] if settings else []
        code, *_ = run(*options, *words, "--guidance-scale", 3, "--out", f"{name}.png")
        assert code == 0
        generator = torch.Generator().manual_seed(0)
        image = pipe("a red heart", height=16, width=40, guidance_scale=3, generator=generator, **settings).images[0]
        np.testing.assert_array_equal(pixels(f"{name}.png"), np.asarray(image))
    assert not np.array_equal(pixels("away.png"), pixels("default.png"))
    assert "the size is either height and width" in refused(*options[:-2])
    assert "negative_prompt" in refused("generate", "tree", "--model", models["text"], "--negative-prompt", "bird")


def test_an_anole_without_its_image_decoder_is_refused_in_one_sentence(refused, tmp_path):
    assert "holds no image decoder" in refused(
        "convert", "anole", str(tiny_chameleon.FIXTURE), "--out", str(tmp_path / "made")
    )


def test_seeds_out_of_range_are_a_usage_error(run):
    code, _, err = run("generate", "x", "--seed", 2**64)
    assert code == 2 and "--seed" in err


def test_an_unknown_option_is_a_usage_error(run):
    code, out, err = run("generate", "x", "--nonesuch")
    assert code == 2 and out == "" and "--nonesuch" in err and "Traceback" not in err


def test_ctrl_c_exits_with_130(run, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "load_pipeline", interrupted)
    assert run("generate", "x")[0] == 130


# Tables


def test_models_lists_every_published_name_whole(run):
    code, out, _ = run("models")
    assert code == 0
    rows = {line.split("│")[1].strip(): line for line in out.splitlines() if line.startswith("│")}
    for entry in PUBLISHED:
        for part in (entry.repository, size_text(entry.download), entry.licence, f"{entry.parameters / 1e6:,.0f} M"):
            assert part in rows[entry.name]


def test_models_lists_the_installed_names(run, monkeypatch, tmp_path):
    from arimage import auto

    transformer, shared = tmp_path / "hearts" / "transformer", tmp_path / "others" / "vq"
    for folder, count in ((transformer, 1_500_000), (shared, 500_000)):
        folder.mkdir(parents=True)
        save_file({"weight": torch.zeros(count)}, folder / "diffusion_pytorch_model.safetensors")
    (tmp_path / "hearts" / "model_index.json").write_text("{}")
    (tmp_path / "hearts" / "shared.json").write_text('{"vq": "others/vq"}')
    monkeypatch.setattr(auto, "installed_models", lambda: {"hearts": tmp_path / "hearts"})
    code, out, err = run("models")
    assert code == 0, err
    [row] = [line for line in out.splitlines() if "hearts" in line]
    # What it holds itself, and what it shares.
    assert "2.0 M" in row and "8.0 MB" in row


def test_models_lists_what_a_model_knows(run, refused, models, monkeypatch):
    code, out, _ = run("models", "emoji-arpg")
    assert code == 0 and len(out.splitlines()) == 1601 and "hot dog" in out.splitlines()
    assert run("models", models["known"])[1] == "red heart\ntree\n"
    assert run("models", models["known"], "--search", "FIR")[1] == "tree\n"
    assert run("models", models["named"])[1].splitlines()[7:9] == ["7 Eskimo dog", "8 hen"]
    assert run("models", models["named"], "--search", "er")[1] == "1 retriever\n3 otter\n"
    monkeypatch.setattr(sys.stdout.__class__, "isatty", lambda self: True)
    monkeypatch.setenv("COLUMNS", "60")
    lines = run("models", models["named"])[1].splitlines()
    assert 2 <= len(lines) < 10 and "sea lion" in lines[-1]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["emoji-llamagen", "--search", "qqq"], "knows contains 'qqq'"),
        (["--search", "x"], "name the model"),
        (["someone/hearts"], "is a repository of the Hub"),
        (["nonesuch"], "nonesuch is neither"),
    ],
)
def test_what_cannot_be_listed_is_refused(refused, arguments, sentence):
    assert sentence in refused("models", *arguments)


def test_a_downloaded_model_is_listed(run, models, monkeypatch):
    monkeypatch.setattr("arimage.published.fetch.load_published", lambda name, local_files_only: Path(models["named"]))
    assert run("models", "llamagen-c2i-b-256", "--search", "otter")[1] == "3 otter\n"


def test_a_model_of_any_text_has_no_list(refused, models):
    assert "has no list of what it knows" in refused("models", models["text"])


def test_combined_captions_are_listed_with_their_words(run, tmp_path, monkeypatch):
    known = KnownCaptions({"cat": [], "[b]ox": []}, {"number": ["two", "three"]}, ["{number} cats"])
    (tmp_path / "combined").mkdir()
    (tmp_path / "combined" / "model_index.json").write_text('{"_class_name": "LlamaGenPipeline"}')
    known.save(tmp_path / "combined")
    assert run("models", tmp_path / "combined")[1] == "cat\n[b]ox\n"
    monkeypatch.setattr(sys.stdout.__class__, "isatty", lambda self: True)
    out = run("models", tmp_path / "combined")[1]
    assert "[b]ox" in out and "{number} cats" in out and "number: two, three\n" in out


def test_decodings_lists_every_name_with_its_papers(run):
    from arimage import decoding_names

    code, out, _ = run("decodings")
    assert code == 0
    names = [line.split("│")[1].strip() for line in out.splitlines() if line.startswith("│")]
    assert list(filter(None, names)) == decoding_names()
    assert "2410.01699" in out and "refresh=gumbel" in out


def table(text):
    """The cells of the Markdown tables in `text`, without their heads."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in cells if row[0] != "decoding" and not row[0].startswith("---")]


def test_bench_prints_a_table_and_writes_every_figure(run, models):
    options = ["--decoding", "ar", "--decoding", "sjd-coupled", "--batch-size", 3, "--per-prompt", 3, "--seed", 4]
    options += ["--prompt", "tree", "--prompt", "heart", "--top-k", 5]
    code, out, _ = run("bench", "--model", models["text"], *options, "--out", "bench")
    assert code == 0
    ar, coupled = table(out)
    assert ar[:6] == ["ar", ar[1], "16.0", "16.0", "1.00", "1.0"] and ar[8] == "1.00"
    assert coupled[0] == "sjd-coupled" and coupled[1].startswith("exact (0.")
    assert "top_k 5" in out and "calls of 3" in out and torch.__version__ in out
    assert Image.open("bench/report.png").width > 500 and Path("bench/report.md").read_text("utf-8") + "\n" == out

    written = json.loads(Path("bench/report.json").read_text())
    settings = written["settings"]
    assert settings["model"] == models["text"] and (settings["images"], settings["seed"]) == (6, 4)
    assert settings["sampling"]["top_k"] == 5 and written["machine"]["torch"] == torch.__version__
    ar, coupled = written["rows"]
    assert ar["decoding"] == "ar" and ar["cost"]["passes"] == ar["cost"]["call_passes"] == 16
    assert coupled["exact"] is True and 2 <= coupled["cost"]["passes"] <= 16
    assert coupled["settings"]["refresh"] == "coupled" and coupled["cost"]["timed_calls"] == 2


@pytest.mark.slow
def test_bench_measures_what_the_model_can_do_and_says_what_it_leaves_out(run, refused, models, monkeypatch):
    from arimage import SpeculativeJacobiDecoding

    def picky(self, model):
        return "it needs a crystal ball" if self.refresh == "gumbel" else None

    monkeypatch.setattr(SpeculativeJacobiDecoding, "supports", picky)
    options = ["--model", models["class"], "--class-label", 1, "--per-prompt", 1, "--metrics", ""]
    code, out, err = run("bench", *options)
    assert code == 0
    (line,) = [line for line in err.splitlines() if "left out" in line]
    assert "sjd-gumbel (it needs a crystal ball)" in line
    left_out = [reason.partition(" (")[0] for reason in line.partition("left out ")[2].split("; ")]
    assert sorted([row[0] for row in table(out)] + left_out) == sorted([*FOR_TOKENS, "groups"])
    assert {"ar", "sjd", "sjd-coupled"} <= {row[0] for row in table(out)}
    assert "it needs a crystal ball" in refused("bench", *options, "--decoding", "sjd-gumbel")


@pytest.mark.slow
def test_bench_sets_two_reports_side_by_side(run, refused, models):
    options = ["--model", models["text"], "--decoding", "sjd", "--per-prompt", 1, "--metrics", ""]
    run("bench", *options, "--decoding", "ar", "--out", "old")
    code, out, _ = run("bench", *options, "--against", "old/report.json")
    assert code == 0
    assert [row[:1] + row[3:4] for row in table(out)[1:]] == [["sjd", "1.00"]]
    assert out.splitlines()[-1] == "Only in one of the two: ar."
    against = "--against", "old/report.json", "--out", "new"
    for others, word in (
        (("--top-k", 3), "another sampling"),
        (("--seed", 1), "another seed (0) than this command (1)"),
        (("--dtype", "bfloat16"), "another weights"),
        (("--prompt", "tree"), "another manifest"),
        (("--per-prompt", 2), "another source"),
    ):
        assert word in refused("bench", *options, *others, *against)
    assert "arimage bench --out" in refused("bench", "--model", models["text"], "--against", "missing.json")
    assert not Path("new").exists()


@pytest.mark.every(3)
@pytest.mark.parametrize(
    "options, word",
    [
        (["--per-prompt", 0], "--per-prompt is 0"),
        (["--batch-size", 0], "--batch-size is 0"),
        (["--batch-size", 10**9], "--batch-size"),
        (["--decoding", "sdj"], "sdj"),
        (["--decoding", "sjd:window"], "write it as key=value"),
        (["--decoding", "sjd:windows=3"], "no setting 'windows'"),
        (["--decoding", "sjd:window=0"], "window is 0"),
        (["--metrics", "deviation,is"], "unknown metric"),
        (["--prompt", "tree", "--class-label", 1], "exclude each other"),
        (["--prompts", "nonesuch.jsonl"], "nonesuch.jsonl"),
        (["--out", "/dev/null/x"], "--out"),
    ],
)
def test_bench_refuses_what_it_cannot_measure(refused, models, options, word):
    assert word in refused("bench", "--model", models["text"], *options)


def test_a_part_of_an_image_is_generated_again(run, refused, models, tmp_path):
    image = torch.randint(256, (SIZE, SIZE, 3), generator=torch.Generator().manual_seed(0)).byte().numpy()
    mask = np.zeros((SIZE, SIZE), np.uint8)
    mask[:, : SIZE // 2] = 255
    Image.fromarray(image).save(tmp_path / "image.png")
    Image.fromarray(mask).save(tmp_path / "mask.png")
    (tmp_path / "text.txt").write_text("no image")
    for model in ("text", "scales"):
        options = ("generate", "tree", "--model", models[model], "--image", tmp_path / "image.png")
        assert run(*options, "--mask-image", tmp_path / "mask.png", "--out", "x.png")[0] == 0
        assert np.array_equal(pixels("x.png")[:, SIZE // 2 :], image[:, SIZE // 2 :])
        assert not np.array_equal(pixels("x.png")[:, : SIZE // 2], image[:, : SIZE // 2])
    assert "there is no --mask-image" in refused(*options)
    assert "text.txt" in refused(*options, "--mask-image", tmp_path / "text.txt")


def test_a_next_scale_model_is_traced_and_measured(run, refused, models):
    code, _, err = run("generate", "tree", "--model", models["scales"], "--trace", "trace.gif", "--decoding", "code")
    assert code == 0 and "4 forward passes, 7.5 tokens per pass" in err
    with Image.open("trace.gif") as animation:
        assert animation.n_frames == 5
    assert "--trace map.png" in refused("generate", "tree", "--model", models["scales"], "--trace", "map.png")
    code, out, _ = run("bench", "--model", models["scales"], "--per-prompt", 1)
    assert code == 0 and "| next-scale |" in out and "| code |" in out
