"""An estimate of the forward passes that NextStep's denoising steps leave: the packaged model of continuous tokens,
denoised by them. Its head was trained for another path from noise to tokens, with the same ends; its predictions are
converted to the velocity of a straight one. The model is small, and its guidance is far weaker than that of a language
model of 14B, so the figures say how samplers, steps and guidance compare, not what the published weights would reach.

    python benchmarks/flow_acceptance.py --prompts prompts.jsonl
"""

import math
import time
from pathlib import Path
from typing import Annotated

import torch
import typer

from arimage.cli.options import Device, Dtype, load_pipeline
from arimage.decoding import LatentSampling, decode, decoding_from_text
from arimage.eval.metrics.standard_errors import estimate_text, standard_error
from arimage.eval.runs.prompts import read_prompts
from arimage.pipelines.latent_llama.transformer_latent_llama import LatentLlamaModel
from arimage.pipelines.nextstep.flow import STEPS, flow_steps


MODEL = "emoji-latent-llama"
DECODINGS = ["ar", "sjd-coupled:window=16", "sjd-coupled:window=64"]
GUIDANCE, COUNTS = [1.0, 3.0, 7.5], [0, 14]


class FlowModel(LatentLlamaModel):
    """The packaged model with the steps of NextStep."""

    sampler = "em"

    def velocity_steps(self, num_diffusion_steps):
        return flow_steps(self.sampler, num_diffusion_steps)

    def denoising_head(self, tokens, times, conditions):
        """The velocity of t data + (1 - t) noise, from that of the path with variance 1 at the time of training with
        as much noise."""
        times = times[..., None]
        size = (times.square() + (1 - times).square()).sqrt()
        kept, rest = times / size, (1 - times) / size
        # The share of the variance at a time u of training is cos((u + 0.008) / 1.008 pi / 2) ** 2.
        trained = (torch.acos(kept.clamp(max=1)) * 2 / math.pi * 1.008 - 0.008).clamp(min=0)
        timesteps = (trained * self.transformer.config.num_train_timesteps - 1).clamp(min=0)
        scaled = tokens / size
        velocity = self.transformer.denoising_head(scaled, timesteps[..., 0], conditions)
        return (kept * scaled - rest * velocity) - (rest * scaled + kept * velocity)


@torch.no_grad()
def main(
    prompts: Annotated[Path, typer.Option(help="A file of prompts, as for `arimage eval generate`.")],
    decoding: Annotated[list[str], typer.Option(help="Decodings, with settings.")] = DECODINGS,
    guidance: Annotated[list[float], typer.Option(help="Guidance scales.")] = GUIDANCE,
    steps: Annotated[list[int], typer.Option(help="Denoising steps; 0: those of the sampler.")] = COUNTS,
    device: Device = None,
    dtype: Dtype = "float32",
) -> None:
    pipe = load_pipeline(MODEL, device, dtype)
    texts = [row["prompt"] for row in read_prompts(prompts)]
    print("| sampler | steps | guidance | decoding | forward passes per image | head calls | seconds per batch |")
    print("|---|---:|---:|---|---:|---:|---:|")
    for sampler in ("em", "sde"):
        for count in (one or STEPS[sampler] for one in steps):
            for scale in guidance:
                settings = {"guidance_scale": scale, "guidance_schedule": "constant", "num_diffusion_steps": count}
                for text in decoding:
                    model = pipe.prepare(texts, **settings).model
                    # The pipeline binds its own class to the prompts.
                    model.__class__, model.sampler = FlowModel, sampler
                    seeds, begun = torch.arange(len(texts), device=model.device), time.perf_counter()
                    state = decode(model, decoding_from_text(text), LatentSampling(**settings), seeds)
                    passes = state.steps.double().cpu()
                    mean = estimate_text(float(passes.mean()), standard_error(passes.numpy()), None)
                    seconds = time.perf_counter() - begun
                    cells = sampler, count, scale, text, mean, state.head_calls, f"{seconds:.1f}"
                    print("|", *(f"{cell} |" for cell in cells), flush=True)


if __name__ == "__main__":
    typer.run(main)
