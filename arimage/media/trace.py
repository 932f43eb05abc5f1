"""Records how an image is decoded, step by step, and draws animations and maps of it."""

import math
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from ..decoding import Layout
from ..pipelines.call import GenerationCall
from .folders import replacing


ACCEPTED, REJECTED, DRAFT, NOTHING = (26, 150, 80), (214, 40, 40), (120, 134, 156), (214, 218, 224)
INK, FAINT, PAPER = (30, 34, 40), (110, 116, 124), (255, 255, 255)
# Early to late, as in matplotlib's viridis.
COLOURS = np.array([(68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37)], dtype=float)
# Images are enlarged to at least this many pixels.
SMALLEST = 384
MARGIN = 10
# A token without a draft.
UNKNOWN = -1


class Trace:
    """Records every step of a pipeline's call:
    `pipe(..., callback_on_step_end=trace, callback_on_step_end_tensor_inputs=Trace.inputs)`."""

    inputs = ["tokens", "decided"]
    call: GenerationCall

    def __init__(self):
        self._tokens, self._decided = [], []

    def __call__(self, pipe, step: int, passes: int, tensors: dict[str, torch.Tensor]) -> None:
        self.call = pipe.current_call
        self._tokens.append(tensors["tokens"].clone())
        self._decided.append(tensors["decided"].clone())

    def of_image(self, image: int = 0) -> tuple[torch.LongTensor, torch.BoolTensor]:
        """The tokens [T, N], drafts included, after each step of an image, and which of them are decided [T, N]."""
        tokens = torch.stack([each[image] for each in self._tokens]).cpu()
        decided = torch.stack([each[image] for each in self._decided]).cpu()
        # An image may wait for others of its batch.
        passes = int((~decided.all(1)).sum()) + 1
        return tokens[:passes], decided[:passes]


def is_known(tokens: torch.Tensor) -> torch.BoolTensor:
    """Which tokens are decided or drafts: all but `UNKNOWN`, or all but zeros for continuous tokens [..., D]."""
    return tokens.any(-1) if tokens.is_floating_point() else tokens != UNKNOWN


def deciding_passes(decided: torch.BoolTensor) -> torch.LongTensor:
    """The step, counted from 1, that decided each of N tokens, from `decided` [T, N]."""
    return (~decided).sum(0) + 1


def side_by_side(places: torch.Tensor) -> torch.Tensor:
    """Values [rows, columns] of places; the maps [frames, rows, columns] of a video are put next to each other, [rows,
    frames * columns]."""
    return places if places.ndim == 2 else places.movedim(0, 1).flatten(1)


