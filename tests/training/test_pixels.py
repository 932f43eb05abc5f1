"""Tokenizers and upscalers are trained on any data set of images, which is read when a batch needs it. Batches do not
depend on the processes that prepare them, nor on where a run is resumed."""

import functools
import gc
import io
import json
import multiprocessing
import sys
import tarfile
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file


pytest.importorskip("datasets", reason="the extra `train` is not installed")
from arimage.cli import main as cli  # noqa: E402
from arimage.settings.schema import check  # noqa: E402
from arimage.training.loop import fit  # noqa: E402
from arimage.training.pixels import open_pixels  # noqa: E402
from arimage.training.recipe import TokenizerRecipe, load_recipe  # noqa: E402
from arimage.training.tokenizers import tokenizer  # noqa: E402
from arimage.training.tokenizers.tokenizer import TokenizerTask  # noqa: E402


SIZE = 16
WIDTHS = {"channels": 8, "channel_multipliers": [1, 2, 2], "layers_per_block": 1, "norm_num_groups": 4}
OPTIMIZER = {"steps": 6, "learning_rate": 5e-3, "warmup_steps": 2, "ema_decay": 0.9}
RECIPE = {
    "tokenizer": "LlamaGenVQModel",
    "image_size": SIZE,
    "model": {**WIDTHS, "codebook_size": 16, "codebook_dim": 4, "latent_channels": 8},
    "optimizer": OPTIMIZER,
    "training": {"batch_size": 3, "codebook_start": 3, "kmeans_batches": 2, "max_shift": 1},
}
SPLITS = {"split": "train", "heldout_split": "train"}


def run_tokenizer(folder, out, workers):
    table = check(TokenizerRecipe, RECIPE, "mine.toml")
    return tokenizer.run_tokenizer(table, folder, folder, out, "cpu", workers=workers, **SPLITS)


def picture(number, mode="RGB"):
    levels = np.random.default_rng(number).integers(0, 256, (SIZE, SIZE, len(mode)), dtype=np.uint8)
    return Image.fromarray(levels, mode)


def encoded(number):
    file = io.BytesIO()
    picture(number).save(file, "PNG")
    return file.getvalue()


def folder_of(root, names):
    for number, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        picture(number).save(root / name)
    return root


@pytest.fixture
def folder(tmp_path):
    return folder_of(tmp_path / "data", [f"{number}.png" for number in range(7)])


def numbers_of(images):
    """Which pictures they are."""
    known = {picture(number).tobytes(): number for number in range(20)}
    return [known[image.permute(1, 2, 0).numpy().tobytes()] for image in images]


def batch(source, step, count=3):
    return source.batch(step, count, torch.Generator().manual_seed(step))


# Data sets


def test_a_folder_is_all_images_in_it_whatever_their_names_and_places(tmp_path):
    # `datasets` would take some for splits, and a bracket for a pattern.
    names = ["COCO_val2014_1.png", "a/test-1.png", "train/b/2.png", "val/c.png", ".hidden/x.png"]
    folder = folder_of(tmp_path / "photos [2]", names)
    (folder / "notes.txt").write_text("no image")
    assert sorted(numbers_of(open_pixels(folder, SIZE).read(range(4))[0])) == [0, 1, 2, 3]
    assert len(open_pixels(folder, SIZE)) == 4


def test_shards_need_no_captions(tmp_path):
    for shard in range(2):
        numbers = [2 * shard, 2 * shard + 1]
        rows = [{"bytes": encoded(number), "path": None} for number in numbers]
        for kind in ("parquet", "tar"):
            (tmp_path / kind).mkdir(exist_ok=True)
        pq.write_table(pa.table({"photo": rows, "id": numbers}), tmp_path / "parquet" / f"{shard}.parquet")
        with tarfile.open(tmp_path / "tar" / f"{shard}.tar", "w") as tar:
            for number in numbers:
                info = tarfile.TarInfo(f"{number}.png")
                info.size = len(encoded(number))
                tar.addfile(info, io.BytesIO(encoded(number)))
    tables = tmp_path / "parquet"
    for data, image in ((tables / "*.parquet", "photo"), (tables, "photo"), (tmp_path / "tar", None)):
        images, alpha = open_pixels(data, SIZE, image=image).read(range(4))
        assert numbers_of(images) == [0, 1, 2, 3] and alpha.shape == (4, 1, SIZE, SIZE) and alpha.min() == 255
    with pytest.raises(ValueError, match="has the columns photo, id: name that of its images with --image"):
        open_pixels(tables, SIZE)


