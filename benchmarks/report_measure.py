"""Measures what the figures of notes/report.md show, on a CPU, in parts. Each writes a table to benchmarks/report/,
from which report_figures.py makes the figures:

- windows: forward passes by model, order, refresh and window
- mesh: the same of a Markov mesh, without a network
- drafts: forward passes by how good first drafts are
- seconds: speed against `ar` by window
- exactness: how far exact, relaxed and faulty methods are from the distribution of a model small enough to enumerate
- siblings: how far a token is off that is chosen among two drafts, rightly and with faults
- paths: how often coupled denoising paths keep a token
- wrong_paths: how far continuous tokens are off where the coupling is wrong

The small models and the faults are those of the tests, whose packages it needs.

    python benchmarks/report_measure.py
    python benchmarks/report_measure.py --only seconds    # on cores that do nothing else
"""

import contextlib
import math
import statistics
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated
from unittest.mock import patch

import torch
import typer


# The models that are small enough to know their distributions are those of the tests.
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from continuous_kit import MixtureModel, normal_joint
from decoding.conftest import TableModel
from decoding.continuous import test_wrong_coupling as couplings
from decoding.test_exactness import BROKEN
from decoding.test_siblings import FLAWS, output_distribution, random_distributions
from first_drafts import PerfectDrafts, steps_of
from markov_mesh import MarkovMesh

from arimage.cli.options import load_pipeline
from arimage.decoding import (
    Decoding,
    GroupAcceptance,
    LatentSampling,
    NeighbourAcceptance,
    ParallelJacobiDecoding,
    PathJacobiDecoding,
    Sampling,
    SpeculativeJacobiDecoding,
    ZipARDecoding,
    decode,
    decoding_from_name,
)
from arimage.decoding.continuous import path_coupling
from arimage.eval.bench.measure import quiet
from arimage.eval.metrics.standard_errors import standard_error
from arimage.eval.runs.prompts import prompt_file, read_prompts


FOLDER = Path(__file__).with_name("report")
WINDOWS = [8, 16, 32, 64, 128]
# Of the model of six tokens that every method is compared with.
GRID = (2, 3)
Rows = Iterator[dict[str, str | int | float]]


