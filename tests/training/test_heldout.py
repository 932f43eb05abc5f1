"""What is called held out was seen by no step."""

import itertools

import numpy as np
import pytest
import torch
from pipelines.latent_llama import tiny as tiny_latents
from pipelines.llamagen import tiny as tiny_llamagen

from arimage import AutoPipeline
from arimage.training.commands import train_app
from arimage.training.losses import losses_of


pytest.importorskip("datasets", reason="the extra `train` is not installed")
from training.tokens.test_cache import class_folders, encode, parquet  # noqa: E402
from training.tokens.test_task import recipe  # noqa: E402

from arimage.training.adapters.pairs import Pairs  # noqa: E402
from arimage.training.pixels import open_both  # noqa: E402
from arimage.training.recipe import TokenRecipe, load_recipe  # noqa: E402
from arimage.training.tokens.beginning import begin_training, token_settings  # noqa: E402
from arimage.training.tokens.cache import MappedShard, TokenCache  # noqa: E402
from arimage.training.tokens.heldout import Part, hold_out  # noqa: E402


# Commands that hold out by themselves, with the tests that say so: here, and of parts in `test_parts.py`.
BY_THEMSELVES = {"model", "lora", "drafter", "denoiser", "refiner", "student"}


def test_every_command_is_given_what_it_holds_out_or_is_tested_here():
    commands = {one.name: one.callback.__annotations__ for one in train_app.registered_commands if one.callback}
    without = {name for name, options in commands.items() if "heldout" not in options}
    optional = {name for name in commands.keys() - without if "None" in str(commands[name]["heldout"])}
    # `tokens` trains nothing, and a model of neighbours cannot change what is generated.
    assert without | optional == BY_THEMSELVES | {"tokens", "neighbours"}


