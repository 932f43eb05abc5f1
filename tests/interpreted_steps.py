"""Prints what a packaged model, cut to two layers, generates in a few steps, in torch and by the kernels of a step in
Triton's interpreter, which must be chosen before Triton is imported: hence the process.

python tests/interpreted_steps.py emoji-var
"""

import json
import sys

import pytest
import torch
from steps import allow_steps, count_layers

import arimage.kernels.step
from arimage import AutoPipeline
from arimage.decoding import AutoregressiveDecoding, NextScaleDecoding
from arimage.decoding.run.batch import decode
from arimage.kernels.operation import DEVICES
from arimage.models import step


# Greedy tokens, but for continuous ones; with the number of forward passes.
CALLS = {
    "emoji-llamagen": ({"top_k": 1}, AutoregressiveDecoding(), 4),
    "emoji-var": ({"top_k": 1}, NextScaleDecoding(), 4),
    "emoji-latent-llama": ({"num_diffusion_steps": 2}, AutoregressiveDecoding(), 2),
}


def tokens(pipe, settings, decoding, count) -> list:
    generator = torch.Generator().manual_seed(0)
    call = pipe.prepare("a red heart", guidance_scale=3.0, generator=generator, **settings)
    state = decode(call.model, decoding, call.sampling, call.seeds, lambda state, passes: passes == count)
    return state.tokens.tolist()


@torch.no_grad()
def main(name: str) -> None:
    pipe = AutoPipeline.from_pretrained(name)
    del pipe.transformer.blocks[2:]
    pipe.transformer.register_to_config(num_layers=2)
    found = {"torch": tokens(pipe, *CALLS[name])}
    with pytest.MonkeyPatch.context() as patch:
        heads = step.HEAD_DIMS
        allow_steps(patch)
        # Unlike the references, the kernels take these only.
        patch.setattr(step, "HEAD_DIMS", heads)
        rows = count_layers(patch)
        DEVICES.add("cpu")
        found["few"] = tokens(pipe, *CALLS[name])
        patch.setattr(arimage.kernels.step, "MOST_ROWS", 1)
        found |= {"many": tokens(pipe, *CALLS[name]), "rows": rows}
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
