"""What runs are scored against: a folder of images, or a file of images or of their statistics."""

import logging
from dataclasses import astuple, dataclass
from pathlib import Path

import numpy as np
import torch

from ...media.files import read_image
from ..runs.files import write_whole
from .array_files import ARRAY_SUFFIXES, FIRST, array_headers, read_array
from .features import Space, file_sha256, files_sha256, image_paths
from .frechet import check_eigenvalues


logger = logging.getLogger(__name__)

# Arrays of a file of statistics that name the `Space` of its features and their number, which other programs ignore.
ORIGIN, COUNT = ("network", "weights", "resize"), "count"


@dataclass(frozen=True)
class Statistics:
    """Mean [D] and covariance [D, D] of features, float64.

    Attributes:
        space: the network and resizing of the features, if the file names them.
        count: the number of images, if the file names it.
    """

    mean: np.ndarray
    covariance: np.ndarray
    space: Space | None = None
    count: int | None = None


@dataclass(frozen=True)
class Reference:
    """What runs are scored against, or images that are not a run.

    Attributes:
        label: its name and a digest of its contents.
        sha256: digest of the contents.
        paths: images as `extract` takes them; empty if there are only statistics.
        count: the number of images.
        statistics: those of Inception features, `mu` and `sigma`, if the file has them.
    """

    label: str
    sha256: str
    paths: list[Path]
    count: int
    statistics: Statistics | None = None


def read_folder(folder: Path, *, videos: bool = False, skip_damaged: bool = False) -> Reference:
    """The images or videos of a folder, or of another run. `skip_damaged` leaves out images that cannot be read,
    with a warning that counts and names them."""
    paths, skipped = image_paths(folder, videos=videos), ""
    if skip_damaged and not videos:
        damaged = [path for path in paths if not _is_readable(path)]
        if damaged:
            names = ", ".join(str(path.relative_to(folder)) for path in damaged)
            logger.warning(
                "%d of %d images of %s are damaged and left out: %s", len(damaged), len(paths), folder, names
            )
            skipped = f", {len(damaged)} damaged ones left out"
            paths = [path for path in paths if path not in set(damaged)]
        if not paths:
            raise ValueError(f"all images of {folder} are damaged: get them again")
    sha256 = files_sha256(paths)
    return Reference(f"{folder.resolve().name}, files {sha256[:8]}{skipped}", sha256, paths, len(paths))


def _is_readable(path: Path) -> bool:
    try:
        read_image(path)
    except (ValueError, OSError):
        return False
    return True


def read_images(path: Path, *, skip_damaged: bool = False) -> Reference:
    """Images that need not be a run: a folder of images, or a .npz (`arr_0`) or .npy of images, uint8 [N, H, W, 3].
    `skip_damaged` is that of `read_folder`."""
    found = _read(
        path,
        skip_damaged,
        f"{path} is not a set of images: name a folder of images, a folder of `arimage eval generate`, or a .npz "
        f"({FIRST}) or .npy of images",
    )
    if not found.paths:
        raise ValueError(f"{path} holds statistics only: name a folder of images, or a .npz with images as {FIRST}")
    return found


def read_reference(path: Path | None, *, skip_damaged: bool = False) -> Reference:
    """A folder of images, a .npz with statistics (`mu` and `sigma`), images (`arr_0`, uint8 [N, H, W, 3]) or both,
    or a .npy of images. `skip_damaged` is that of `read_folder`."""
    return _read(
        path,
        skip_damaged,
        f"--ref is {path}, which is not a reference: name a folder of images, a .npz of statistics or images, or a "
        ".npy of images",
    )


