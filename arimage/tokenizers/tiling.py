"""Slicing and tiling: image tokenizers run on one image or one part of an image at a time, in bounded memory."""

from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from diffusers.models.autoencoders.vae import AutoencoderMixin


TILE_TOKENS = 32
"""Default height and width of a tile in tokens: 512 pixels for a tokenizer with 16 pixels per token."""

Network = Callable[[torch.Tensor], torch.Tensor]


def tile_starts(length: int, tile: int, stride: int) -> list[int]:
    """The starts of the tiles along an axis. All tiles have the same length: the last one is moved back to end with
    the axis."""
    return [*range(0, length - tile, stride), length - tile]


def ramp(length: int, device: torch.device) -> torch.Tensor:
    """Positive weights [length] that fall linearly towards both ends."""
    place = torch.arange(length, device=device, dtype=torch.float32) + 0.5
    return torch.minimum(place, length - place)


def tiled(
    network: Network,
    images: torch.Tensor,
    tile: tuple[int, int],
    stride: tuple[int, int],
    before: int,
    after: int,
) -> torch.Tensor:
    """Apply `network` to images in overlapping tiles and blend the results.

    Args:
        network (`Callable`): maps [..., rows * before, columns * before] to [..., rows * after, columns * after]; the
            leading dimensions may change.
        images (`torch.Tensor`): its input.
        tile (`tuple[int, int]`), stride (`tuple[int, int]`): rows and columns of a tile, and from one tile to the
            next, in tokens.
        before (`int`), after (`int`): pixels per token along each side of the input and of the result.
    """
    rows, columns = (length // before for length in images.shape[-2:])
    tile_rows, tile_columns = min(tile[0], rows), min(tile[1], columns)
    result = weights = None
    for top, left in product(tile_starts(rows, tile_rows, stride[0]), tile_starts(columns, tile_columns, stride[1])):
        source, target = (
            (..., slice(top * n, (top + tile_rows) * n), slice(left * n, (left + tile_columns) * n))
            for n in (before, after)
        )
        part = network(images[source])
        window = ramp(tile_rows * after, part.device)[:, None] * ramp(tile_columns * after, part.device)
        if result is None or weights is None:
            # At least float32, so that sums in bfloat16 are not rounded.
            dtype = torch.promote_types(part.dtype, torch.float32)
            result = part.new_zeros(*part.shape[:-2], rows * after, columns * after, dtype=dtype)
            weights = result.new_zeros(result.shape[-2:])
        result[target] += part * window
        weights[target] += window
    return (result / weights).to(part.dtype)


def check_multiple(name: str, value: int, factor: int) -> int:
    if not isinstance(value, int) or value <= 0 or value % factor:
        raise ValueError(f"{name} is {value!r}: make it a positive multiple of {factor}, the pixels per token")
    return value


def check_sides(pixels: torch.Tensor, factor: int, what: str = "images", model: str = "tokenizer") -> None:
    """Raise a `ValueError` if `factor` does not divide the sides of `pixels` [..., H, W]."""
    height, width = pixels.shape[-2:]
    if height % factor or width % factor:
        raise ValueError(
            f"{what} of {height}x{width} pixels do not fit this {model}: make both sides multiples of {factor}"
        )


def check_encoded(latents: torch.Tensor) -> torch.Tensor:
    """The latents of an encoder. Those that are not finite have a nearest code too, so nothing later would fail.

    Raises:
        ValueError: if they are not finite.
    """
    if not latents.isfinite().all():
        raise ValueError(
            "what the image or video tokenizer encodes is not finite: check its weights, or load it in float32"
        )
    return latents


class TilingMixin(AutoencoderMixin):
    """`enable_slicing` and `enable_tiling` of diffusers for a tokenizer.

    Slicing encodes and decodes the images of a batch one after the other, in the memory of one image. The results are
    the same up to rounding (1e-6), since torch computes convolutions in another way for another batch size.

    The tokenizer calls its networks through `in_slices`, `in_tiles` and `encoded`. The settings are not part of its
    config and are not saved.
    """

    config: Any

    use_slicing = False
    use_tiling = False

    @property
    def scale_factor(self) -> int:
        """Pixels per token along each side; of the finest map, if there are several."""
        return 2 ** (len(self.config.channel_multipliers) - 1)

    def enable_tiling(
        self,
        tile_sample_min_height: int | None = None,
        tile_sample_min_width: int | None = None,
        tile_sample_stride_height: int | None = None,
        tile_sample_stride_width: int | None = None,
    ) -> None:
        """Decode images larger than a tile in overlapping tiles, and encode them so where the tokenizer can.

        Peak memory is then that of one tile and of the image itself. Overlapping tiles are blended linearly. An image
        that fits into one tile is not divided, and its result is the same as without tiling.

        Results differ from those without tiling, since attention and group norms see a tile instead of the image.
        Larger tiles differ less. For 256x256 pixels and a LlamaGen that was trained on 128x128, the PSNR between
        pixels decoded in tiles and at once is 35 dB with the default tiles of 128 pixels, and 31 dB with tiles of 64.
        Both have the same PSNR to the encoded image, 26 dB. Encoding in tiles changes a third of the token ids there;
        the others decode almost as well (25.7 dB instead of 25.9).

        Args:
            tile_sample_min_height (`int`, *optional*), tile_sample_min_width (`int`, *optional*): size of a tile in
                pixels, by default 32 times `scale_factor`.
            tile_sample_stride_height (`int`, *optional*), tile_sample_stride_width (`int`, *optional*): pixels from
                one tile to the next, by default three quarters of the size of a tile.

        Raises:
            ValueError: if an argument is not a positive multiple of `scale_factor`, or a stride is larger than its
                tile.
        """
        factor = self.scale_factor
        settings = {}
        for side, tile, stride in (
            ("height", tile_sample_min_height, tile_sample_stride_height),
            ("width", tile_sample_min_width, tile_sample_stride_width),
        ):
            tile = TILE_TOKENS * factor if tile is None else check_multiple(f"tile_sample_min_{side}", tile, factor)
            name = f"tile_sample_stride_{side}"
            stride = (
                max(tile // factor * 3 // 4, 1) * factor if stride is None else check_multiple(name, stride, factor)
            )
            if stride > tile:
                raise ValueError(f"{name} is {stride}: make it at most {tile}, the {side} of a tile")
            settings |= {f"tile_sample_min_{side}": tile, name: stride}
        vars(self).update(settings)
        self.use_tiling = True

    def in_slices(self, network: Network, images: torch.Tensor) -> torch.Tensor:
        """Apply `network` to images or latents [B, ...], one after the other if slicing is enabled."""
        if self.use_slicing and len(images) > 1:
            return torch.cat([network(image) for image in images.split(1)])
        return network(images)

    def in_tiles(self, network: Network, images: torch.Tensor, before: int, after: int) -> torch.Tensor:
        """`in_slices`, and also in tiles if tiling is enabled and the images are larger than a tile. See `tiled` for
        the arguments."""
        if self.use_tiling:
            tile, stride = (
                (height // self.scale_factor, width // self.scale_factor)
                for height, width in (
                    (self.tile_sample_min_height, self.tile_sample_min_width),
                    (self.tile_sample_stride_height, self.tile_sample_stride_width),
                )
            )
            if images.shape[-2] > tile[0] * before or images.shape[-1] > tile[1] * before:
                return self.in_slices(lambda image: tiled(network, image, tile, stride, before, after), images)
        return self.in_slices(network, images) if self.use_slicing else network(images)

    def encoded(self, encoder: Network, images: torch.Tensor) -> torch.Tensor:
        """`in_tiles` of an encoder: latents [..., H / f, W / f] of images [..., H, W], f = `scale_factor`.

        Raises:
            ValueError: if they are not finite.
        """
        return check_encoded(self.in_tiles(encoder, images, before=self.scale_factor, after=1))


class Tiling(TilingMixin):
    """Slicing and tiling for a tokenizer class of diffusers or transformers that has neither."""

    def __init__(self, scale_factor: int):
        self._factor = scale_factor

    @property
    def scale_factor(self) -> int:
        return self._factor
