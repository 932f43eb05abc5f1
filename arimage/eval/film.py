"""Video files in and out."""

import importlib.util
from pathlib import Path

from PIL import Image, ImageSequence


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
