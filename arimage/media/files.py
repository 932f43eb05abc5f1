"""Files of images and videos, read. Heavy imports stay inside the functions, as in `arimage.cli.main`.

Every file goes through `open_image`, every image from outside through `to_rgb`, and every mask through `to_mask`.
`name` begins the sentence of an error: "image", or "--image is x.png, which".
"""

import importlib.util
import io
import re
import subprocess
import tempfile
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from itertools import accumulate, islice, takewhile
from itertools import count as counted
from pathlib import Path
from typing import IO, Any

from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError
from PIL.PngImagePlugin import Blend, Disposal, PngImageFile

from ..settings.schema import MAX_BYTES, check_regular
from .colours import SPACE, as_rgba, eight_bits, in_srgb
from .limits import (
    MAX_FRAMES,
    MAX_VIDEO_PIXELS,
    check_pixels,
    too_much,
    too_much_exif,
)
from .metadata import Metadata, from_text, in_comment, in_image


# Formats that are read. Pillow has more decoders: some start other programs, and some are hardly used.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "PPM")
# How an image is turned whose EXIF data has this orientation.
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
# Read with Pillow; other videos with ffmpeg.
ANIMATED_SUFFIXES = (".gif", ".webp", ".png")
# How ffmpeg converts colours: its quick ways darken a video by a level each time that it is read.
SCALER = "flags=bicubic+accurate_rnd+full_chroma_int+full_chroma_inp"
# What `write_video` notes in a file whose format stores equal frames once, in the first line of a comment.
NOTE = re.compile(r"(\d{1,6}) frames(?:\n|$)")


@contextmanager
def _reading(name: str) -> Iterator[None]:
    """Say in one sentence what cannot be read."""
    try:
        yield
    except UnidentifiedImageError as error:
        raise ValueError(f"{name} cannot be read as an image: give a whole PNG, JPEG or WebP file") from error
    # Decoders raise errors of many kinds for damaged files: OSError, SyntaxError, IndexError, EOFError, struct.error.
    except Exception as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ValueError(f"{name} cannot be read ({reason}): give a file that is whole") from error


def _check_file(name: str, path: Path, most: int | None = MAX_BYTES) -> None:
    try:
        check_regular(name, path, most)
    except OSError as error:
        raise ValueError(f"{name} cannot be read ({error}): give a file that is whole") from error


def open_image(name: str, source: Path | IO[bytes], formats: list[str] | tuple[str, ...] = FORMATS) -> Image.Image:
    """Open an image file without reading its pixels. `formats` are those of Pillow.

    Raises:
        ValueError: if it is not an image, has too many pixels, or is made so that it takes minutes to decode.
    """
    if isinstance(source, Path):
        _check_file(name, source)
    with _reading(name):
        data = source.read_bytes() if isinstance(source, Path) else source.read()
    reason = too_much(data)
    if reason is not None:
        raise ValueError(f"{name} has {reason}: save it again, as PNG or JPEG")
    with _reading(name):
        image = Image.open(io.BytesIO(data), formats=formats)
    check_pixels(name, image)
    return image


def to_rgba(name: str, image: Image.Image) -> Image.Image:
    """An image of any mode as viewers show it, in mode RGBA and in sRGB. Levels of 16 bits (modes I;16 and I) are
    divided by 257; floats (mode F) are levels in [0, 1]. Colours are converted to sRGB by the image's profile (see
    `colours.in_srgb`).

    Raises:
        ValueError: if it is damaged, or has levels outside this range.
    """
    return as_rgba(in_srgb(eight_bits(name, _upright(name, image))))


def to_rgb(name: str, image: Image.Image) -> Image.Image:
    """An image of any mode as viewers show it on a white page, in mode RGB; see `to_rgba`.

    Raises:
        ValueError: if it is damaged, or has levels outside the range of its mode.
    """
    return _on_white(in_srgb(eight_bits(name, _upright(name, image))))


def to_levels(name: str, image: Image.Image) -> Image.Image:
    """An image whose levels are not colours but coverage, for example, in mode L: as they are, without its profile."""
    return _on_white(eight_bits(name, _upright(name, image))).convert("L")


def read_image(path: Path) -> Image.Image:
    """The image in a file, as `to_rgb` gives it."""
    name = f"one of the pictures is {path}, which"
    with open_image(name, path) as image:
        return to_rgb(name, image)


