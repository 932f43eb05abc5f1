"""Denoising heads that predict a velocity: what the models of continuous tokens in raster order share."""

from typing import Any, NamedTuple

import torch


class VelocitySteps(NamedTuple):
    """The coefficients of S denoising steps in double precision. Step 0 is taken last.

    Attributes:
        times: what the head reads of each step.
        of_token, of_velocity: the weights of the noisy token and of the predicted velocity in the mean after a step.
        stds: the standard deviations of the noise that a step adds.
    """

    times: tuple[float, ...]
    of_token: tuple[float, ...]
    of_velocity: tuple[float, ...]
    stds: tuple[float, ...]


class VelocityModel:
    """The denoising of a `CausalLatentModel` whose head predicts a velocity.

    Attributes:
        denoising_head: the `DenoisingHead`.
        branches: rows per image, 1 or more under guidance.
    """

    denoising_head: Any
    branches: int

    def velocity_steps(self, num_diffusion_steps: int | tuple[int, ...]) -> VelocitySteps:
        """The steps of the model."""
        raise NotImplementedError

    def guide(self, velocities: torch.FloatTensor, guidance: torch.FloatTensor) -> torch.FloatTensor:
        """The guided velocities [..., D] from those of each branch [G, ..., D]."""
        if self.branches == 1:
            return velocities[0]
        return velocities[1] + guidance * (velocities[0] - velocities[1])

    def denoise(
        self,
        step: int,
        tokens: torch.FloatTensor,
        conditions: torch.Tensor,
        guidance: torch.FloatTensor,
        num_diffusion_steps: int | tuple[int, ...],
    ) -> tuple[torch.FloatTensor, torch.FloatTensor]:
        """See `LatentModel.denoise`; one standard deviation [1]."""
        times, *weights, stds = (values[step] for values in self.velocity_steps(num_diffusion_steps))
        time, std = (torch.full((1,), value, device=tokens.device, dtype=torch.float32) for value in (times, stds))
        return self._mean(tokens, time, conditions, guidance, *weights), std

    def denoise_paths(
        self,
        paths: torch.FloatTensor,
        conditions: torch.Tensor,
        guidance: torch.FloatTensor,
        num_diffusion_steps: int | tuple[int, ...],
    ) -> torch.FloatTensor:
        """See `CausalLatentModel.denoise_paths`."""
        steps = self.velocity_steps(num_diffusion_steps)[:3]
        times, *weights = torch.tensor(steps, device=paths.device, dtype=torch.float32)
        weights = [weight[:, None] for weight in weights]
        return self._mean(paths, times, conditions[:, :, :, None], guidance[:, :, None], *weights)

    def _mean(self, tokens, times, conditions, guidance, of_token, of_velocity):
        """The mean of the tokens after the step, from noisy `tokens` [..., D] and `conditions` [G, ..., C]."""
        velocities = self.denoising_head(tokens.expand(self.branches, *tokens.shape), times, conditions)
        return of_token * tokens + of_velocity * self.guide(velocities, guidance)
