"""The head of models of continuous tokens: a small network that denoises one token, given the transformer's output for
it (MAR, https://arxiv.org/abs/2406.11838)."""

import functools
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from diffusers import ConfigMixin
from diffusers.configuration_utils import register_to_config
from torch import nn

from ..settings.schema import Flag, Layers, Width, checked
from .layers import Linear
from .mixin import ModelMixin
from .modulated_blocks import NORM_EPS, launch, layer_norm, modulate
from .step import runs_kernels


# Width of the sines and cosines that encode the timestep.
FREQUENCIES = 256


class HeadBlock(nn.Module):
    def __init__(self, hidden_size: int):
        super().__init__()
        self.norm = nn.LayerNorm(hidden_size, eps=NORM_EPS)
        self.fc1 = Linear(hidden_size, hidden_size)
        self.fc2 = Linear(hidden_size, hidden_size)
        self.modulation = Linear(hidden_size, 3 * hidden_size)

    def forward(self, hidden, condition):
        shift, scale, gate = self.modulation(condition).chunk(3, dim=-1)
        return torch.addcmul(hidden, gate, self.inner(hidden, shift, scale))

    def inner(self, hidden, shift, scale):
        normed = torch.addcmul(shift, self.norm(hidden), 1 + scale)
        return self.fc2(F.silu(self.fc1(normed)))

    def step(self, hidden, modulation):
        """`forward` over few rows by the kernels of `arimage.kernels.step`, in two launches, given what `modulation`
        makes of the condition."""
        shift, scale, gate = modulation.chunk(3, dim=-1)
        of_norm = {"eps": NORM_EPS, "norm_weight": self.norm.weight, "norm_bias": self.norm.bias}
        inner = launch(self.fc1, hidden, **of_norm, scale=scale, added=1.0, shift=shift, activation="silu")
        return launch(self.fc2, inner, residual=hidden, gate=gate)


