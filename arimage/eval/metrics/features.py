"""Features of pictures, from networks in local files, and their cache."""

import hashlib
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from tqdm import tqdm

from ..runs.files import replace
from ..runs.run_folder import MANIFEST, read_finished


IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
VIDEO_SUFFIXES = (".mp4", ".gif", ".webp", ".png")
Resize = Literal["clean", "tf1"]


@dataclass(frozen=True)
class Space:
    """Two sets of features are comparable if they share this: the network's name, the SHA-256 of its weights, the resizing."""

    name: str
    sha256: str
    resize: str


class Extractor(Protocol):
    """A network that turns a batch of B pictures of any mode and size, or B videos, into features [B, D], float32."""

    space: Space

    def __call__(self, images: list) -> torch.FloatTensor: ...


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def image_paths(folder: Path, *, videos: bool = False) -> list[Path]:
    """The images or videos of a run in the order of its manifest, or all pictures or videos below another folder, sorted.

    Raises:
        ValueError: if the run is not finished or damaged, or the folder has no pictures or no videos.
    """
    if (folder / MANIFEST).is_file():
        return [folder / row["path"] for row in read_finished(folder)[0]]
    kind, suffixes = ("videos", VIDEO_SUFFIXES) if videos else ("pictures", IMAGE_SUFFIXES)
    found = sorted(path for path in folder.rglob("*") if path.suffix.lower() in suffixes)
    if not found:
        raise ValueError(f"{folder} has no {kind}: name a folder of {', '.join(suffixes)} files")
    return found


def _open(path: Path) -> Image.Image:
    with Image.open(path) as image:
        return image.convert("RGB")


def extract(
    paths: list[Path],
    extractor: Extractor,
    *,
    cache: Path | None = None,
    batch_size: int = 32,
    size: int | None = None,
    read: Callable[[Path], object] = _open,
) -> np.ndarray:
    """Features [N, D], float32, of pictures or videos in their order.

    Args:
        paths: files of pictures, or a single .npz whose `arr_0` holds them: uint8 [N, H, W, 3], as the ADM evaluator reads.
        cache: a folder for files of features, whose names depend on the extractor's space and the pictures' names, sizes
            and modification times.
        size: before that, `resize` the pictures to this side in pixels.
        read: how a file becomes what the extractor takes, an RGB picture by default.
    """
    file = (
        None if cache is None else cache / f"{extractor.space.name}-{_fingerprint(paths, extractor.space, size)}.npz"
    )
    if file is not None and file.is_file():
        return np.load(file)["features"]
    batches = _batches(paths, batch_size, extractor.space.name, read)
    if size is not None:
        batches = ([Image.fromarray(resize(np.asarray(one), size)) for one in images] for images in batches)
    found = [extractor(images).float().cpu().numpy() for images in batches]
    features = np.concatenate(found)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)

        def write(path: Path) -> None:
            with path.open("wb") as stream:
                np.savez(stream, features=features, space=json.dumps(asdict(extractor.space)))

        replace(file, write)
    return features


def resize(pixels: np.ndarray, size: int) -> np.ndarray:
    """A picture, uint8 [H, W, 3], with sides of `size` pixels, as LlamaGen makes 256 of 384 for the evaluator of ADM: bicubic
    without antialiasing. It rounds to levels afterwards, here they are rounded before and after."""
    if pixels.shape[:2] == (size, size):
        return pixels
    image = torch.from_numpy(pixels.copy()).permute(2, 0, 1)[None].float()
    image = F.interpolate(image, size=(size, size), mode="bicubic").round().clamp(0, 255)
    return image[0].permute(1, 2, 0).byte().numpy()


def _fingerprint(paths: list[Path], space: Space, size: int | None) -> str:
    stats = [(path.name, path.stat()) for path in paths]
    files = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    sizes = [] if size is None else [size]
    return hashlib.sha256(json.dumps([asdict(space), files, *sizes]).encode()).hexdigest()[:16]


def _batches(paths: list[Path], size: int, name: str, read: Callable[[Path], object]) -> Iterator[list]:
    packed = paths[0].suffix == ".npz"
    pictures = paths
    if packed:
        pictures = np.load(paths[0])["arr_0"]
        if pictures.dtype != np.uint8 or pictures.ndim != 4 or pictures.shape[-1] != 3:
            raise ValueError(
                f"arr_0 of {paths[0]} is {pictures.dtype} {list(pictures.shape)}: pictures are uint8 [N, H, W, 3]"
            )
    with ThreadPoolExecutor() as pool, tqdm(total=len(pictures), desc=name, unit="image", leave=False) as progress:
        for start in range(0, len(pictures), size):
            batch = pictures[start : start + size]
            yield list(pool.map(Image.fromarray if packed else read, batch))
            progress.update(len(batch))


@dataclass(frozen=True)
class WeightsFile:
    """A published file of weights, and the option and environment variable that name it."""

    name: str
    url: str
    sha256: str
    option: str
    variable: str

    @property
    def where(self) -> str:
        """How to get and name the file, for errors."""
        return f"download {self.url}, and name the file with {self.option} or {self.variable}"

    def check(self, path: Path | None, user: str) -> Path:
        """The path, if there is a file.

        Raises:
            ValueError: if there is none, naming the `user` of the weights.
        """
        if path is None:
            raise ValueError(f"{user} needs {self.name}: {self.where}")
        if not path.is_file():
            raise ValueError(f"{self.option} is {path}, which is not a file: {self.where}")
        return path

    def provenance(self, digest: str) -> str:
        """ "published", or a note that a file of another SHA-256 was used."""
        if digest == self.sha256:
            return "published"
        return f"unknown (sha256 {digest}), not comparable with published figures"
