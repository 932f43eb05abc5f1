"""What a metric is given: the images to score, the reference, and features of both."""

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from ..media.files import read_image, read_raw
from .metrics.clip_score import ClipExtractor
from .metrics.dinov2 import Dinov2Extractor
from .metrics.features import (
    Extractor,
    ExtractorT,
    Resize,
    Space,
    cache_folder,
    extract,
    image_paths,
    of_raw_files,
)
from .metrics.i3d import I3DExtractor
from .metrics.inception import InceptionExtractor, SpatialInceptionExtractor
from .metrics.reference import (
    Reference,
    Statistics,
    read_images,
    read_reference,
    read_spatial_statistics,
    write_statistics,
)
from .metrics.small_versions import SIDE, small_versions
from .metrics.standard_errors import Estimate
from .metrics.wavelets import WaveletExtractor
from .runs.files import write_json
from .runs.run_folder import MANIFEST, prompts_of, read_rows


if TYPE_CHECKING:
    from ..training.pixels import PixelSource

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job:
    """Images to score, and what to score them with. Features that several metrics share are extracted once.

    Attributes:
        run: the folder of a finished run, or other images as `read_images` takes them.
        reference: as `read_reference` takes it; for `fvd` a folder of videos, or of another run.
        inception_weights: the file of `InceptionExtractor`.
        clip: the folder of `ClipExtractor`.
        size: for the Inception metrics, `resize` the images of the run, not the reference, to this side in pixels.
        i3d_weights: the file of `I3DExtractor`.
        frames: how many frames of each video `fvd` compares; by default as many as the first video of the run has.
        skip_damaged: leave out images of the reference that cannot be read.
        dinov2: the source of `Dinov2Extractor`.
        train: for `nearest`, the training set, as `open_pixels` takes it.
        held_out: for `nearest`, real images that training did not see, of which the same is said.
        sheet: for `nearest`, a .png file to write.
        raw: read files by `read_raw` for networks.
    """

    run: Path
    reference: Path | None = None
    inception_weights: Path | None = None
    clip: Path | None = None
    resize: Resize = "clean"
    device: str = "cpu"
    batch_size: int = 32
    size: int | None = None
    i3d_weights: Path | None = None
    frames: int | None = None
    skip_damaged: bool = False
    dinov2: str | Path | None = None
    train: str | Path | None = None
    held_out: str | Path | None = None
    sheet: Path | None = None
    raw: bool = False

    @property
    def is_run(self) -> bool:
        """Whether the images are those of a run, with prompts or classes."""
        return (self.run / MANIFEST).is_file()

    @cached_property
    def images(self) -> Reference:
        """The images that are not a run."""
        return read_images(self.run)

    @cached_property
    def paths(self) -> list[Path]:
        return image_paths(self.run) if self.is_run else self.images.paths

    @cached_property
    def rows(self) -> list[dict]:
        """The manifest of the run."""
        return read_rows(self.run)

    @property
    def count(self) -> int:
        """The number of images."""
        return len(self.rows) if self.is_run else self.images.count

    @cached_property
    def prompts(self) -> np.ndarray | None:
        """The prompt of each image, by its number; None for a run of classes, and for images that are not a run."""
        prompts = prompts_of(self.rows) if self.is_run else None
        return None if prompts is None else np.unique(prompts, return_inverse=True)[1]

    @cached_property
    def inception(self) -> InceptionExtractor:
        return self._named(InceptionExtractor(self.inception_weights, self.resize, self.device))

    @cached_property
    def spatial_inception(self) -> SpatialInceptionExtractor:
        return self._named(SpatialInceptionExtractor(self.inception_weights, self.device))

    @cached_property
    def clip_extractor(self) -> ClipExtractor:
        return self._named(ClipExtractor(self.clip, self.device))

    @cached_property
    def dinov2_extractor(self) -> Dinov2Extractor:
        return self._named(Dinov2Extractor(self.dinov2, self.device))

    @cached_property
    def wavelets(self) -> WaveletExtractor:
        return self._named(WaveletExtractor(self.device))

    def i3d_extractor(self, frames: int) -> I3DExtractor:
        return I3DExtractor(self.i3d_weights, frames, self.device)

    def _named(self, extractor: ExtractorT) -> ExtractorT:
        return of_raw_files(extractor) if self.raw else extractor

    @property
    def read(self) -> Callable[[Path], Image.Image]:
        """How networks read a file."""
        return read_raw if self.raw else read_image

    @cached_property
    def features(self) -> np.ndarray:
        return self.extract(self.inception, self.size)

    def extract(self, extractor: Extractor, size: int | None = None) -> np.ndarray:
        """Features of the images: those of a run are cached with it, others where those of references are."""
        settings: dict[str, Any] = {"batch_size": self.batch_size, "size": size, "read": self.read}
        if not self.is_run:
            return extract_reference(self.images, extractor, **settings)
        return extract(self.paths, extractor, cache=self.run / "features", **settings)

    @cached_property
    def small_versions(self) -> np.ndarray:
        return small_versions(self.paths)

    @cached_property
    def examples(self) -> "PixelSource":
        """The training set."""
        if self.train is None:
            raise ValueError(
                "--train is missing: nearest needs the training set, a folder of images or shards, which only "
                "`arimage eval score` takes"
            )
        return _open_pixels(self.train)

    @cached_property
    def held_out_images(self) -> "PixelSource | None":
        if self.held_out is None:
            return None
        found = _open_pixels(self.held_out)
        if both := self.examples.shared_with(found):
            logger.warning(f"{both} of {len(found)} images of --held-out are in --train too: give others")
        return found

    @cached_property
    def against(self) -> Reference:
        return read_reference(self.reference, skip_damaged=self.skip_damaged)

    @cached_property
    def spatial_statistics(self) -> Statistics | None:
        return read_spatial_statistics(self.reference)

    @cached_property
    def reference_features(self) -> np.ndarray:
        return self.extract_against(self.inception)

    def extract_against(self, extractor: Extractor) -> np.ndarray:
        """Features of the reference's images, cached for other runs."""
        return extract_reference(self.against, extractor, batch_size=self.batch_size, read=self.read)

    def entry(
        self, estimate: Estimate, reference: str, space: Space | None, some: np.ndarray | None = None, **more
    ) -> dict:
        """The entry of a figure of the images, or of `some` of them, given by their ids."""
        some = np.arange(self.count) if some is None else some
        prompts = {} if self.prompts is None else {"prompts": len(np.unique(self.prompts[some]))}
        return entry(estimate, len(some), reference, space, **prompts, **more)

    @property
    def against_label(self) -> str:
        """The reference and the number of its images."""
        return f"{self.against.label}: {self.against.count} pictures"

    def inception_entry(
        self, estimate: Estimate, reference: str | None = None, some=None, space: Space | None = None, **more
    ) -> dict:
        """The entry of a figure in the space of the Inception network, or in another `space` of it."""
        if self.size is not None:
            more["size"] = f"{self.size}, bicubic without antialiasing"
        space = space or self.inception.space
        return self.entry(
            estimate, reference or self.against_label, space, some, weights=self.inception.weights, **more
        )

    def of_prompts(self, some: np.ndarray) -> np.ndarray | None:
        """The prompts of some of the images, given by their ids."""
        return None if self.prompts is None else self.prompts[some]