def prompts_of(kind: str, count: int) -> list[str]:
    """`count` prompts that the packaged models know, or new colours, counts and pairs."""
    rows = read_prompts(prompt_file("emoji" if kind == "known" else "emoji-checks"))
    if kind == "new":
        rows = [row for row in rows if row["check"] in ("colours", "counts", "pairs")]
    return [row["prompt"] for row in rows[:: len(rows) // count]][:count]


def summary(passes: torch.Tensor) -> dict[str, int | float]:
    """Of the forward passes [B] of each image."""
    values = passes.double().numpy()
    error = standard_error(values) or 0.0
    return {"images": len(values), "passes": round(values.mean(), 3), "error": round(error, 3)}


def windows(images: int) -> Rows:
    """Forward passes per image, by model, prompts, order, refresh and window."""
    for name, order, kinds in (
        ("emoji-llamagen", "raster", ["known"]),
        ("emoji-arpg", "raster", ["known", "new"]),
        ("emoji-arpg", "farthest", ["known", "new"]),
    ):
        pipe = quiet(load_pipeline(name, "cpu", "float32"))
        orders = {"order": order} if name == "emoji-arpg" else {}
        for kind in kinds:
            for refresh in ("independent", "coupled"):
                for window in WINDOWS:
                    generators = [torch.Generator().manual_seed(seed) for seed in range(images)]
                    decoding = SpeculativeJacobiDecoding(window=window, refresh=refresh)
                    out = pipe(
                        prompts_of(kind, images),
                        generator=generators,
                        decoding=decoding,
                        batch_size=min(images, 8),
                        output_type="latent",
                        **orders,
                    )
                    row = {"model": name, "prompts": kind, "order": order, "refresh": refresh, "window": window}
                    yield row | summary((out.stats.accepted > 0).sum(0))


def mesh(images: int) -> Rows:
    """The same of a distribution whose tokens depend on their neighbours and are never certain."""
    model = MarkovMesh()
    for refresh in ("independent", "coupled"):
        for window in WINDOWS:
            decoding = SpeculativeJacobiDecoding(window=window, refresh=refresh)
            state = decode(model, decoding, Sampling(), torch.arange(images))
            yield {"refresh": refresh, "window": window, "tokens": model.num_tokens} | summary(state.steps)


def drafts(images: int) -> Rows:
    """Forward passes per image by how good the first drafts are."""
    for name, window in (("emoji-llamagen", 32), ("emoji-arpg", 64)):
        pipe = load_pipeline(name, "cpu", "float32")
        for share in (0.0, 0.5, 0.75, 0.9, 0.97, 1.0):
            decoding = PerfectDrafts(window=window, share=share) if share else SpeculativeJacobiDecoding(window=window)
            passes = steps_of(pipe, prompts_of("known", images), decoding)
            yield {"model": name, "window": window, "share": share} | summary(passes)


def seconds(images: int) -> Rows:
    """How many times as fast as `ar`, one image at a time: medians and ranges over prompts, in turn."""
    for name in ("emoji-llamagen", "emoji-arpg"):
        pipe = quiet(load_pipeline(name, "cpu", "float32"))
        decodings = {1: "ar", **{window: f"sjd-coupled:window={window}" for window in WINDOWS}}
        taken: dict[int, list[float]] = {window: [] for window in decodings}
        for index, prompt in enumerate([*prompts_of("known", 1), *prompts_of("known", images)]):
            for window, decoding in decodings.items():
                stats = pipe(prompt, generator=torch.Generator().manual_seed(index), decoding=decoding).stats
                # The first round is not timed.
                taken[window] += [stats.seconds["tokens"]] if index else []
        for window, each in taken.items():
            ratios = [ar / one for ar, one in zip(taken[1], each, strict=True)]
            yield {
                "model": name,
                "window": window,
                "images": images,
                "seconds": round(statistics.median(each), 3),
                "speed": round(statistics.median(ratios), 3),
                "slowest": round(min(ratios), 3),
                "fastest": round(max(ratios), 3),
            }


def methods() -> Iterator[tuple[str, str, Decoding]]:
    """The kind, name and decoding of each method without a fault."""
    jacobi = partial(SpeculativeJacobiDecoding, window=4)
    yield "exact", "ar", decoding_from_name("ar")
    for refresh in ("independent", "coupled", "gumbel"):
        yield "exact", f"sjd, {refresh}", jacobi(refresh=refresh)
    yield "exact", "sjd-tree", decoding_from_name("sjd-tree", window=4, width=2, depth=3)
    yield "exact", "sjd-lazy", decoding_from_name("sjd-lazy", window=6, chain=2, tokens=4)
    for relax in (1.1, 1.5, 2.0):
        yield "relaxed", f"relax={relax}", jacobi(relax=relax)
    for gap in (0.15, 1.0):
        yield "relaxed", f"gsd, gap={gap}", jacobi(acceptance=GroupAcceptance(3, gap, 9.0))
    for delta in (0.05, 0.1, 0.2):
        yield "relaxed", f"lantern, delta={delta}", jacobi(acceptance=NeighbourAcceptance(1000, delta))
    for delta in (0.5, 1.0):
        acceptance = NeighbourAcceptance(1000, delta, relative=True)
        yield "relaxed", f"lantern++, delta={delta}", jacobi(acceptance=acceptance)
    for reuse in (0.8, 0.3):
        yield "relaxed", f"sjd++, reuse={reuse}", jacobi(refresh="independent", reuse=reuse)
    for window in (1, 2):
        yield "cut", f"zipar, window={window}", ZipARDecoding(window)
        yield "cut", f"pjd, context={window}", ParallelJacobiDecoding(3, window)


@contextlib.contextmanager
def with_fault(name: str) -> Iterator[Decoding]:
    """A decoding of the tests with the fault of this name put in."""
    settings, patches = BROKEN[name]
    settings = {"method": SpeculativeJacobiDecoding, **settings}
    decoding = settings.pop("method")(**settings)
    module = sys.modules[type(decoding).__mro__[-3].__module__]
    with patch.multiple(module, **patches) if patches else contextlib.nullcontext():
        yield decoding


def exactness(images: int) -> Rows:
    """How far the images of each method are from the model's joint distribution, and how far those of an exact one
    would be."""
    model = TableModel(grid=GRID, vocab_size=3, sharpness=2.5, truncated=True)
    joint, size = model.joint(Sampling()), model.vocab_size**model.num_tokens
    powers = model.vocab_size ** torch.arange(model.num_tokens - 1, -1, -1)
    floor = float((2 * joint * (1 - joint) / (math.pi * images)).sqrt().sum() / 2)
    faults = [("faulty", name, with_fault(name)) for name in BROKEN]
    for kind, name, entered in [
        *((kind, name, contextlib.nullcontext(one)) for kind, name, one in methods()),
        *faults,
    ]:
        counts, passes = torch.zeros(size, dtype=torch.float64), 0
        with entered as decoding:
            for seeds in torch.arange(images).split(10_000):
                state = decode(model, decoding, Sampling(), seeds)
                counts += torch.bincount((state.tokens * powers).sum(1), minlength=size)
                passes += int((state.accepted_per_step() > 0).sum())
        distance = float((counts / images - joint).abs().sum() / 2)
        yield {
            "kind": kind,
            "method": name,
            "images": images,
            "passes": round(passes / images, 4),
            "distance": round(distance, 5),
            "floor": round(floor, 5),
        }


def paths(count: int) -> Rows:
    """How often a denoising path ends in the same token after its condition has moved, by how far the distribution of
    the token moves, in standard deviations, and the most that any coupling can reach."""
    dim, seeds = 4, torch.arange(count)
    position = torch.ones(count, 1, dtype=torch.long)
    live = torch.ones_like(position, dtype=torch.bool)
    for steps in (6, 25, 100):
        sampling = LatentSampling(num_diffusion_steps=steps)
        model = MixtureModel(num_tokens=2, slope=0.0, offsets=((0.0,) * dim,))
        moved, covariance = normal_joint(MixtureModel(num_tokens=2, slope=0.0, offsets=((1.0,) * dim,)), sampling)
        for distance in (0.1, 0.2, 0.4, 0.8, 1.6):
            for coupling, couple in (("reflection", path_coupling.reflect_paths), ("path", path_coupling.test_paths)):
                state = path_coupling.start_paths(model, sampling, seeds, 1, keep_conditions=True)
                before = torch.zeros(1, count, 1, dim)
                noise = state.row(state.paths, position)
                path, means, _ = path_coupling.sample_paths(
                    model, sampling, 1.0, before, state.guidance(position), noise
                )
                state.write_paths(position, path, means)
                # All numbers of the token move alike; together by `distance`.
                step = distance / dim**0.5 * covariance[0, 0] ** 0.5 / moved[0]
                kept = couple(state, position, live, before + float(step))[2].double().mean()
                yield {
                    "coupling": coupling,
                    "steps": steps,
                    "distance": distance,
                    "paths": count,
                    "kept": round(float(kept), 4),
                    "error": round(float((kept * (1 - kept) / count).sqrt()), 4),
                    "most": round(math.erfc(distance / 8**0.5), 4),
                }


def wrong_paths(count: int) -> Rows:
    """The largest deviation of continuous tokens from their closed form, in standard errors, with the right coupling
    and with those that are wrong in one place."""
    decoding = PathJacobiDecoding(couplings.TOKENS)
    yield {"coupling": "right", "images": count, "deviation": round(float(couplings.deviation(decoding, count)), 2)}
    for fault, (name, wrong) in couplings.WRONG.items():
        with patch.object(path_coupling if name == "uniforms" else path_coupling.F, name, wrong):
            found = couplings.deviation(decoding, count)
        yield {"coupling": fault, "images": count, "deviation": round(float(found), 2)}


def siblings(pairs: int) -> Rows:
    """How far a token is from its distribution where two drafts for it are verified, as a total variation that is
    enumerated for random pairs of distributions over five tokens: verified rightly, and with the faults of the
    tests. The first fault is of the kind that the published code of SJD-PAC has."""
    for name, fault in {"right": {}, **FLAWS}.items():
        found = []
        for seed in range(pairs):
            p, q = random_distributions(2, 5, seed)
            settings = dict(fault)
            if settings.pop("drafts_from", None):
                settings["drafts_from"] = (p - q).clamp(min=0) / (p - q).clamp(min=0).sum()
            found.append(float((output_distribution(p, q, 2, **settings) - p).abs().sum() / 2))
        yield {
            "verification": name,
            "pairs": pairs,
            "distance": round(statistics.mean(found), 6),
            "largest": round(max(found), 6),
        }


# The parts, and how many images, pairs or paths each measures.
PARTS = {
    "windows": (windows, 8),
    "mesh": (mesh, 4),
    "drafts": (drafts, 6),
    "seconds": (seconds, 5),
    "exactness": (exactness, 40_000),
    "siblings": (siblings, 50),
    "paths": (paths, 4000),
    "wrong_paths": (wrong_paths, couplings.MANY),
}


def write_table(rows: Rows, path: Path) -> None:
    """Write and print rows as they come; the columns are those of the first."""
    lines: list[str] = []
    for row in rows:
        lines += [] if lines else ["\t".join(row)]
        lines.append("\t".join(map(str, row.values())))
        print(lines[-1], flush=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


@torch.no_grad()
def main(
    only: Annotated[list[str] | None, typer.Option(help=f"Parts, of {', '.join(PARTS)}. Default: all.")] = None,
    count: Annotated[int | None, typer.Option(help="Images, pairs or paths, instead of each part's own.")] = None,
    out: Annotated[Path, typer.Option(help="The folder of the tables.")] = FOLDER,
) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for name in only or PARTS:
        part, usual = PARTS[name]
        began = time.perf_counter()
        write_table(part(count or usual), out / f"{name}.tsv")
        print(f"{name}: {time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    typer.run(main)
