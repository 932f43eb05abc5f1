"""Distilled Decoding (https://arxiv.org/abs/2412.17153): a student learns to turn noise into the image that its
teacher makes of it."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from pydantic import Field
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from tqdm import tqdm

from ...cli.options import fast_dtype
from ...decoding import FewStepDecoding, FlowDecoding, NextScaleDecoding
from ...decoding.contract.noise import Purpose, normals
from ...decoding.flow import flow
from ...decoding.next_scale import ScaleState
from ...eval.runs.files import remove_all_leftovers, write_whole
from ...pipelines.base import ARPipeline
from ...pipelines.distilled_decoding.pipeline_llamagen_dd import LlamaGenDDPipeline
from ...pipelines.distilled_decoding.pipeline_var_dd import VARDDPipeline
from ...pipelines.distilled_decoding.transformer_llamagen_dd import LlamaGenDDTransformer
from ...pipelines.distilled_decoding.transformer_var_dd import VARDDTransformer
from ...pipelines.llamagen.pipeline_llamagen import LlamaGenPipeline
from ...pipelines.var.pipeline_var import VARPipeline
from ...settings.schema import COMPLETE, Batch, Flag, Number, Seed, Share, Whole
from ..data.pictures import save_grid
from ..loop import OptimizerSettings
from ..losses import condition_of
from ..processes import batch_generator, processes, wait_for_all
from ..recipe import PartRecipe, settings_of
from ..resuming import check_metadata, digest, of_pipeline, of_settings, to_metadata
from ..tokens.cache import TokenCache
from ..tokens.heldout import Part
from .drafter import as_llamagen
from .parts import PartTask, Sets


PAIRS = "pairs"


class FlowMaps(NextScaleDecoding):
    """`NextScaleDecoding` of tokens that their noise determines, as in `FlowDecoding`: for pairs of a VAR."""

    def sample(
        self, state: ScaleState, probabilities: torch.FloatTensor, positions: torch.LongTensor
    ) -> torch.LongTensor:
        codebook = state.model.codebook
        assert codebook is not None
        noise = normals(state.seeds, positions, None, Purpose.NOISE, codebook.shape[1])
        return super().sample(state, flow(probabilities, noise, codebook), positions)


@dataclass(frozen=True)
class StudentSettings:
    """How a student is trained. The authors' training code and hyper-parameters are not public; these are ours.

    The data are pairs of noise and tokens, `noises_per_prompt` for each caption or class of the cache, which the
    teacher generates by `FlowDecoding` with its default sampling settings, `pair_batch_size` images at a time with the
    given `window`; a VAR generates each map at once. Each step takes `batch_size` of them and a start, the first of
    `starts` in `first_share` of the steps and else another: tokens before it are given as their vectors, the others as
    their noise. Starts are tokens, of a VAR maps; by default the first and one after 5/16 of them, or after half of
    the maps. The loss, of the others, is the cross-entropy of the tokens and, weighted by `vector_weight`, the squared
    error of the vectors.
    `place_embeddings` is that of `LlamaGenDDTransformer`.
    """

    optimizer: OptimizerSettings
    batch_size: Batch = 32
    noises_per_prompt: Annotated[int, Field(strict=True, ge=1, le=1000)] = 6
    pair_batch_size: Batch = 64
    window: Batch = 32
    starts: Annotated[tuple[Whole, ...], Field(min_length=1, max_length=100)] | None = None
    first_share: Share = 0.75
    vector_weight: Number = 1.0
    place_embeddings: Flag = False
    seed: Seed = 0
    __pydantic_config__ = COMPLETE

    def __post_init__(self):
        # The decoding refuses starts that are not in order.
        FewStepDecoding(self.starts or (0,))


def prompts_of(rows: TokenCache | Part) -> list[str]:
    """The captions of images, the first of each, or the classes, as digits."""
    found: dict[str, None] = {}
    for start in range(0, len(rows), 1024):
        part = [*range(start, min(start + 1024, len(rows)))]
        found |= dict.fromkeys(rows.read(part, [0] * len(part))[1])
    return [*found]


class StudentTask(PartTask):
    """Teaches `student` the pairs of `pipe` for the captions or classes of a cache. The folder `pairs` keeps them."""

    def __init__(
        self,
        student: LlamaGenDDTransformer | VARDDTransformer,
        pipe: LlamaGenPipeline | VARPipeline,
        sets: Sets,
        settings: StudentSettings,
        pairs: Path,
    ):
        super().__init__(pipe, sets, settings)
        self.student, self.codebook = student, pipe.vq.code_vectors().detach().float()
        # A VAR generates all tokens of a map at once, and nothing verifies its student.
        in_maps = isinstance(pipe, VARPipeline)
        self.decodings = () if in_maps else ("flow:guesses=random", "flow")
        self.teaching = FlowMaps() if in_maps else FlowDecoding(settings.window, guesses="random")
        self.offsets = level_offsets(pipe)
        self.prompts = prompts_of(sets.trained)
        self.about = {**of_settings(settings), **of_pipeline(pipe), "prompts": digest(self.prompts)}
        self.condition = self.encode()
        # The last round of noise is held out, for some prompts.
        rounds = settings.noises_per_prompt
        self.index = torch.arange(len(self.prompts)).repeat(rounds + 1)[: rounds * len(self.prompts) + 32]
        self.seeds, self.tokens = self.pairs(pairs)
        self.count = rounds * len(self.prompts)

    @torch.no_grad()
    def encode(self) -> dict[str, torch.Tensor]:
        """The conditions of all prompts, one row each."""
        batches = [
            self.frozen.pipe.prepare(
                **condition_of(self.frozen.pipe, self.prompts[start : start + 64]), guidance_scale=1.0
            ).model.condition
            for start in range(0, len(self.prompts), 64)
        ]
        return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}

    def pairs(self, folder: Path) -> tuple[torch.LongTensor, torch.LongTensor]:
        """Seeds [M], which the noise is made from, and the teacher's tokens [M, N]. Each batch is a file in `folder`,
        so that an interruption loses one batch at most.

        Raises:
            ValueError: if a file is damaged, or holds the pairs of another teacher, other prompts or settings.
        """
        settings = self.settings
        about = {
            **of_pipeline(self.frozen.pipe),
            "prompts": digest(self.prompts),
            "pairs": len(self.index),
            "seed": settings.seed,
            "pair_batch_size": settings.pair_batch_size,
        }
        rank, count = processes()
        folder.mkdir(parents=True, exist_ok=True)
        if rank == 0:
            remove_all_leftovers(folder)
        wait_for_all()
        batches = [
            (folder / f"{number:05}.safetensors", number, index, about)
            for number, index in enumerate(self.index.split(settings.pair_batch_size))
        ]
        for batch in tqdm(batches[rank::count], desc="pairs", unit="batch", disable=True if rank else None):
            self.pair_batch(*batch)
        wait_for_all()
        parts = [self.pair_batch(*batch) for batch in batches]
        return torch.cat([part["seeds"] for part in parts]), torch.cat([part["tokens"] for part in parts])

    def pair_batch(
        self, path: Path, number: int, index: torch.LongTensor, about: dict[str, Any]
    ) -> dict[str, torch.Tensor]:
        """The pairs of batch `number`, of the prompts `index`: those of the file `path`, or new ones, stored there."""
        if path.is_file():
            try:
                with safe_open(path, "pt") as file:
                    found, theirs = {name: file.get_tensor(name) for name in ("seeds", "tokens")}, file.metadata()
            except SafetensorError as error:
                raise ValueError(f"{path} is damaged ({error}): delete it to generate its pairs again") from error
            check_metadata(path, theirs, about)
            return found
        pipe, seed = self.frozen.pipe, self.settings.seed * 1_000_003 + number
        prompts = [self.prompts[i] for i in index.tolist()]
        images = pipe(
            **condition_of(pipe, prompts),
            generator=torch.Generator().manual_seed(seed),
            decoding=self.teaching,
            output_type="latent",
        )
        _, seeds = pipe.prepare_seeds(torch.Generator().manual_seed(seed), len(index))
        tokens = images.tokens if isinstance(images.tokens, list) else [images.tokens]
        found = {"seeds": seeds.cpu(), "tokens": torch.cat([each.flatten(1) for each in tokens], dim=1).cpu()}
        write_whole(path, lambda file: save_file(found, file, to_metadata(about)))
        return found

    def predict(
        self, pairs: torch.LongTensor, start: int
    ) -> tuple[torch.LongTensor, torch.FloatTensor, torch.FloatTensor]:
        """The teacher's tokens [B, N] of `pairs` [B], and the student's vectors and logits, with the tokens before the
        level `start`."""
        device = self.student.device
        tokens, seeds = self.tokens[pairs].to(device), self.seeds[pairs].to(device)
        condition = {name: value[self.index[pairs]].to(device) for name, value in self.condition.items()}
        ranks = torch.arange(tokens.shape[1], device=device)
        noise = normals(seeds, ranks.expand_as(tokens), None, Purpose.NOISE, self.codebook.shape[1])
        start = self.offsets[start]
        known = self.codebook[tokens[:, :start]]
        vectors, logits = self.student(torch.cat([known, noise[:, start:]], dim=1), start=start, **condition)
        return tokens, vectors, logits

    def losses(self, pairs: torch.LongTensor, start: int) -> dict[str, torch.Tensor]:
        """The losses, and the share of the tokens that the student foresees."""
        tokens, vectors, logits = (values[:, self.offsets[start] :] for values in self.predict(pairs, start))
        return {
            "code loss": F.cross_entropy(logits.float().flatten(0, 1), tokens.flatten()),
            "vector loss": (vectors - self.codebook[tokens]).square().sum(-1).mean(),
            "foreseen": (logits.argmax(-1) == tokens).float().mean(),
        }

    def loss(self, step: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        settings = self.settings
        generator = batch_generator(settings.seed, step)
        pairs = torch.randint(self.count, (settings.batch_size,), generator=generator)
        first, other = torch.rand(2, generator=generator).tolist()
        assert settings.starts is not None
        later = settings.starts[1:] or settings.starts
        start = settings.starts[0] if first < settings.first_share else later[int(other * len(later))]
        figures = self.losses(pairs, start)
        loss = figures["code loss"] + settings.vector_weight * figures["vector loss"]
        return loss, {name: value.detach() for name, value in figures.items()}

    def report(self, step: int, out: Path) -> dict[str, float]:
        """The figures of noise that is held out, and pictures of the teacher, above, and of the student in one pass,
        below."""
        pairs = torch.arange(self.count, len(self.index))
        tokens, _, logits = self.predict(pairs, 0)
        pipe, shown = self.frozen.pipe, min(8, len(pairs))
        both = torch.cat([tokens[:shown], logits[:shown].argmax(-1)])
        if isinstance(pipe, VARPipeline):
            both = pipe.token_maps(both)
        else:
            both = both.unflatten(1, (pipe.transformer.config.grid_size,) * 2)
        save_grid((pipe.vq.decode(both).float() / 2 + 0.5).clamp(0, 1), out / "samples.png", columns=shown)
        return {f"held-out {name}": float(value) for name, value in self.losses(pairs, 0).items()}


def level_offsets(pipe: LlamaGenPipeline | VARPipeline) -> Sequence[int]:
    """How many tokens come before each level, then the number of all. A level is a token, of a VAR a map."""
    if isinstance(pipe, VARPipeline):
        return [*itertools.accumulate((side**2 for side in pipe.transformer.config.scales), initial=0)]
    return range(pipe.transformer.config.grid_size**2 + 1)


def begin_student(recipe: PartRecipe, pipe: ARPipeline, sets: Sets, out: Path) -> StudentTask:
    """A student of the transformer of `pipe` to train, and the pairs that it learns, which `out`/pairs keeps.

    Raises:
        ValueError: if `pipe` is neither a LlamaGen pipeline nor a VAR one of classes, a setting is wrong, or `out`
            holds the pairs of another teacher, other captions or settings.
    """
    settings = settings_of(StudentSettings, recipe)
    if not isinstance(pipe, VARPipeline):
        pipe = as_llamagen(pipe)
    elif pipe.transformer.config.conditioning != "class":
        raise ValueError("--model is a VAR of texts, and students of VAR take classes: give one of classes")
    elif settings.place_embeddings:
        raise ValueError("place_embeddings is true, and a student of VAR has embeddings of places: leave it out")
    count = len(level_offsets(pipe)) - 1
    if settings.starts is None:
        second = count // 2 if isinstance(pipe, VARPipeline) else 5 * count // 16
        settings = replace(settings, starts=(0, second) if second else (0,))
    assert settings.starts is not None
    if settings.starts[-1] >= count:
        levels = "maps" if isinstance(pipe, VARPipeline) else "tokens"
        raise ValueError(f"starts is {settings.starts}: give less than the {count} {levels} of an image")
    codebook, labels = pipe.vq.code_vectors(), pipe.config.get("id2label")
    if isinstance(pipe, VARPipeline):
        student = VARDDTransformer.for_teacher(pipe.transformer)
        distilled = VARDDPipeline(student, pipe.vq, pipe.transformer, labels)
    else:
        student = LlamaGenDDTransformer.for_teacher(pipe.transformer, codebook, settings.place_embeddings)
        more = pipe.tokenizer, pipe.text_encoder, pipe.upscaler
        distilled = LlamaGenDDPipeline(student, pipe.vq, pipe.transformer, labels, *more)
    nn.Module.to(student, pipe.device, fast_dtype(str(pipe.device)))
    task = StudentTask(student, pipe, sets, settings, out / PAIRS)
    distilled.generation_config, distilled.known_captions = dict(pipe.generation_config), pipe.known_captions
    distilled.decoding, task.result = FewStepDecoding(settings.starts), distilled
    return task