def seen_and_judged(task):
    """The tokens that the steps of an epoch take, and those that a report reads."""
    judged, heldout = [], task.frozen.heldout
    read = type(heldout).read

    def reading(images, views):
        tokens, texts = read(heldout, images, views)
        judged.extend(tokens)
        return tokens, texts

    steps = range(len(task.frozen.batches.cache) // task.settings.batch_size + 1)
    seen = torch.cat([task._batch(step).tokens for step in steps])
    heldout.read = reading
    return seen, judged


def training(tmp_path, tokens, *heldout):
    table = load_recipe(recipe(tmp_path, steps=40), TokenRecipe)
    return begin_training(table, token_settings(table, workers=0), tokens, heldout, None, "cpu")


def test_training_on_tokens_holds_out_pictures_with_all_their_captions(tmp_path):
    pipe = tiny_llamagen.text_pipeline()
    pipe.save_pretrained(tmp_path / "model")
    # Three captions of each of twenty pictures, in three rounds.
    numbers = [*range(20)] * 3
    parquet(tmp_path / "a.parquet", numbers, caption=[f"{number}, {i}" for i, number in enumerate(numbers)])
    encode(pipe, tmp_path / "a.parquet", tmp_path / "tokens", model=str(tmp_path / "model"))
    task = training(tmp_path, tmp_path / "tokens")
    seen, judged = seen_and_judged(task)
    with torch.no_grad():
        figures = task.report(0, tmp_path)
    assert list(figures) == ["held-out loss"] and judged
    assert not {tuple(row) for row in seen.tolist()} & {tuple(row.tolist()) for row in judged}
    assert len(task.frozen.heldout) == 2 and len(task.frozen.batches.cache) == 54


def test_continuous_tokens_of_one_picture_are_found_though_rounded_otherwise(tmp_path):
    pipe = tiny_latents.pipeline()
    pipe.save_pretrained(tmp_path / "model")
    parquet(tmp_path / "a.parquet", [*range(20)] * 2, label=[number % 2 for number in range(40)])
    encode(pipe, tmp_path / "a.parquet", tmp_path / "tokens", model=str(tmp_path / "model"))
    cache = TokenCache(tmp_path / "tokens")
    plain = cache._mapped

    def rounded(number):
        # In another batch sums are rounded in another order.
        shard = plain(number)
        return MappedShard(shard.tokens * np.float16(1 + number % 2 * 2**-10), shard.labels)

    cache._mapped = rounded
    trained, held = hold_out(cache)
    assert held is not None
    ours, theirs = (one.read(list(range(len(one))), [0] * len(one))[0].flatten(1) for one in (trained, held))
    assert len(trained) < 38 and torch.cdist(ours, theirs).min() > 0.1 * theirs.norm(dim=1).max()


def test_every_class_keeps_an_image_and_few_images_are_all_trained(tmp_path):
    pipe = tiny_llamagen.class_pipeline()
    for count, names in ((1, "abcdefghij"), (2, "abcde"), (3, "abc")):
        encode(pipe, class_folders(tmp_path / f"{count}", names, count), tmp_path / f"{count}-tokens")
        cache = TokenCache(tmp_path / f"{count}-tokens")
        trained, held = hold_out(cache)
        _, classes = trained.read(list(range(len(trained))), [0] * len(trained))
        assert set(classes) == {str(number) for number in range(len(names))}
        assert (held is None) == (count != 2) and len(trained) == len(cache) - (count == 2)


def test_images_of_the_heldout_set_are_not_trained(tmp_path, caplog):
    pipe = tiny_llamagen.class_pipeline()
    pipe.save_pretrained(tmp_path / "model")
    data = class_folders(tmp_path / "data", "ab", 4)
    encode(pipe, data, tmp_path / "tokens", model=str(tmp_path / "model"))
    # Of each class the last two, and two that are not in the other set.
    for name, number in itertools.product("ab", range(2)):
        (data / name / f"{number}.png").unlink()
    class_folders(tmp_path / "new", "ab", 6)
    for name, number in itertools.product("ab", range(4, 6)):
        (tmp_path / "new" / name / f"{number}.png").rename(data / name / f"{number}.png")
    encode(pipe, data, tmp_path / "held", model=str(tmp_path / "model"))
    task = training(tmp_path, tmp_path / "tokens", tmp_path / "held")
    assert len(task.frozen.batches.cache) == 4 and "4 of 8 images" in caplog.text
    seen, judged = seen_and_judged(task)
    with torch.no_grad():
        task.report(0, tmp_path)
    assert not {tuple(row) for row in seen.tolist()} & {tuple(row.tolist()) for row in judged}
    with pytest.raises(ValueError, match="all images .* give others as --heldout"):
        training(tmp_path, tmp_path / "tokens", tmp_path / "tokens")


def test_a_part_reads_what_it_says(tmp_path):
    encode(tiny_llamagen.class_pipeline(), class_folders(tmp_path / "data"), tmp_path / "tokens")
    cache = TokenCache(tmp_path / "tokens")
    every, _ = cache.read(list(range(9)), [0] * 9)
    numbers = torch.tensor([0, 1, 4, 8]).numpy()
    for part, places in ((Part(cache, numbers), [0, 1, 4, 8]), (Part(cache, numbers, without=True), [2, 3, 5, 6, 7])):
        assert torch.equal(part.read(list(range(len(part))), [0] * len(part))[0], every[places])


def test_an_adapter_holds_out_pictures_with_all_their_captions_and_from_the_prior():
    pytest.importorskip("peft", reason="the extra `lora` is not installed")
    from arimage.training.adapters.lora import LoraSettings, LoraTask

    pipe = tiny_llamagen.text_pipeline()
    images = torch.randint(256, (10, 3, *pipe.image_sizes[0]), dtype=torch.uint8).repeat(3, 1, 1, 1)
    data = Pairs(images, [f"caption {number}" for number in range(30)])
    task = LoraTask(pipe, data, LoraSettings(rank=2), base="tiny", prior=data.take(list(range(10))))
    trained = {*task.data.pictures(), *task.prior.pictures()}
    assert len(task.heldout) == 3 and len(set(task.heldout.pictures())) == 1 and len(trained) == 9
    assert not trained & set(task.heldout.pictures())
    with pytest.raises(ValueError, match="1 different pictures: give at least 2"):
        LoraTask(pipe, data.take([0, 10, 20]), LoraSettings(rank=2), base="tiny")


def test_files_of_a_folder_that_are_in_both_sets_are_counted(tmp_path, caplog):
    data = class_folders(tmp_path / "data")
    open_both(data, data, 8, split="train[4:]", heldout_split="train[:4]")
    assert not caplog.text
    open_both(data, data, 8, split="train", heldout_split="train[:4]")
    assert "4 of 4 held-out images are in --data too" in caplog.text


def test_files_of_a_folder_in_the_other_one_are_counted(tmp_path, caplog):
    data = class_folders(tmp_path / "data", "ab", 4)
    (tmp_path / "link").symlink_to(data / "b")
    whole = {"split": "train", "heldout_split": "train"}
    for one, other in ((data, data / "b"), (data, tmp_path / "link"), (data / "a" / ".." / "b", data / "b")):
        caplog.clear()
        open_both(one, other, 8, **whole)
        assert "4 of 4 held-out images" in caplog.text
    caplog.clear()
    open_both(data / "b", data, 8, **whole)
    assert "4 of 8 held-out images" in caplog.text
    caplog.clear()
    open_both(data / "a", data / "b", 8, **whole)
    assert not caplog.text


def test_rows_of_tables_that_are_in_both_sets_are_counted(tmp_path, caplog):
    for number in range(2):
        parquet(tmp_path / f"{number}.parquet", range(4 * number, 4 * number + 4), label=[0] * 4)
    data, held = open_both(tmp_path, tmp_path, 8, split="train[3:]", heldout_split="train[:5]")
    assert (len(data), len(held)) == (5, 5) and "2 of 5 held-out images" in caplog.text
    caplog.clear()
    open_both(tmp_path, tmp_path, 8, split="train[5:]", heldout_split="train[:5]")
    assert not caplog.text


def test_captions_of_a_batch_are_encoded_in_one_call():
    pipe = tiny_llamagen.text_pipeline()
    losses, calls = losses_of(pipe, "a red heart"), []
    pipe.text_encoder.register_forward_hook(lambda *_: calls.append(1))
    captions = ["a red heart", "cat", "a red heart", "a blue book"]
    together = losses.conditions(captions)
    assert len(calls) == 1
    for name, value in together.items():
        alone = torch.cat([losses.conditions([text])[name] for text in captions])
        torch.testing.assert_close(value, alone)
        # A resumed run has encoded others before.
        assert torch.equal(value, losses.conditions(captions)[name])


@pytest.fixture
def sets(tmp_path):
    """Tokens of classes to train on, and of two held-out sets, one of which shares an image with them."""
    pipe = tiny_llamagen.class_pipeline()
    pipe.save_pretrained(tmp_path / "model")
    for name, first in {"tokens": 0, "val": 5, "test": 9}.items():
        data = tmp_path / "data" / name
        data.mkdir(parents=True)
        parquet(data / "a.parquet", range(first, first + 6), label=[0, 1] * 3)
        encode(pipe, data / "a.parquet", tmp_path / name, model=str(tmp_path / "model"))
    return tmp_path


def run_of(sets, best=None, steps=3, heldout=("val", "test")):
    training = "" if best is None else f'best = "{best}"'
    table = load_recipe(recipe(sets, training=training, steps=steps), TokenRecipe)
    folders = [sets / name for name in heldout]
    return begin_training(table, token_settings(table, workers=0), sets / "tokens", folders, None, "cpu")


def test_several_sets_are_held_out_and_reported_by_their_names(sets, caplog):
    task = run_of(sets)
    assert len(task.frozen.batches.cache) == 5 and "images to train on: 5, held out: 12" in task.held_out
    assert "1 of 6 images" in caplog.text
    with torch.no_grad():
        figures = task.report(0, sets)
        mean = {name: run_of(sets, heldout=[name]).report(0, sets)["held-out loss"] for name in ("val", "test")}
    count = task.frozen.sets["val"].index.shape[0]
    assert figures == {f"nats per picture, {name}": pytest.approx(count * mean[name]) for name in ("val", "test")}
    (sets / "other").mkdir()
    (sets / "val").rename(sets / "other" / "test")
    with pytest.raises(ValueError, match="two folders that are called alike"):
        run_of(sets, heldout=["other/test", "test"])


def test_the_weights_of_the_lowest_loss_are_kept(sets, monkeypatch):
    task = run_of(sets, best="test")
    out = sets / "run" / "transformer"
    out.mkdir(parents=True)
    losses = iter([9.0, 3.0, 9.0, 2.0, 9.0, 2.5])
    monkeypatch.setattr(task, "_judge", lambda held: (next(losses), 16))
    with torch.no_grad():
        kept = []
        for step in range(3):
            task.report(step, out)
            kept.append((sets / "run" / "best").stat().st_mtime_ns)
            task.transformer.head.weight.add_(1)
    assert task.lowest.tolist() == [2.0, 1.0] and kept[0] < kept[1] == kept[2]
    pipe = AutoPipeline.from_pretrained(sets / "run" / "best", dtype=torch.float32)
    torch.testing.assert_close(pipe.transformer.head.weight, task.transformer.head.weight - 2, atol=1e-2, rtol=1e-2)


def test_a_resumed_run_remembers_the_lowest_loss(sets):
    task = run_of(sets, best="val")
    task.fit(sets / "run")
    assert (sets / "run" / "best" / "model_index.json").is_file() and task.lowest[0] < torch.inf
    again = run_of(sets, best="val", steps=6)
    again.frozen.judge = lambda *given: torch.full((6, 1), 99.0)
    again.fit(sets / "run")
    assert torch.equal(again.lowest, task.lowest)
    with pytest.raises(ValueError, match="best = 'val' and you ask for 'test'"):
        run_of(sets, best="test", steps=9).fit(sets / "run")


def test_a_set_that_there_is_not_cannot_choose_the_weights(sets):
    with pytest.raises(ValueError, match="best is 'dev', .* those are val, test"):
        run_of(sets, best="dev")
    with pytest.raises(ValueError, match="best is 'val', .* give --heldout"):
        run_of(sets, best="val", heldout=())
