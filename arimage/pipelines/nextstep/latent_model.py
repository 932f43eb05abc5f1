"""A language model with continuous tokens and the prompts of one call, as a `CausalLatentModel`."""

from collections.abc import Hashable
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import nn

from ...models.cache_transformers import LanguageCache
from ...models.language_model import LanguageTokenModel
from ...models.velocity import VelocityModel, VelocitySteps
from .flow import Sampler, flow_steps


NORM_EPS = 1e-6


class NextStepModel(VelocityModel, LanguageTokenModel):
    """A language model of transformers with a `NextStepProjector` and a `DenoisingHead`, as a `CausalLatentModel` (see
    `arimage.decoding.contract.models`).

    Args:
        decoder, prompts: see `LanguageTokenModel`.
        projector: the `NextStepProjector`.
        denoising_head: predicts the velocity from noise to a token.
        sampler, shift: see `flow_steps`.
        normalises: whether tokens are normalised before they are fed, as in NextStep-1.
        image_guidance_scale: s' in u + s' (r - u) + s (c - r), with the velocities r of the second of three branches,
            which has a reference image and the negative prompt. Two branches have none.
        drafter: a `NextStepModel` of a smaller language model with the same prompts.
    """

    companions = ("drafter",)
    kind: ClassVar[Literal["causal_latents"]] = "causal_latents"  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(
        self,
        decoder,
        *,
        projector: nn.Module,
        denoising_head: nn.Module,
        sampler: Sampler = "em",
        shift: float = 1.0,
        normalises: bool = False,
        image_guidance_scale: float = 1.0,
        drafter: "NextStepModel | None" = None,
        **prompts,
    ):
        self.projector, self.denoising_head = projector, denoising_head
        self.sampler, self.shift, self._normalises = sampler, shift, normalises
        self.image_guidance_scale, self.drafter = image_guidance_scale, drafter
        self.dim = denoising_head.config.token_dim
        super().__init__(decoder, embed=self._embed_tokens, head=self._conditions, **prompts)

    def _embed_tokens(self, tokens: torch.FloatTensor) -> torch.Tensor:
        return self.projector(normalised(tokens) if self._normalises else tokens)

    def _conditions(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.projector(hidden, hidden=True)

    @property
    def noisy(self) -> bool:
        """See `CausalLatentModel`."""
        return self.sampler != "em-1.0"

    @property
    def put_key(self) -> Hashable:
        settings = self.sampler, self.shift, self._normalises, self.image_guidance_scale
        return super().put_key, self.projector, self.denoising_head, settings

    def guide(self, velocities: torch.FloatTensor, guidance: torch.FloatTensor) -> torch.FloatTensor:
        guided = super().guide(velocities, guidance)
        if self.branches < 3:
            return guided
        return guided + (self.image_guidance_scale - 1) * (velocities[1] - velocities[2])

    @torch.no_grad()
    def forward(self, tokens: torch.FloatTensor, positions: torch.LongTensor, cache: LanguageCache) -> torch.Tensor:
        """Conditions [G, B, Q, C] of the positions after `positions`; see `CausalLatentModel.forward`."""
        cache.allocate()
        embedded = self._embed(tokens).to(self._dtype)
        if self._begins_step(cache):
            return self._step(embedded, None, positions, cache)
        slots = cache.slots_of(positions, None)
        seen, at = cache.seen(slots, None), positions.clamp(min=0).repeat(self.branches, 1)
        cache.write_next_at(cache.index(slots))
        hidden = self._run(
            embedded.repeat(self.branches, 1, 1),
            at + self._first[..., None],
            self.conditions.visible_keys(cache.prefix_end, seen),
            cache,
        )
        return self._logits(hidden)

    def velocity_steps(self, num_diffusion_steps: int | tuple[int, ...]) -> VelocitySteps:
        assert isinstance(num_diffusion_steps, int)
        return flow_steps(self.sampler, num_diffusion_steps, self.shift)


def normalised(tokens: torch.FloatTensor) -> torch.FloatTensor:
    """Tokens [..., D] with a mean of 0 and a variance of 1 over their numbers."""
    return F.layer_norm(tokens, tokens.shape[-1:], eps=NORM_EPS)
