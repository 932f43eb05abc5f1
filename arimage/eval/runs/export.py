"""`arimage eval export`: writes runs in the file layouts of scorers that are not part of this library."""

import re
import shutil
import zipfile
from pathlib import Path

import numpy as np
from diffusers.utils import make_image_grid

from ...media.files import read_image
from ..metrics.features import image_paths, resize
from .files import to_lines, write_whole
from .run_folder import CONFIG, RESTORE, read_config, read_rows


# Bytes of a file's name, on most file systems.
LONGEST_NAME = 255
# The images of one prompt: rows of the manifest and paths.
Group = list[tuple[dict, Path]]


def export(run: Path, format: str, out: Path, size: int | None = None) -> None:
    """Write the images of a run to `out`.

    Args:
        format: "adm-npz" writes a file; "geneval", "dpg", "wise", "t2i-compbench" and "result-jsonl" write a folder.
        size: for "adm-npz": resize to this side in pixels.

    Raises:
        ValueError: if images of the run are missing or damaged, its manifest lacks what the scorer needs, or `out`
            exists.
    """
    paths = image_paths(run)
    if out.exists():
        raise ValueError(f"--out {out} already exists: name another, or delete it")
    if size is not None and format != "adm-npz":
        raise ValueError(f"--size is for adm-npz: {format} keeps the size of the images")
    if format == "adm-npz":
        out.parent.mkdir(parents=True, exist_ok=True)
        write_whole(out, lambda file: write_adm_npz(paths, file, size))
        return
    writers = {
        "geneval": write_geneval,
        "dpg": write_dpg,
        "wise": write_wise,
        "t2i-compbench": write_t2i_compbench,
        "result-jsonl": write_result_jsonl,
    }
    groups = group_by_prompt(run, paths)
    try:
        writers[format](groups, out)
    except BaseException:
        shutil.rmtree(out, ignore_errors=True)
        raise


def is_file_name(name: str) -> bool:
    """Whether a file can have this name and a suffix of four characters: a text that UTF-8 can encode, and no path."""
    return bool(name) and not re.search("[/\0\ud800-\udfff]", name) and len(name.encode()) <= LONGEST_NAME - 4


def group_by_prompt(run: Path, paths: list[Path]) -> list[Group]:
    """The rows and `paths` of a run by their prompts."""
    images, count = list(zip(read_rows(run), paths, strict=True)), read_config(run)["source"].get("per_prompt", 1)
    groups = [images[start : start + count] for start in range(0, len(images), count)]
    for group in groups:
        first, *others = ({**row, "id": 0, "seed": 0, "path": ""} for row, _ in group)
        if len(group) != count or any(row != first for row in others):
            raise ValueError(
                f"{run / CONFIG} says per_prompt = {count}, but image {group[0][0]['id']} is not the first of as many "
                f"of one prompt: {RESTORE}"
            )
    return groups


def write_adm_npz(paths: list[Path], file: Path, size: int | None = None) -> None:
    """Write one array `arr_0`, uint8 [N, H, W, 3], for the evaluator of ADM (https://arxiv.org/abs/2105.05233), which
    the ImageNet figures of LlamaGen and VAR come from.

    The images are in a fixed random order, because the evaluator averages the Inception score over groups of 5,000
    consecutive images, and each group must cover all classes. `size` resizes as LlamaGen does, see `resize`."""
    order = np.random.default_rng(0).permutation(len(paths))
    first = _read(paths[0], size)
    header = {"descr": "|u1", "fortran_order": False, "shape": (len(paths), *first.shape)}
    # Written image by image: 50,000 images of 256x256 pixels are 9.8 GB.
    with zipfile.ZipFile(file, "w") as archive, archive.open("arr_0.npy", "w", force_zip64=True) as stream:
        np.lib.format.write_array_header_1_0(stream, header)
        for index in order:
            pixels = _read(paths[index], size)
            if pixels.shape != first.shape:
                raise ValueError(f"{paths[index]} has another size than {paths[0]}: give --size")
            stream.write(pixels.tobytes())


def _read(path: Path, size: int | None) -> np.ndarray:
    pixels = np.array(read_image(path))
    return pixels if size is None else resize(pixels, size)