def _read(path: Path | None, skip_damaged: bool, otherwise: str) -> Reference:
    if path is not None and path.is_dir():
        return read_folder(path, skip_damaged=skip_damaged)
    if path is None or path.suffix not in ARRAY_SUFFIXES or not path.is_file():
        raise ValueError(otherwise)
    arrays = array_headers(path)
    has_images, has_statistics = FIRST in arrays, {"mu", "sigma"} <= arrays.keys()
    if not has_images and not has_statistics:
        raise ValueError(f"{path} holds {sorted(arrays)}: give a .npz with mu and sigma, or with images as {FIRST}")
    count = 0
    if has_images:
        shape, dtype = arrays[FIRST]
        if dtype != np.uint8 or len(shape) != 4 or shape[-1] != 3 or 0 in shape:
            raise ValueError(
                f"{FIRST} of {path} is {dtype} {list(shape)}: images are uint8 [N, H, W, 3], and at least one"
            )
        count = shape[0]
    sha256 = file_sha256(path)
    return Reference(
        f"{path.name}, sha256 {sha256[:8]}",
        sha256,
        [path] if has_images else [],
        count,
        _read_statistics(path, arrays, "mu", "sigma") if has_statistics else None,
    )


def read_spatial_statistics(path: Path | None) -> Statistics | None:
    """The statistics of the spatial features of the sFID, `mu_s` and `sigma_s`, in a reference batch of ADM; None for
    other references."""
    if path is None or not path.is_file():
        return None
    arrays = array_headers(path)
    return _read_statistics(path, arrays, "mu_s", "sigma_s") if {"mu_s", "sigma_s"} <= arrays.keys() else None


def _read_statistics(
    path: Path, arrays: dict[str, tuple[tuple[int, ...], np.dtype]], mu: str, sigma: str
) -> Statistics:
    (mean_shape, mean_dtype), (shape, dtype) = arrays[mu], arrays[sigma]
    if len(mean_shape) != 1 or shape != 2 * mean_shape or 0 in shape or {mean_dtype.kind, dtype.kind} - set("fiu"):
        raise ValueError(
            f"{mu} and {sigma} of {path} are {mean_dtype} {list(mean_shape)} and {dtype} {list(shape)}: statistics "
            f"are real numbers, {mu} [D] and {sigma} [D, D]"
        )
    mean, covariance = (read_array(path, name).astype(np.float64) for name in (mu, sigma))
    if not np.isfinite(mean).all() or not np.isfinite(covariance).all():
        raise ValueError(f"{mu} or {sigma} of {path} has values that are not finite: compute the statistics again")
    if not np.allclose(covariance, covariance.T, atol=1e-6 * np.abs(covariance).max()):
        raise ValueError(
            f"{sigma} of {path} is not symmetric, so it is not a covariance: compute the statistics again"
        )
    check_eigenvalues(f"{sigma} of {path}", torch.linalg.eigvalsh(torch.from_numpy(covariance)))
    # Other programs may use these names for something else.
    kinds = [
        (shape, dtype.kind) for shape, dtype in (arrays.get(name, ((), np.dtype("V"))) for name in (*ORIGIN, COUNT))
    ]
    if mu != "mu" or kinds != [((), "U")] * len(ORIGIN) + [((), "i")]:
        return Statistics(mean, covariance)
    space = Space(*(str(read_array(path, name)) for name in ORIGIN))
    return Statistics(mean, covariance, space, int(read_array(path, COUNT)))


def write_statistics(path: Path, features: np.ndarray, space: Space) -> None:
    """Write mean and covariance of features [N, D] as `mu` and `sigma`, as in the files of pytorch-fid and clean-fid,
    and next to them their `space` and number."""
    if len(features) < 2:
        raise ValueError(f"statistics need at least 2 images, and there are {len(features)}: give more")
    features = features.astype(np.float64)
    origin = dict(zip(ORIGIN, astuple(space), strict=True))
    arrays = {"mu": features.mean(0), "sigma": np.cov(features, rowvar=False), COUNT: len(features), **origin}

    def write(file: Path) -> None:
        with file.open("wb") as stream:
            np.savez(stream, allow_pickle=False, **arrays)

    write_whole(path, write)
