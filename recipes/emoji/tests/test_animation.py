"""Clips of moving sprites, and a recipe that trains a video model on them."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from arimage import AutoPipeline
from arimage.pipelines.cosmos.pipeline_cosmos import CosmosPipeline
from arimage.training import loop
from arimage_emoji.data.animation import ClipSettings, animate, is_held_out, make_clips, poses
from arimage_emoji.metrics.motions import CAST, COMBINATIONS, motions_in
from arimage_emoji.training.captioned import load_captioned_images
from arimage_emoji.training.recipe import run_tokenizer, run_transformer


SIZE = 16
NAMES = {"red heart": (220, 30, 30), "pizza": (240, 180, 40), "frog": (20, 160, 60)}
RECIPE = {
    "image_size": SIZE,
    "clips": {"frames": 4, "grounds": 20, "heldout_stride": 2},
    "tokenizer": {
        "model": {
            "channels": 8, "channel_multipliers": [1, 2, 2], "layers_per_block": 1, "latent_channels": 16,
            "codebook_size": 24, "codebook_dim": 4, "norm_num_groups": 4,
        },
        "optimizer": {"steps": 12, "learning_rate": 5e-3, "weight_decay": 0.0, "warmup_steps": 4, "ema_decay": 0.9},
        "training": {"batch_size": 16, "codebook_start": 2, "kmeans_batches": 2, "max_shift": 0},
    },
    "transformer": {
        "model": {
            "hidden_size": 48, "intermediate_size": 64, "num_layers": 1, "num_attention_heads": 2,
            "num_key_value_heads": 2, "head_dim": 24, "rope_theta": 100.0,
        },
        "optimizer": {"steps": 8, "learning_rate": 5e-3, "warmup_steps": 2, "ema_decay": 0.5},
        "training": {
            "batch_size": 4, "caption_length": 12, "text_vocab_size": 300,
            "stages": [{"start": 4, "noisy_share": 0.5}],
            "sample_prompts": ["a heart, moving right", "a frog, growing"],
        },
    },
    "text_encoder": {"d_model": 16, "d_kv": 8, "num_heads": 2, "d_ff": 32, "num_layers": 1, "dropout_rate": 0.0},
    "generation": {"sampling": {"top_k": 5}, "decoding": {"name": "sjd-coupled", "window": 8}},
}  # fmt: skip


@pytest.fixture(scope="module")
def path(tmp_path_factory, write_pictures):
    """Three sprites, twice the size of training: their left half is darker."""
    y, x = np.mgrid[: 2 * SIZE, : 2 * SIZE] - SIZE + 0.5
    inside = (abs(x) < 13) & (abs(y) < 13)
    rows = []
    for name, colour in NAMES.items():
        picture = np.full((2 * SIZE, 2 * SIZE, 3), 255, np.uint8)
        picture[inside] = colour
        picture[inside & (x < 0)] //= 2
        rows.append({"image": picture, "alpha": inside, "name": name})
    return write_pictures(tmp_path_factory.mktemp("data") / "sprites.parquet", rows)


@pytest.fixture(scope="module")
def data(path):
    return load_captioned_images(path, SIZE)


@pytest.fixture(autouse=True)
def no_plots(monkeypatch):
    monkeypatch.setattr(loop, "plot_log", lambda log, path: None)


# Clips


def test_every_object_makes_every_motion_but_those_held_out(data):
    settings = ClipSettings(frames=4, grounds=0, heldout_stride=1)
    clips, held_out = make_clips(data, settings), make_clips(data, settings, held_out=True)
    assert len(clips) + len(held_out) == len(NAMES) * len(COMBINATIONS) and len(held_out)
    assert clips.images.shape == (len(clips), 4, 3, SIZE, SIZE) and clips.images.dtype == torch.uint8
    for kept, one in ((False, clips), (True, held_out)):
        assert all(
            is_held_out(name, motions_in(texts[0])) == kept
            for name, texts in zip(one.names, one.captions, strict=True)
        )
    share = np.mean([is_held_out(name, motions) for name in CAST for motions in COMBINATIONS])
    assert 0.08 < share < 0.12


def test_clips_on_coloured_grounds_say_so(data):
    clips = make_clips(data, ClipSettings(frames=2, grounds=100))
    coloured = [i for i, texts in enumerate(clips.captions) if "background" in texts[0]]
    assert len(coloured) == len(clips) / 2
    for i, texts in enumerate(clips.captions):
        assert ((clips.images[i, :, :, 0, 0] < 255).any() == (i in coloured)) and len(set(texts)) > 8
        assert {"background" in text for text in texts} == {i in coloured}
        assert len({motions_in(text) for text in texts}) == 1
    again = make_clips(data, ClipSettings(frames=2, grounds=100))
    assert torch.equal(again.images, clips.images) and again.captions == clips.captions


def test_sprites_move_grow_and_turn_clockwise(data):
    def where(motion, frame):
        """The columns, rows and number of the dark pixels, and of all."""
        images, alpha = animate(data.images[0], data.alpha[0], poses((motion,), 8))
        inside = alpha[frame, 0] > 127
        dark = inside & (images[frame, 0] < 150)
        return [(*mask.nonzero().float().mean(0).flip(0).tolist(), int(mask.sum())) for mask in (dark, inside)]

    middle = (SIZE - 1) / 2
    for motion, axis, sign in (("right", 0, 1), ("left", 0, -1), ("up", 1, -1), ("down", 1, 1)):
        first, last = (where(motion, frame)[1][axis] - middle for frame in (0, -1))
        assert sign * first < -2 and sign * last > 2
    assert where("growing", 7)[1][2] > 3 * where("growing", 0)[1][2]
    assert where("shrinking", 0)[1][2] > 3 * where("shrinking", 7)[1][2]
    # The dark half is on the left, and a quarter of a turn later at the top.
    (left, row, _), _ = where("spinning", 0)
    (column, top, _), _ = where("spinning", 2)
    assert left < middle - 1 and abs(row - middle) < 0.5 and top < middle - 1 and abs(column - middle) < 0.5
    heights = [where("bouncing", frame)[1][1] for frame in range(8)]
    assert heights[0] == heights[4] > middle + 2 and heights[2] == heights[6] < middle - 2


def test_a_data_set_without_the_objects_is_refused(data):
    with pytest.raises(ValueError, match="none of the objects"):
        make_clips(replace(data, names=["nothing"] * len(data)), ClipSettings())


# Training


@pytest.fixture(scope="module")
def trained(path, tmp_path_factory):
    out = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(loop, "plot_log", lambda log, path: None)
        run_tokenizer(RECIPE, path, path, out, "cpu")
        pipe = run_transformer(RECIPE, path, path, out, "cpu")
    return out, pipe


@pytest.mark.slow
def test_a_trained_model_makes_videos_of_texts(trained):
    out, _ = trained
    pipe = AutoPipeline.from_pretrained(out / "model")
    pipe.set_progress_bar_config(disable=True)
    assert type(pipe) is CosmosPipeline and pipe.generation_config["top_k"] == 5 and pipe.num_frames == 4
    assert pipe.known_captions is not None and pipe.known_captions.knows("a pizza, growing and spinning")
    [frames] = pipe("a red heart, moving right").frames
    assert len(frames) == 4 and frames[0].size == (SIZE, SIZE)
    generator = torch.Generator().manual_seed(0)
    output = pipe(
        ["pizza, growing", "a frog, spinning"], num_videos_per_prompt=2, generator=generator, output_type="pt"
    )
    assert output.frames.shape == (4, 4, 3, SIZE, SIZE) and output.tokens.shape == (4, 4, 4, 4)
    # What it continues comes first.
    image = Image.new("RGB", (SIZE, SIZE), "white")
    continued = pipe("a frog, spinning", image=image, output_type="latent")
    given = pipe.vq.encode(torch.ones(1, 3, 1, SIZE, SIZE))
    assert torch.equal(continued.frames[:, :1], given)


def test_reports_show_a_video_per_row(trained):
    out, _ = trained
    assert Image.open(out / "transformer" / "samples.png").size == (4 * SIZE, 2 * SIZE)
    assert "held-out loss" in (out / "transformer" / "log.jsonl").read_text()


def test_a_wrong_setting_of_clips_is_refused(path, tmp_path):
    with pytest.raises(ValueError, match="^the recipe: clips.speed is not a setting: "):
        run_tokenizer(RECIPE | {"clips": {"speed": 3}}, path, path, tmp_path, "cpu")
