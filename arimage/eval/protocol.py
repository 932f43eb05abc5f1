"""Published figures with the settings that they were measured with: the rows that `arimage reproduce` knows."""

import math
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from ..published.registry import find_published
from ..settings.installed import installed_files, not_installed
from ..settings.schema import COMPLETE, Count, Items, Number, Positive, Rows, Text, Whole, check
from .runs.files import sampling_text


FOLDER = Path(__file__).parent / "protocols"
Benchmark = Literal["imagenet", "geneval", "dpg", "installed"]
# The prompts of a benchmark, and where they are.
PROMPTS = {"geneval": 553, "dpg": 1065}
PROMPT_FILES = {
    "geneval": "prompts/evaluation_metadata.jsonl of https://github.com/djghosh13/geneval",
    "dpg": "the folder dpg_bench/prompts of https://github.com/TencentQQGYLab/ELLA",
}
# By how much a figure may differ: the FID of 50,000 images by 0.1 or 3 %, GenEval by 2 points, and DPG-Bench by 1.
FID_BAND, FID_SHARE, GENEVAL_BAND, DPG_BAND = 0.1, 0.03, 0.02, 1.0
STANDARD_ERRORS = 3


class Protocol(BaseModel):
    """A published figure and how it was measured.

    Attributes:
        source: where the figure and the settings are from.
        prompts: the name of the installed prompts that the benchmark "installed" takes, whose metrics are its figures.
        first: how many of them, from the first on.
        passes: forward passes of a batch.
        tokens: of an image, by default as many as passes.
        score_size: the side in pixels at which the images are scored.
        sampling: arguments of the pipeline's call; the checkpoint's own where there are none.
        expected: the figures, by their names.
        expected_error: the standard error of a figure of installed prompts.
        differs: how the procedure here differs from that of the authors.
        mistakes: settings that give another figure.
        memory: what is quoted from memory, not from the source.
        billions: of parameters of the network, for models without an entry in the registry.
        folder: how a model is made that has no name here; it is given as a folder.
    """

    model_config = COMPLETE
    source: Text
    benchmark: Benchmark
    prompts: Text | None = None
    first: Items = 1
    images: Rows = 0
    per_prompt: Items = 4
    size: Count
    score_size: Count | None = None
    passes: Positive
    tokens: Count | None = None
    decoding: Text
    order: Text | None = None
    num_inference_steps: Count | None = None
    dtype: Literal["float32", "float16", "bfloat16"]
    sampling: dict[str, Whole | Number] = {}
    expected: Annotated[dict[str, Number], Field(min_length=1)]
    expected_error: Number = 0.0
    differs: list[Text] = []
    mistakes: list[Text] = []
    memory: list[Text] = []
    billions: Positive | None = None
    folder: Text | None = None

    @property
    def number(self) -> int:
        """How many images the published figure used."""
        return self.images or PROMPTS[self.benchmark] * self.per_prompt

    @property
    def figure(self) -> str:
        """The name of the figure that is compared."""
        return next(iter(self.expected))

    @property
    def groups(self) -> int:
        """How many classes or prompts the published figure used."""
        return {**PROMPTS, "imagenet": 1000, "installed": self.first}[self.benchmark]

    def check_images(self, images: int | None) -> int:
        """The number of images of a reproduction, by default that of the figure."""
        if images is None or images == self.number:
            return self.number
        if images > self.number:
            raise ValueError(
                f"--images is {images}: the published figure uses {self.number:,} images, give at most that"
            )
        if self.benchmark in PROMPTS:
            raise ValueError(
                f"--images is {images}: {self.benchmark} needs the images of all its prompts, leave it out"
            )
        if images > self.groups and images % self.groups:
            raise ValueError(
                f"--images is {images}: give at most {self.groups}, or a multiple of it, so that each "
                f"{'class' if self.benchmark == 'imagenet' else 'prompt'} has equally many"
            )
        return images

    def band(self, standard_error: float = 0.0) -> float:
        """By how much a figure, of this standard error, may differ from the published one."""
        value = self.expected[self.figure]
        if self.benchmark == "imagenet":
            return max(FID_BAND, FID_SHARE * value)
        if self.benchmark == "installed":
            return STANDARD_ERRORS * math.hypot(self.expected_error, standard_error)
        return GENEVAL_BAND if self.benchmark == "geneval" else DPG_BAND


