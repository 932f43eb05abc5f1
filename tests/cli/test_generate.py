"""`arimage generate`: what it writes and where, and how its process ends."""

import json
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from commands import python
from PIL import Image
from pipelines.llamagen import tiny as tiny_llamagen
from pipelines.var import tiny as tiny_var

from arimage import LlamaGenPipeline
from arimage.cli import options
from arimage.pipelines.base import ARPipeline
from arimage.pipelines.seeds import image_seeds
from arimage_emoji.known import KnownCaptions


SIZE = 4 * tiny.SCALE_FACTOR
PROMPTS = ["a red heart", "tree", "a blue book"]
CLASSES = ["tench", "retriever", "crane", "otter", "finch", "cock", "tabby", "Eskimo dog", "hen", "sea lion"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root, pipe = tmp_path_factory.mktemp("models"), tiny_llamagen.text_pipeline()
    pipe.save_pretrained(root / "text")
    tiny_var.pipeline("text").save_pretrained(root / "scales")
    named = LlamaGenPipeline(**tiny_llamagen.class_pipeline().components, id2label=dict(enumerate(CLASSES)))
    named.save_pretrained(root / "named")
    pipe.known_captions = KnownCaptions({"red heart": ["heart"], "tree": ["fir"]})
    pipe.save_pretrained(root / "known")
    return root


def expected_images(kind, seed, **arguments):
    """What the pipeline itself generates, uint8 [B, H, W, 3]."""
    pipe = tiny_llamagen.text_pipeline() if kind == "text" else tiny_llamagen.class_pipeline()
    images = pipe(**arguments, generator=torch.Generator().manual_seed(seed)).images
    return np.stack([np.asarray(image) for image in images])


def pixels(path):
    return np.asarray(Image.open(path).convert("RGB"))


# The process


def test_the_module_refuses_like_the_command_and_runs_nothing_when_it_is_imported():
    done = python("-m", "arimage", "generate")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("arimage: give prompts") and done.stderr.count("\n") == 1
    done = python("-c", "import sys; sys.argv = ['x', '--help']; import arimage.__main__; print('imported')")
    assert done.stdout == "imported\n"


@pytest.mark.parametrize(
    "action, code, error",
    [("sys.exit(0)", 0, ""), ("sys.exit(3)", 3, ""), ("raise KeyError('lost')", 1, "KeyError: 'lost'")],
)
def test_the_process_ends_with_its_handlers_but_takes_nothing_down(action, code, error):
    script = f"""
import atexit, sys

class Framework:
    def __del__(self):
        print("taken down")

def main(app):
    atexit.register(print, "handled")
    {action}

kept = Framework()
cli.main = main
cli.run()
"""
    done = python("-c", f"from arimage.cli import main as cli\n{script}")
    assert (done.stdout, done.returncode) == ("handled\n", code)
    assert error in done.stderr


# Images


def test_one_prompt_to_a_file_with_every_setting(run, models, tmp_path):
    out = tmp_path / "new" / "heart.png"
    settings = {"guidance_scale": 3.0, "temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.02}
    settings |= {"decoding": "sjd-gumbel"}
    words = [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", value)]
    options = ["--model", models / "text", "--out", out, "--seed", 3, "--device", "cpu"]
    code, output, err = run("generate", PROMPTS[0], *options)
    assert code == 0 and output.splitlines() == [str(out)]
    # Without a terminal there are no progress bars.
    assert err.count("\n") == 1 and "\r" not in err
    assert err.splitlines()[-1].startswith("1 image, 16 forward passes, 1.0 tokens per pass, ")
    np.testing.assert_array_equal(pixels(out), expected_images("text", 3, prompt=PROMPTS[0])[0])
    assert run("generate", PROMPTS[0], *options, *words)[0] == 0
    np.testing.assert_array_equal(pixels(out), expected_images("text", 3, prompt=PROMPTS[0], **settings)[0])


def test_images_to_a_folder_one_file_each(run, models):
    code, output, _ = run("generate", *PROMPTS[:2], "-n", 2, "--model", models / "text", "--out", "images")
    seeds = image_seeds(torch.Generator().manual_seed(0), 4)
    names = [f"{name}-{seed}.png" for name, seed in zip(["a-red-heart"] * 2 + ["tree"] * 2, seeds, strict=True)]
    assert code == 0 and output.splitlines() == [str(Path("images") / name) for name in names]
    assert {path.name for path in Path("images").iterdir()} == {*names} and names[0] == "a-red-heart-0.png"
    expected = expected_images("text", 0, prompt=PROMPTS[:2], num_images_per_prompt=2)
    for name, image in zip(names, expected, strict=True):
        np.testing.assert_array_equal(pixels(Path("images") / name), image)


@pytest.mark.every(2)
@pytest.mark.parametrize(
    "prompts, count, rows, columns",
    [
        (2, 3, 2, 3),
        (3, 1, 1, 3),
        (10, 1, 2, 5),
        (1, 12, 2, 6),
        (1, 1, 1, 1),
        (16, 1, 2, 8),
        (11, 1, 2, 8),
        (2, 11, 4, 8),
    ],
)
def test_a_file_shows_all_images_in_a_grid_that_ends_in_white(run, models, prompts, count, rows, columns):
    texts = [f"tree {i}" for i in range(prompts)]
    assert run("generate", *texts, "-n", count, "--model", models / "text", "--out", "grid.png")[0] == 0
    grid = pixels("grid.png")
    assert grid.shape == (rows * SIZE, columns * SIZE, 3)
    cells = grid.reshape(rows, SIZE, columns, SIZE, 3).swapaxes(1, 2).reshape(-1, SIZE, SIZE, 3)
    # The images of a prompt begin a row.
    each = count if count > 1 else prompts
    cells = cells.reshape(prompts * count // each, -1, SIZE, SIZE, 3)
    expected = expected_images("text", 0, prompt=texts, num_images_per_prompt=count)
    np.testing.assert_array_equal(cells[:, :each].reshape(expected.shape), expected)
    assert (cells[:, each:] == 255).all()


@pytest.mark.parametrize("suffix", [".jpg", ".webp", ".PNG"])
def test_other_image_formats_are_written(run, models, suffix):
    assert run("generate", "tree", "--model", models / "text", "--out", f"tree{suffix}")[0] == 0
    assert Image.open(f"tree{suffix}").size == (SIZE, SIZE)


def test_prompts_are_read_from_a_file_after_those_given(run, models):
    Path("prompts.txt").write_text(f"{PROMPTS[1]}\n\n  {PROMPTS[2]}  \n")
    assert (
        run("generate", PROMPTS[0], "--prompts", "prompts.txt", "--model", models / "text", "--out", "x.png")[0] == 0
    )
    images = pixels("x.png").reshape(SIZE, 3, SIZE, 3).swapaxes(0, 1)
    np.testing.assert_array_equal(images, expected_images("text", 0, prompt=PROMPTS))


def test_classes_are_generated_by_their_names_and_ids(run, refused, models):
    seeds = image_seeds(torch.Generator().manual_seed(0), 2)
    code, output, _ = run("generate", "otter", "hen", "--model", models / "named", "--out", "classes")
    assert code == 0 and output.splitlines() == [f"classes/otter-{seeds[0]}.png", f"classes/hen-{seeds[1]}.png"]
    options = ["--class-label", "3", "--class-label", "hen", "--model", models / "named"]
    code, more, _ = run("generate", *options, "--out", "classes")
    assert code == 0 and more.splitlines() == [f"classes/class-3-{seeds[0]}.png", f"classes/hen-{seeds[1]}-2.png"]
    images = expected_images("class", 0, class_labels=[3, 8])
    for path, image in zip((output + more).splitlines(), [*images, *images], strict=True):
        np.testing.assert_array_equal(pixels(path), image)
    assert 'the nearest is "otter"' in refused("generate", "oter", "--model", models / "named")
    code, output, _ = run("bench", *options, "--decoding", "ar", "--per-prompt", "1", "--metrics", "", "--out", "runs")
    rows = [json.loads(line) for line in Path("runs/ar/manifest.jsonl").read_text().splitlines()]
    assert code == 0 and "| ar |" in output and [row["class_label"] for row in rows] == [3, 8]


def test_an_unknown_prompt_is_reported_once_with_the_nearest_captions(run, models, caplog):
    assert run("generate", "a hart", "a red heart", "a hart", "--model", models / "known")[0] == 0
    (record,) = caplog.records
    assert record.message.startswith('"a hart" is not among the 2 pictures') and '"red heart"' in record.message


def test_trace_and_acceptance_map_are_written_next_to_the_images(run, models):
    options = ["--trace", "new/x.webp", "--trace", "new/map.png", "--decoding", "sjd", "--out", "x.png"]
    code, output, _ = run("generate", *PROMPTS[:2], "--model", models / "text", *options)
    assert code == 0 and output.splitlines() == ["x.png", "new/x.webp", "new/map.png"]
    with Image.open("new/x.webp") as animation:
        assert 3 <= animation.n_frames <= 17
    assert min(Image.open("new/map.png").size) >= 384
    # Watching changes nothing.
    expected = expected_images("text", 0, prompt=PROMPTS[:2], decoding="sjd")
    np.testing.assert_array_equal(pixels("x.png"), np.concatenate(list(expected), axis=1))


def test_a_next_scale_model_is_traced_and_measured(run, refused, models):
    options = ["--model", models / "scales"]
    code, _, err = run("generate", "tree", *options, "--trace", "trace.gif", "--decoding", "code")
    assert code == 0 and "4 forward passes, 7.5 tokens per pass" in err
    with Image.open("trace.gif") as animation:
        assert animation.n_frames == 5
    assert "--trace map.png" in refused("generate", "tree", *options, "--trace", "map.png")
    code, out, _ = run("bench", *options, "--per-prompt", 1)
    assert code == 0 and "| next-scale |" in out and "| code |" in out


def test_many_images_are_generated_a_batch_at_a_time(run, models, monkeypatch):
    sizes, call = [], LlamaGenPipeline.__call__

    def noted(pipe, *given, batch_size, **others):
        sizes.append(batch_size)
        return call(pipe, *given, batch_size=batch_size, **others)

    monkeypatch.setattr(LlamaGenPipeline, "__call__", noted)
    for given in (["-n", 3], ["-n", 3, "--batch-size", 2], ["-n", 70]):
        assert run("generate", "tree", *given, "--model", models / "text", "--out", "x.png")[0] == 0
    assert sizes == [3, 2, 64]


# The dtype of weights


@pytest.mark.every(2)
@pytest.mark.parametrize("dtype", ["int8", "float8"])
def test_weights_of_8_bits_generate_and_are_recorded(models, run, refused, dtype):
    common = "--model", models / "text", "--prompt", "a red heart", "--dtype", dtype, "--device", "cpu"
    run("bench", *common, "--decoding", "ar", "--per-prompt", "1", "--metrics", "", "--out", "rows")
    assert json.loads(Path("rows/report.json").read_text())["settings"]["dtype"] == dtype
    assert "--lora" in refused(
        "generate", "a red heart", "--model", models / "text", "--dtype", dtype, "--lora", "a/b"
    )


def test_weights_of_8_bits_are_never_on_the_device_in_full(models, monkeypatch):
    moved, to = [], ARPipeline.to

    def record(pipe, *args, **kwargs):
        moved.append({name: weight.dtype for name, weight in pipe.transformer.named_parameters()})
        return to(pipe, *args, **kwargs)

    monkeypatch.setattr(ARPipeline, "to", record)
    pipe = options.load_pipeline(str(models / "text"), "cpu", "int8")
    quantised = {name for name, weight in pipe.transformer.named_parameters() if weight.dtype == torch.int8}
    assert quantised and all(weights[name] == torch.int8 for weights in moved for name in quantised)


@pytest.mark.parametrize(
    "device, fast, dtype, expected",
    [
        ("cpu", None, "auto", "float32"),
        ("cpu", "_is_avx512_bf16_supported", "auto", "bfloat16"),
        ("cpu", None, "bfloat16", "bfloat16"),
        ("cuda", "is_bf16_supported", "auto", "bfloat16"),
        # A T4 or V100, where it is emulated.
        ("cuda", None, "auto", "float32"),
    ],
)
def test_the_default_dtype_depends_on_the_device(monkeypatch, device, fast, dtype, expected):
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
        options.load_pipeline("x", device, *([] if dtype == "auto" else [dtype]))


def test_the_default_dtype_is_that_of_the_card_that_is_asked_for(monkeypatch):
    # A T4, which is the current device, next to a newer one.
    current = [0]

    @contextmanager
    def device(index):
        current.append(index)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: current[-1] == 1)
    found = [options.fast_dtype(name) for name in ("cuda", "cuda:0", "cuda:1")]
    assert found == [torch.float32, torch.float32, torch.bfloat16]


# Converted files


def test_converted_files_of_var_generate_images(run):
    files = tiny_var.FOLDER
    options = ["--transformer", files / "var_d2.pth", "--tokenizer", files / "vae_ch32v64z8.pth"]
    code, out, _ = run("convert", "var", *options, "--out", "made")
    assert code == 0 and out == "made\n"
    code, _, err = run("generate", "--class-label", "3", "--model", "./made", "--out", "image.png")
    assert code == 0 and "4 forward passes" in err and pixels("image.png").shape == (16, 16, 3)
