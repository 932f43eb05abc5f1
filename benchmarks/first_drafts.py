"""The most that better first drafts can save speculative Jacobi decoding: forward passes with uniform first drafts,
and with first drafts that are sampled one after another from the model itself, in forward passes that are not counted.

    python benchmarks/first_drafts.py --prompts prompts.jsonl
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer

from arimage import SpeculativeJacobiDecoding
from arimage.cli.options import DEFAULT_MODEL, Device, Dtype, Model, load_pipeline
from arimage.decoding import decode
from arimage.decoding.contract.noise import Purpose, uniforms
from arimage.eval.metrics.standard_errors import estimate_text, standard_error
from arimage.eval.runs.prompts import read_prompts
from arimage.kernels.coupling import sample


@dataclass(frozen=True)
class PerfectDrafts(SpeculativeJacobiDecoding):
    """Samples first drafts from the model, given the drafts before them; with a `share` below 1, from a mixture of
    this distribution and the uniform one."""

    share: float = 1.0

    def step(self, state):
        super().step(state)
        positions, fresh, last = state.positions, state.fresh, state.model.num_tokens - 1
        first = torch.where(fresh, positions, last + 1).amin(1, keepdim=True)
        for offset in range(state.window):
            at = first + offset
            here = fresh & (positions == at) & (at <= last)
            if not here.any():
                break
            before = (at - 1).clamp(max=last)
            tokens = state.token_buffer.gather(1, before)
            logits = state.model.forward(tokens, torch.where(at <= last, before, -1), state.cache)
            p = state.sampling.probabilities(logits, at.clamp(max=last))
            q = self.share * p + (1 - self.share) * state.sampling.uniform(at.clamp(max=last), p.shape[-1])
            noise = uniforms(state.seeds, at, state.steps, Purpose.REFRESH, 1)[..., 0]
            state.write_tokens(positions, here, sample(q, noise).expand_as(positions))
            torch.where(here[..., None], q, state.draft_probabilities, out=state.draft_probabilities)


@torch.no_grad()
def steps_of(pipe, prompts: list[str], decoding: SpeculativeJacobiDecoding) -> torch.Tensor:
    """The forward passes [B] of one image per prompt."""
    sampling = pipe.sampling()
    # An order is derived from the seeds of the call.
    generator = torch.Generator().manual_seed(0)
    model = pipe.prepare(prompts, guidance_scale=sampling.guidance_scale, generator=generator).model
    return decode(model, decoding, sampling, torch.arange(len(prompts), device=model.device)).steps.double()


def main(
    prompts: Annotated[Path, typer.Option(help="A file of prompts, as for `arimage eval generate`.")],
    window: int = 32,
    model: Model = DEFAULT_MODEL,
    device: Device = None,
    dtype: Dtype = "float32",
) -> None:
    pipe = load_pipeline(model, device, dtype)
    texts = [row["prompt"] for row in read_prompts(prompts)]
    uniform, perfect = (
        steps_of(pipe, texts, method(window=window)) for method in (SpeculativeJacobiDecoding, PerfectDrafts)
    )
    for name, counts in (("uniform", uniform), ("perfect", perfect), ("saved", uniform - perfect)):
        print(f"{name}: {estimate_text(float(counts.mean()), standard_error(counts.numpy()), None)}")


if __name__ == "__main__":
    typer.run(main)
