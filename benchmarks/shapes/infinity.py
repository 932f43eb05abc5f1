"""The published shape of Infinity."""

import torch

from arimage.decoding import Sampling
from arimage.pipelines.infinity.bsq_infinity import InfinityVQModel
from arimage.pipelines.infinity.scale_model import InfinityScaleModel
from arimage.pipelines.infinity.schedules import SCHEDULES
from arimage.pipelines.infinity.transformer_infinity import InfinityTransformer

from . import PROMPT, Bind, Bound, Published, build, text_condition


def infinity_2b(layers: int) -> Bind:
    network = build(lambda: InfinityTransformer(num_layers=layers))
    vq = build(InfinityVQModel, torch.float32)

    def bind(batch: int) -> Bound:
        condition = text_condition(2 * batch, PROMPT, 2048)
        condition["unconditional"] = torch.arange(2 * batch) >= batch
        model = InfinityScaleModel(network, vq, condition, SCHEDULES[64, 64], guided=True)
        sampling = Sampling(guidance_scale=3.0, temperature=0.5, top_p=0.97)
        return Bound(model, sampling, sum(model.cells), (network,))

    return bind


PUBLISHED = {"infinity-2b": Published(32, infinity_2b, ("next-scale", "fastvar"))}
