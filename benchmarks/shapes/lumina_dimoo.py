"""The published shape of Lumina-DiMOO."""

from typing import Any

import torch

from arimage.decoding import Layout, Sampling
from arimage.pipelines.lumina_dimoo.masked_model import LuminaDiMOOModel
from arimage.pipelines.lumina_dimoo.pipeline_lumina_dimoo import CONFIDENCE
from arimage.pipelines.lumina_dimoo.transformer_lumina_dimoo import LuminaDiMOOTransformer

from . import NARROW, PROMPT, Bind, Bound, Published, build


def lumina_dimoo(layers: int, shape: tuple[int, int] = (64, 64), **size: Any) -> Bind:
    network = build(lambda: LuminaDiMOOTransformer(num_layers=layers, **size))

    def bind(batch: int) -> Bound:
        # The prompt of the branch without one is shorter.
        branches = [[torch.zeros(length, dtype=torch.long)] * batch for length in (PROMPT, PROMPT // 2)]
        model = LuminaDiMOOModel(network, branches, Layout(shape), CONFIDENCE)
        return Bound(model, Sampling(guidance_scale=5.0), 0, (network,))

    return bind


TINY = {"shape": (4, 4), **NARROW}
PUBLISHED = {"lumina-dimoo": Published(32, lumina_dimoo, ("confidence:steps=8", "ml-cache:steps=8"), TINY)}
