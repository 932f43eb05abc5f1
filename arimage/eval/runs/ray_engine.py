"""Generates a run with the workers of Ray. Images and files are the same as those of `generate.generate`.

Workers write their images themselves, so the machines of a cluster must share the folder of the run, and that of the
model if it is a folder. Results come back to this process, which records them.
"""

import json
import logging
import os
from pathlib import Path
from typing import Any

import torch

from ...cli.options import Steps, load_pipeline
from .generate import generate_images, missing_batches, open_run, prepare, record
from .progress import progress_bar, tell_left
from .run_folder import read_results


class Worker:
    """Loads the pipeline once and generates batches by their indices."""

    def __init__(self, folder: Path, model: str, device: str, dtype: str, steps: Steps):
        self.pipe = load_pipeline(model, device, dtype, videos=True, steps=steps)
        self.run = open_run(folder)

    def __call__(self, batch: dict) -> dict:
        """The results of the batch with the index `batch["index"]`, or the error."""
        results, error = [], ""
        try:
            results = generate_images(self.run, self.pipe, int(batch["index"][0]))
        except (ValueError, OSError) as raised:
            error = str(raised)
        return {"results": [json.dumps(results)], "error": [error]}


def generate_by_ray(
    config: dict, rows: list[dict], folder: Path, device: str | None, workers: int | None, steps: Steps
) -> None:
    """Prepare the run and generate the missing calls with `workers` workers of Ray, on the cluster at RAY_ADDRESS or
    on this machine. Each has its own GPU if there are GPUs."""
    # Before Ray is imported, which reports its usage by default.
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray

    on_gpu = device != "cpu" and torch.cuda.is_available()
    workers = workers or (torch.cuda.device_count() if on_gpu else 1)
    # A worker's share of this process's threads.
    config["machine"]["threads"] = max(config["machine"]["threads"] // workers, 1)
    run = prepare(config, rows, folder.resolve())
    missing = missing_batches(run)
    if not missing:
        return
    # Without an address Ray would join any cluster that was started on this machine.
    local: dict[str, Any] = {} if "RAY_ADDRESS" in os.environ else {"address": "local", "include_dashboard": False}
    ray.init(log_to_driver=False, logging_level=logging.ERROR, **local)
    ray.data.DataContext.get_current().enable_progress_bars = False
    finished = ray.data.from_items(
        [{"index": index} for index in missing], override_num_blocks=len(missing)
    ).map_batches(
        Worker,
        fn_constructor_args=(run.folder, config["model"], "cuda" if on_gpu else "cpu", config["dtype"], steps),
        batch_size=1,
        num_gpus=1 if on_gpu else None,
        compute=ray.data.ActorPoolStrategy(size=workers),
    )
    with progress_bar(total=len(rows), initial=len(read_results(folder)), unit="image", desc=folder.name) as bar:
        told = False
        for number, batch in enumerate(finished.iter_rows(), 1):
            if batch["error"]:
                raise ValueError(batch["error"])
            results = json.loads(batch["results"])
            record(run, results)
            bar.update(len(results))
            if results[0]["warm"] and not told:
                tell_left(bar, results[0]["seconds"] * (len(missing) - number) / workers)
                told = True
    ray.shutdown()
