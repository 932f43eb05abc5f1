"""The published shape of NextStep."""

import torch
from transformers import Qwen2Config, Qwen2Model

from arimage.decoding import LatentSampling, Layout
from arimage.models.denoising_head import DenoisingHead
from arimage.pipelines.nextstep.latent_model import NextStepModel
from arimage.pipelines.nextstep.projector import NextStepProjector

from . import PROMPT, Bind, Bound, Published, build


def nextstep(layers: int, side: int = 32) -> Bind:
    rope = {"rope_type": "default", "rope_theta": 1e6}
    config = Qwen2Config(
        vocab_size=152064,
        hidden_size=5120,
        intermediate_size=13824,
        num_hidden_layers=layers,
        num_attention_heads=40,
        num_key_value_heads=8,
        rope_parameters=rope,
    )
    decoder, projector = build(lambda: Qwen2Model(config)), build(NextStepProjector)
    head = build(
        lambda: DenoisingHead(
            token_dim=64, condition_dim=5120, hidden_size=1536, num_layers=min(layers, 12), learned_variance=False
        ),
        torch.float32,
    )

    def bind(batch: int) -> Bound:
        model = NextStepModel(
            decoder,
            projector=projector,
            denoising_head=head,
            layout=Layout((side, side)),
            input_ids=torch.zeros(2 * batch, PROMPT, dtype=torch.long),
            branches=2,
        )
        sampling = LatentSampling(guidance_scale=7.5, guidance_schedule="constant", num_diffusion_steps=28)
        return Bound(model, sampling, side**2, (decoder, projector, head))

    return bind


PUBLISHED = {"nextstep-1.1": Published(48, nextstep, ("ar", "sjd-coupled"))}
