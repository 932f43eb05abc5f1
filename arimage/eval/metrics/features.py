"""Features of images and videos that networks compute, and their cache."""

import hashlib
import json
import logging
import os
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, Protocol, TypeVar
from urllib.error import URLError

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from tqdm import tqdm

from ...media.files import read_image
from ...media.folders import IMAGE_SUFFIXES, VIDEO_SUFFIXES, list_files, named, say_left_out
from ..runs.files import write_whole
from ..runs.run_folder import MANIFEST, read_finished
from .array_files import ARRAY_SUFFIXES, read_array


logger = logging.getLogger(__name__)

Resize = Literal["clean", "tf1"]
# How files become pixels: another word for another way, so that cached features of the former are not used.
READING, READING_OF_VIDEOS = "srgb", "srgb, accurately rounded"
# What is noted of a network that published figures of a metric are not of.
OTHER_NETWORK = "of another network than {}, not comparable with published figures"


@dataclass(frozen=True)
class Space:
    """What comparable sets of features share: the network, the SHA-256 of its weights, and the resizing."""

    name: str
    sha256: str
    resize: str


ExtractorT = TypeVar("ExtractorT", bound="Extractor")


class Extractor(Protocol):
    """A network that computes features [B, D], float32, of B images of any mode and size, or of B videos."""

    space: Space

    def __call__(self, images: list) -> torch.FloatTensor: ...


def of_raw_files(extractor: ExtractorT) -> ExtractorT:
    """An extractor whose space says that it is given images as `read_raw` reads them."""
    extractor.space = replace(extractor.space, resize=f"{extractor.space.resize}, raw files")
    return extractor


def cache_folder(name: str) -> Path:
    """A folder of what commands keep for each other."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "arimage" / name


def file_sha256(path: Path) -> str:
    """SHA-256 of a file as hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def files_sha256(paths: list[Path]) -> str:
    """SHA-256 of the contents of files in their order, whatever their names."""
    with ThreadPoolExecutor() as pool:
        return hashlib.sha256("".join(pool.map(file_sha256, paths)).encode()).hexdigest()


def weights_sha256(files: list[Path]) -> str:
    """SHA-256 of the weights of a model in one file, or in several."""
    return file_sha256(files[0]) if len(files) == 1 else files_sha256(files)


def image_paths(folder: Path, *, videos: bool = False) -> list[Path]:
    """The images or videos of a run in the order of its manifest, or all images or videos below another folder, see
    `list_files`. Other files of such a folder are counted and named in a warning."""
    if (folder / MANIFEST).is_file():
        return [folder / row["path"] for row in read_finished(folder)[0]]
    kind, suffixes = ("videos", VIDEO_SUFFIXES) if videos else ("images", IMAGE_SUFFIXES)
    found = list_files(folder, suffixes)
    rest = [*found.others, *found.lost]
    if not found.files:
        what = f" but {named(rest)}" if rest else ""
        raise ValueError(f"{folder} has no {kind}{what}: name a folder of {', '.join(suffixes)} files")
    say_left_out(folder, rest)
    return [folder / name for name in found.files]


def extract(
    paths: list[Path],
    extractor: Extractor,
    *,
    cache: Path | None = None,
    sha256: str | None = None,
    batch_size: int = 32,
    size: int | None = None,
    read: Callable[[Path], object] = read_image,
) -> np.ndarray:
    """The features of images or videos in their order, float32 [N, D].

    Args:
        paths: files of images, or a single .npy or .npz (`arr_0`) that holds all of them as uint8 [N, H, W, 3].
        cache: a folder for files of features, which are found again by the extractor's space and the contents of the
            images. A cache that cannot be written is a warning.
        sha256: `files_sha256(paths)`, if it is known already.
        size: `resize` the images to this side in pixels first.
        read: reads a file as the extractor needs it, by default as an RGB image.

    Raises:
        ValueError: if an image cannot be read, or its features are not finite.
    """
    file = None
    if cache is not None:
        by_ffmpeg = any(path.suffix.lower() not in (*IMAGE_SUFFIXES, ".gif", *ARRAY_SUFFIXES) for path in paths)
        reading = READING_OF_VIDEOS if by_ffmpeg else READING
        settings = [asdict(extractor.space), sha256 or files_sha256(paths), size, reading]
        key = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:16]
        file = cache / f"{extractor.space.name}-{key}.npz"
        cached = _read_cached(file)
        if cached is not None:
            return cached
    batches = image_batches(paths, batch_size, extractor.space.name, read)
    if size is not None:
        batches = ([Image.fromarray(resize(np.asarray(one), size)) for one in images] for images in batches)
    # An accelerator computes while the next batch is prepared: nothing waits for it before the end.
    features = torch.cat([extractor(images).float() for images in batches]).cpu().numpy()
    finite = np.isfinite(features).all(1)
    if not finite.all():
        first = int(finite.argmin())
        name = f"image {first} of {paths[0]}" if paths[0].suffix in ARRAY_SUFFIXES else paths[first]
        raise ValueError(
            f"{extractor.space.name} gives features of {name} that are not finite: use other weights, or leave it out"
        )
    if file is not None:
        _write_cached(file, features, extractor.space)
    return features


