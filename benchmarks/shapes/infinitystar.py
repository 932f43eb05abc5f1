"""The published shape of InfinityStar."""

import torch

from arimage.decoding import Sampling
from arimage.pipelines.infinitystar.scale_model import InfinityStarScaleModel
from arimage.pipelines.infinitystar.schedules import SCHEDULES, Grid, PixelClass, passes, repetitions_of
from arimage.pipelines.infinitystar.transformer_infinitystar import InfinityStarTransformer

from . import PROMPT, Bind, Bound, Published, build, text_condition


def infinitystar(layers: int, pixels: PixelClass = "0.40M", finest: Grid = (30, 53), latent_frames: int = 21) -> Bind:
    network = build(lambda: InfinityStarTransformer(num_layers=layers, pixels=pixels))
    film = passes(SCHEDULES[pixels, finest], latent_frames, network.config.bits, repetitions_of(pixels))

    def bind(batch: int) -> Bound:
        condition = text_condition(2 * batch, PROMPT, 2048)
        condition["unconditional"] = torch.arange(2 * batch) >= batch
        model = InfinityStarScaleModel(network, condition, film, finest, guided=True, threshold=0.05)
        temperature = tuple(0.4 if one.clip else 1.0 for one in film)
        sampling = Sampling(guidance_scale=34.0, temperature=temperature)
        return Bound(model, sampling, sum(model.cells), (network,))

    return bind


PUBLISHED = {"infinitystar-480p": Published(36, infinitystar, ("next-scale", "fastvar"))}
