"""Prints how far the logits of tiny decoders by the kernels of a step in Triton's interpreter are from those of
transformers' layers; see `interpreted_steps.py`.

python tests/interpreted_language.py llama 7 3 2 true
"""

import json
import sys

import pytest
from decoders import bind, decoder_of, passes
from steps import allow_steps

from arimage.kernels.operation import DEVICES
from arimage.models import language_model, step


def main(kind: str, window: int, batch: int, branches: int, row_end: bool) -> None:
    model = bind(kind, decoder_of(kind), batch, branches, row_end)
    *expected, begun = passes(model, window)
    with pytest.MonkeyPatch.context() as patch:
        heads = step.HEAD_DIMS
        allow_steps(patch)
        patch.setattr(step, "HEAD_DIMS", heads)
        # Prefills on a CPU have layers of their own.
        patch.setattr(language_model, "misfit_in_torch", lambda decoder: "modules")
        DEVICES.add("cpu")
        *found, steps = passes(model, window)
    distances = [float((one - other).abs().max()) for one, other in zip(expected, found, strict=True)]
    print(json.dumps({"distances": distances, "steps": [float(begun), float(steps)]}))


if __name__ == "__main__":
    main(sys.argv[1], *map(json.loads, sys.argv[2:]))
