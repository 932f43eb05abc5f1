"""What tests whether a decoding of continuous tokens is exact: models whose head is the exact denoiser of a known
distribution, and tests of whether samples follow one."""

import copy

import torch

from arimage.decoding import Layout
from arimage.decoding.contract.cache import Cache
from arimage.models.denoising_head import diffusion_tables


class VectorCache(Cache):
    """The tokens that were fed, by slot [B, N + 1, D], and which slots were written; the last takes what is to be
    thrown away."""

    def __init__(self, batch_size, slots, dim):
        self.tokens, self.written = torch.zeros(batch_size, slots + 1, dim), torch.zeros(batch_size, slots + 1).bool()
        self.attended_slots = slots

    def expand(self, images):
        self.tokens, self.written = self.tokens[images], self.written[images]

    def put(self, images, other):
        self.tokens[images], self.written[images] = other.tokens, other.written


class MixtureModel:
    """A `CausalLatentModel` of N tokens [D]: each is SLOPE times the sum of half of the token before, a quarter of the
    one before that, and so on, plus one of several offsets, plus normal noise. Its head is the exact denoiser of such
    a mixture. It refuses to read a slot that was never written.

    Args:
        offsets: [K, D], those of the mixture; one of them makes all tokens together normal.
        variance: of the noise.
        branches: 2 adds conditions of the head without the prompt, which give another mean.
        drafter: a model of the same sizes.
    """

    kind, noisy = "causal_latents", True

    SHIFT = 0.4
    device = torch.device("cpu")

    def __init__(self, num_tokens=4, slope=0.9, offsets=((0.7,), (-0.8,)), variance=0.2, branches=1, drafter=None):
        self.num_tokens, self.slope, self.variance = num_tokens, slope, variance
        self.modes = torch.tensor(offsets)
        self.dim, self.branches, self.drafter = self.modes.shape[1], branches, drafter
        self.layout, self.network, self.forward_passes = Layout((1, num_tokens)), self, 0

    def prefill(self, batch_size, scratch=0):
        self.forward_passes += 1
        center = torch.zeros(self.branches, batch_size, self.dim)
        center[1:] += self.SHIFT
        return VectorCache(batch_size, self.num_tokens, self.dim), center

    def forward(self, tokens, positions, cache):
        self.forward_passes += 1
        rows, live = torch.arange(len(tokens))[:, None], positions >= 0
        assert (positions < self.num_tokens).all()
        slots = torch.where(live, positions, self.num_tokens)
        cache.tokens[rows, slots], cache.written[rows, slots] = tokens, True
        distance = positions[..., None] - torch.arange(self.num_tokens)
        unseen = ~cache.written[:, None, : self.num_tokens] & (distance >= 0) & live[..., None]
        assert not unseen.any(), "a slot is read that was never written"
        seen = cache.tokens[:, None, : self.num_tokens].masked_fill((distance < 0)[..., None], 0)
        center = self.slope * (seen * 0.5 ** distance.clamp(min=0)[..., None]).sum(2)
        center = center.masked_fill(~live[..., None], torch.nan)
        return torch.stack([center, center + self.SHIFT][: self.branches])

    def denoise(self, step, tokens, conditions, guidance, num_diffusion_steps):
        """See `LatentModel.denoise`; one standard deviation for all."""
        steps = torch.full(tokens.shape[:-1], step)
        tables = diffusion_tables(num_diffusion_steps)
        return self._means(steps, tokens, conditions, guidance, tables), torch.tensor(tables.middle_std(step))

    def denoise_paths(self, paths, conditions, guidance, num_diffusion_steps):
        steps = torch.arange(paths.shape[2]).expand(paths.shape[:-1])
        tables = diffusion_tables(num_diffusion_steps)
        return self._means(steps, paths, conditions[:, :, :, None], guidance[:, :, None], tables)

    def _means(self, steps, tokens, centers, guidance, tables):
        kept = torch.tensor(tables.alphas_cumprod)[steps][..., None]
        spread = kept * self.variance + 1 - kept
        clean = []
        for center in centers:
            means = center[..., None, :] + self.modes
            off = tokens[..., None, :] - kept.sqrt()[..., None] * means
            weights = (-off.square().sum(-1) / (2 * spread)).softmax(-1)
            clean.append(
                (weights[..., None] * (means + (kept.sqrt() * self.variance / spread)[..., None] * off)).sum(-2)
            )
        clean = clean[0] if self.branches == 1 else clean[1] + guidance * (clean[0] - clean[1])
        of_clean, of_noisy = (
            torch.tensor(values)[steps][..., None] for values in (tables.mean_of_clean, tables.mean_of_noisy)
        )
        return of_clean * clean + of_noisy * tokens

    def take(self, images):
        return copy.copy(self)

    def put(self, images, other):
        return False


