"""`arimage reproduce`: generates the images of a published figure with its settings, scores them, and says whether the
figure is the same."""

import json
import tempfile
from pathlib import Path

from ..cli.options import load_pipeline
from ..decoding import decoding_from_text
from .job import Job
from .metrics.features import file_sha256
from .protocol import PROMPT_FILES, Protocol, settings_text
from .runs.export import export
from .runs.files import write_whole
from .runs.generate import generate_by_processes, join_processes, make_config
from .runs.manifest import make_manifest
from .runs.prompts import prompt_file, prompt_metrics, read_prompts
from .score import figure_text, score


OUTSIDE = "outside"
SCORERS = {
    # Of https://github.com/openai/guided-diffusion.
    "imagenet": "python evaluator.py VIRTUAL_imagenet{size}_labeled.npz {out}",
    # Then the mean of the means of its six tasks.
    "geneval": "python evaluation/evaluate_images.py {out} --outfile results.jsonl --model-path DETECTOR",
    "dpg": "accelerate launch dpg_bench/compute_dpg_bench.py --image-root-path {out} --resolution {size} --pic-num 4 "
    "--res-path dpg.txt",
}


def check_decoding(row: Protocol, decoding: str | None, allow_lossy: bool) -> str:
    """The decoding of a reproduction: the authors' own, or an exact one."""
    if decoding is None or decoding == row.decoding:
        return row.decoding
    if not decoding_from_text(decoding).exact and not allow_lossy:
        raise ValueError(
            f"--decoding {decoding} is lossy, and the published figure used {row.decoding}: choose an exact one, or "
            "give --allow-lossy to measure what it costs"
        )
    return decoding


