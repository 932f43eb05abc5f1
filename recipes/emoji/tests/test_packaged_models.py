"""What the model cards of the packaged models claim. The data set is not part of the repository: name the folder of
its two parquet files in ARIMAGE_EMOJI_DATA."""

import pytest
import torch

from arimage import AutoPipeline
from arimage_emoji import MODELS


@pytest.fixture(scope="module", params=["emoji-llamagen", "emoji-var", "emoji-arpg"])
def name(request):
    return request.param


@pytest.fixture(scope="module")
def pipe(name):
    pipe = AutoPipeline.from_pretrained(name)
    pipe.set_progress_bar_config(disable=True)
    return pipe


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
    alone = teacher("a red heart", generator=torch.Generator().manual_seed(0), decoding="flow:guesses=random")
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
