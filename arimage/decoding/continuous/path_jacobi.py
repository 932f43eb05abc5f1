"""Speculative Jacobi decoding of continuous tokens: a window of denoising paths that are coupled from pass to pass."""

from dataclasses import dataclass
from typing import get_args

import torch

from ..contract.distribution import Sampling
from ..contract.layout import Layout
from ..contract.models import CausalLatentModel
from ..contract.settings import check_settings
from ..contract.supports import DecodingMethod
from .path_coupling import Coupling, LatentSampling, PathState, start_paths, step_window


@dataclass(frozen=True)
class PathJacobiDecoding(DecodingMethod):
    """Speculative Jacobi decoding of a `CausalLatentModel`, exact.

    Every position of the window holds a denoising path. A step evaluates the window in one forward pass, couples each
    path to its new distribution, and decides the tokens up to and including the first one that changed: everything
    before it was evaluated with the right context. The last denoising step adds noise, like all others, since
    otherwise no two paths would end in the same token; `ar` samples from the same distribution.

    Attributes:
        window: paths per step, >= 1; 1 is autoregressive decoding.
        coupling: "reflection" samples the new path step by step next to the held one, and reflects its noise where
            they differ (reflection coupling, as in https://arxiv.org/abs/2501.05370, but the two may meet again): as
            many calls of the head as there are denoising steps. "path" keeps more drafts: it tests whole paths by
            their densities, all steps in one call, and replaces rejected ones by rejection sampling from the residual
            distribution, 32 candidates at a time. This takes more arithmetic, a number of calls that depends on the
            data, and a read of the device per step.
    """

    window: int = 32
    coupling: Coupling = "reflection"

    exact = True
    needs = {"causal_latents": ("noise",)}

    def __post_init__(self):
        check_settings(self, {"window": 1}, {"coupling": get_args(Coupling)})

    def positions(self, layout: Layout) -> int | None:
        return min(self.window, layout.num_tokens)

    def start(self, model: CausalLatentModel, sampling: Sampling, seeds: torch.LongTensor) -> PathState:
        assert isinstance(sampling, LatentSampling)
        return start_paths(model, sampling, seeds, self.window, keep_conditions=self.coupling == "path")

    def step(self, state: PathState) -> None:
        step_window(state, self.coupling)
