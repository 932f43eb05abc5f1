"""What the model cards of the packaged models claim. The data set is not part of the repository: name the folder of
its two parquet files in ARIMAGE_EMOJI_DATA."""

import os
from pathlib import Path

import pytest
import torch
from emoji_quality import caption_retrieval, patch_kmeans_reconstructions, psnr

from arimage import AutoPipeline
from arimage.training.data.pictures import to_unit_range
from arimage_emoji import MODELS
from arimage_emoji.training.captioned import load_captioned_images
from arimage_emoji.training.recipe import load_recipe


@pytest.fixture(scope="module", params=["emoji-llamagen", "emoji-var", "emoji-arpg"])
def name(request):
    return request.param


@pytest.fixture(scope="module")
def pipe(name):
    pipe = AutoPipeline.from_pretrained(name)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="module")
def data_folder():
    if "ARIMAGE_EMOJI_DATA" not in os.environ:
        pytest.skip("ARIMAGE_EMOJI_DATA does not name the folder of train.parquet and heldout.parquet")
    return Path(os.environ["ARIMAGE_EMOJI_DATA"])


def test_packaged_weights_are_small():
    assert sum(path.stat().st_size for path in MODELS.rglob("*") if path.is_file()) <= 60e6


@pytest.mark.every(2)
def test_a_red_heart_is_red_in_the_middle_and_white_around_after_few_passes(pipe, name):
    output = pipe("a red heart", generator=torch.Generator().manual_seed(0), output_type="pt")
    image, stats = output.images[0], output.stats
    red, green, blue = image[:, 24:40, 24:40].mean((1, 2))
    assert red > 0.7 and green < 0.45 and blue < 0.45
    assert image[:, :3, :3].min() > 0.9 and image[:, -3:, :3].min() > 0.9
    assert stats.exact and stats.forward_passes <= {"emoji-llamagen": 128, "emoji-var": 6, "emoji-arpg": 40}[name]


def test_a_student_makes_a_red_heart_in_one_pass_and_saves_its_teacher_passes():
    pipe = AutoPipeline.from_pretrained("emoji-llamagen-dd")
    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(0)
    output = pipe("a red heart", generator=generator, output_type="pt")
    assert output.images.shape[-2:] == (128, 128) and output.stats.forward_passes == 1 and not output.stats.exact
    for image in (output.images[0], pipe("a red heart", generator=generator, output_type="pt", height=64).images[0]):
        red, green, blue = image[:, 24:40, 24:40].mean((1, 2))
        assert red > 0.7 and green < 0.45 and blue < 0.45 and image[:, :3, :3].min() > 0.9
    verified = pipe("a red heart", generator=torch.Generator().manual_seed(0), decoding="flow").stats
    teacher = AutoPipeline.from_pretrained("emoji-llamagen")
    teacher.set_progress_bar_config(disable=True)
    alone = teacher("a red heart", generator=torch.Generator().manual_seed(0), decoding="flow")
    assert verified.exact and verified.student_passes == 1
    assert verified.forward_passes < alone.stats.forward_passes


def test_a_red_heart_moves_right():
    pipe = AutoPipeline.from_pretrained("emoji-video-blocks")
    pipe.set_progress_bar_config(disable=True)
    output = pipe("a red heart, moving right", generator=torch.Generator().manual_seed(0), output_type="np")
    frames = torch.from_numpy(output.frames[0])
    assert frames.shape == (8, 64, 64, 3) and output.stats.exact and output.stats.forward_passes < 50
    red = (frames[..., 0] - frames[..., 1]).clamp(0)
    places = (red.sum(1) * torch.arange(64)).sum(1) / red.sum((1, 2))
    assert (places.diff() > 0).all() and places[-1] - places[0] > 20


def test_a_red_heart_of_continuous_tokens_is_red_in_the_middle_and_white_around():
    pipe = AutoPipeline.from_pretrained("emoji-latent-llama")
    pipe.set_progress_bar_config(disable=True)
    output = pipe(
        "red heart",
        decoding="sjd-coupled:window=8",
        num_diffusion_steps=10,
        generator=torch.Generator().manual_seed(0),
        output_type="pt",
    )
    red, green, blue = output.images[0][:, 24:40, 24:40].mean((1, 2))
    assert red > 0.7 and green < 0.4 and blue < 0.4 and output.images[0][:, :4, :4].min() > 0.9
    assert output.stats.exact and output.stats.forward_passes < 64 <= output.stats.head_calls


@pytest.mark.slow
@pytest.mark.parametrize("decoding", ["first", "second"])
def test_the_model_generates_what_the_prompt_asks_for(pipe, name, data_folder, decoding):
    decoding = {
        "emoji-llamagen": {"first": "ar", "second": "sjd-coupled"},
        "emoji-var": {"first": "next-scale", "second": "code"},
        "emoji-arpg": {"first": "ar", "second": "sjd-coupled"},
    }[name][decoding]
    recipe = load_recipe(name)
    trained_on = load_captioned_images(data_folder / "train.parquet", 64, **recipe["transformer"]["data"])
    gallery = load_captioned_images(data_folder / "train.parquet", 64, styles=["noto"])
    accuracy = caption_retrieval(pipe, trained_on, gallery, count=200, decoding=decoding)
    assert accuracy["top-1"] >= 0.6
    assert accuracy["top-5"] >= 0.8


@pytest.mark.slow
@torch.no_grad()
def test_the_tokenizer_beats_patch_kmeans_on_held_out_images(pipe, data_folder):
    train = load_captioned_images(data_folder / "train.parquet", 64, styles=["noto"]).images / 255
    heldout = load_captioned_images(data_folder / "heldout.parquet", 64, styles=["noto"]).images
    rebuilt = torch.cat([pipe.vq.decode(pipe.vq.encode(to_unit_range(batch))) for batch in heldout.split(64)])
    floor = patch_kmeans_reconstructions(train, heldout / 255, 4, 1024)
    assert psnr(heldout / 255, (rebuilt.clamp(-1, 1) + 1) / 2) > psnr(heldout / 255, floor) + 0.5
