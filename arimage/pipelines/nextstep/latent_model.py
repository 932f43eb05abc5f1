"""A language model with continuous tokens and the prompts of one call, as a `CausalLatentModel`."""

from collections.abc import Hashable
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import nn

from ...models.cache_transformers import LanguageCache
from ...models.language_model import LanguageTokenModel
from .flow import FlowSteps, Sampler, flow_steps


NORM_EPS = 1e-6


class NextStepModel(LanguageTokenModel):
    """A language model of transformers with a `NextStepProjector` and a `DenoisingHead`, as a `CausalLatentModel` (see
    `arimage.decoding.contract.models`).

    Args:
        decoder, prompts: see `LanguageTokenModel`.
        projector: the `NextStepProjector`.
        denoising_head: predicts the velocity from noise to a token.
        sampler, shift: see `flow_steps`.
        normalises: whether tokens are normalised before they are fed, as in NextStep-1.
    """

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
        **prompts,
    ):
        self.projector, self.denoising_head = projector, denoising_head
        self.sampler, self.shift, self._normalises = sampler, shift, normalises
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
        """See `BoundModel.put`."""
        return super().put_key, self.projector, self.denoising_head, self.sampler, self.shift, self._normalises

    @torch.no_grad()
    def forward(self, tokens: torch.FloatTensor, positions: torch.LongTensor, cache: LanguageCache) -> torch.Tensor:
        """Conditions [G, B, Q, C] of the positions after `positions`; see `CausalLatentModel.forward`."""
        cache.allocate()
        slots = cache.slots_of(positions, None)
        seen, at = cache.seen(slots, None), positions.clamp(min=0).repeat(self.branches, 1)
        cache.write_next_at(cache.index(slots))
        hidden = self._run(
            self._embed(tokens).to(self._dtype).repeat(self.branches, 1, 1),
            at + self._first[..., None],
            self.conditions.visible_keys(cache.prefix_end, seen),
            cache,
        )
        return self._logits(hidden)

    def denoise(
        self,
        step: int,
        tokens: torch.FloatTensor,
        conditions: torch.Tensor,
        guidance: torch.FloatTensor,
        num_diffusion_steps: int | tuple[int, ...],
    ) -> tuple[torch.FloatTensor, torch.FloatTensor]:
        """See `LatentModel.denoise`; one standard deviation [1]."""
        steps = self._steps(num_diffusion_steps)
        times = torch.full((1,), steps.times[step], device=tokens.device, dtype=torch.float32)
        mean = self._mean(tokens, times, conditions, guidance, steps.of_token[step], steps.of_velocity[step])
        return mean, torch.full((1,), steps.stds[step], device=tokens.device, dtype=torch.float32)

    def denoise_paths(
        self,
        paths: torch.FloatTensor,
        conditions: torch.Tensor,
        guidance: torch.FloatTensor,
        num_diffusion_steps: int | tuple[int, ...],
    ) -> torch.FloatTensor:
        """See `CausalLatentModel.denoise_paths`."""
        steps = self._steps(num_diffusion_steps)
        times, *weights = torch.tensor(
            [steps.times, steps.of_token, steps.of_velocity], device=paths.device, dtype=torch.float32
        )
        weights = [weight[:, None] for weight in weights]
        return self._mean(paths, times, conditions[:, :, :, None], guidance[:, :, None], *weights)

    def _steps(self, num_diffusion_steps: int | tuple[int, ...]) -> FlowSteps:
        assert isinstance(num_diffusion_steps, int)
        return flow_steps(self.sampler, num_diffusion_steps, self.shift)

    def _mean(self, tokens, times, conditions, guidance, of_token, of_velocity):
        """The mean of the tokens after the step, from noisy `tokens` [..., D] and `conditions` [G, ..., C]."""
        velocity = self.denoising_head(tokens.expand(self.branches, *tokens.shape), times, conditions)
        guided = velocity[0] if self.branches == 1 else velocity[1] + guidance * (velocity[0] - velocity[1])
        return of_token * tokens + of_velocity * guided


def normalised(tokens: torch.FloatTensor) -> torch.FloatTensor:
    """Tokens [..., D] with a mean of 0 and a variance of 1 over their numbers."""
    return F.layer_norm(tokens, tokens.shape[-1:], eps=NORM_EPS)
