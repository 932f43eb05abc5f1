"""Prints the greedy tokens of three steps of emoji-llamagen, cut to two layers, in torch and by the kernels of a step
for few and for many rows in Triton's interpreter, which must be chosen before Triton is imported: hence the
process."""

import importlib
import json

import pytest
import torch
from steps import allow_steps, count_layers

import arimage.kernels.step
from arimage import AutoPipeline
from arimage.decoding import AutoregressiveDecoding
from arimage.decoding.run.batch import decode


def tokens(pipe) -> list[list[int]]:
    call = pipe.prepare("a red heart", guidance_scale=3.0, top_k=1, generator=torch.Generator().manual_seed(0))
    state = decode(call.model, AutoregressiveDecoding(), call.sampling, call.seeds, lambda state, passes: passes == 4)
    return state.tokens.tolist()


@torch.no_grad()
def main() -> None:
    pipe = AutoPipeline.from_pretrained("emoji-llamagen")
    del pipe.transformer.blocks[2:]
    pipe.transformer.register_to_config(num_layers=2)
    found = {"torch": tokens(pipe)}
    with pytest.MonkeyPatch.context() as patch:
        allow_steps(patch)
        rows = count_layers(patch)
        for operation in ("attention", "embedding", "gate", "keys", "linear", "qkv"):
            module = importlib.import_module(f"arimage.kernels.step.{operation}")
            patch.setattr(module, "runs_triton", lambda tensor: True)
        found["few"] = tokens(pipe)
        patch.setattr(arimage.kernels.step, "MOST_ROWS", 1)
        found |= {"many": tokens(pipe), "rows": rows}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