def read_raw(path: Path) -> Image.Image:
    """The levels in a file in mode RGB as Pillow converts them, without its orientation, profile and transparency: not
    what viewers show, but what most programs of published figures read."""
    name = f"one of the pictures is {path}, which"
    with open_image(name, path) as image, _reading(name):
        found = image.convert("RGB")
    found.info = {}
    return found


def _upright(name: str, image: Image.Image) -> Image.Image:
    """A copy, turned as its EXIF data says, with all pixels read. Its `info` is only of its pixels."""
    with _reading(name):
        image.load()
        turn = TURNS.get(_exif(image).get(ExifTags.Base.Orientation, 1))
        copy = image.copy() if turn is None else image.transpose(turn)
    copy.info = {key: image.info[key] for key in ("transparency", *SPACE) if key in image.info}
    return copy


def _on_white(image: Image.Image) -> Image.Image:
    if not image.has_transparency_data:
        return image.convert("RGB")
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), as_rgba(image)).convert("RGB")


def _exif(image: Image.Image) -> Image.Exif:
    data, text = image.info.get("exif"), image.info.get("Raw profile type exif")
    if data is None and text is not None:
        data = bytes.fromhex("".join(text.split("\n")[3:]))
    reason = too_much_exif(data or b"")
    if reason is not None:
        raise ValueError(reason)
    return image.getexif()


def read_metadata(name: str, path: Path) -> Metadata:
    """How the picture or video in a file was made.

    Raises:
        ValueError: if it cannot be read, or does not say so as arimage does, with a sentence that begins with `name`.
    """
    _check_file(name, path, None)
    with _reading(name), path.open("rb") as file:
        head = file.read(12)
    if head[4:8] == b"ftyp" and head[8:] != b"avif":
        return from_text(name, in_comment(_comment(name, path)))
    with open_image(name, path) as image, _reading(name):
        text = in_image(image.info, _exif(image))
    return from_text(name, text)


def _comment(name: str, path: Path) -> str:
    """The comment in an MP4 file."""
    _check_mp4(name)
    from imageio_ffmpeg import get_ffmpeg_exe

    # In other formats a file may name others to read.
    source = ["-f", "mov", "-i", str(path.absolute())]
    command = [get_ffmpeg_exe(), "-v", "error", *source, "-f", "ffmetadata", "-"]
    with _reading(name):
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=60)
        if done.returncode:
            raise ValueError(done.stderr.decode("utf-8", "replace"))
    found = re.search(
        r"^comment=((?:[^\\\n]|\\.)*)$", done.stdout.decode("utf-8", "replace"), re.DOTALL | re.MULTILINE
    )
    return re.sub(r"\\(.)", r"\1", found[1], flags=re.DOTALL) if found else ""


# Masks


def to_mask(name: str, mask: Image.Image) -> Image.Image:
    """A mask in mode L: at least 128 where an image is generated again, less where it is kept.

    Labels 0 and 1 count as black and white. A mask that is transparent in part must be all white or all black where
    it is not: what is transparent counts as the other one.

    Raises:
        ValueError: if it is damaged, unclear, or selects nothing.
    """
    import numpy as np

    mask = _upright(name, mask)
    values, labels = np.asarray(mask), None
    if values.ndim == 2 and values.dtype.kind != "f" and values.max() == 1:
        labels = Image.fromarray((values == 1).astype(np.uint8) * 255)
        if mask.mode != "P":
            return labels
    rgba = as_rgba(eight_bits(name, mask))
    grey, alpha = rgba.convert("L"), rgba.getchannel("A")
    if _selects(ImageOps.invert(alpha)):
        visible = np.asarray(rgba)[np.asarray(alpha) >= 128, :3]
        if not visible.size or visible.min() < 128 <= visible.max():
            raise ValueError(
                f"{name} is transparent in part, and what is left is neither all white nor all black: give a mask "
                "without transparency, white where the image is generated again"
            )
        grey = alpha if visible.min() >= 128 else ImageOps.invert(alpha)
    # Palettes show labels in any two colours.
    if labels is not None and not _selects(grey):
        grey = labels
    if not _selects(grey):
        raise ValueError(nothing_selected(name))
    return grey


def nothing_selected(name: str) -> str:
    return f"{name} selects nothing: make it white where the image is to be generated again"


def _selects(mask: Image.Image) -> bool:
    return mask.getextrema()[1] >= 128  # pyright: ignore[reportOperatorIssue] a number in mode L