class LazyBlocks:
    """The blocks of a head in a step that evaluates all of them, and in those after it that do not, as LazyMAR
    (https://arxiv.org/abs/2503.12450) has it. What is kept is that of the first branch.

    Attributes:
        whole: whether this is the first step. In others the inner blocks change their inputs as much as in that one.
        fresh: whether in others the outer blocks evaluate their feed-forward layers again, and not their gates alone.
    """

    INNER = range(1, 5)

    def __init__(self):
        self.whole = self.fresh = True
        self._changes, self._inner = {}, {}

    def run(self, layer: int, block: HeadBlock, hidden: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        """What the block of a `layer` makes of `hidden` [G, ..., C]."""
        if not self.whole and layer in self.INNER:
            return hidden + self._changes[layer]
        shift, scale, gate = block.modulation(condition).chunk(3, dim=-1)
        inner = block.inner(hidden, shift, scale) if self.whole or self.fresh else self._inner[layer]
        after = torch.addcmul(hidden, gate, inner)
        self._inner[layer] = inner[:1]
        if self.whole:
            self._changes[layer] = after[:1] - hidden[:1]
        return after


class DenoisingHead(ModelMixin, ConfigMixin):
    """The denoising head of MAR. The defaults are those of the published MAR-B.

    It predicts the noise in a token and, with `learned_variance`, the log-variance of the denoising step, between its
    smallest and its largest value. `from_pretrained` keeps its weights in float32: the first steps multiply its errors
    by up to 20,000.

    Args:
        token_dim (`int`): D, the width of a token.
        condition_dim (`int`): C, the width of the transformer's output.
        hidden_size, num_layers (`int`): the head's shape.
        num_train_timesteps (`int`): the diffusion steps of training.
        learned_variance (`bool`): whether it predicts the log-variance.
    """

    _keep_in_fp32_modules = [
        "input_projection",
        "time_fc1",
        "time_fc2",
        "condition_projection",
        "blocks",
        "output_modulation",
        "output_projection",
    ]

    @register_to_config
    @checked
    def __init__(
        self,
        token_dim: Width = 16,
        condition_dim: Width = 768,
        hidden_size: Width = 1024,
        num_layers: Layers = 6,
        num_train_timesteps: Width = 1000,
        learned_variance: Flag = True,
    ):
        super().__init__()
        self.input_projection = Linear(token_dim, hidden_size)
        self.time_fc1 = Linear(FREQUENCIES, hidden_size)
        self.time_fc2 = Linear(hidden_size, hidden_size)
        self.condition_projection = Linear(condition_dim, hidden_size)
        self.blocks = nn.ModuleList(HeadBlock(hidden_size) for _ in range(num_layers))
        self.output_modulation = Linear(hidden_size, 2 * hidden_size)
        self.output_projection = Linear(hidden_size, (1 + learned_variance) * token_dim)

    def forward(
        self,
        tokens: torch.Tensor,
        timesteps: torch.Tensor,
        conditions: torch.Tensor,
        *,
        lazy: LazyBlocks | None = None,
    ) -> torch.FloatTensor:
        """The predicted noise (or velocity, if the head was trained for it) and, with `learned_variance`, the place of
        the log-variance between its smallest value (-1) and its largest (1), float32 [..., D or 2 D].

        Args:
            tokens: noisy tokens [..., D].
            timesteps: steps of training, 0 .. num_train_timesteps - 1, broadcast to [...].
            conditions: [..., C].
            lazy: runs the blocks in place of the head.
        """
        ranks = torch.arange(FREQUENCIES // 2, device=tokens.device, dtype=torch.float32)
        angles = timesteps[..., None].float() * torch.exp(-math.log(10000) / (FREQUENCIES // 2) * ranks)
        time = torch.cat([angles.cos(), angles.sin()], dim=-1).to(self.dtype)
        # A step of denoising has one timestep, and a condition per token.
        alike = lazy is None and timesteps.numel() == 1 and tokens.shape[:-1] == conditions.shape[:-1]
        if alike and runs_kernels(self, conditions.shape[:-1].numel(), float32=True):
            predicted = self.step(tokens.to(self.dtype).flatten(0, -2), time, conditions.to(self.dtype).flatten(0, -2))
            return predicted.view(*tokens.shape[:-1], -1).float()
        time = self.time_fc2(F.silu(self.time_fc1(time)))
        condition = F.silu(time + self.condition_projection(conditions.to(self.dtype)))
        hidden = self.input_projection(tokens.to(self.dtype))
        for layer, block in enumerate(self.blocks):
            hidden = block(hidden, condition) if lazy is None else lazy.run(layer, block, hidden, condition)
        shift, scale = self.output_modulation(condition).chunk(2, dim=-1)
        return self.output_projection(layer_norm(hidden, 1 + scale, shift)).float()

    @property
    def step_parts(self) -> list[nn.Module]:
        """See `runs_kernels`."""
        before = [self.time_fc1, self.time_fc2, self.condition_projection]
        return [*before, *self.blocks, self.output_modulation, self.output_projection]

    def step(self, tokens: torch.Tensor, time: torch.Tensor, conditions: torch.Tensor) -> torch.Tensor:
        """What `forward` predicts for few `tokens` [R, D] by the kernels of `arimage.kernels.step`, given the encoded
        timestep [1, FREQUENCIES] and the conditions [R, C]."""
        time = launch(self.time_fc2, launch(self.time_fc1, time, activation="silu"))
        condition = launch(self.condition_projection, conditions, residual=time, activation="silu")
        layers = [*(block.modulation for block in self.blocks), self.output_modulation]
        *of_blocks, of_output = modulate(condition, layers)
        hidden = self.input_projection(tokens)
        for block, part in zip(self.blocks, of_blocks, strict=True):
            hidden = block.step(hidden, part)
        shift, scale = of_output.chunk(2, dim=1)
        return launch(self.output_projection, hidden, eps=NORM_EPS, scale=scale, added=1.0, shift=shift)


@dataclass(frozen=True)
class DiffusionTables:
    """The coefficients of a diffusion of S steps in double precision. Step 0 has the least noise and is taken last.

    Attributes:
        timesteps: the step of training that each step stands for.
        alphas_cumprod, betas: the noise schedule.
        log_variances: the smallest log-variance of each step: the posterior's.
        mean_of_clean, mean_of_noisy: the weights of the predicted and of the noisy token in the next mean.
    """

    timesteps: tuple[int, ...]
    alphas_cumprod: tuple[float, ...]
    betas: tuple[float, ...]
    log_variances: tuple[float, ...]
    mean_of_clean: tuple[float, ...]
    mean_of_noisy: tuple[float, ...]

    def middle_std(self, step: int) -> float:
        """The geometric mean of the smallest and the largest standard deviation of a step, for heads that predict
        none."""
        return math.exp((self.log_variances[step] + math.log(self.betas[step])) / 4)

    def transition(
        self, step: int, tokens: torch.Tensor, noise: torch.Tensor, share: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and standard deviation [..., D] of the tokens after `step`, from the tokens before it and the two
        predictions of a `DenoisingHead`, all [..., D] in float32."""
        kept = self.alphas_cumprod[step]
        clean = kept**-0.5 * tokens - (1 / kept - 1) ** 0.5 * noise
        mean = self.mean_of_clean[step] * clean + self.mean_of_noisy[step] * tokens
        least, largest = self.log_variances[step], math.log(self.betas[step])
        log_variance = least + (share + 1) / 2 * (largest - least)
        return mean, torch.exp(0.5 * log_variance)


def _kept(time: float) -> float:
    """The share of a token's variance that the cosine schedule keeps at `time` in 0 .. 1."""
    return math.cos((time + 0.008) / 1.008 * math.pi / 2) ** 2


@functools.lru_cache(maxsize=256)
def diffusion_tables(num_diffusion_steps: int | tuple[int, ...], num_train_timesteps: int = 1000) -> DiffusionTables:
    """The tables of the cosine schedule for some of the steps of training.

    Args:
        num_diffusion_steps: how many steps, at equal distances. Several numbers: how many in each of equal parts of
            the training steps, from the least noise to the most.
        num_train_timesteps: the steps of training.

    Raises:
        ValueError: if a part has fewer steps of training than it should give, or there are fewer than two steps.
    """
    counts = (num_diffusion_steps,) if isinstance(num_diffusion_steps, int) else num_diffusion_steps
    chosen, first = [], 0
    for part, count in enumerate(counts):
        size = num_train_timesteps // len(counts) + (part < num_train_timesteps % len(counts))
        if not 1 <= count <= size or sum(counts) < 2:
            raise ValueError(
                f"num_diffusion_steps is {num_diffusion_steps}: give at least 2 steps, and up to {size} in a part of "
                f"the {num_train_timesteps} steps of training"
            )
        distance = (size - 1) / max(count - 1, 1)
        chosen += [first + round(i * distance) for i in range(count)]
        first += size

    product, kept = 1.0, []
    for step in range(num_train_timesteps):
        product *= 1 - min(1 - _kept((step + 1) / num_train_timesteps) / _kept(step / num_train_timesteps), 0.999)
        if step == chosen[len(kept)]:
            kept.append(product)
        if len(kept) == len(chosen):
            break
    before = [1.0, *kept[:-1]]
    betas = [1 - now / last for now, last in zip(kept, before, strict=True)]
    variances = [beta * (1 - last) / (1 - now) for beta, now, last in zip(betas, kept, before, strict=True)]
    # The posterior of the last step has no variance, so the one before stands in.
    variances[0] = variances[1]
    return DiffusionTables(
        timesteps=tuple(chosen),
        alphas_cumprod=tuple(kept),
        betas=tuple(betas),
        log_variances=tuple(map(math.log, variances)),
        mean_of_clean=tuple(b * p**0.5 / (1 - k) for b, p, k in zip(betas, before, kept, strict=True)),
        mean_of_noisy=tuple((1 - p) * (1 - b) ** 0.5 / (1 - k) for b, p, k in zip(betas, before, kept, strict=True)),
    )
