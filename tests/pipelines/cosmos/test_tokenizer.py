"""The video tokenizer equals the authors' on random weights in their files, and is causal in both directions."""

import pytest
import torch
from families import close
from pipelines.cosmos.tiny import TOKENIZER
from safetensors.torch import load_file

from arimage.convert import convert_cosmos_tokenizer


pytestmark = pytest.mark.usefixtures("no_grad")


VIDEOS = pytest.mark.parametrize("name", ["t1", "t9", "t17"])


@pytest.fixture
def vq():
    return convert_cosmos_tokenizer(TOKENIZER)


@pytest.fixture(scope="module")
def expected():
    return load_file(TOKENIZER / "expected.safetensors")


def pixels_of(expected, name):
    return expected[f"{name}.video_uint8"].float() / 127.5 - 1


@VIDEOS
def test_tokens_equal_the_original(vq, expected, name):
    codes = vq.encode(pixels_of(expected, name))
    assert codes.dtype == torch.long and torch.equal(codes, expected[f"{name}.codes"])
    assert torch.equal(vq.quantizer.decode(codes).movedim(-1, 1), expected[f"{name}.latents"])


@pytest.mark.every(2)
@VIDEOS
@pytest.mark.parametrize("framewise", [False, True])
def test_pixels_equal_the_original(vq, expected, name, framewise):
    if framewise:
        vq.enable_framewise_decoding()
    video = vq.decode(expected[f"{name}.codes"])
    assert video.shape[2:] == expected[f"{name}.video_uint8"].shape[2:]
    if name == "t17":
        close(video[:, :, [0, 1, 8, 9, 16]], expected["t17.decoded_frames"])
    else:
        close(video, expected[f"{name}.decoded"])


def test_every_token_has_the_vector_of_the_original(vq, expected):
    assert torch.equal(vq.code_vectors(), expected["codebook"])


@pytest.mark.every(2)
@pytest.mark.parametrize("parts", [(1, 1, 1), (2, 1), (1, 2), (3,)])
def test_a_stream_returns_the_frames_of_the_whole(vq, expected, parts):
    stream, frames = vq.stream(), []
    for codes in expected["t17.codes"].split(parts, dim=1):
        frames.append(stream.decode(codes))
    assert [part.shape[2] for part in frames] == [vq.num_frames(parts[0]), *(8 * maps for maps in parts[1:])]
    close(torch.cat(frames, dim=2), vq.decode(expected["t17.codes"]))


def test_tiles_as_large_as_the_frames_change_nothing_and_smaller_ones_little_inside(vq, expected):
    codes = expected["t17.codes"]
    whole = vq.decode(codes)
    vq.enable_tiling(64, 64)
    assert torch.equal(vq.decode(codes), whole)
    vq.enable_tiling(32, 32)
    vq.enable_framewise_decoding()
    tiled = vq.decode(codes)
    assert tiled.shape == whole.shape and not torch.equal(tiled, whole)
    assert vq.encode(pixels_of(expected, "t17")).shape == codes.shape


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((1, 3, 5, 32, 32), "5 frames do not fit .*: give 1, 9, 17"),
        ((1, 3, 8, 32, 32), "8 frames"),
        ((1, 3, 9, 40, 32), "40x32 pixels .* multiples of 16"),
    ],
)
def test_videos_that_do_not_fit_are_refused(vq, shape, message):
    with pytest.raises(ValueError, match=message):
        vq.encode(torch.zeros(shape))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tokens_in_half_precision_are_near_those_in_float32(vq, expected, dtype):
    pixels = pixels_of(expected, "t9")
    exact = vq.quantizer.decode(vq.encode(pixels))
    near = vq.to(dtype).quantizer.decode(vq.encode(pixels.to(dtype)))
    assert (near - exact).abs().mean() < 0.05
