"""The checkpoints of a run."""

import logging
import shutil
from pathlib import Path

import torch

from ..eval.runs.files import write_whole
from .optimizer import MasterWeights
from .processes import processes


# The newest checkpoint of a run, and the one before.
CHECKPOINT, BEFORE = "checkpoint.pt", "checkpoint-before.pt"
# Those that are kept, by their steps.
KEPT = "checkpoint-{}.pt"

logger = logging.getLogger(__name__)


def save_checkpoint(path: Path, state: dict) -> None:
    """Write `state` so that an interruption leaves either the old file or the new one, and keep the old one too."""

    def write(file: Path) -> None:
        # Given a path, torch does not say that the disk is full.
        with open(file, "wb") as opened:
            torch.save(state, opened)

    write_whole(path, write, before=path.with_name(BEFORE))


def keep_checkpoint(out: Path, step: int, most: int | None) -> None:
    """Keep the newest checkpoint as that of `step`, and of all that are kept at most the newest `most`."""
    write_whole(out / KEPT.format(step), lambda file: shutil.copyfile(out / CHECKPOINT, file))
    if most is not None:
        for old in kept_checkpoints(out)[:-most]:
            old.unlink()


def kept_checkpoints(out: Path) -> list[Path]:
    """The checkpoints of a run that are kept, in the order of their steps."""
    found = {int(path.stem.partition("-")[2]): path for path in out.glob(KEPT.format("[0-9]*"))}
    return [found[step] for step in sorted(found)]


def chosen_checkpoint(out: Path, name: str) -> tuple[Path, dict]:
    """The kept checkpoint of that name, as in "checkpoint-1000", and what it holds."""
    kept = {path.stem: path for path in kept_checkpoints(out)}
    if name not in kept:
        raise ValueError(f"--resume-from is {name}, and {out} keeps {', '.join(kept) or 'none'}: give one of these")
    return kept[name], load_checkpoint(kept[name])


def newest_checkpoint(out: Path) -> tuple[Path, dict | None]:
    """The newest checkpoint of a run that can be read, and what it holds; None if there are none."""
    damaged = None
    for path in (out / CHECKPOINT, out / BEFORE):
        if not path.exists():
            continue
        try:
            state = load_checkpoint(path)
        except ValueError as error:
            damaged = damaged or error
            continue
        if damaged is not None and processes()[0] == 0:
            logger.warning(f"{out / CHECKPOINT} is damaged: the run goes on from {path.name}, step {state['step']}")
        return path, state
    if damaged is not None:
        raise damaged
    return out / CHECKPOINT, None


def load_checkpoint(path: Path) -> dict:
    """What a checkpoint holds."""
    try:
        # Processes that train together share the memory of what they read.
        state = torch.load(path, weights_only=True, map_location="cpu", mmap=processes()[1] > 1)
        _shapes(state["weights"], state["buffers"])
        if not isinstance(state["step"], int) or not isinstance(state["log"], list):
            raise TypeError("step or log")
    except (OSError, MemoryError):
        raise
    # A damaged file can raise anything.
    except Exception as error:
        raise ValueError(f"{path} is damaged: delete it to train from the start") from error
    return state


def restore(state: dict, weights: MasterWeights, buffers: dict[str, torch.Tensor], where: Path) -> None:
    """Take over what the checkpoint `where` holds."""
    if _shapes(state["weights"], state["buffers"]) != _shapes(weights.state_dict(), buffers):
        raise ValueError(
            f"{where} was written by a recipe with another model or optimizer: give that recipe or another --out"
        )
    weights.load_state_dict(state["weights"])
    for name, buffer in buffers.items():
        buffer.copy_(state["buffers"][name])


def _shapes(weights: dict, buffers: dict[str, torch.Tensor]) -> tuple:
    """What the weights and buffers of a checkpoint and of a task must have in common."""
    groups = [[group["params"] for group in optimizer["param_groups"]] for optimizer in weights["optimizers"]]
    shapes = [[one.shape for one in weights[name]] for name in ("masters", "averages")]
    return shapes, groups, {name: it.shape for name, it in buffers.items()}
