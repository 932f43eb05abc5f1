"""`benchmarks/gpu_day.py` with tiny models: on a CPU, and steps on an accelerator without one."""

import json
import math
import sys
from pathlib import Path

import card
import gpu_day
import kernel_times
import pytest
import torch


MODELS = {"llamagen-xl-384", "var-d30", "janus-pro-7b", "emu3-gen", "cosmos-4b", "glm-image"}
PAGES = [gpu_day.ROOT / "benchmarks/notes/gpu.md", gpu_day.ROOT / "README.md"]


def run(folder: Path, *options: str) -> dict:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["gpu_day", "--tiny", "--out", str(folder), *options])
        gpu_day.main()
    return read(folder)


def read(folder: Path) -> dict:
    return json.loads((folder / "gpu_day.json").read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpu_day")
    pages = [page.read_bytes() for page in PAGES]
    run(folder)
    assert [page.read_bytes() for page in PAGES] == pages
    return folder


@pytest.mark.slow
def test_every_part_and_model_is_measured(folder):
    data = read(folder)
    results = data["results"]
    assert list(results) == list(gpu_day.PARTS) and data["left_out"] == dict.fromkeys(gpu_day.PARTS, [])
    assert {"device", "torch", "transformers", "diffusers"} <= data.keys() and data["tiny"]
    entries = [entry for part in results.values() for entry in part.values()]
    assert not [entry for entry in entries if "error" in entry or "out_of_memory" in entry]
    assert all(entry["commit"] and entry["date"] and entry["seconds"] > 0 for entry in entries)
    assert all(math.isfinite(v) for entry in entries for v in entry.values() if isinstance(v, int | float))
    for part, unit in (("kernels", "us"), ("steps", "ms"), ("images", "s_per_image"), ("pixels", "ms_per_image")):
        timed = [entry for entry in results[part].values() if entry.get("kernel") not in ("copy", "product")]
        assert timed and all(
            0 < entry[f"low_{unit}"] <= entry[f"median_{unit}"] <= entry[f"high_{unit}"] for entry in timed
        )
    assert {(entry["model"], entry["form"]) for entry in results["steps"].values()} == {
        (model, form) for model in MODELS for form in ("eager", "captured")
    }
    assert all(entry["floor_ms"] >= entry["operations_ms"] > 0 for entry in results["steps"].values())
    assert all(
        entry["floor_ms"] >= entry["bytes_ms"] > 0 and entry["ratio"] > 1 for entry in results["steps"].values()
    )
    assert results["memory"]["failing capture emoji-llamagen sjd-coupled:window=16"]["share_of_equal_tokens"] == 1


def test_an_interrupted_run_resumes(tmp_path, monkeypatch):
    measured, calls = kernel_times.measured, []

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return measured(*arguments)

    monkeypatch.setattr(kernel_times, "measured", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, "--only", "kernels")
    before = read(tmp_path)["results"]["kernels"]
    assert len(before) == 3
    after = run(tmp_path, "--only", "kernels")["results"]["kernels"]
    assert before.items() <= after.items() and len(calls) == 4 + len(after) - len(before)


class Event(card.Stream):
    def elapsed_time(self, other):
        return 1.0


class Capturing(card.Stream):
    def synchronize(self):
        raise RuntimeError("operation not permitted when stream is capturing")


@pytest.mark.slow
def test_steps_and_calls_are_replayed_on_an_accelerator(monkeypatch, tmp_path):
    models = {name: gpu_day.TINY[name] for name in ("llamagen-xl-384", "var-d30")}
    forms, device = tuple(gpu_day.FORMS), torch.device("cuda")
    plan = gpu_day.TINY_PLAN._replace(device=device, models=models, forms=forms, calls=1)
    for rate in ("bandwidth", "product_rate"):
        monkeypatch.setattr(gpu_day.Day, rate, lambda day: 1e12)
    monkeypatch.setattr(gpu_day, "machine", lambda device: {"device": "card", "torch": ""})
    monkeypatch.setattr(gpu_day.ARPipeline, "to", lambda pipe, device: card.move(pipe))
    for name in ("reset_peak_memory_stats", "max_memory_allocated", "memory_reserved", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: 2**20)
    with card.card(), torch.no_grad():
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: Capturing())
        monkeypatch.setattr(torch.cuda, "default_stream", Capturing)
        day = gpu_day.Day(tmp_path, plan, 600, "commit")
        for part in ("steps", "memory"):
            day.begin(part)
            gpu_day.PARTS[part](day)
            assert not day.left_out
    results = read(tmp_path)["results"]
    assert not [entry for part in results.values() for entry in part.values() if "error" in entry]
    captured = {(entry["model"], entry["form"]) for entry in results["steps"].values() if entry["replays"]}
    assert captured >= {(model, form) for model in models for form in ("captured", "compiled")}
    assert "eager" not in {form for _, form in captured}
    failed = results["memory"]["failing capture emoji-llamagen sjd-coupled:window=16"]
    assert failed["replays"] == 0 and failed["share_of_equal_tokens"] == 1
