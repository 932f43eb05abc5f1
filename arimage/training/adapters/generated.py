"""Pictures that a model makes itself before its adapter is trained, and then learns to keep."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ...eval.bench.measure import quiet
from ...eval.runs.generate import progress_bar
from ...eval.runs.manifest import image_seed
from ...pipelines.base import ARPipeline
from .losses import condition_of


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
    """Generate a picture of each caption with the settings of the pipeline. `file` keeps the tokens, and gives them
    back to a later call with the same captions, seed and decoding."""
    about = {"captions": json.dumps(captions), "seed": str(seed), "decoding": str(decoding)}
    if (kept := _read(file, about)) is not None:
        return Generated(captions, kept)
    quiet_pipe, found = quiet(pipe), []
    with progress_bar(total=len(captions), unit="image", desc="prior") as progress:
        for chunk in torch.arange(len(captions)).split(CHUNK):
            tokens = quiet_pipe(
                **condition_of(pipe, [captions[i] for i in chunk]),
                decoding=decoding,
                generator=[torch.Generator().manual_seed(image_seed(seed, int(i))) for i in chunk],
                output_type="latent",
            ).tokens
            maps = tokens if isinstance(tokens, list) else [tokens]
            found.append(torch.cat([part.flatten(1) for part in maps], dim=1).cpu())
            progress.update(len(chunk))
    whole = torch.cat(found)
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file({"tokens": whole.contiguous()}, file, metadata=about)
    return Generated(captions, whole)


def _read(file: Path, about: dict[str, str]) -> torch.LongTensor | None:
    try:
        with safe_open(file, framework="pt") as kept:
            return kept.get_tensor("tokens") if kept.metadata() == about else None
    except (SafetensorError, OSError):
        return None
