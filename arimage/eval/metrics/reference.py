"""What runs are scored against: a folder of images, or a file of images or of their statistics."""

import logging
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...media.files import read_image
from .array_files import ARRAY_SUFFIXES, FIRST, array_headers, read_array
from .features import file_sha256, files_sha256, image_paths


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Reference:
    """What runs are scored against.

    Attributes:
        label: its name and a digest of its contents.
        sha256: digest of the contents.
        paths: images as `extract` takes them; empty if there are only statistics.
        statistics: mean [D] and covariance [D, D] of features, if the file has them.
    """

    label: str
    sha256: str
    paths: list[Path]
    statistics: tuple[np.ndarray, np.ndarray] | None = None


def read_folder(folder: Path, *, videos: bool = False, skip_damaged: bool = False) -> Reference:
    """The images or videos of a folder, or of another run. `skip_damaged` leaves out images that cannot be read,
    with a warning that counts and names them.

    Raises:
        ValueError: if no image is left.
    """
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
    return Reference(f"{folder.resolve().name}, files {sha256[:8]}{skipped}", sha256, paths)


def _is_readable(path: Path) -> bool:
    try:
        read_image(path)
    except (ValueError, OSError):
        return False
    return True


def read_reference(path: Path | None, *, skip_damaged: bool = False) -> Reference:
    """A folder of images, a .npz with statistics (`mu` and `sigma`), images (`arr_0`, uint8 [N, H, W, 3]) or both,
    or a .npy of images. `skip_damaged` is that of `read_folder`.

    Raises:
        ValueError: if it is none of these, or its arrays have unsuitable shapes, dtypes or values.
    """
    if path is not None and path.is_dir():
        return read_folder(path, skip_damaged=skip_damaged)
    if path is None or path.suffix not in ARRAY_SUFFIXES or not path.is_file():
        raise ValueError(
            f"--ref is {path}, which is not a reference: name a folder of images, a .npz of statistics or images, "
            "or a .npy of images"
        )
    arrays = array_headers(path)
    has_images, has_statistics = FIRST in arrays, {"mu", "sigma"} <= arrays.keys()
    if not has_images and not has_statistics:
        raise ValueError(
            f"--ref {path} holds {sorted(arrays)}: give a .npz with mu and sigma, or with images as {FIRST}"
        )
    if has_images:
        shape, dtype = arrays[FIRST]
        if dtype != np.uint8 or len(shape) != 4 or shape[-1] != 3 or 0 in shape:
            raise ValueError(
                f"{FIRST} of {path} is {dtype} {list(shape)}: images are uint8 [N, H, W, 3], and at least one"
            )
    sha256 = file_sha256(path)
    return Reference(
        f"{path.name}, sha256 {sha256[:8]}",
        sha256,
        [path] if has_images else [],
        _read_statistics(path, arrays) if has_statistics else None,
    )


def _read_statistics(path: Path, arrays: dict[str, tuple[tuple[int, ...], np.dtype]]) -> tuple[np.ndarray, np.ndarray]:
    (mean_shape, mean_dtype), (shape, dtype) = arrays["mu"], arrays["sigma"]
    if len(mean_shape) != 1 or shape != 2 * mean_shape or 0 in shape or {mean_dtype.kind, dtype.kind} - set("fiu"):
        raise ValueError(
            f"mu and sigma of {path} are {mean_dtype} {list(mean_shape)} and {dtype} {list(shape)}: statistics are "
            "real numbers, mu [D] and sigma [D, D]"
        )
    mean, covariance = (read_array(path, name).astype(np.float64) for name in ("mu", "sigma"))
    if not np.isfinite(mean).all() or not np.isfinite(covariance).all():
        raise ValueError(f"mu or sigma of {path} has values that are not finite: compute the statistics again")
    if not np.allclose(covariance, covariance.T, atol=1e-6 * np.abs(covariance).max()):
        raise ValueError(f"sigma of {path} is not symmetric, so it is not a covariance: compute the statistics again")
    return mean, covariance