def animate(
    tokens: torch.LongTensor,
    decided: torch.BoolTensor,
    layout: Layout | None,
    decode_tokens: Callable[[torch.LongTensor], torch.Tensor],
    title: str,
    path: Path,
    finished: Image.Image | None = None,
) -> None:
    """Write an animation of about eight seconds, WebP or GIF: one frame per step, then the finished image. The
    arguments are those of `draw_steps`."""
    frames = draw_steps(tokens, decided, layout, decode_tokens, title, range(len(tokens)), finished)
    duration = min(400, max(40, 8000 // len(frames)))
    write_animation(frames, [duration] * (len(frames) - 1) + [2500], path)


def draw_steps(
    tokens: torch.LongTensor,
    decided: torch.BoolTensor,
    layout: Layout | None,
    decode_tokens: Callable[[torch.LongTensor], torch.Tensor],
    title: str,
    steps: Iterable[int],
    finished: Image.Image | None = None,
) -> list[Image.Image]:
    """Draw one frame per step, which marks the tokens that the step decided, and one of the finished image.

    Args:
        tokens, decided: from `Trace.of_image`; continuous tokens are [T, N, D].
        layout: the layout of this image, to mark tokens; None for a next-scale model, whose tokens are not marked.
        decode_tokens: from the tokens of a step [1, N] to pixels [1, 3, H, W], the frames of a video side by side.
        steps: which steps to draw, counted from 0, in order.
        finished: the finished image; by default that of the last step.
    """

    def pixels_of(step: torch.LongTensor) -> np.ndarray:
        pixels = ((decode_tokens(step[None]).float().clamp(-1, 1) + 1) * 127.5).round().byte()
        return _enlarge(pixels[0].permute(1, 2, 0).cpu().numpy())

    frames = []
    for index in steps:
        step, done, number = tokens[index], decided[index], index + 1
        known = decided[index - 1] if index else torch.zeros_like(done)
        drafts, drafted = (tokens[index - 1], is_known(tokens[index - 1])) if index else (step, known)
        new = done & ~known
        rejected = new & drafted & (step != drafts).view(*done.shape, -1).any(-1)
        marks = {
            ACCEPTED: new & ~rejected,
            REJECTED: rejected,
            DRAFT: ~done & is_known(step),
            NOTHING: ~done & ~is_known(step),
        }
        count = int(done.sum())
        caption = f"step {number} of {len(tokens)}: {count} of {len(step)} tokens, {count / number:.1f} per step"
        pixels = pixels_of(step)
        if layout is not None:
            shown = {colour: layout.current(mark[None], is_known(step)[None])[0] for colour, mark in marks.items()}
            pixels = _mark(pixels, {colour: side_by_side(mark).numpy() for colour, mark in shown.items()})
        frames.append(_frame(pixels, title, caption, legend=layout is not None))
    count, number = int(decided[-1].sum()), len(tokens)
    caption = f"{count} tokens in {number} step{'s' if number > 1 else ''}: {count / number:.1f} per step"
    pixels = pixels_of(tokens[-1]) if finished is None else _enlarge(np.asarray(finished.convert("RGB")))
    return [*frames, _frame(pixels, title, caption, legend=layout is not None)]


def write_animation(frames: list[Image.Image], durations: list[int], path: Path) -> None:
    """Write frames as a WebP or GIF that repeats; each is shown for its `durations` in milliseconds."""
    if path.suffix.lower() == ".gif":
        # One palette without dithering, so that colours do not flicker and unchanged pixels compress well.
        halves = np.concatenate([np.asarray(frames[len(frames) // 2]), np.asarray(frames[-1])])
        palette = Image.fromarray(halves).quantize(256)
        frames = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    options = {"duration": durations, "loop": 0, "quality": 80, "method": 4}
    with replacing(path) as file:
        frames[0].save(file, save_all=True, append_images=frames[1:], **options)


def acceptance_map(passes: np.ndarray, size: tuple[int, int]) -> Image.Image:
    """An image of the step that decided each token: early steps are dark, late ones bright; numbers if they fit.

    Args:
        passes: int [rows, columns], from `deciding_passes`.
        size: height and width in pixels.
    """
    cell = size[0] // passes.shape[0], size[1] // passes.shape[1]
    heat = _colours((passes - 1) / max(1, passes.max() - 1))
    image = Image.fromarray(heat.repeat(cell[0], 0).repeat(cell[1], 1))
    if min(cell) < 20:
        return image
    pen = ImageDraw.Draw(image)
    for (row, column), number in np.ndenumerate(passes):
        ink = PAPER if heat[row, column].mean() < 120 else INK
        at = (column + 0.5) * cell[1], (row + 0.5) * cell[0]
        pen.text(at, str(number), ink, _font(min(cell) * 0.42), anchor="mm")
    return image


def draw_acceptance_map(decided: torch.BoolTensor, layout: Layout, image: Image.Image, title: str, path: Path):
    """Write an image next to its `acceptance_map` as one image.

    Args:
        decided: from `Trace.of_image`.
        layout: the layout of this image, or of a video whose frames `image` shows side by side.
    """
    passes = side_by_side(layout.to_places(deciding_passes(decided)[None])[0]).numpy()
    last = int(passes.max())
    pixels = _enlarge(np.asarray(image.convert("RGB")))
    height, width = pixels.shape[:2]
    bar, top = 34, 54
    canvas = Image.new("RGB", (2 * width + 3 * MARGIN, top + height + bar + MARGIN), PAPER)
    canvas.paste(acceptance_map(passes, (height, width)), (MARGIN, top))
    canvas.paste(Image.fromarray(pixels), (width + 2 * MARGIN, top))
    pen = ImageDraw.Draw(canvas)
    pen.text((MARGIN, 8), title, INK, _font(16))
    pen.rectangle((width + 2 * MARGIN - 1, top - 1, 2 * width + 2 * MARGIN, top + height), outline=NOTHING)
    text = f"{passes.size} tokens in {last} steps: {passes.size / last:.1f} per step. "
    text += "Left: the step that decided each token."
    pen.text((MARGIN, 30), text, FAINT, _font(13))
    ramp = _colours(np.linspace(0, 1, width)[None].repeat(10, 0))
    canvas.paste(Image.fromarray(ramp), (MARGIN, top + height + 8))
    pen.text((MARGIN, top + height + 20), "step 1", FAINT, _font(12))
    pen.text((MARGIN + width, top + height + 20), f"step {last}", FAINT, _font(12), anchor="ra")
    with replacing(path) as file:
        canvas.save(file)


def _enlarge(pixels: np.ndarray) -> np.ndarray:
    """Enlarge an image [H, W, 3] without smoothing."""
    scale = math.ceil(SMALLEST / min(pixels.shape[:2]))
    return pixels.repeat(scale, 0).repeat(scale, 1)


def _mark(pixels: np.ndarray, marks: dict[tuple, np.ndarray]) -> np.ndarray:
    """Tint the cells of an image by `marks`, bool [rows, columns] per colour; outline drafts and decided tokens."""
    strength = {ACCEPTED: 0.15, REJECTED: 0.35, DRAFT: 0.55, NOTHING: 1.0}
    image = Image.fromarray(pixels)
    for colour, mark in marks.items():
        alpha = Image.fromarray((255 * strength[colour] * mark).round().astype(np.uint8))
        image.paste(colour, mask=alpha.resize(image.size, Image.Resampling.NEAREST))
    cell = pixels.shape[0] // marks[DRAFT].shape[0], pixels.shape[1] // marks[DRAFT].shape[1]
    pen = ImageDraw.Draw(image)
    for colour, width in ((DRAFT, 1), (ACCEPTED, 3), (REJECTED, 3)):
        for row, column in np.argwhere(marks[colour]):
            left, top = column * cell[1], row * cell[0]
            pen.rectangle((left, top, left + cell[1] - 1, top + cell[0] - 1), outline=colour, width=width)
    return np.asarray(image)


def _frame(pixels: np.ndarray, title: str, caption: str, legend: bool) -> Image.Image:
    """An image with its title, caption and, if asked, a legend of the marks."""
    height, width = pixels.shape[:2]
    top = 52
    canvas = Image.new("RGB", (width + 2 * MARGIN, top + height + (32 if legend else MARGIN)), PAPER)
    canvas.paste(Image.fromarray(pixels), (MARGIN, top))
    pen = ImageDraw.Draw(canvas)
    pen.rectangle((MARGIN - 1, top - 1, MARGIN + width, top + height), outline=NOTHING)
    pen.text((MARGIN, 6), title, FAINT, _font(13))
    pen.text((MARGIN, 25), caption, INK, _font(17))
    if not legend:
        return canvas
    left, line = MARGIN, top + height + 16
    for colour, meaning in (
        (ACCEPTED, "decided now"),
        (REJECTED, "draft rejected"),
        (DRAFT, "draft"),
        (NOTHING, "empty"),
    ):
        pen.rectangle((left, line - 6, left + 12, line + 6), fill=colour)
        pen.text((left + 17, line), meaning, INK, _font(12), anchor="lm")
        left += 17 + int(pen.textlength(meaning, _font(12))) + 14
    return canvas


def _colours(values: np.ndarray) -> np.ndarray:
    """Colours uint8 [..., 3] for numbers in [0, 1]."""
    stops = np.linspace(0, 1, len(COLOURS))
    return np.stack([np.interp(values, stops, channel) for channel in COLOURS.T], -1).round().astype(np.uint8)


def _font(size: float) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)