def test_a_part_of_a_split_is_taken(folder):
    assert numbers_of(open_pixels(folder, SIZE, split="train[5:]").read([0, 1])[0]) == [5, 6]
    with pytest.raises(ValueError, match="no splits, and 'validation'"):
        open_pixels(folder, SIZE, split="validation")
    with pytest.raises(ValueError, match="has no rows"):
        open_pixels(folder, SIZE, split="train[7:]")


def test_folders_of_splits_are_not_learned_together(tmp_path, caplog):
    folder = folder_of(tmp_path, ["train/a/0.png", "train/b/1.png", "val/a/2.png"])
    assert numbers_of(open_pixels(folder, SIZE).read([0, 1])[0]) == [0, 1] and "not val" in caplog.text
    for split in ("val", "validation[:1]"):
        assert numbers_of(open_pixels(folder, SIZE, split=split).read([0])[0]) == [2]


# Batches


def test_every_image_is_learned_once_per_epoch(folder):
    source = open_pixels(folder, SIZE, workers=0)
    seen = [number for step in range(14) for number in numbers_of(batch(source, step)[0])]
    epochs = [seen[start : start + 7] for start in range(0, 42, 7)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs) and len(set(map(tuple, epochs))) > 1
    other = open_pixels(folder, SIZE, workers=0, seed=1)
    assert [number for step in range(14) for number in numbers_of(batch(other, step)[0])] != seen


def test_a_batch_depends_on_the_step_alone(folder):
    plain, others = open_pixels(folder, SIZE, workers=0), open_pixels(folder, SIZE, workers=2)
    torch.manual_seed(0)
    for step in (0, 1, 2, 1, 9, 10):
        for ours, theirs in zip(batch(others, step), batch(plain, step), strict=True):
            assert torch.equal(ours, theirs)
    # No random number of the training is used up.
    after = torch.rand(3)
    torch.manual_seed(0)
    assert torch.equal(after, torch.rand(3))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_damaged_image_is_named_in_one_sentence(folder, workers):
    (folder / "4.png").write_bytes(encoded(4)[:60])
    source = open_pixels(folder, SIZE, workers=workers)
    with pytest.raises(ValueError, match=rf"^{folder}/4.png cannot be read[^\n]*$"):
        for step in range(3):
            batch(source, step)


def test_a_run_belongs_to_its_images_wherever_they_lie(folder, tmp_path):
    about = open_pixels(folder, SIZE).about
    assert about["count"] == 7 and about["size"] == SIZE
    moved = folder.rename(tmp_path / "moved")
    assert open_pixels(moved, SIZE).about == about
    picture(19).save(moved / "3.png")
    assert open_pixels(moved, SIZE).about != about


# Trainings


def weights_of(folder):
    return load_file(next(folder.glob("*.safetensors")))


def stopping(task, module, monkeypatch, at):
    loss = task.loss

    def stops(self, step):
        if step == at:
            raise KeyboardInterrupt
        return loss(self, step)

    monkeypatch.setattr(task, "loss", stops)
    monkeypatch.setattr(module, "fit", functools.partial(fit, checkpoint_every_seconds=-1.0))


def test_a_resumed_tokenizer_is_the_same_with_any_workers(folder, tmp_path, monkeypatch):
    run_tokenizer(folder, tmp_path / "whole", 0)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stopping(TokenizerTask, tokenizer, patch, 4)
        run_tokenizer(folder, tmp_path / "cut", 2)
    run_tokenizer(folder, tmp_path / "cut", 1)
    whole, cut = (weights_of(tmp_path / run / "tokenizer" / "tokenizer") for run in ("whole", "cut"))
    assert [name for name in whole if not torch.equal(whole[name], cut[name])] == []


