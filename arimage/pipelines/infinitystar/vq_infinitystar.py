"""The video tokenizer of InfinityStar (https://arxiv.org/abs/2511.04675): causal convolutions between videos and the
latents that its bits add up to."""

import itertools
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from diffusers import ConfigMixin
from diffusers.configuration_utils import register_to_config
from diffusers.utils.accelerate_utils import apply_forward_hook
from torch import nn

from ...models.mixin import ModelMixin
from ...settings.schema import Layers, Width, Widths, checked
from ...tokenizers.tiling import TilingMixin, check_sides


# Frames per latent frame after the first, and pixels per latent along each side.
FRAMES, PIXELS = 4, 16
# Latent frames that are decoded, and encoded, at a time.
CHUNK = 2


class Stream:
    """What layers remember of the chunks of a video before this one. It is empty at the beginning of a video."""

    def __init__(self) -> None:
        self._past: dict[nn.Module, torch.Tensor] = {}
        self.begins = True

    def extend(self, layer: nn.Module, hidden: torch.Tensor, count: int) -> torch.Tensor:
        """`hidden` [B, C, T, H, W] after the last `count` frames that `layer` read; at the beginning the first frame,
        repeated."""
        past = self._past.get(layer)
        if past is None:
            past = hidden[:, :, :1].expand(-1, -1, count, -1, -1)
        hidden = torch.cat([past, hidden], dim=2)
        # A view would keep the whole chunk.
        self._past[layer] = hidden[:, :, -count:].clone()
        return hidden


class CausalConv(nn.Conv3d):
    """A convolution whose windows end with their own frame."""

    def __init__(self, in_channels: int, out_channels: int):
        super().__init__(in_channels, out_channels, 3, padding=(0, 1, 1))

    def forward(self, hidden: torch.Tensor, stream: Stream) -> torch.Tensor:
        return super().forward(stream.extend(self, hidden, 2))