def load_protocols() -> dict[str, Protocol]:
    """The rows of all files, installed ones too, by NAME or NAME:PROTOCOL."""
    found: dict[str, Protocol] = {}
    for path in [*sorted(FOLDER.glob("*.toml")), *installed_files("protocols", "*.toml")]:
        shared = tomllib.loads(path.read_text(encoding="utf-8"))
        rows = shared.pop("rows")
        for name, own in rows.items():
            if name in found:
                raise ValueError(f"{path} has a row {name} that another file has: leave one out")
            # Lists of a row come after those of the file, and its settings override the file's.
            lists = {key: shared.get(key, []) + own.get(key, []) for key in ("differs", "mistakes")}
            sampling = {**shared.get("sampling", {}), **own.get("sampling", {})}
            found[name] = check(Protocol, {**shared, **own, **lists, "sampling": sampling}, f"{path.name}, {name}")
    return found


def find_protocol(name: str, protocol: str | None = None) -> tuple[str, Protocol]:
    """The row of a model, which `protocol` chooses if it has several."""
    rows = load_protocols()
    wanted = name if protocol is None else f"{name}:{protocol}"
    if wanted in rows:
        return wanted, rows[wanted]
    several = [row.partition(":")[2] for row in rows if row.partition(":")[0] == name]
    if several:
        raise ValueError(f"{name} has the protocols {', '.join(several)}: give one as --protocol")
    raise ValueError(not_installed(name) or f"{wanted} has no published figure: choose among {', '.join(rows)}")


def describe(
    name: str, row: Protocol, images: int, decoding: str, batch_size: int, bandwidth: float, teraflops: float
) -> str:
    """What a reproduction would do, and how long it takes at least.

    Args:
        batch_size: images generated together.
        bandwidth, teraflops: of the accelerator. A forward pass reads all weights, and computes two products per
            weight and token, twice under guidance.
    """
    model = name.partition(":")[0]
    entry = find_published(model)
    billions = row.billions if entry is None else entry.parameters / 1e9
    batches = -(-images // batch_size)
    passes = batches * row.passes
    lines = [
        f"{name}: {', '.join(f'{figure} {value:g}' for figure, value in row.expected.items())}",
        f"source: {row.source}",
        f"images: {images:,} of {row.size}x{row.size} pixels"
        + (f", scored at {row.score_size}" if row.score_size not in (None, row.size) else ""),
        f"settings: {decoding}, {settings_text(row)}",
        f"passes: {passes:,.0f} forward passes, {row.passes:g} for each of {batches:,} batches of {batch_size}",
    ]
    if billions is None:
        lines.append("hours: measured by the command itself, since the model is installed: leave out --dry-run")
    else:
        gigabytes = billions * (4 if row.dtype == "float32" else 2)
        reading = passes * gigabytes / (1000 * bandwidth) / 3600
        computing = images * (row.tokens or row.passes) * 2 * 2 * billions / (1000 * teraflops) / 3600
        lines.append(
            f"hours: at least {max(reading, computing):.2g} with {bandwidth:g} TB/s and {teraflops:g} "
            f"TFLOP/s, {reading:.2g} to read {gigabytes:.1f} GB of weights per pass and {computing:.2g} to compute"
        )
    lines.append(f"band: ± {row.band():.3g}" + (" and the error of the run" if row.benchmark == "installed" else ""))
    lines += [f"differs: {text}" for text in row.differs] + [f"mistake: {text}" for text in row.mistakes]
    lines += [f"quoted from memory: {', '.join(row.memory)}"] if row.memory else []
    lines += [f"needs: {PROMPT_FILES[row.benchmark]}, as --prompts"] if row.benchmark in PROMPT_FILES else []
    lines += [f"needs: {row.folder}, as --model FOLDER"] if row.folder else []
    return "\n".join(lines)


def settings_text(row: Protocol) -> str:
    """The settings of a row in words."""
    settings: dict[str, Any] = {**row.sampling, "order": row.order, "num_inference_steps": row.num_inference_steps}
    given = {name: value for name, value in settings.items() if value is not None}
    return ", ".join(filter(None, [sampling_text(given), row.dtype]))