def _open_pixels(data: str | Path) -> "PixelSource":
    # It needs arimage[train], as no other metric does.
    from ..training.pixels import open_pixels

    return open_pixels(data, SIDE)


def extract_reference(images: Reference, extractor: Extractor, **settings) -> np.ndarray:
    """Features of images that are not a run, cached for other commands."""
    return extract(images.paths, extractor, cache=cache_folder("features"), sha256=images.sha256, **settings)


def make_statistics(
    path: Path,
    extractor: Extractor,
    out: Path,
    *,
    skip_damaged: bool = False,
    batch_size: int = 32,
    raw: bool = False,
) -> None:
    """Write the statistics of the features of images to a .npz file, which `read_reference` takes; see
    `write_statistics`.

    Args:
        path: as `read_images` takes it.
        skip_damaged: leave out images that cannot be read.
        raw: read files by `read_raw`.

    Raises:
        ValueError: if there are fewer than 2 images, or one cannot be read.
    """
    extractor, read = (of_raw_files(extractor), read_raw) if raw else (extractor, read_image)
    images = read_images(path, skip_damaged=skip_damaged)
    features = extract_reference(images, extractor, batch_size=batch_size, read=read)
    warn_of_few("fid", features.shape[1], len(features))
    out.parent.mkdir(parents=True, exist_ok=True)
    write_statistics(out, features, extractor.space)


def entry(estimate: Estimate, count: int, reference: str, space: Space | None, **more) -> dict:
    """A metric as stored in `metrics.json`; `more` are its settings."""
    interval = {} if estimate.interval is None else {"interval": list(estimate.interval)}
    return {
        "value": estimate.value,
        "standard_error": estimate.standard_error,
        **interval,
        "count": count,
        "reference": reference,
        "space": None if space is None else asdict(space),
        **more,
    }


def warn_of_few(metric: str, fewest: int, *counts: int) -> None:
    """Warn if one of the `counts` of images is too small for a Fréchet distance."""
    if min(counts) < fewest:
        logger.warning(
            f"{metric} from {min(counts):,} images or references is too high and unreliable: use at least "
            f"{fewest:,} of each"
        )


def write_scores(run: Path, name: str, values: np.ndarray) -> None:
    """Write the values [N] of a metric, one per image in manifest order, to `scores/<name>.json`."""
    (run / "scores").mkdir(exist_ok=True)
    ids = [row["id"] for row in read_rows(run)]
    write_json(run / "scores" / f"{name}.json", {"ids": ids, "values": [float(value) for value in values]})