class ChannelNorm(nn.Module):
    """RMS norm over the channels of [B, C, T, H, W]."""

    def __init__(self, channels: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        weight = self.weight[:, None, None, None]
        return F.normalize(hidden, dim=1) * len(self.weight) ** 0.5 * weight


class ConditionedNorm(nn.Module):
    """A `ChannelNorm` that is scaled and shifted by the latents [B, D, t, h, w] of its place."""

    def __init__(self, channels: int, latent_channels: int):
        super().__init__()
        self.norm = ChannelNorm(channels)
        self.scale = nn.Conv3d(latent_channels, channels, 1)
        self.shift = nn.Conv3d(latent_channels, channels, 1)

    def forward(self, hidden: torch.Tensor, latents: torch.Tensor, stream: Stream) -> torch.Tensor:
        scale, shift = (stretch(part(latents), hidden, stream.begins) for part in (self.scale, self.shift))
        return self.norm(hidden) * scale + shift


def stretch(latents: torch.Tensor, hidden: torch.Tensor, begins: bool) -> torch.Tensor:
    """Latents repeated to the size of `hidden`. The first latent frame of a video stands for one frame."""
    frames = hidden.shape[2]
    first, latents = (latents[:, :, :1], latents[:, :, 1:]) if begins else (latents[:, :, :0], latents)
    if latents.shape[2]:
        latents = latents.repeat_interleave((frames - first.shape[2]) // latents.shape[2], dim=2)
    for axis in (3, 4):
        first, latents = (
            part.repeat_interleave(hidden.shape[axis] // part.shape[axis], axis) for part in (first, latents)
        )
    return torch.cat([first, latents], dim=2)


class ResBlock(nn.Module):
    """Two convolutions; with `latent_channels`, norms that the latents condition."""

    def __init__(self, channels: int, latent_channels: int | None = None):
        super().__init__()
        for name in ("norm1", "norm2"):
            own = ChannelNorm(channels) if latent_channels is None else ConditionedNorm(channels, latent_channels)
            self.add_module(name, own)
        self.conv1, self.conv2 = CausalConv(channels, channels), CausalConv(channels, channels)

    def forward(self, hidden: torch.Tensor, stream: Stream, latents: torch.Tensor | None = None) -> torch.Tensor:
        condition = () if latents is None else (latents, stream)
        inner = self.conv1(F.silu(self.norm1(hidden, *condition)), stream)
        return hidden + self.conv2(F.silu(self.norm2(inner, *condition)), stream)


class Downsample(nn.Module):
    """Half of the rows and columns, and with `time` of the frames after the first, plus their plain averages."""

    def __init__(self, in_channels: int, out_channels: int, time: bool):
        super().__init__()
        self.time, self.out_channels = time, out_channels
        self.norm, self.conv = ChannelNorm(in_channels), CausalConv(in_channels, out_channels // 4)

    def forward(self, hidden: torch.Tensor, stream: Stream) -> torch.Tensor:
        inner = self._halve(self.conv(F.silu(self.norm(hidden)), stream), stream)
        return inner + self._halve(hidden, stream).unflatten(1, (-1, self.out_channels)).mean(1)

    def _halve(self, hidden: torch.Tensor, stream: Stream) -> torch.Tensor:
        # Channels by (row, column, channel).
        hidden = hidden.unflatten(4, (-1, 2)).unflatten(3, (-1, 2)).permute(0, 4, 6, 1, 2, 3, 5).flatten(1, 3)
        if not self.time:
            return hidden
        first, hidden = (hidden[:, :, :1], hidden[:, :, 1:]) if stream.begins else (hidden[:, :, :0], hidden)
        return torch.cat([first, hidden.unflatten(2, (-1, 2)).mean(3)], dim=2)


class Upsample(nn.Module):
    """Twice the rows and columns, and with `time` the frames after the first, plus plain copies."""

    def __init__(self, in_channels: int, out_channels: int, time: bool):
        super().__init__()
        self.factors = (2 if time else 1, 2, 2)
        self.norm, self.conv = ChannelNorm(in_channels), CausalConv(in_channels, out_channels * (8 if time else 4))

    def forward(self, hidden: torch.Tensor, stream: Stream) -> torch.Tensor:
        inner = self.conv(F.silu(self.norm(hidden)), stream)
        copies = inner.shape[1] // hidden.shape[1]
        return self._double(inner, stream) + self._double(hidden.repeat(1, copies, 1, 1, 1), stream)

    def _double(self, hidden: torch.Tensor, stream: Stream) -> torch.Tensor:
        hidden = hidden.unflatten(1, (*self.factors, -1)).permute(0, 4, 5, 1, 6, 2, 7, 3)
        hidden = hidden.flatten(6, 7).flatten(4, 5).flatten(2, 3)
        if self.factors[0] == 1 or not stream.begins:
            return hidden
        # The first frame of a video has no partner.
        return torch.cat([hidden[:, :, :2].mean(2, keepdim=True), hidden[:, :, 2:]], dim=2)


class Level(nn.Module):
    """Residual blocks of one width, then a change of resolution, if any."""

    def __init__(self, blocks: list[ResBlock], resample: nn.Module | None):
        super().__init__()
        self.res, self.resample = nn.ModuleList(blocks), resample

    def forward(self, hidden: torch.Tensor, stream: Stream, latents: torch.Tensor | None = None) -> torch.Tensor:
        for block in self.res:
            hidden = block(hidden, stream, latents)
        return hidden if self.resample is None else self.resample(hidden, stream)


class Encoder(nn.Module):
    def __init__(self, widths: list[int], blocks: int, latent_channels: int):
        super().__init__()
        self.conv_in = CausalConv(3, widths[0])
        downs = [Downsample(*widths[:2], time=True), Downsample(*widths[1:3], time=True)]
        downs += [Downsample(*widths[2:4], time=False), None]
        levels = zip(widths, downs, strict=True)
        self.levels = nn.ModuleList(Level([ResBlock(width) for _ in range(blocks)], down) for width, down in levels)
        self.mid = Level([ResBlock(widths[-1]) for _ in range(2)], None)
        self.norm_out, self.conv_out = ChannelNorm(widths[-1]), CausalConv(widths[-1], 2 * latent_channels)

    def forward(self, video: torch.Tensor, stream: Stream) -> torch.Tensor:
        hidden = self.conv_in(video, stream)
        for level in (*self.levels, self.mid):
            hidden = level(hidden, stream)
        return self.conv_out(F.silu(self.norm_out(hidden)), stream)


class Decoder(nn.Module):
    def __init__(self, widths: list[int], blocks: int, latent_channels: int):
        super().__init__()
        wide = widths[3]
        self.conv_in = CausalConv(latent_channels, wide)
        self.mid = Level([ResBlock(wide, latent_channels) for _ in range(2)], None)
        ups = [None, Upsample(wide, widths[2], time=False), Upsample(widths[2], widths[1], time=True)]
        ups.append(Upsample(widths[1], widths[0], time=True))
        levels = zip((wide, wide, widths[2], widths[1]), ups, strict=True)
        self.levels = nn.ModuleList(
            Level([ResBlock(width, latent_channels) for _ in range(blocks)], up) for width, up in levels
        )
        self.norm_out, self.conv_out = ConditionedNorm(widths[0], latent_channels), CausalConv(widths[0], 3)

    def forward(self, latents: torch.Tensor, stream: Stream) -> torch.Tensor:
        hidden = self.conv_in(latents, stream)
        for level in (self.mid, *self.levels):
            hidden = level(hidden, stream, latents)
        return self.conv_out(F.silu(self.norm_out(hidden, latents, stream)), stream)


class InfinityStarVideoTokenizer(TilingMixin, ModelMixin, ConfigMixin):
    """Encodes videos of 1 + 4n frames into 1 + n latent frames with 16 pixels per latent along each side, and decodes
    them, a few latent frames at a time: the memory does not depend on the length of a video.

    The authors sample latents from the encoder's distribution; here they are its means, so one video always has the
    same latents.

    Args:
        widths (`tuple[int, ...]`, defaults to `(96, 192, 384, 384)`): channels at the four resolutions of the encoder,
            in pixels from fine to coarse.
        layers_per_block (`int`, defaults to 2): residual blocks per resolution; the decoder has one more.
        latent_channels (`int`, defaults to 16): channels at 8 pixels per cell; a latent has four times as many.
    """

    @register_to_config
    @checked
    def __init__(
        self, widths: Widths = (96, 192, 384, 384), layers_per_block: Layers = 2, latent_channels: Width = 16
    ):
        super().__init__()
        # A change of resolution has a quarter of the channels of the coarser one, and averages four times the others.
        fits = all(coarse % 4 == 0 and 4 * fine % coarse == 0 for fine, coarse in itertools.pairwise(widths))
        if len(widths) != 4 or not fits:
            raise ValueError(
                f"widths are {widths}: give four, of which the later ones are multiples of 4 and divide four times "
                "the one before"
            )
        channels = 4 * latent_channels
        self.encoder = Encoder(list(widths), layers_per_block, latent_channels)
        self.decoder = Decoder(list(widths), layers_per_block + 1, latent_channels)
        self.proj_down, self.proj_up = nn.Linear(channels, channels), nn.Linear(channels, channels)
        self.scale = nn.Parameter(torch.ones(()))

    @property
    def scale_factor(self) -> int:
        """Pixels per latent along each side."""
        return PIXELS

    @staticmethod
    def num_latent_frames(frames: int) -> int:
        """How many latent frames a video has.

        Raises:
            ValueError: if its number of frames is not 1 + 4n.
        """
        if frames < 1 or (frames - 1) % FRAMES:
            raise ValueError(f"a video has {frames} frames: give 1, or 1 more than a multiple of {FRAMES}")
        return 1 + (frames - 1) // FRAMES

    @apply_forward_hook
    def encode_latents(self, video: torch.Tensor) -> torch.Tensor:
        """The latents [B, C, t, h, w] of videos [B, 3, T, H, W] in [-1, 1], in their dtype.

        Raises:
            ValueError: if the number of frames is not 1 + 4n, or 16 does not divide both sides.
        """
        self.num_latent_frames(video.shape[2])
        check_sides(video, self.scale_factor, "frames")
        return self.encoded(self._encode, video)

    @apply_forward_hook
    def decode_latents(self, latents: torch.Tensor) -> torch.Tensor:
        """The frames [B, 3, T, H, W] of latents [B, C, t, h, w], nominally in [-1, 1]."""
        return self.in_tiles(self._decode, latents, before=1, after=PIXELS)

    def _encode(self, video: torch.Tensor) -> torch.Tensor:
        stream, means = Stream(), []
        for chunk in chunks(video, FRAMES):
            hidden = self.encoder(chunk, stream).transpose(1, 2)
            means.append(F.pixel_unshuffle(hidden, 2).transpose(1, 2).chunk(2, dim=1)[0])
            stream.begins = False
        return over_channels(self.proj_down, torch.cat(means, dim=2)) * self.scale

    def _decode(self, latents: torch.Tensor) -> torch.Tensor:
        stream, frames = Stream(), []
        hidden = F.pixel_shuffle(over_channels(self.proj_up, latents / self.scale).transpose(1, 2), 2).transpose(1, 2)
        for chunk in chunks(hidden, 1):
            frames.append(self.decoder(chunk, stream))
            stream.begins = False
        return torch.cat(frames, dim=2)


def chunks(video: torch.Tensor, factor: int) -> Iterator[torch.Tensor]:
    """Parts of a video [B, C, T, H, W] with `CHUNK` latent frames of `factor` frames each; the first one has a frame
    more."""
    start = 0
    while start < video.shape[2]:
        end = start + CHUNK * factor + (start == 0)
        yield video[:, :, start:end]
        start = end


def over_channels(layer: nn.Linear, video: torch.Tensor) -> torch.Tensor:
    return layer(video.movedim(1, -1)).movedim(-1, 1)
