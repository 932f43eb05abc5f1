"""The metric `concepts`, as `arimage eval score --metrics` names it: whether icons show what their prompts ask for."""

import json
from pathlib import Path

import numpy as np
import torch

from arimage.eval.job import Job, write_scores
from arimage.eval.metrics.features import Space, file_sha256
from arimage.eval.metrics.standard_errors import mean_estimate

from . import JUDGE
from .judge_network import COMMON, IconJudge, concepts_of, verdicts


def concepts(job: Job, judge: Path = JUDGE) -> dict[str, dict]:
    """The shares of icons whose likeliest concept is that of the prompt, and one of whose five likeliest is, of all
    and of the commonest names. Each says the same share of real icons of sets that training did not see."""
    if "prompt" not in job.rows[0]:
        raise ValueError(f"{job.run} was generated from classes: concepts needs a run of prompts")
    model = IconJudge.from_pretrained(judge).to(job.device).eval()
    numbers = np.array(concepts_of([row["prompt"] for row in job.rows], model.config.concepts))
    hits = verdicts(model, torch.from_numpy(job.small_versions).float().mean(1), numbers.tolist()).numpy()
    real = json.loads((judge / "figures.json").read_text("utf-8"))["test, from tokens"]
    space = Space(judge.name, file_sha256(judge / "diffusion_pytorch_model.safetensors"), "64x64")
    entries = {}
    for name, part, some in (
        ("concepts", "all", np.arange(len(numbers))),
        (f"concepts-of-{COMMON}", "common", np.flatnonzero(numbers < COMMON)),
    ):
        for end, found, figure in (("", hits[some, 0], "right"), ("-top-5", hits[some].any(1), "top-5")):
            if len(some):
                label = f"of real icons of other sets {real[part][figure]:.3f}"
                entries[name + end] = job.entry(mean_estimate(found, job.of_prompts(some)), label, space, some)
    write_scores(job.run, "concepts", hits[:, 0])
    write_scores(job.run, "concepts-top-5", hits.any(1))
    return entries
