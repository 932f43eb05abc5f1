"""How tokenizers in training quantise: by codebooks that follow the encodings as moving averages."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn

from ...kernels.codebook import nearest_code
from ...tokenizers.vq_llamagen import LlamaGenVQModel
from ...tokenizers.vq_var import VARVQModel


def kmeans(
    points: torch.Tensor, count: int, generator: torch.Generator, *, spherical: bool, rounds: int = 20
) -> torch.Tensor:
    """`count` centres [count, D] close to the `points` [M, D]; unit vectors, like the points, if `spherical`."""
    if len(points) < count:
        raise ValueError(f"{len(points)} encodings cannot start {count} codes: raise kmeans_batches or batch_size")
    centres = points[torch.randperm(len(points), generator=generator)[:count]]
    for _ in range(rounds):
        nearest = nearest_code(points, centres)
        sums = torch.zeros_like(centres).index_add_(0, nearest, points)
        sizes = torch.bincount(nearest, minlength=count)
        empty = sizes == 0
        sums[empty] = points[torch.randint(len(points), (int(empty.sum()),), generator=generator)]
        centres = F.normalize(sums, dim=-1) if spherical else sums / sizes.clamp_min(1)[:, None]
    return centres


class MovingCodebook(nn.Module):
    """Codes that are moving averages of the points nearest to them (https://arxiv.org/abs/1711.00937, appendix A);
    unit vectors if `spherical`."""

    def __init__(self, codes: torch.Tensor, spherical: bool, decay: float):
        super().__init__()
        self.spherical, self.decay = spherical, decay
        self.register_buffer("counts", torch.ones(len(codes)))
        self.register_buffer("sums", codes.detach().float().clone())
        self.register_buffer("codes", self.sums.clone())

    @property
    def moved(self) -> bool:
        """Whether it has followed any points since its start."""
        return bool((self.counts != 1).any())

    def start(self, codes: torch.Tensor) -> None:
        self.codes.copy_(codes)
        self.sums.copy_(codes)
        self.counts.fill_(1)

    def update(self, points: torch.Tensor, nearest: torch.Tensor) -> None:
        """Move the codes towards the points [M, D] of a batch, whose codes are `nearest` [M]."""
        self.counts.mul_(self.decay).add_(torch.bincount(nearest, minlength=len(self.counts)), alpha=1 - self.decay)
        sums = torch.zeros_like(self.sums).index_add_(0, nearest, points)
        self.sums.mul_(self.decay).add_(sums, alpha=1 - self.decay)
        self.codes.copy_(F.normalize(self.sums, dim=-1) if self.spherical else self.sums / self.counts[:, None])

    def restart(self, points: torch.Tensor, dead_count: float, generator: torch.Generator) -> None:
        """Put the codes whose moving count is below `dead_count` on random points [M, D]."""
        dead = (self.counts < dead_count).nonzero().flatten()
        chosen = points[torch.randint(len(points), (len(dead),), generator=generator).to(points.device)]
        self.codes[dead] = self.sums[dead] = chosen
        self.counts[dead] = 1


class SphericalQuantiser(nn.Module):
    """LlamaGen's: an encoding becomes the code of the greatest cosine."""

    def __init__(self, model: LlamaGenVQModel, decay: float):
        super().__init__()
        self.codebook = MovingCodebook(F.normalize(model.codebook.weight.float(), dim=-1), True, decay)

    def start(self, latents: torch.Tensor, generator: torch.Generator) -> None:
        """Start the codebook by k-means from latents [B, C, h, w]."""
        points = latents.movedim(1, -1).flatten(0, 2).cpu()
        self.codebook.start(kmeans(points, len(self.codebook.codes), generator, spherical=True))

    def normalise(self, encoded: torch.Tensor) -> torch.Tensor:
        return F.normalize(encoded, dim=1)

    def forward(self, latents: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor, torch.LongTensor]:
        """Latents [B, C, h, w] to those that are decoded, the points [M, C] that were quantised, and their codes
        [M]."""
        points = latents.detach().movedim(1, -1)
        nearest = nearest_code(points.flatten(0, 2), self.codebook.codes)
        quantised = self.codebook.codes[nearest].view(points.shape).movedim(-1, 1)
        return [quantised], points.flatten(0, 2), nearest


class ResidualQuantiser(nn.Module):
    """VAR's: token maps from coarse to fine, each of what those before it leave of the encoding."""

    def __init__(self, model: VARVQModel, decay: float):
        super().__init__()
        # In a list so that the model is not registered twice.
        self._model = [model]
        self.codebook = MovingCodebook(model.codebook.weight, False, decay)
        # As the identity, so that the first codes mean what they were averaged from.
        for phi in model.phi:
            nn.init.dirac_(phi.weight)
            nn.init.zeros_(phi.bias)

    def start(self, latents: torch.Tensor, generator: torch.Generator) -> None:
        """Start the codebook by k-means from latents [B, C, P, P]: a share of the codes for the residuals of each
        scale, in proportion to the scale's side, after the quantisation of those before it."""
        scales, size = self._model[0].config.scales, len(self.codebook.codes)
        ends = [round(size * sum(scales[:k]) / sum(scales)) for k in range(len(scales) + 1)]
        codes, accumulated = latents.new_zeros(0, latents.shape[1]), torch.zeros_like(latents)
        for scale, (before, end) in enumerate(pairwise(ends)):
            points = self.residual(scale, latents - accumulated)
            flat = points.flatten(0, 2).cpu()
            chosen = kmeans(flat, end - before, generator, spherical=False)
            codes = torch.cat([codes, chosen.to(codes.device)])
            vectors = codes[nearest_code(points.flatten(0, 2), codes)].view(points.shape).movedim(-1, 1)
            accumulated = self._model[0].accumulate(scale, accumulated, vectors)
        self.codebook.start(codes)

    def normalise(self, encoded: torch.Tensor) -> torch.Tensor:
        return encoded

    def residual(self, scale: int, latents: torch.Tensor) -> torch.Tensor:
        side = self._model[0].config.scales[scale]
        return F.interpolate(latents, size=(side, side), mode="area").movedim(1, -1)

    def forward(self, latents: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor, torch.LongTensor]:
        """Latents [B, C, P, P] to those accumulated after each scale, the points [M, C] of all scales and their codes
        [M]."""
        accumulated, partial, points, codes = torch.zeros_like(latents), [], [], []
        for scale in range(len(self._model[0].config.scales)):
            residual = self.residual(scale, (latents - accumulated).detach())
            points.append(residual.flatten(0, 2))
            codes.append(nearest_code(points[-1], self.codebook.codes))
            vectors = self.codebook.codes[codes[-1]].view(residual.shape).movedim(-1, 1)
            accumulated = self._model[0].accumulate(scale, accumulated, vectors)
            partial.append(accumulated)
        return partial, torch.cat(points), torch.cat(codes)
