"""The published shapes of LlamaGen-DD and VAR-DD."""

import torch

from arimage.decoding import Layout, Sampling
from arimage.pipelines.distilled_decoding.transformer_llamagen_dd import LlamaGenDDTransformer
from arimage.pipelines.distilled_decoding.transformer_var_dd import VARDDTransformer
from arimage.pipelines.distilled_decoding.vector_model import DistilledModel
from arimage.pipelines.llamagen.transformer_llamagen import LlamaGenTokenModel, LlamaGenTransformer

from . import Bind, Bound, Published, build, class_condition


def llamagen_dd(layers: int) -> Bind:
    student = build(lambda: LlamaGenDDTransformer(num_layers=layers))
    network = build(lambda: LlamaGenTransformer(num_layers=layers))

    def bind(batch: int) -> Bound:
        condition, codebook, layout = class_condition(batch), torch.zeros(16384, 8), Layout((16, 16))
        teacher = LlamaGenTokenModel(network, condition, layout, guided=True, codebook=codebook)
        model = DistilledModel(student, condition, range(257), codebook, layout=layout, teacher=teacher)
        return Bound(model, Sampling(guidance_scale=4.0), 256, (student, network))

    return bind


def var_dd(layers: int) -> Bind:
    student = build(lambda: VARDDTransformer(num_layers=layers))

    def bind(batch: int) -> Bound:
        offsets = [0]
        for side in student.config.scales:
            offsets.append(offsets[-1] + side**2)
        model = DistilledModel(student, class_condition(batch), offsets, torch.zeros(4096, 32))
        return Bound(model, Sampling(), 0, (student,))

    return bind


PUBLISHED = {
    "llamagen-dd-b": Published(12, llamagen_dd, ("few-step", "flow")),
    "var-dd-d16": Published(16, var_dd, ("few-step",)),
}