def manifest_of(row: Protocol, images: int | None, prompts: str | None, seed: int) -> tuple[list[dict], dict]:
    """The manifest of `images` images, by default as many as the published figure used, and where they come from; see
    `make_manifest`."""
    images = row.check_images(images)
    if row.benchmark == "imagenet":
        classes = min(images, row.groups)
        return make_manifest(None, 1, classes, images // classes, seed)
    if row.prompts is not None:
        every = read_prompts(prompt_file(row.prompts))[: row.first]
        count = min(images, len(every))
        # Evenly among all prompts.
        chosen = [every[i * len(every) // count] for i in range(count)]
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "prompts.jsonl"
            file.write_text("".join(json.dumps(one) + "\n" for one in chosen), encoding="utf-8")
            return make_manifest(str(file), images // count, None, 1, seed)
    if prompts is None:
        raise ValueError(f"--prompts is missing: give {PROMPT_FILES[row.benchmark]}")
    rows, source = make_manifest(prompts, row.per_prompt, None, 1, seed)
    if len(rows) != row.number:
        raise ValueError(
            f"{prompts} has {len(rows) // row.per_prompt} prompts, and {row.benchmark} has "
            f"{row.number // row.per_prompt}: give {PROMPT_FILES[row.benchmark]}"
        )
    return rows, source


def reproduce(
    name: str,
    row: Protocol,
    out: Path,
    *,
    decoding: str,
    images: int | None = None,
    model: str | None = None,
    prompts: str | None = None,
    reference: Path | None = None,
    inception_weights: Path | None = None,
    batch_size: int = 32,
    seed: int = 0,
    device: str | None = None,
) -> tuple[str, bool]:
    """Generate, score or export, and compare. Resumes an interrupted run.

    Returns:
        The text of OUT/report.md, and whether the figure is outside of its band: False if it is not judged.
    """
    rows, source = manifest_of(row, images, prompts, seed)
    state = join_processes(device)
    if state.num_processes > 1 and device is None:
        device = str(state.device)
    loaded = model or name.partition(":")[0]
    pipe = load_pipeline(loaded, device, row.dtype)
    sampling = {**row.sampling, "num_inference_steps": row.num_inference_steps}
    asked = {"source": source, "seed": seed, "batch_size": batch_size, "decoding": decoding, "sampling": sampling}
    try:
        config = make_config(pipe, rows, model=loaded, order=row.order, **asked)
    except ValueError as error:
        if model is None:
            raise
        raise ValueError(
            f"--model is {model}, which cannot reproduce {name} ({error}): give a folder with a model of that kind"
        ) from error
    run = out / "run"
    generate_by_processes(pipe, config, rows, run, state)
    if not state.is_main_process:
        return "", False
    entries, scorer = _score(row, run, out, reference, inception_weights, str(pipe._execution_device))
    text = report_text(name, row, decoding, len(rows), entries, scorer)
    outside = scorer is None and verdict_of(row, decoding, len(rows), entries) == OUTSIDE
    if reference is not None and reference.is_file():
        text += f"\nReference: {reference.name}, sha256 {file_sha256(reference)}\n"
    write_whole(out / "report.md", lambda file: file.write_text(text, encoding="utf-8"))
    return text, outside


def _score(row, run: Path, out: Path, reference, weights, device: str) -> tuple[dict[str, dict], str | None]:
    """The entries of `metrics.json`, or the command of the scorer that the images were exported for."""
    if row.prompts is not None:
        return score(Job(run, device=device), prompt_metrics(row.prompts)), None
    if row.benchmark == "imagenet" and reference is not None:
        size = row.score_size if row.score_size != row.size else None
        job = Job(run, reference, weights, resize="tf1", device=device, size=size)
        return score(job, ["fid"]), None
    layout = {"imagenet": "adm-npz"}.get(row.benchmark, row.benchmark)
    target = out / ("images.npz" if layout == "adm-npz" else "images")
    if not target.exists():
        export(run, layout, target, row.score_size if layout == "adm-npz" and row.score_size != row.size else None)
    return {}, SCORERS[row.benchmark].format(out=target, size=row.score_size or row.size)


def verdict_of(row: Protocol, decoding: str, count: int, entries: dict[str, dict]) -> str:
    """Whether the figure of `count` images is inside its band, or why that is not judged."""
    found = entries[row.figure]
    if not decoding_from_text(decoding).exact and decoding != row.decoding:
        return f"none: {decoding} is lossy, and the published figure used {row.decoding}"
    if row.benchmark == "imagenet" and count < row.number:
        return f"none: a FID of {count:,} images is too high by what fewer images add, see fid-infinity"
    if row.prompts is not None and found["standard_error"] is None:
        return "none: a figure of one prompt has no error"
    error = found["standard_error"] or 0.0
    return "inside" if abs(found["value"] - row.expected[row.figure]) <= row.band(error) else OUTSIDE


def report_text(
    name: str, row: Protocol, decoding: str, count: int, entries: dict[str, dict], scorer: str | None
) -> str:
    """The report of a reproduction."""
    figure, value = row.figure, row.expected[row.figure]
    lines = [f"# {name}", "", f"{count:,} images, {decoding}, {settings_text(row)}. Published: {row.source}.", ""]
    if scorer is None:
        found = entries[figure]
        band = row.band(found["standard_error"] or 0.0)
        verdict = verdict_of(row, decoding, count, entries)
        lines += [
            "| figure | published | here | band | verdict |",
            "| --- | --- | --- | --- | --- |",
            f"| {figure} | {value:g} | {figure_text(found)} | ± {band:.3g} | {verdict} |",
        ]
        others = {key: entry for key, entry in entries.items() if key != figure}
        lines += ["", *(f"- {key}: {figure_text(entry)}" for key, entry in others.items())]
    else:
        lines += [f"Published: {figure} {value:g}, band ± {row.band():.3g}. Score the exported images with", "", "```"]
        lines += [scorer, "```"]
    lines += [
        "",
        *(f"- Differs: {text}." for text in row.differs),
        *(f"- Usual mistake: {text}." for text in row.mistakes),
    ]
    lines += [f"- Quoted from memory: {', '.join(row.memory)}."] if row.memory else []
    return "\n".join(lines) + "\n"
