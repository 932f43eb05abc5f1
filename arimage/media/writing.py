"""Files of images and videos, written, with what made them inside (`metadata.py`)."""

import re
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from itertools import count as counted
from pathlib import Path

from PIL import Image

from . import files
from .files import SCALER
from .folders import replacing
from .metadata import MARK, saving


# Of a sheet of images.
MAX_COLUMNS = 8


def write_video(frames: list[Image.Image], path: Path, fps: int, text: str | None = None) -> None:
    """Write frames as .mp4, or as an animated .gif or .webp that repeats, which round the time of a frame to 10 and 1
    ms. `text` is their metadata."""
    suffix = path.suffix.lower()
    if suffix == ".mp4":
        _encode(frames, path, fps, text)
        return
    step = 10 if suffix == ".gif" else 1
    with replacing(path) as file:
        frames[0].save(
            file,
            save_all=True,
            append_images=frames[1:],
            duration=step * max(1, round(1000 / fps / step)),
            loop=0,
            quality=90,
            method=4,
            **saving(suffix, text, note=f"{len(frames)} frames"),
        )


def _encode(frames: list[Image.Image], path: Path, fps: int, text: str | None) -> None:
    from imageio_ffmpeg import get_ffmpeg_exe

    width, height = frames[0].size
    source = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}", "-r", str(fps), "-i", "-"]
    # Players guess the matrix of a video that does not name it by its height. H.264 has even sides.
    options = ["-vf", f"scale=ceil(iw/2)*2:ceil(ih/2)*2:{SCALER}", "-colorspace", "smpte170m", "-color_range", "tv"]
    options += [] if text is None else ["-metadata", f"comment={MARK}{text}"]
    codec = ["-vcodec", "libx264", "-pix_fmt", "yuv420p", "-crf", "25"]
    with replacing(path) as file, tempfile.TemporaryFile() as said:
        # imageio-ffmpeg's own writer does not say that ffmpeg has failed, as where the disk is full.
        command = [get_ffmpeg_exe(), "-y", "-v", "error", *source, *codec, *options, str(file.absolute())]
        # In a group of its own: a terminal sends Ctrl-C to all of one, and a server finishes its videos.
        with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=said, process_group=0) as process:
            assert process.stdin is not None
            # One that ends early says why.
            with suppress(BrokenPipeError), process.stdin as pipe:
                for frame in frames:
                    pipe.write(frame.convert("RGB").tobytes())
        if process.returncode:
            said.seek(0)
            reason = (
                " ".join(said.read().decode("utf-8", "replace").split()) or f"ffmpeg ended with {process.returncode}"
            )
            raise OSError(f"{path} cannot be written ({reason}): make room on the disk, and write it again")


def grid_of(images: list[Image.Image], rows: int) -> Image.Image:
    """Images in `rows` rows."""
    from diffusers.utils import make_image_grid

    return make_image_grid(images, rows=rows, cols=len(images) // rows)


def sheet_of(images: list[Image.Image], count: int) -> Image.Image:
    """Images, `count` for each prompt, as one: a row per prompt, or the fewest rows of at most eight images. A prompt
    begins a row, and the cells after its last image are white."""
    together = count if count > 1 else len(images)
    # Without empty cells where four or more columns allow it.
    columns = next(
        (n for n in range(min(together, MAX_COLUMNS), 3, -1) if together % n == 0), min(together, MAX_COLUMNS)
    )
    cells: list[Image.Image] = []
    for begin in range(0, len(images), together):
        cells += images[begin : begin + together]
        cells += [Image.new("RGB", images[0].size, "white")] * (-together % columns)
    return grid_of(cells, len(cells) // columns)


def write_grid(images: list, count: int, path: Path, fps: int | None = None, text: str | None = None) -> Path:
    """Write images, `count` for each prompt, as one; or, with frames per second, videos of equally many frames as
    one. `text` is their metadata."""
    if fps is None:
        with replacing(path) as file:
            sheet_of(images, count).save(file, **saving(path.suffix.lower(), text))
    else:
        write_video([sheet_of(list(frames), count) for frames in zip(*images, strict=True)], path, fps, text)
    return path


def free_path(folder: Path, name: str, suffix: str) -> Path:
    """FOLDER/NAME.suffix, or if there is such a file already, NAME-2, NAME-3, ..."""
    names = (f"{name}-{number}" if number > 1 else name for number in counted(1))
    return next(path for path in (folder / f"{name}{suffix}" for name in names) if not path.exists())


def video_suffix() -> str:
    return ".mp4" if files.can_write_mp4() else ".webp"


def write_files(
    images: list,
    names: list[str],
    seeds: Sequence[int],
    folder: Path,
    fps: int | None = None,
    texts: Sequence[str | None] = (),
) -> list[Path]:
    """Write every image to a file of its own, NAME-SEED.png, or every video with frames per second; each of `names`
    has equally many. No file is replaced, see `free_path`. `texts` are their metadata."""
    suffix = ".png" if fps is None else video_suffix()
    count = len(images) // len(names)
    return [
        write_grid([image], 1, free_path(folder, f"{slug(names[i // count], 60)}-{seed}", suffix), fps, text)
        for i, (image, seed, text) in enumerate(zip(images, seeds, texts or [None] * len(images), strict=True))
    ]


def slug(name: str, most: int) -> str:
    """The letters in a name, at most so many, for that of a file."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:most] or "image"


def own_path(name: str, suffix: str, folder: str) -> Path:
    """For a file in a folder of its own in `folder`, named after the letters in `name`."""
    return Path(tempfile.mkdtemp(dir=folder)) / f"{slug(name, 80)}{suffix}"