def _read_cached(file: Path) -> np.ndarray | None:
    try:
        with np.load(file) as arrays:
            return arrays["features"]
    # Not there, or damaged: it is written again.
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile):
        return None


def _write_cached(file: Path, features: np.ndarray, space: Space) -> None:
    def write(path: Path) -> None:
        with path.open("wb") as stream:
            np.savez(stream, features=features, space=json.dumps(asdict(space)))

    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, write)
    except OSError as error:
        logger.warning("%s cannot be written (%s): these features are computed again next time", file, error)


def resize(pixels: np.ndarray, size: int) -> np.ndarray:
    """Resize an image, uint8 [H, W, 3], to sides of `size` pixels as LlamaGen does from 384 to 256 for the evaluator
    of ADM: bicubic without antialiasing. LlamaGen resizes before it rounds to 256 levels; here the image is rounded
    before and after."""
    if pixels.shape[:2] == (size, size):
        return pixels
    image = torch.from_numpy(pixels.copy()).permute(2, 0, 1)[None].float()
    image = F.interpolate(image, size=(size, size), mode="bicubic").round().clamp(0, 255)
    return image[0].permute(1, 2, 0).byte().numpy()


def image_batches(paths: list[Path], size: int, name: str, read: Callable[[Path], object]) -> Iterator[list]:
    packed = paths[0].suffix in ARRAY_SUFFIXES
    images = read_array(paths[0]) if packed else paths
    batches = [images[start : start + size] for start in range(0, len(images), size)]
    with ThreadPoolExecutor() as pool, tqdm(total=len(images), desc=name, unit="image", leave=False) as progress:
        reading = partial(pool.map, Image.fromarray if packed else read)
        ahead = reading(batches[0])
        # The next batch is read while this one is in use.
        for following in [*batches[1:], []]:
            batch, ahead = list(ahead), reading(following)
            yield batch
            progress.update(len(batch))


def fetch(url: str, path: Path, sha256: str, remedy: str) -> None:
    """Download a file with a progress bar.

    Args:
        sha256: how its SHA-256 begins.
        remedy: what to do with a file that was got elsewhere.

    Raises:
        ValueError: if it is another file.
        ConnectionError: if it cannot be downloaded.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        torch.hub.download_url_to_file(url, str(path), hash_prefix=sha256)
    except RuntimeError as error:
        raise ValueError(
            f"{url} is not the published file or broke off ({error}): repeat the command, or get the file elsewhere "
            f"and {remedy}"
        ) from error
    except URLError as error:
        raise ConnectionError(
            f"{url} cannot be downloaded ({error.reason}): connect, or get the file elsewhere and {remedy}"
        ) from error


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
        return (
            f"let `arimage eval score --download` fetch it, or get {self.url} and name the file with {self.option} or "
            f"{self.variable}"
        )

    @property
    def kept(self) -> Path:
        """Where `--download` keeps the file."""
        return cache_folder("networks") / self.name

    def check(self, path: Path | None, user: str) -> Path:
        """The path, by default that of the downloaded file, if there is a file."""
        if path is None and self.kept.is_file():
            return self.kept
        if path is None:
            raise ValueError(f"{user} needs {self.name}: {self.where}")
        if not path.is_file():
            raise ValueError(f"{self.option} is {path}, which is not a file: {self.where}")
        return path

    def provenance(self, digest: str) -> str:
        """ "published", or a note that the file has another SHA-256."""
        if digest == self.sha256:
            return "published"
        return f"unknown (sha256 {digest}), not comparable with published figures"
