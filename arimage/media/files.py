"""Files of images and videos, in and out. Heavy imports stay inside the functions, as in `arimage.cli`."""

import importlib.util
import re
import tempfile
from pathlib import Path

from PIL import Image, ImageSequence


def open_image(option: str, path: Path) -> Image.Image:
    """An image.

    Raises:
        ValueError: if it cannot be read, naming the option.
    """
    try:
        image = Image.open(path)
        image.load()
    # Damaged PNG files raise SyntaxError.
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(f"{option} is {path}, which cannot be read: {error}") from error
    return image


def can_write_mp4() -> bool:
    """Whether the packages of the extra "video" are there."""
    return all(importlib.util.find_spec(name) for name in ("imageio", "imageio_ffmpeg"))


def check_mp4(option: str, path: Path) -> None:
    """Refuse a file that needs the extra "video" where it is not installed.

    Raises:
        ValueError: naming the option.
    """
    if path.suffix.lower() not in (".gif", ".webp", ".png") and not can_write_mp4():
        raise ValueError(
            f"{option} is {path}, which needs imageio: pip install 'arimage[video]', or give a .webp or .gif"
        )


def read_video(option: str, path: Path) -> list[Image.Image]:
    """The frames of a video, or of an animated GIF, WebP or PNG.

    Raises:
        ValueError: if it cannot be read, naming the option.
    """
    check_mp4(option, path)
    try:
        if path.suffix.lower() in (".gif", ".webp", ".png"):
            with Image.open(path) as file:
                return [frame.convert("RGB") for frame in ImageSequence.Iterator(file)]
        from diffusers.utils import load_video

        return load_video(str(path))
    # Each format fails in ways of its own.
    except (OSError, SyntaxError, ValueError, RuntimeError, Image.DecompressionBombError) as error:
        raise ValueError(f"{option} is {path}, which cannot be read: {error}") from error


def write_video(frames: list[Image.Image], path: Path, fps: int) -> None:
    """Write frames as .mp4, or as an animated .gif or .webp that repeats, which round the time of a frame to 10 and 1 ms."""
    if path.suffix.lower() == ".mp4":
        from diffusers.utils import export_to_video

        # Any even size is kept.
        export_to_video(frames, str(path), fps=fps, macro_block_size=2)
    else:
        duration = round(1000 / fps)
        frames[0].save(path, save_all=True, append_images=frames[1:], duration=duration, loop=0, quality=90, method=4)


def grid_of(images: list[Image.Image], rows: int) -> Image.Image:
    """Images in `rows` rows."""
    from diffusers.utils import make_image_grid

    return make_image_grid(images, rows=rows, cols=len(images) // rows)


def write_grid(images: list, count: int, path: Path, fps: int | None = None) -> Path:
    """Write images, `count` for each prompt, as one; or, with frames per second, videos of equally many frames as one."""
    # One row per prompt; with one image each, the widest grid of up to eight columns without empty cells.
    columns = count if count > 1 else max(n for n in range(1, 9) if len(images) % n == 0)
    rows = len(images) // columns
    if fps is None:
        grid_of(images, rows).save(path)
    else:
        write_video([grid_of(list(frames), rows) for frames in zip(*images, strict=True)], path, fps)
    return path


def write_files(images: list, names: list[str], seed: int, folder: Path, fps: int | None = None) -> list[Path]:
    """Write every image to a file of its own, or every video with frames per second; each of `names` has equally many."""
    suffix = ".png" if fps is None else ".mp4" if can_write_mp4() else ".webp"
    paths = []
    for i, image in enumerate(images):
        name = names[i * len(names) // len(images)]
        slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:60]
        paths.append(write_grid([image], 1, folder / f"{slug or 'image'}-{seed}-{i}{suffix}", fps))
    return paths


def own_path(name: str, suffix: str, folder: str) -> Path:
    """For a file in a folder of its own in `folder`, named after the letters in `name`."""
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:80] or "image"
    return Path(tempfile.mkdtemp(dir=folder)) / f"{slug}{suffix}"
