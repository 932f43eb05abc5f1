"""A recipe trains on a small data set, goes on after an interruption, and leaves a model that generates."""

import copy
import itertools
import json
import math
import shutil
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from arimage import AutoPipeline, SpeculativeJacobiDecoding
from arimage.pipelines.kinds.class_or_text import last_state
from arimage.pipelines.text.known import KNOWN_CAPTIONS
from arimage.training.loop import OptimizerSettings
from arimage.training.tokenizers.tokenizer import TokenizerTask
from arimage_emoji.known import KnownCaptions
from arimage_emoji.training.captioned import COLUMNS, load_captioned_images
from arimage_emoji.training.recipe import load_recipe, run_tokenizer, run_transformer, whole_recipes
from arimage_emoji.training.transformers.llamagen import TransformerSettings, TransformerTask


SIZE = 16
COLOURS = {"red": (220, 30, 30), "green": (20, 180, 60), "blue": (30, 60, 230)}

RECIPE = {
    "image_size": SIZE,
    "tokenizer": {
        "data": {"styles": ["flat"]},
        "model": {
            "channels": 8, "channel_multipliers": [1, 2, 2], "layers_per_block": 1, "latent_channels": 16,
            "codebook_size": 16, "codebook_dim": 4, "norm_num_groups": 4,
        },
        "optimizer": {"steps": 24, "learning_rate": 5e-3, "weight_decay": 0.0, "warmup_steps": 4, "ema_decay": 0.9},
        "training": {"batch_size": 8, "codebook_start": 4, "kmeans_batches": 2, "restart_every": 5},
    },
    "transformer": {
        "data": {"styles": ["flat"], "skin_tones": False},
        "model": {
            "hidden_size": 32, "intermediate_size": 64, "num_layers": 1, "num_attention_heads": 2, "dropout": 0.1,
        },
        "optimizer": {"steps": 30, "learning_rate": 1e-2, "warmup_steps": 4, "ema_decay": 0.9},
        "training": {
            "batch_size": 8, "caption_length": 8, "text_vocab_size": 300,
            "sample_prompts": ["a red square", "a blue disc"],
        },
    },
    "text_encoder": {"d_model": 16, "d_kv": 8, "num_heads": 2, "d_ff": 32, "num_layers": 1, "dropout_rate": 0.1},
    "generation": {
        "sampling": {"guidance_scale": 2.0, "top_k": 10}, "decoding": {"name": "sjd-coupled", "window": 8},
    },
}  # fmt: skip


def rows():
    """Squares and discs of three colours in two styles, twice the size of training; half of the squares are toned."""
    y, x = np.mgrid[: 2 * SIZE, : 2 * SIZE] - SIZE + 0.5
    shapes = {"square": (abs(x) < 9) & (abs(y) < 9), "disc": x**2 + y**2 < 90}
    for style, (shape, inside), (colour, rgb) in itertools.product(("flat", "line"), shapes.items(), COLOURS.items()):
        picture = np.full((2 * SIZE, 2 * SIZE, 3), 255, np.uint8)
        picture[inside] = rgb
        toned = shape == "square" and colour == "red"
        yield {
            "image": picture,
            "alpha": inside,
            "caption": f"a {colour} {shape}",
            "captions": [f"{shape}, {colour}", f"{colour} {shape}, {style} style"],
            "style": style,
            "group": f"{shape}s",
            "name": f"{colour} {shape}",
            "base": f"{shape}-{colour}",
            "skin_tones": ["light"] if toned else [],
            "weight": 2.0 if shape == "disc" else 1.0,
        }


@pytest.fixture(scope="module")
def data(tmp_path_factory, write_pictures):
    return write_pictures(tmp_path_factory.mktemp("data") / "shapes.parquet", rows())


