"""Pictures that a model makes itself before its adapter is trained, and then learns to keep."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ...eval.bench.measure import quiet
from ...eval.runs.files import write_whole
from ...eval.runs.manifest import image_seed
from ...eval.runs.progress import progress_bar
from ...pipelines.base import ARPipeline
from ..loop import BEFORE, CHECKPOINT
from ..losses import condition_of, with_ids
from ..resuming import check_metadata, digest, of_pipeline, to_metadata


# Pictures per call.
CHUNK = 32


@dataclass
class Generated:
    """The tokens [M, N] of pictures as a model sampled them, and the caption of each.

    Encoded again, its pictures would have other tokens, which the model does not know.
    """

    captions: list[str]
    tokens: torch.LongTensor


@torch.no_grad()
def generate_prior(
    pipe: ARPipeline, captions: list[str], file: Path, *, seed: int, decoding: str | None = None
) -> Generated:
    """Generate a picture of each caption with the settings of the pipeline. `file` keeps the tokens after every call:
    a later run with the same model, captions, settings, seed and decoding takes them and generates the rest."""
    if pipe.abilities.kind == "causal_latents":
        raise ValueError("this model does not make its own prior pictures: give pictures as --prior")
    about = {
        **of_pipeline(pipe),
        "captions": digest(captions),
        "decoding": decoding,
        "seed": seed,
    }
    found, quiet_pipe, given = _read(file, about), quiet(pipe), with_ids(pipe, captions)
    file.parent.mkdir(parents=True, exist_ok=True)
    with progress_bar(total=len(captions), unit="image", desc="prior") as progress:
        progress.update(len(found))
        while len(found) < len(captions):
            numbers = range(len(found), min(len(found) + CHUNK, len(captions)))
            tokens = quiet_pipe(
                **condition_of(pipe, [given[i] for i in numbers]),
                decoding=decoding,
                generator=[torch.Generator().manual_seed(image_seed(seed, i)) for i in numbers],
                output_type="latent",
            ).tokens
            maps = tokens if isinstance(tokens, list) else [tokens]
            new = torch.cat([part.flatten(1) for part in maps], dim=1).cpu()
            found = torch.cat([found, new]) if len(found) else new
            kept = {"tokens": found.contiguous()}
            write_whole(file, lambda path, kept=kept: save_file(kept, path, to_metadata(about)))
            progress.update(len(new))
    return Generated(captions, found)


def _read(file: Path, about: dict[str, Any]) -> torch.LongTensor:
    """The tokens that `file` has of such a run; none if it is missing, or of another one that has not begun to
    train."""
    if file.is_file():
        try:
            with safe_open(file, framework="pt") as kept:
                theirs, tokens = kept.metadata(), kept.get_tensor("tokens")
        except SafetensorError as error:
            raise ValueError(
                f"{file} is damaged ({error}): delete it, and its pictures are generated again"
            ) from error
        if theirs == to_metadata(about):
            return tokens
        if any((file.parent / name).exists() for name in (CHECKPOINT, BEFORE)):
            check_metadata(file, theirs, about)
    return torch.empty(0, dtype=torch.long)
