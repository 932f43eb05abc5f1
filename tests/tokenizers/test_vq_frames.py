"""Every frame of a video is an image of its own to the tokenizer."""

import pytest
import tiny
import torch

from arimage import FramewiseVQModel, LlamaGenVQModel


@pytest.fixture(scope="module")
def both():
    settings = {
        "channels": 8, "channel_multipliers": (1, 2), "layers_per_block": 1, "latent_channels": 8, "codebook_size": 20,
        "codebook_dim": 4, "norm_num_groups": 4,
    }  # fmt: skip
    frames = tiny.randomise(FramewiseVQModel(**settings), 0)
    images = LlamaGenVQModel(**settings).eval()
    images.load_state_dict(frames.state_dict())
    return frames, images


@torch.no_grad()
def test_frames_are_those_of_the_image_tokenizer(both):
    frames, images = both
    video = torch.rand(2, 3, 5, 12, 8, generator=torch.Generator().manual_seed(0)) * 2 - 1
    tokens = frames.encode(video)
    assert tokens.shape == (2, 5, 6, 4)
    assert torch.equal(tokens, torch.stack([images.encode(video[:, :, t]) for t in range(5)], dim=1))
    decoded = frames.decode(tokens)
    assert decoded.shape == video.shape
    one_by_one = torch.stack([images.decode(tokens[:, t]) for t in range(5)], dim=2)
    torch.testing.assert_close(decoded, one_by_one, atol=1e-5, rtol=0)
    stream = frames.stream()
    streamed = torch.cat([stream.decode(maps) for maps in tokens.split([1, 3, 1], dim=1)], dim=2)
    torch.testing.assert_close(streamed, decoded, atol=1e-5, rtol=0)


def test_frames_are_counted_as_maps(both):
    frames, _ = both
    assert frames.num_maps(9) == frames.num_frames(9) == 9 and frames.codebook_size == 20
    with pytest.raises(ValueError, match="0 frames do not fit"):
        frames.num_maps(0)


def test_a_folder_of_the_image_tokenizer_is_read(both, tmp_path):
    frames, images = both
    images.save_pretrained(tmp_path)
    loaded = FramewiseVQModel.from_pretrained(tmp_path)
    assert all(torch.equal(value, frames.state_dict()[name]) for name, value in loaded.state_dict().items())
