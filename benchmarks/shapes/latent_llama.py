"""A shape of SphereAR's size."""

from arimage.decoding import LatentSampling, Layout
from arimage.pipelines.latent_llama.transformer_latent_llama import LatentLlamaModel, LatentLlamaTransformer

from . import Bind, Bound, Published, build, class_condition


def latent_llama(layers: int) -> Bind:
    network = build(lambda: LatentLlamaTransformer(num_layers=layers, num_head_layers=min(layers, 6)))

    def bind(batch: int) -> Bound:
        condition, layout = class_condition(batch), Layout((16, 16))
        drafter = LatentLlamaModel(network, condition, layout, guided=True)
        model = LatentLlamaModel(network, condition, layout, guided=True, drafter=drafter)
        return Bound(model, LatentSampling(guidance_scale=2.9, num_diffusion_steps=4), 256, (network,))

    return bind


PUBLISHED = {"latent-llama": Published(12, latent_llama, ("ar", "sjd-coupled"))}