def test_a_codebook_starts_though_its_step_was_skipped(folder, tmp_path, monkeypatch):
    loss, start, started = TokenizerTask.loss, TokenizerTask.start_codebook, []

    def not_finite_at_first(self, step):
        found, figures = loss(self, step)
        return found * (torch.nan if step == RECIPE["training"]["codebook_start"] else 1), figures

    monkeypatch.setattr(TokenizerTask, "loss", not_finite_at_first)
    monkeypatch.setattr(TokenizerTask, "start_codebook", lambda self, step: started.append(step) or start(self, step))
    run_tokenizer(folder, tmp_path / "run", 0)
    assert started == [3, 4]


def test_processes_end_with_their_batches(folder):
    others = multiprocessing.active_children()
    source = open_pixels(folder, SIZE, workers=1)
    batch(source, 0)
    children = [child for child in multiprocessing.active_children() if child not in others]
    # As a task that trains is in cycles.
    source.own = source
    del source
    began = time.monotonic()
    gc.collect()
    # One that is not told to end waits for five seconds.
    assert [child.exitcode for child in children] == [0] and time.monotonic() - began < 4


def test_the_command_takes_parts_of_splits(folder, tmp_path, monkeypatch, capsys):
    lines = ['tokenizer = "LlamaGenVQModel"', f"image_size = {SIZE}"]
    for name in ("model", "optimizer", "training"):
        lines += [f"[{name}]", *(f"{key} = {value}" for key, value in RECIPE[name].items())]
    (tmp_path / "mine.toml").write_text("\n".join(lines))
    words = ["--recipe", tmp_path / "mine.toml", "--data", folder, "--split", "train[2:]", "--heldout", folder]
    words += ["--heldout-split", "train[:2]", "--workers", 0, "--out", tmp_path / "run", "--device", "cpu"]

    def run(*more):
        monkeypatch.setattr(sys, "argv", ["arimage", "train", "tokenizer", *map(str, [*words, *more])])
        with pytest.raises(SystemExit) as end:
            cli.main()
        return end.value.code

    assert not run()
    settings = json.loads((tmp_path / "run" / "tokenizer" / "settings.json").read_text())
    assert settings["data"]["count"] == 5 and settings["heldout"]["count"] == 2
    assert run("--workers", -1) == 2 and "--workers" in capsys.readouterr().err


def test_the_packaged_recipe_is_that_of_the_published_tokenizer():
    recipe = load_recipe("imagenet-vq-16", TokenizerRecipe)
    with torch.device("meta"):
        published = tokenizer.LlamaGenVQModel()
        ours = tokenizer.LlamaGenVQModel(**recipe.model)
    assert {name: one.shape for name, one in ours.state_dict().items()} == {
        name: one.shape for name, one in published.state_dict().items()
    }
    # 40 epochs without the last part of each.
    assert recipe.optimizer.steps == 40 * (1_281_167 // recipe.training["batch_size"])


# Sizes


@pytest.mark.slow
def test_memory_does_not_grow_with_the_data_set(tmp_path):
    import psutil

    (tmp_path / "shards").mkdir()
    for shard in range(20):
        rows = [{"bytes": encoded(number), "path": None} for number in range(1000 * shard, 1000 * shard + 1000)]
        pq.write_table(pa.table({"image": rows}), tmp_path / "shards" / f"{shard:02d}.parquet")
    folder_of(tmp_path / "folder", [f"{number % 100}/{number}.png" for number in range(20_000)])
    for data in (tmp_path / "shards", tmp_path / "folder"):
        # In this process, since pages that processes share are counted in each of them.
        source, sizes = open_pixels(data, 64, workers=0), []
        for step in range(200):
            batch(source, step, 100)
            sizes.append(psutil.Process().memory_info().rss / 2**20)
        print(f"{data.name}: {sizes[19]:.0f} MB after 2,000 images and {sizes[-1]:.0f} after 20,000")
        assert max(sizes[19:]) < sizes[19] + 64
