"""The published shape of MAR."""

import torch

from arimage.decoding import LatentSampling, Layout
from arimage.models.denoising_head import DenoisingHead
from arimage.pipelines.mar.transformer_mar import MARLatentModel, MARTransformer

from . import Bind, Bound, Published, build, class_condition


def mar_b(layers: int) -> Bind:
    network = build(lambda: MARTransformer(num_layers=layers, num_decoder_layers=layers))
    head = build(lambda: DenoisingHead(num_layers=min(layers, 6)), torch.float32)

    def bind(batch: int) -> Bound:
        labels, layout = class_condition(batch)["class_labels"], Layout((16, 16))
        drafter = MARLatentModel(network, head, labels, layout, guided=True)
        model = MARLatentModel(network, head, labels, layout, guided=True, drafter=drafter)
        sampling = LatentSampling(guidance_scale=2.9, num_inference_steps=4, num_diffusion_steps=4)
        return Bound(model, sampling, 0, (network, head))

    return bind


DECODINGS = ("mar", "mar-disa:diffusion_steps=4+2", "recap", "lazy-mar:first=1,layer=1", "cspd")
PUBLISHED = {"mar-b-256": Published(12, mar_b, DECODINGS)}