def normal_joint(model, sampling):
    """Mean [N D] and covariance [N D, N D] in double precision of all tokens [D] of a `MixtureModel` with one offset,
    whose numbers are independent of each other."""
    numbers = [_normal_joint(model, sampling, float(offset)) for offset in model.modes[0]]
    covariances = torch.stack([covariance for _, covariance in numbers], dim=-1)
    return torch.stack([mean for mean, _ in numbers], dim=1).flatten(), (
        torch.diag_embed(covariances).transpose(1, 2).flatten(2).flatten(0, 1)
    )


def _normal_joint(model, sampling, offset):
    """Mean [N] and covariance [N, N] of one number of each token: what each denoising step does to a normal token,
    followed from the first to the last."""
    tables, size = diffusion_tables(sampling.num_diffusion_steps), model.num_tokens
    # Tokens as a constant and multiples of independent normal numbers, one for each.
    joint = torch.zeros(size, 1 + size, dtype=torch.float64)
    for rank in range(size):
        scale = float(sampling.guidance_at(torch.tensor(rank / size)))
        center = model.slope * sum(0.5**back * joint[rank - 1 - back] for back in range(rank)) + joint[rank] * 0
        # Without the condition the center is larger by SHIFT, and guidance goes the other way.
        center[0] += offset + ((1 - scale) * model.SHIFT if model.branches == 2 else 0)
        of_center, variance = 0.0, 1.0
        for step in reversed(range(len(tables.betas))):
            kept = tables.alphas_cumprod[step]
            gain = kept**0.5 * model.variance / (kept * model.variance + 1 - kept)
            # The predicted clean token is (1 - gain sqrt(kept)) center + gain token, whatever the guidance.
            slope = tables.mean_of_clean[step] * gain + tables.mean_of_noisy[step]
            of_center = slope * of_center + tables.mean_of_clean[step] * (1 - gain * kept**0.5)
            variance = slope**2 * variance + sampling.temperature**2 * tables.middle_std(step) ** 2
        joint[rank] = of_center * center
        joint[rank, 1 + rank] = variance**0.5
    return joint[:, 0], joint[:, 1:] @ joint[:, 1:].T


def worst_z(samples, mean, covariance):
    """The largest deviation of means and covariances of samples [n, N] from those of a normal distribution, in
    standard errors."""
    samples, count = samples.double(), len(samples)
    errors = (samples.mean(0) - mean) / (covariance.diagonal() / count).sqrt()
    variances = covariance.diagonal()[:, None] * covariance.diagonal() + covariance.square()
    return max(errors.abs().max(), ((samples.T.cov() - covariance) / (variances / count).sqrt()).abs().max())


def energy_p_value(samples, others, permutations=199, seed=0):
    """The probability, by permutations, that samples [n, ...] and others [n, ...] of one distribution are as far apart
    as these in energy distance: uniform on 1 / (permutations + 1) .. 1 if they are of one distribution."""
    both = torch.cat([samples, others]).flatten(1)
    distances, count = torch.cdist(both, both), len(samples)
    generator, sides = torch.Generator().manual_seed(seed), torch.ones(2 * count)
    sides[count:] = -1
    shuffled = [sides[torch.randperm(2 * count, generator=generator)] for _ in range(permutations)]
    sides = torch.stack([sides, *shuffled])
    # Twice the mean between less the means within, up to a factor.
    energies = -((sides @ distances) * sides).sum(1)
    return float((energies >= energies[0]).float().mean())