def write_geneval(groups: list[Group], out: Path) -> None:
    """Write a folder for GenEval (https://arxiv.org/abs/2310.11513): one folder per prompt, with its line of
    evaluation_metadata.jsonl and its images."""
    for [(row, _), *_] in groups:
        if not {"tag", "include"} <= row.get("metadata", {}).keys():
            raise ValueError(
                f"image {row['id']} has no tag and include for GenEval: generate with --prompts "
                "evaluation_metadata.jsonl"
            )
    for number, group in enumerate(groups):
        folder, row = out / f"{number:05d}", group[0][0]
        (folder / "samples").mkdir(parents=True)
        (folder / "metadata.jsonl").write_bytes(to_lines([{**row["metadata"], "prompt": row["prompt"]}]))
        for sample, (_, path) in enumerate(group):
            shutil.copyfile(path, folder / "samples" / f"{sample:05d}.png")


def _check_count(group: Group, count: int, scorer: str) -> None:
    if len(group) != count:
        raise ValueError(
            f"image {group[0][0]['id']} is one of {len(group)} of its prompt, and {scorer} needs {count}: generate "
            f"with --per-prompt {count}"
        )


def write_dpg(groups: list[Group], out: Path) -> None:
    """Write a folder for DPG-Bench (https://arxiv.org/abs/2403.05135): one image per prompt, item_id.png, a 2x2 grid
    of its four images."""
    seen = set()
    for group in groups:
        row = group[0][0]
        if "item_id" not in row.get("metadata", {}):
            raise ValueError(f"image {row['id']} has no item_id for DPG-Bench: generate with prompts that have one")
        name = str(row["metadata"]["item_id"])
        # The scorer takes what comes before the first dot of a file's name.
        if not is_file_name(name) or "." in name or name in seen:
            raise ValueError(
                f"image {row['id']} has the item_id {name!r:.80}, which is not a file name or not unique: give each "
                "prompt its own, without / and dots"
            )
        seen.add(name)
        _check_count(group, 4, "DPG-Bench")
    out.mkdir(parents=True)
    for group in groups:
        images = [read_image(path) for _, path in group]
        make_image_grid(images, rows=2, cols=2).save(out / f"{group[0][0]['metadata']['item_id']}.png")


def write_wise(groups: list[Group], out: Path) -> None:
    """Write a folder for WISE (https://arxiv.org/abs/2503.07265): one image per prompt, prompt_id.png."""
    names: dict[int, Path] = {}
    for group in groups:
        row, path = group[0]
        number = row.get("metadata", {}).get("prompt_id")
        if not isinstance(number, int) or isinstance(number, bool) or number in names or abs(number) >= 10**18:
            raise ValueError(
                f"image {row['id']} has the prompt_id {number!r:.80}, which is not a whole number or not unique: "
                "generate with a .json file of WISE"
            )
        _check_count(group, 1, "WISE")
        names[number] = path
    out.mkdir(parents=True)
    for number, path in names.items():
        shutil.copyfile(path, out / f"{number}.png")


def write_t2i_compbench(groups: list[Group], out: Path) -> None:
    """Write a folder for T2I-CompBench (https://arxiv.org/abs/2307.06350): samples/PROMPT_000000.png, numbered without
    gaps in the order of the prompts. The scorers read one category at a time."""
    names = {}
    for row, path in (pair for group in groups for pair in group):
        prompt = row.get("prompt", "")
        name = f"{prompt}_{len(names):06d}"
        if not prompt or "_" in prompt or not is_file_name(name):
            raise ValueError(
                f"image {row['id']} has the prompt {prompt!r:.80}, which cannot be a file name for T2I-CompBench: "
                f"give prompts without / and _, of up to {LONGEST_NAME - 11} bytes"
            )
        names[f"{name}.png"] = path
    (out / "samples").mkdir(parents=True)
    for name, path in names.items():
        shutil.copyfile(path, out / "samples" / name)


def write_result_jsonl(groups: list[Group], out: Path) -> None:
    """Write a folder like LlamaGen's text-to-image runs (https://arxiv.org/abs/2406.06525): result.jsonl with text and
    image_path, captions.txt, and the images."""
    images = [pair for group in groups for pair in group]
    if "prompt" not in images[0][0]:
        raise ValueError("result-jsonl needs prompts, and this run is of classes: use --format adm-npz")
    (out / "images").mkdir(parents=True)
    lines = []
    for row, path in images:
        copy = shutil.copyfile(path, out / "images" / path.name)
        lines.append({"text": row["prompt"], "image_path": str(copy.absolute())})
    (out / "result.jsonl").write_bytes(to_lines(lines))
    (out / "captions.txt").write_text("".join(row["prompt"] + "\n" for row, _ in images), encoding="utf-8")