def record_losses(monkeypatch, task_class):
    """Loss by step of every step that is run."""
    losses = {}
    loss = task_class.loss

    def recorded(self, step):
        value, figures = loss(self, step)
        losses[step] = float(value.detach())
        return value, figures

    monkeypatch.setattr(task_class, "loss", recorded)
    return losses


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """A finished run: its folder, and the losses of tokenizer and transformer."""
    out = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as monkeypatch:
        tokenizer_losses = record_losses(monkeypatch, TokenizerTask)
        transformer_losses = record_losses(monkeypatch, TransformerTask)
        torch.manual_seed(1)
        run_tokenizer(RECIPE, data, data, out, "cpu")
        run_transformer(RECIPE, data, data, out, "cpu")
    return out, tokenizer_losses, transformer_losses


def weights_of(out):
    """Every weight that a run leaves, by its file and name."""
    return {
        (path.relative_to(out).as_posix(), name): value
        for path in sorted(out.rglob("*.safetensors"))
        for name, value in load_file(path).items()
    }


# Data


def test_a_data_set_is_decoded_filtered_and_resized(data):
    images = load_captioned_images(data, SIZE, styles=["flat"], skin_tones=False)
    assert len(images) == 5 and "red square" not in images.names
    assert images.images.dtype == torch.uint8 and images.images.shape == (5, 3, SIZE, SIZE)
    assert images.alpha.dtype == torch.uint8 and images.alpha.shape == (5, 1, SIZE, SIZE)
    disc = images.names.index("blue disc")
    assert images.images[disc, :, SIZE // 2, SIZE // 2].tolist() == list(COLOURS["blue"])
    assert images.images[disc, :, 0, 0].tolist() == [255, 255, 255]
    assert images.alpha[disc, 0, SIZE // 2, SIZE // 2] == 255 and images.alpha[disc, 0, 0, 0] == 0
    assert images.captions[disc] == ["a blue disc", "disc, blue", "blue disc, flat style"]
    assert images.bases[disc] == "disc-blue" and images.weights[disc] == 2
    assert len(load_captioned_images(data, SIZE)) == 12


def test_images_are_sampled_in_proportion_to_their_weights(data):
    images = load_captioned_images(data, SIZE, styles=["flat"])
    sampled = images.sample(9000, torch.Generator().manual_seed(0))
    discs = torch.tensor(["disc" in name for name in images.names])[sampled].float().mean()
    assert abs(discs - 2 / 3) < 0.03
    assert torch.equal(sampled, images.sample(9000, torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("column", COLUMNS)
def test_a_missing_column_is_refused_by_name(data, tmp_path, column):
    path = tmp_path / "poor.parquet"
    pq.write_table(pq.read_table(data).drop_columns([column]), path)
    with pytest.raises(ValueError, match=rf"poor.parquet lacks the columns \['{column}'\]"):
        load_captioned_images(path, SIZE)


def test_groups_are_selected_and_a_selection_without_images_is_refused(data, tmp_path):
    images = load_captioned_images(data, SIZE, groups=["discs"])
    assert sorted(images.bases) == sorted(2 * [f"disc-{colour}" for colour in COLOURS])
    with pytest.raises(ValueError, match=r"has no row left with styles=\['noto'\] and groups=None"):
        load_captioned_images(data, SIZE, styles=["noto"])
    with pytest.raises(ValueError, match=r"none.parquet is not a file"):
        load_captioned_images(tmp_path / "none.parquet", SIZE)


def test_some_images_have_much_noise_and_the_others_little():
    settings = TransformerSettings(
        OptimizerSettings(1, 1.0), code_noise=0.02, most_noise=0.8, stages=({"start": 10, "noisy_share": 0.5},)
    )
    tokens = (1 << 20) + torch.arange(2000)[:, None].expand(-1, 256)
    task = SimpleNamespace(settings=settings)
    early, noisy = (
        TransformerTask.noisy(task, tokens, 1 << 20, step, torch.Generator().manual_seed(0)) for step in (9, 10)
    )
    assert (early != tokens).float().mean(1).max() < 0.1
    shares = (noisy != tokens).float().mean(1)
    much = shares > 0.08
    of_another = ((noisy != tokens) & (noisy >= 1 << 20)).any(1)
    assert (noisy[of_another] >= 1 << 20).all()
    assert of_another.float().mean() == pytest.approx(0.25, abs=0.03)
    assert much.float().mean() == pytest.approx(0.5 * 0.92, abs=0.04)
    assert shares[~much].mean() == pytest.approx(0.02, abs=0.005)
    assert shares[much].max() < 0.9 and shares[much].mean() == pytest.approx(0.44, abs=0.03)


def test_stages_change_settings_from_their_step_on():
    stages = ({"start": 4, "noisy_share": 0.5}, {"start": 8, "short_share": 0.1})
    settings = TransformerSettings(OptimizerSettings(1, 1.0), stages=stages)
    found = [(one.noisy_share, one.short_share) for one in map(settings.at, (3, 4, 8))]
    assert found == [(0.0, 0.75), (0.5, 0.75), (0.5, 0.1)]
    with pytest.raises(ValueError, match=r"^stages\[0\]: nosy_share is not a setting: "):
        TransformerSettings(OptimizerSettings(1, 1.0), stages=({"start": 4, "nosy_share": 0.5},))


# Recipes


@pytest.mark.parametrize("name", [*whole_recipes()])
def test_packaged_recipes_are_complete(name):
    recipe = load_recipe(name)
    assert recipe["image_size"] % 2 ** (len(recipe["tokenizer"]["model"]["channel_multipliers"]) - 1) == 0


def test_an_unknown_recipe_is_refused_with_those_that_are_known():
    with pytest.raises(ValueError, match="unknown recipe nonesuch: give a TOML file or one of .*emoji-llamagen"):
        load_recipe("nonesuch")


def test_a_recipe_may_be_a_file(tmp_path):
    (tmp_path / "mine.toml").write_text("image_size = 32\n")
    assert load_recipe(tmp_path / "mine.toml") == {"image_size": 32}


def test_the_losses_fall(trained):
    _, tokenizer_losses, transformer_losses = trained
    assert sorted(tokenizer_losses) == list(range(24)) and sorted(transformer_losses) == list(range(30))
    for losses, factor in ((tokenizer_losses, 0.7), (transformer_losses, 0.9)):
        values = list(losses.values())
        assert sum(values[-4:]) < factor * sum(values[:4])
    # A head of zeros gives every code the same probability.
    assert transformer_losses[0] == pytest.approx(math.log(16), abs=1e-3)


def test_a_run_leaves_its_records(trained):
    out, *_ = trained
    for part, figure, picture in (
        ("tokenizer", "held-out PSNR", "reconstructions.png"),
        ("transformer", "held-out loss", "samples.png"),
    ):
        log = [json.loads(line) for line in (out / part / "log.jsonl").read_text().splitlines()]
        assert math.isfinite(log[-1][figure])
        assert Image.open(out / part / picture).size[0] >= 2 * SIZE
        assert not list(out.rglob("*partial")) and not list(out.rglob("*.old"))
    assert (out / "model" / "model_index.json").is_file()


def test_the_trained_model_loads_by_its_folder_and_generates(trained):
    out, *_ = trained
    files = {name: value.dtype for (_, name), value in weights_of(out / "model").items()}
    assert set(files.values()) == {torch.float16}
    pipe = AutoPipeline.from_pretrained(out / "model")
    pipe.set_progress_bar_config(disable=True)
    assert pipe.decoding == SpeculativeJacobiDecoding(window=8, refresh="coupled")
    assert pipe.generation_config == {"guidance_scale": 2.0, "temperature": 1.0, "top_k": 10, "top_p": 1.0}
    assert pipe.transformer.dtype == torch.float32
    output = pipe(["a red square", "a blue disc"], generator=torch.Generator().manual_seed(0))
    assert [image.size for image in output.images] == [(SIZE, SIZE)] * 2
    # A few steps teach no more than that the background is white.
    border = [np.asarray(image)[[0, -1]].mean() for image in output.images]
    assert min(border) > 160, border


def test_pictures_that_are_not_learned_are_sampled_more_often(trained, data, tmp_path, monkeypatch):
    out, *_ = trained
    (tmp_path / "tokenizer").symlink_to(out / "tokenizer")
    unlearned = {"red disc": ["a red disc"], "green disc": ["green disc"]}
    known = KnownCaptions({"blue disc": [], "red disc": []}, unlearned=unlearned)
    (tmp_path / KNOWN_CAPTIONS).write_text(known.to_text())
    seen = {}

    def run(task_run):
        seen.update(zip(task_run.data.names, task_run.data.weights.tolist(), strict=True))
        return AutoPipeline.from_pretrained(out / "model")

    monkeypatch.setattr(TransformerTask, "run", run)
    run_transformer(RECIPE, data, data, tmp_path, "cpu", unlearned=tmp_path)
    assert seen["green disc"] == 4 * seen["blue disc"]
    assert seen["red disc"] == seen["blue disc"]
    with pytest.raises(ValueError, match="has no known_captions.json: give the folder"):
        run_transformer(RECIPE, data, data, tmp_path, "cpu", unlearned=out)


def test_a_model_is_trained_further_and_its_text_encoder_can_stay_as_it_was(trained, data, tmp_path):
    shutil.copytree(trained[0] / "tokenizer", tmp_path / "tokenizer")
    recipe = copy.deepcopy(RECIPE)
    recipe["transformer"]["optimizer"]["steps"] = 4
    recipe["transformer"]["training"]["train_text"] = False
    run_transformer(recipe, data, data, tmp_path, "cpu", start_from=trained[0] / "model")
    for part, same in (("text_encoder", True), ("transformer", False)):
        ours, theirs = (
            load_file(next((run / "model" / part).glob("*.safetensors"))) for run in (tmp_path, trained[0])
        )
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs) == same
    recipe["transformer"]["model"] |= {"hidden_size": 24, "intermediate_size": 40}
    shutil.copytree(tmp_path / "tokenizer", tmp_path / "other" / "tokenizer")
    with pytest.raises(ValueError, match="whose weights do not fit a LlamaGenTransformer"):
        run_transformer(recipe, data, data, tmp_path / "other", "cpu", start_from=trained[0] / "model")


def test_the_text_encoder_of_another_model_can_be_taken(trained, data, tmp_path):
    shutil.copytree(trained[0] / "tokenizer", tmp_path / "tokenizer")
    recipe = copy.deepcopy(RECIPE)
    recipe["transformer"]["optimizer"]["steps"] = 2
    recipe["transformer"]["training"]["train_text"] = False
    recipe["text_encoder"] = {"start_from": str(trained[0] / "model")}
    pipe = run_transformer(recipe, data, data, tmp_path, "cpu")
    theirs = AutoPipeline.from_pretrained(trained[0] / "model", dtype=torch.float32)
    for name, weight in theirs.text_encoder.state_dict().items():
        torch.testing.assert_close(pipe.text_encoder.state_dict()[name], weight, rtol=2**-8, atol=0)
    assert pipe.tokenizer.get_vocab() == theirs.tokenizer.get_vocab()


def test_another_caption_is_mixed_into_the_embeddings(trained, data):
    pipe = AutoPipeline.from_pretrained(trained[0] / "model", dtype=torch.float32)
    images = load_captioned_images(data, SIZE, ["flat"])
    settings = TransformerSettings(OptimizerSettings(1, 1e-3), caption_length=8, mixed_share=0.5)
    task = TransformerTask(pipe, images, images, settings).eval()
    prompts = ["a red square", "blue"] * 200
    # The captions differ in length, and the last state is mixed with the last one.
    alone = last_state(*task.embed(prompts))[0]
    task.train().text_encoder.eval()
    mixed = last_state(*task.embed(prompts))[0] - alone
    other = alone.roll(1, 0) - alone
    share = (mixed.norm(dim=(1, 2)) / other.norm(dim=(1, 2))).detach()
    torch.testing.assert_close(mixed, share[:, None, None] * other, rtol=0, atol=1e-5)
    assert 0.4 < (share > 1e-6).float().mean() < 0.6
    assert 0.4 < share.max() <= 0.5 + 1e-6


def test_the_transformer_needs_the_tokenizer_first(data, tmp_path):
    with pytest.raises(ValueError, match="has no trained tokenizer: run `arimage-emoji train tokenizer`"):
        run_transformer(RECIPE, data, data, tmp_path, "cpu")
    assert list(tmp_path.iterdir()) == []
