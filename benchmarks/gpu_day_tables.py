"""What `gpu_day.py` found, as tables and as a line for the README."""

import json
from pathlib import Path


BEGIN, END = "<!-- written by gpu_day.py --report -->\n", "<!-- end of what gpu_day.py wrote -->\n"
FORMS = ("eager", "captured", "compiled")
CASE = ("model", "batch", "decoding")
STEP_FORMS = {"torch": "PyTorch", "kernels": "arimage"}


def described(found: dict) -> str:
    """A measurement in a line, without when and with which code it was made."""
    kept = {name: value for name, value in found.items() if name not in ("seconds", "date", "commit")}
    return ", ".join(f"{name} {v:.4g}" if isinstance(v, float) else f"{name} {v}" for name, v in kept.items())


def number(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def outcome(entry: dict | None, unit: str) -> str:
    """The median and range of a measurement, or why it has none."""
    if entry is None:
        return ""
    if f"median_{unit}" not in entry:
        return "out of memory" if "out_of_memory" in entry else "failed"
    numbers = "{} ({} to {})".format(*(number(entry[f"{name}_{unit}"]) for name in ("median", "low", "high")))
    replayed = entry.get("form") not in ("captured", "compiled") or entry["replays"]
    return numbers if replayed else f"{numbers}, not captured"


def table(columns: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown, empty without rows."""
    if not rows:
        return ""
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns), *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join(lines) + "\n"


def grouped(results: dict, part: str, names: tuple[str, ...]) -> dict[tuple, dict[str, dict]]:
    """The measurements of a part that have these fields, by the fields and by their form."""
    rows: dict[tuple, dict[str, dict]] = {}
    for entry in results.get(part, {}).values():
        if all(name in entry for name in names):
            rows.setdefault(tuple(entry[name] for name in names), {})[entry.get("form", "")] = entry
    return rows


def fastest(row: dict[str, dict], unit: str) -> dict:
    name = f"median_{unit}"
    return min((entry for entry in row.values() if name in entry), key=lambda entry: entry[name], default={})


def measured(results: dict, part: str, names: tuple[str, ...], forms: dict[str, str], unit: str, more: dict) -> str:
    """A table with a row for each value of the fields `names`, a column for each form, and `more` columns of the
    fastest form."""
    rows = []
    for key, row in grouped(results, part, names).items():
        found = fastest(row, unit)
        numbers = (number(found[name]) if name in found else "" for name in more.values())
        rows.append([*map(str, key), *(outcome(row.get(form), unit) for form in forms), *numbers])
    return table([*names, *forms.values(), *more], rows)


def in_step(results: dict, names: tuple[str, ...], value: str) -> str:
    """The measurements of the part `step` that have these fields, with the kernels of PyTorch and with ours."""
    rows = [
        [*map(str, key), *(number(row[form][value]) if value in row.get(form, {}) else "" for form in STEP_FORMS)]
        for key, row in grouped(results, "step", names).items()
    ]
    return table([*names, *STEP_FORMS.values()], rows)


def estimated(results: dict) -> str:
    """Seconds per image of large models, from the forward passes of a packaged model."""
    rows, packaged = [], grouped(results, "images", CASE)
    for (model, batch, decoding), row in grouped(results, "steps", CASE).items():
        step, image = fastest(row, "ms"), fastest(packaged.get(("emoji-llamagen", batch, decoding), {}), "s_per_image")
        if step and image:
            passes = step["tokens"] * image["passes_per_token"]
            seconds = passes * step["median_ms"] / 1000 / batch
            rows.append([model, str(batch), decoding, *map(number, (passes, step["median_ms"], seconds))])
    return table([*CASE, "passes", "ms per step", "seconds per image"], rows)


def tables(data: dict) -> str:
    results, forms = data["results"], {form: form for form in FORMS}
    copy, product = (results.get("kernels", {}).get(name, {}) for name in ("copy", "product"))
    about = f"{data['device']}, PyTorch {data['torch']}, transformers {data['transformers']}"
    if "bytes_per_s" in copy:
        about += f", copies at {copy['bytes_per_s'] / 1e12:.3g} TB/s"
    if "operations_per_s" in product:
        about += f", bfloat16 products at {product['operations_per_s'] / 1e12:.3g} TFLOPS"
    tests = [described(entry) for entry in results.get("tests", {}).values()]
    checks = [[described(found)] for found in results.get("step", {}).values() if {"check", "rate"} & found.keys()]
    checks = [line for line in checks if "kernels" not in line[0]]
    memory = [[described(entry)] for entry in results.get("memory", {}).values()]
    floor, peak = {"floor": "floor_ms", "fastest / floor": "ratio"}, {"peak MiB": "peak_mib"}
    kinds = {"reference": "torch", "triton": "Triton"}
    sections = {
        "Kernels, in µs (ranges: 10th to 90th percentile):\n": measured(
            results, "kernels", ("kernel", "arguments"), kinds, "us", {"floor": "floor_us"}
        ),
        "Captured steps of LlamaGen-XL by the kernels of PyTorch and by ours, mean ms over whole images:\n": in_step(
            results, ("image", "batch"), "median_ms"
        ),
        "Captured steps of language models by the kernels of PyTorch and by ours, in ms:\n": measured(
            results, "step", ("language", "decoding"), STEP_FORMS, "ms", floor
        ),
        "Products of the layers of LlamaGen-XL with the norms before and the sums after them, in µs; `qkv` of PyTorch "
        "without the rotation and the writes to the cache:\n": in_step(results, ("product", "rows"), "us"),
        "Attention of its layers, in µs:\n": in_step(results, ("attention",), "us"),
        "Kernels that do nothing, µs each:\n": in_step(results, ("gap",), "us"),
        "Checks; kernels of a step are in gpu_day.json:\n": table(["measurement"], checks),
        "Steps with random weights, in ms; of `next-scale` all steps of an image:\n": measured(
            results, "steps", CASE, forms, "ms", floor | peak
        ),
        "Packaged models, seconds per image:\n": measured(
            results, "images", CASE, forms, "s_per_image", {"passes per image": "passes"} | peak
        ),
        "Large models: passes of the packaged model x step, not measured. The passes per token are those of "
        "`emoji-llamagen`; prefill and pixels are left out:\n": estimated(results),
        "From tokens to pixels, in ms per image:\n": measured(
            results, "pixels", ("tokenizer", "pixels", "batch"), {"": "ms"}, "ms_per_image", peak
        ),
        "Memory:\n": table(["measurement"], memory),
    }
    parts = [f"{'Tiny models on a CPU, which say nothing: ' * data['tiny']}{about}. Medians with ranges.\n"]
    parts += [f"Tests: {line}\n" for line in tests]
    parts += [part for section in sections.items() if section[1] for part in section]
    return "\n".join(parts)


def readme_line(data: dict) -> str:
    results, said = data["results"], []
    for (model, batch, decoding), row in grouped(results, "images", CASE).items():
        found = fastest(row, "s_per_image")
        if found and batch == 1 and decoding in ("ar", "sjd-coupled", "next-scale"):
            said.append(f"`{model}` takes {found['median_s_per_image']:.2g} s per image with `{decoding}`")
    for (model, batch, decoding), row in grouped(results, "steps", CASE).items():
        found = fastest(row, "ms")
        if found and batch == 1 and decoding in ("ar", "next-scale"):
            unit = "an image" if decoding == "next-scale" else "a step"
            said.append(f"{unit} of {model} {found['median_ms']:.2g} ms, {found['ratio']:.2g} times the floor")
    return f"{'Tiny models, which say nothing: ' * data['tiny']}Measured on one {data['device']}: {'; '.join(said)}."


def report(folder: Path, docs: Path | None = None) -> None:
    """Write the tables next to the measurements, and between the markers of `docs`; print the README's line."""
    data = json.loads((folder / "gpu_day.json").read_text())
    written = tables(data)
    (folder / "gpu_day.md").write_text(written, encoding="utf-8")
    if docs is not None:
        text = docs.read_text(encoding="utf-8")
        before, after = text.split(BEGIN)[0], text.split(END)[1]
        docs.write_text(before + BEGIN + written + END + after, encoding="utf-8")
    print(f"The line for the README:\n{readme_line(data)}")
