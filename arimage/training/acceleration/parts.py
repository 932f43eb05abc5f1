"""What the trainings of parts share that make a finished model faster: they learn from a cache of its tokens, and are
judged on held-out images of it."""

from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn

from ...decoding import Sampling
from ...eval.runs.files import write_json
from ...pipelines.base import ARPipeline
from ..loop import fit
from ..losses import condition_of
from ..processes import batch_generator, processes
from ..recipe import PartRecipe
from ..saving import save_float16
from ..tokens.batches import TokenBatches
from ..tokens.beginning import check_classes, check_fits, open_sets
from ..tokens.cache import TokenCache
from ..tokens.heldout import Part, reported


# The held-out images that reports are on, and those that are also generated again, from their captions or classes.
JUDGED, GENERATED = 128, 16
# The share of drafts that would be accepted: what the distributions of the part and of the model have in common.
OVERLAP = "overlap"


class Sets(NamedTuple):
    """Tokens to train on, and held-out ones."""

    trained: TokenCache | Part
    heldout: TokenCache | Part

    @property
    def about(self) -> dict[str, str]:
        return {"tokens": self.trained.digest, "heldout": self.heldout.digest}


class PartTask(nn.Module):
    """Teaches a part of `pipe`. Its `about` says what the result depends on.

    Attributes:
        decodings: one that needs no part, and one with it, whose forward passes on held-out images are counted.
        result: the pipeline with the part.
    """

    decodings: ClassVar[tuple[str, ...]] = ()
    about: dict[str, Any]

    def __init__(self, pipe: ARPipeline, sets: Sets, settings: Any):
        super().__init__()
        self.settings, self.result, self.learning_rate_scales = settings, pipe, {}
        # Not a module: the pipeline is neither trained nor part of a checkpoint.
        self.frozen = SimpleNamespace(pipe=pipe, sets=sets)
        self.frozen.batches = TokenBatches(sets.trained, settings.batch_size, 0.0, settings.seed)

    def figures(
        self, captions: list[str], tokens: torch.LongTensor, generator: torch.Generator
    ) -> dict[str, torch.Tensor]:
        """The `loss` of images by their captions and tokens [B, N], and figures for the log."""
        raise NotImplementedError

    def loss(self, step: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        tokens, captions, _ = self.frozen.batches[step]
        generator = batch_generator(self.settings.seed, step)
        figures = self.figures(captions, tokens.to(self.frozen.pipe.device), generator)
        return figures["loss"], {name: value.detach() for name, value in figures.items()}

    @torch.no_grad()
    def report(self, step: int, out: Path) -> dict[str, float]:
        """The figures of held-out images."""
        found, heldout = [], self.frozen.sets.heldout
        for part in reported(heldout, JUDGED).split(self.settings.batch_size):
            tokens, captions = heldout.read(part.tolist(), [0] * len(part))
            tokens = tokens.to(self.frozen.pipe.device)
            found.append(self.figures(captions, tokens, torch.Generator().manual_seed(0)))
        return {f"held-out {name}": fmean(float(one[name]) for one in found) for name in found[0]}


@torch.no_grad()
def guided_condition(pipe: ARPipeline, captions: list[str]) -> dict[str, torch.Tensor]:
    """The arguments of `predict` with these captions or classes, followed by as many rows without."""
    return pipe.prepare(**condition_of(pipe, captions), guidance_scale=2.0).model.condition


def log_probabilities(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Those [...] of logits [2, ...] with and without the condition, or [1, ...], differentiable: guided and at the
    temperature of `sampling`, before it cuts tokens off."""
    guided = logits[-1] + (logits[0] - logits[-1]) * sampling.guidance_scale
    return (guided / sampling.temperature).log_softmax(-1)


@torch.no_grad()
def tokens_per_pass(pipe: ARPipeline, heldout: TokenCache | Part, decoding: str) -> float:
    """How many tokens a forward pass decides, where images are generated from held-out captions or classes."""
    numbers = reported(heldout, GENERATED).tolist()
    _, captions = heldout.read(numbers, [0] * len(numbers))
    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(0)
    accepted = pipe(
        **condition_of(pipe, captions), decoding=decoding, generator=generator, output_type="latent"
    ).stats.accepted
    return float((accepted.sum(0) / (accepted > 0).sum(0)).mean())


def run_part(
    begin: Callable[[PartRecipe, ARPipeline, Sets, Path], PartTask],
    recipe: PartRecipe,
    pipe: ARPipeline,
    tokens: Path,
    heldout: Path | None,
    out: Path,
) -> dict[str, float]:
    """Train a part by a recipe. The pipeline with it is saved in `out`/model, in float16, at every report, and
    `out`/acceptance.json has the figures that are returned: those of held-out images before and after.

    Args:
        begin: makes the task, by the recipe, for the pipeline, on these sets; it may write into the folder `out`.
        tokens, heldout: folders of `arimage train tokens`, encoded with the image tokenizer of `pipe`. Without the
            latter a tenth of `tokens` is held out.

    Raises:
        ValueError: if the recipe, the model or the tokens do not fit.
    """
    cache, trained, held = open_sets(tokens, [] if heldout is None else [heldout])
    check_fits(pipe, cache, "--model has another one")
    check_classes(pipe, cache, "--model has")
    if not held:
        raise ValueError(f"{tokens} has too few images to hold some out: give others as --heldout")
    sets = Sets(trained, next(iter(held.values())))
    for part in pipe.components.values():
        if isinstance(part, nn.Module):
            part.requires_grad_(False)
    torch.manual_seed(recipe.training.get("seed", 0))
    task = begin(recipe, pipe, sets, out)
    figures = {}
    (out / recipe.part).mkdir(parents=True, exist_ok=True)

    def measure(when: str, pipe: ARPipeline, decodings: tuple[str, ...]) -> None:
        if processes()[0]:
            return
        found = task.eval().report(0, out / recipe.part)
        figures.update({f"{name} {when}": value for name, value in found.items()})
        for decoding in decodings:
            figures[f"tokens per forward pass {when}, {decoding}"] = tokens_per_pass(pipe, sets.heldout, decoding)
        task.train()

    measure("before", pipe, task.decodings[:1])
    # The weights do not show all of the arguments.
    settings, about = task.settings, {**task.about, **sets.about, "arguments": recipe.model}
    save = lambda: save_float16(task.result, out / "model")  # noqa: E731
    more = {"learning_rate_scales": task.learning_rate_scales, "about": about, "seed": settings.seed}
    fit(task, settings.optimizer, out / recipe.part, on_report=save, **more)
    measure("after", task.result, task.decodings[1:])
    save()
    if figures:
        write_json(out / "acceptance.json", figures)
    return figures