def transparent_part(name: str, image: Image.Image) -> Image.Image:
    """A mask in mode L that is white where an image is transparent."""
    mask = to_rgba(name, image).getchannel("A").point([255] * 128 + [0] * 128)
    if not _selects(mask):
        raise ValueError(f"{name} has no transparency: make it transparent where the image should change")
    return mask


# Videos


def can_write_mp4() -> bool:
    """Whether the packages of the extra "video" are there."""
    return all(importlib.util.find_spec(name) for name in ("imageio", "imageio_ffmpeg"))


def check_mp4(option: str, path: Path) -> None:
    """Refuse a file that needs the extra "video" where it is not installed."""
    if path.suffix.lower() not in ANIMATED_SUFFIXES:
        _check_mp4(f"{option} is {path}, which")


def _check_mp4(name: str) -> None:
    if not can_write_mp4():
        raise ValueError(f"{name} needs imageio: pip install 'arimage[video]', or give .webp or .gif files")


def read_video(option: str, path: Path, fps: int | None = None, count: int | None = None) -> list[Image.Image]:
    """The frames of a video, or of an animated GIF, WebP or PNG, in mode RGB as `to_rgb` gives them.

    Animated files store equal frames once, with a longer duration. They are repeated, so that all frames are equally
    long.

    Args:
        option: that names the file, for errors.
        fps: as many frames per second, as `read_clip` takes them; by default those of the file.
        count: the first `count` frames only.

    Raises:
        ValueError: if it cannot be read, or has too many frames, naming the option.
    """
    check_mp4(option, path)
    return _frames_of(f"{option} is {path}, which", path, fps, count)


def _animation(name: str, source: Path | IO[bytes]) -> tuple[list[Image.Image], list[int], list[int], int]:
    """The frames in an animated file; the milliseconds of each, 0 if the file does not say; as how many equal frames
    each counts; and how many milliseconds the format rounds to."""
    with open_image(name, source) as file:
        shown = list(_frames(name, file))
        with _reading(name):
            note = NOTE.match(_note(file))
    durations, precision = [duration for _, duration in shown], 10 if file.format == "GIF" else 1
    repeats = _repeats(durations, int(note[1]) if note else 0, precision)
    check_pixels(name, file, sum(repeats))
    return [frame for frame, _ in shown], durations, repeats, precision


def _at_rate(durations: list[int], repeats: list[int], precision: int, fps: int) -> Iterator[int]:
    """Which frame of an animated file is shown in the middle of the time of each frame of a video; the arguments are
    those that `_animation` returns."""
    wanted, mean = 1000 / fps, sum(durations) / sum(repeats)
    # Equal frames have the rate that they were rounded from, and this one if the file says none.
    unit = wanted if not mean or abs(mean - wanted) <= precision / 2 else mean
    pairs = list(zip(durations, repeats, strict=True))
    equal = all(abs(duration - times * mean) <= times * precision for duration, times in pairs)
    ends: list[float] = list(accumulate(times * unit if equal else duration for duration, times in pairs))
    # A frame that begins in the middle is shown.
    middles = ((number + 0.5) * wanted + 1e-6 for number in counted())
    return (bisect_right(ends, middle) for middle in takewhile(lambda middle: middle < ends[-1], middles))


def read_clip(name: str, source: Path | bytes, count: int, fps: int) -> list[Image.Image]:
    """The beginning of a video or an animated file: `count` frames at `fps` frames per second in mode RGB, or fewer if
    it is shorter. They are those that are shown in the middle of their time, whatever the rate of the video, which may
    vary. An animated file that does not say its rate has this one.

    Args:
        source: a path, or the content of a file.

    Raises:
        ValueError: if it cannot be read, or the packages that read it are not installed.
    """
    return _frames_of(name, source, fps, count)


def _frames_of(name: str, source: Path | bytes, fps: int | None, count: int | None) -> list[Image.Image]:
    if isinstance(source, Path):
        # ffmpeg reads videos in parts.
        _check_file(name, source, None)
    with _reading(name), io.BytesIO(source) if isinstance(source, bytes) else source.open("rb") as file:
        head = file.read(12)
    if head.startswith((b"GIF8", b"\x89PNG")) or head[8:] == b"WEBP":
        frames, durations, repeats, precision = _animation(
            name, io.BytesIO(source) if isinstance(source, bytes) else source
        )
        if fps is None:
            places = (place for place, times in enumerate(repeats) for _ in range(times))
        else:
            places = _at_rate(durations, repeats, precision, fps)
        return [frames[place] for place in islice(places, count)]
    _check_mp4(name)
    # ffmpeg reads files, not bytes.
    with nullcontext(source) if isinstance(source, Path) else _written(source) as path:
        return _decoded(name, path, fps, count)


def _decoded(name: str, path: Path, fps: int | None, count: int | None) -> list[Image.Image]:
    """The frames of a video, by their time stamps."""
    from imageio_ffmpeg import read_frames

    filters = [f"scale={SCALER}"]
    if fps is not None:
        # Each frame of a video begins a little earlier, so that one which begins in the middle of the time of another
        # is shown.
        filters = ["settb=AVTB", "setpts=PTS-STARTPTS-2", f"fps={fps}", *filters]
    options = ["-vf", ",".join(filters)] + ([] if count is None else ["-frames:v", str(count)])
    with _reading(name), closing(read_frames(str(path.absolute()), output_params=options)) as reader:
        about: Any = next(reader)
        size = about["size"]
        most = min(MAX_FRAMES, MAX_VIDEO_PIXELS // (size[0] * size[1]))
        found = [Image.frombytes("RGB", size, frame) for frame in islice(reader, most + 1)]
    if not found:
        raise ValueError(f"{name} has no frames that can be read: give a file that is whole")
    if len(found) > most:
        raise ValueError(f"{name} has more than {most} frames of {size[0]}x{size[1]} pixels: give a shorter one")
    return found


@contextmanager
def _written(data: bytes) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "video"
        path.write_bytes(data)
        yield path


def _repeats(durations: list[int], count: int, precision: int) -> list[int]:
    """How many equal frames of a video each frame of a file stands for.

    Args:
        durations: of the frames in the file; 0 where it does not say.
        count: frames of the video; 0 if that is not known. Then a frame of the video is as long as the shortest one in
            the file, or a half, a third or a quarter of it if all durations are multiples of that.
        precision: of the durations, which are rounded down.
    """
    if len(durations) == 1:
        return [max(1, count)]
    if count and sum(durations):
        return [max(1, round(count * duration / sum(durations))) for duration in durations]
    shortest = min(filter(None, durations), default=1)
    repeats = [max(1, duration // shortest) for duration in durations]
    # Each of the equal frames may have lost a part to rounding.
    if all(duration - n * shortest <= n * precision for duration, n in zip(durations, repeats, strict=True)):
        return repeats
    parts = next((parts for parts in (2, 3, 4) if not any(parts * duration % shortest for duration in durations)), 1)
    return [max(1, parts * duration // shortest) for duration in durations]


def _frames(name: str, file: Image.Image) -> Iterator[tuple[Image.Image, int]]:
    """The frames of an animated file, and how many milliseconds each is shown; 0 if the file does not say."""
    with _reading(name):
        count = getattr(file, "n_frames", 1)
    check_pixels(name, file, count)
    canvas = Image.new("RGBA", file.size)
    # The first image of a PNG may be only for viewers that show no animation.
    for index in range(int(file.info.get("default_image", False)), count):
        with _reading(name):
            file.seek(index)
            if isinstance(file, PngImageFile):
                # Pillow darkens what is transparent in part, so the frames are put together below.
                file.blend_op = Blend.OP_SOURCE
            file.load()
        frame = file
        if "blend" in file.info:
            box, before = file.info["bbox"], canvas.copy()
            part = as_rgba(eight_bits(name, file)).crop(box)
            canvas.info = file.info
            if file.info["blend"] == Blend.OP_OVER:
                canvas.alpha_composite(part, box[:2])
            else:
                canvas.paste(part, box)
            frame = canvas.copy()
            if file.info["disposal"] == Disposal.OP_BACKGROUND:
                canvas.paste((0, 0, 0, 0), box)
            elif file.info["disposal"] == Disposal.OP_PREVIOUS:
                canvas = before
        yield to_rgb(name, frame), round(file.info.get("duration", 0))


def _note(file: Image.Image) -> str:
    # GIF has comments, WebP has EXIF data.
    note = file.info.get("comment") or _exif(file).get(ExifTags.Base.ImageDescription, "")
    return note.decode("latin-1") if isinstance(note, bytes) else str(note)
