"""Windows of couplings: the whole window at once equals every place by itself, in Triton too."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from arimage.kernels.coupling import couple, couple_at, couple_window, race_at, sample, sample_at
from arimage.kernels.noise import exponentials, uniforms


def random_distributions(*shape, seed=0, zeros=0.0):
    generator = torch.Generator().manual_seed(seed)
    weights = torch.empty(shape).exponential_(generator=generator) ** 2
    weights = weights.masked_fill(torch.rand(shape, generator=generator) < zeros, 0)
    weights[..., 0] += (weights.sum(-1) == 0).float()
    return weights / weights.sum(-1, keepdim=True)


def window(batch, length, size, seed=0, zeros=0.0):
    """p, q, x, noise and live of a window whose drafts are often kept."""
    generator = torch.Generator().manual_seed(seed + 2)
    p = random_distributions(batch, length, size, seed=seed, zeros=zeros)
    q = 0.8 * p + 0.2 * random_distributions(batch, length, size, seed=seed + 1, zeros=zeros)
    x = q.flatten(0, 1).multinomial(1, generator=generator).view(batch, length)
    noise = torch.rand(batch, length, 2, generator=generator)
    return p, q, x, noise, torch.rand(batch, length, generator=generator) < 0.9


def test_a_window_is_its_places_and_counts_up_to_the_first_that_is_rejected_or_not_live():
    p, q, x, noise, live = window(80, 4, 9)
    y, leading = couple_window(p, q, x, noise, live)
    for b in range(80):
        count = 0
        for j in range(4):
            alone = couple(p[b, j], q[b, j], x[b, j], noise[b, j])
            assert alone[0] == y[b, j]
            if count == j and alone[1] and live[b, j]:
                count += 1
        assert leading[b] == count
    assert set(leading.tolist()) == set(range(5))


LAST = 1 - 2.0**-24  # the largest uniform number there is
SIZES = [(1, 1, 2), (3, 2, 16), (1, 4, 1000), (1, 2, 5003), (1, 2, 65536)]


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor that is made."""

    nbytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.nbytes = max(self.nbytes, out.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("size", [1, 2, 3, 100, 128, 129, 1000])
def test_small_vocabularies_are_not_padded(size):
    weights = random_distributions(1, 512, size)
    uniform = torch.rand(1, 512, generator=torch.Generator().manual_seed(1))
    with Largest() as largest:
        tokens = sample(weights, uniform)
    assert largest.nbytes <= 8 * max(weights.nbytes, uniform.nbytes)
    bounds = weights.double().cumsum(-1)
    assert (bounds.gather(-1, tokens[..., None])[..., 0] >= uniform - 1e-5).all()
    assert (
        bounds.gather(-1, tokens[..., None])[..., 0] - weights.gather(-1, tokens[..., None])[..., 0] <= uniform + 1e-5
    ).all()


@pytest.mark.parametrize("size", [2, 100])
def test_few_tokens_are_sampled_as_among_many_that_are_impossible(size):
    weights = random_distributions(1, 512, size, zeros=0.3)
    uniform = torch.rand(1, 512, generator=torch.Generator().manual_seed(1)).masked_fill_(weights[..., 0] > 0.9, 0)
    padded = torch.nn.functional.pad(weights, (0, 300 - size))
    assert torch.equal(sample(weights, uniform), sample(padded, uniform))
    if size == 2:
        # At the very end of the first token.
        assert torch.equal(sample(weights, weights[..., 0]), sample(padded, weights[..., 0]))


def assert_sampled(weights, uniform, tokens):
    """Each of `tokens` is where its uniform falls among the sums of `weights`, up to the rounding of the sums."""
    weights = weights.double()
    ends = weights.cumsum(-1)
    total = ends[..., -1]
    mine, end = (t.gather(-1, tokens[..., None])[..., 0] for t in (weights, ends))
    assert (mine > 0).all()
    assert ((end - mine) / total - uniform < 2e-6).all() and (uniform - end / total < 2e-6).all()


def residual(p, q):
    residual = (p - q).clamp(min=0)
    return torch.where(residual.sum(-1, keepdim=True) > 0, residual, p)


@pytest.mark.every(3)
@pytest.mark.parametrize("shape", SIZES, ids=str)
@pytest.mark.parametrize("zeros", [0.0, 0.9])
def test_triton_couples_as_the_definition_does(on_triton, shape, zeros):
    p, q, x, noise, live = arguments = window(*shape, zeros=zeros)
    noise[:, ::2, 0] = LAST  # to see rejections
    y, kept = on_triton("coupling", "couple", *arguments[:4])
    expected = couple(*arguments[:4])
    assert torch.equal(kept, expected[1]) and torch.equal(y[kept], x[kept])
    for tokens in (y, expected[0]):
        assert_sampled(residual(p, q)[~kept], noise[..., 1][~kept], tokens[~kept])
    in_window, leading = on_triton("coupling", "couple_window", *arguments)
    assert torch.equal(in_window, y) and torch.equal(leading, couple_window(*arguments)[1])


def test_without_rounding_triton_samples_the_very_same_tokens(on_triton):
    # Sums of multiples of 2 ** -12, times 8 bits, are exact in float32 in any order.
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.bincount(torch.randint(6000, (4096,), generator=generator), minlength=6000) / 4096 for _ in "pq")
    noise = torch.rand(2, 8, 2, generator=generator).mul(256).floor() / 256
    x = q.multinomial(16, replacement=True, generator=generator).view(2, 8)
    arguments = p.expand(2, 8, -1), q.expand(2, 8, -1), x, noise, torch.ones(2, 8, dtype=torch.bool)
    expected = couple_window(*arguments)
    assert 0 < couple(*arguments[:4])[1].sum() < 16
    for actual, wanted in zip(on_triton("coupling", "couple_window", *arguments), expected, strict=True):
        assert torch.equal(actual, wanted)
    (sampled,) = on_triton("coupling", "sample", arguments[0], noise[..., 1])
    assert torch.equal(sampled, sample(arguments[0], noise[..., 1]))


@pytest.mark.parametrize(("size", "scale"), [(1, 1.0), (1000, 1e-37), (5000, 1.0)])
def test_triton_never_samples_a_token_without_weight(on_triton, size, scale):
    weights = torch.cat(
        [random_distributions(1, size, seed=seed, zeros=zeros) for seed, zeros in enumerate((0.5, 0.9, 0.999))]
    )
    weights[0, : size // 3] = 0
    weights[1, 2 * size // 3 :] = 0
    weights[weights.sum(-1) == 0, size // 2] = 1.0
    weights = (scale * weights).repeat_interleave(4, 0)
    uniform = torch.tensor([0.0, 2.0**-24, 0.5, LAST]).repeat(3)
    (tokens,) = on_triton("coupling", "sample", weights, uniform)
    assert_sampled(weights, uniform, tokens)
    assert_sampled(weights, uniform, sample(weights, uniform))


def test_triton_samples_from_the_target_where_nothing_remains_of_it(on_triton):
    # Code 2 was never to be drafted, so it is rejected; p - q is nowhere positive.
    p = torch.tensor([0.25, 0.75, 0.0]).expand(8, -1)
    noise = torch.stack([torch.full((8,), 0.5), (torch.arange(8) + 0.5) / 8], dim=-1)
    y, kept = on_triton("coupling", "couple", p, p, torch.full((8,), 2), noise)
    assert not kept.any() and y.tolist() == [0] * 2 + [1] * 6


def test_the_distribution_of_a_place_that_is_not_live_may_be_nan(on_triton):
    p, q, x, noise, live = window(1, 3, 40)
    p[:, 1], live[:, 1] = torch.nan, False
    for y, leading in (
        couple_window(p, q, x, noise, live),
        on_triton("coupling", "couple_window", p, q, x, noise, live),
    ):
        assert ((y >= 0) & (y < 40)).all() and (leading <= 1).all()


@pytest.mark.parametrize("steps", [None, torch.tensor([7, 0, 2**40])], ids=["without steps", "with steps"])
def test_noise_is_that_of_the_place(on_triton, steps):
    p, q, x, _, _ = window(3, 4, 1000)
    seeds, positions = torch.tensor([0, -5, 2**62]), torch.arange(12).view(3, 4) * 2**31
    place = seeds, positions, steps, 4
    noise = uniforms(*place, 3)
    y, kept = couple(p, q, x, noise[..., :2])
    assert 0 < kept.sum() < 12
    for ours in (couple_at(p, q, x, *place), on_triton("coupling", "couple_at", p, q, x, *place)):
        assert torch.equal(ours[0][kept], y[kept]) and torch.equal(ours[1], kept) and torch.equal(ours[2], noise)
        assert_sampled(residual(p, q)[~kept], noise[..., 1][~kept], ours[0][~kept])
    # Rows of an image, as in row-parallel decodings.
    by_row = [values.unflatten(1, (2, 2)) for values in (p, q, x)]
    (in_rows, *_) = on_triton("coupling", "couple_at", *by_row, seeds, positions.view(3, 2, 2), steps, 4)
    assert torch.equal(in_rows.flatten(1), on_triton("coupling", "couple_at", p, q, x, *place)[0])
    for tokens in (sample_at(p, *place), on_triton("coupling", "sample_at", p, *place)[0]):
        assert_sampled(p, noise[..., 0], tokens)


@pytest.mark.parametrize("size", [1, 9, 5003])
def test_a_race_is_won_by_the_largest_weight_over_noise(on_triton, size):
    weights = random_distributions(3, 4, size, zeros=0.5)
    place = torch.tensor([0, -5, 2**62]), torch.arange(12).view(3, 4), torch.tensor([7, 0, 3]), 4
    ratios = weights / exponentials(*place, size)
    (tokens,) = on_triton("coupling", "race_at", weights, *place)
    assert torch.equal(race_at(weights, *place), ratios.argmax(-1))
    # Noise is the same up to rounding.
    torch.testing.assert_close(ratios.gather(-1, tokens[..., None])[..., 0], ratios.amax(-1), rtol=1e-5, atol=0)
    weights[0, 0] = torch.nan
    (tokens,) = on_triton("coupling", "race_at", weights, *place)
    assert (tokens >= 0).all() and (tokens < size).all()


def test_arguments_need_not_be_contiguous(on_triton):
    arguments = window(2, 2, 50)
    turned = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in arguments]
    for a, b in zip(on_triton("coupling", "couple_window", *turned), couple_window(*arguments), strict=True):
        assert torch.equal(a, b)


@pytest.mark.every(2)
@pytest.mark.parametrize(("size", "counts"), [(9, False), (65536, True)])
def test_couple_compiles_without_spills(compile_kernel, size, counts):
    floats, longs = ["p_ptr", "q_ptr", "noise_ptr"], ["x_ptr", "y_ptr"]
    signature = dict.fromkeys(floats, "*fp32") | dict.fromkeys(longs, "*i64") | {"kept_ptr": "*u8"}
    signature |= dict.fromkeys(["window", "vocab_size", "noise_stride"], "i32")
    if counts:
        signature |= {"live_ptr": "*u8", "leading_ptr": "*i64"}
    block = min(4096, 1 << (size - 1).bit_length())
    constants = {"counts": counts, "block": block, "blocks": max(1, size // block)}
    constants |= {} if counts else {"live_ptr": None, "leading_ptr": None}
    compile_kernel("coupling", "couple_kernel", signature, constants, num_warps=8)


@pytest.mark.parametrize("kernel", ["sample_at", "race_at", "couple_at"])
def test_with_noise_of_their_own_they_compile_without_spills(compile_kernel, kernel):
    signature = dict.fromkeys(["seeds_ptr", "positions_ptr", "steps_ptr"], "*i64")
    signature |= {"key": "i64", "queries": "i32", "vocab_size": "i32"}
    if kernel != "couple_at":
        signature |= {"weights_ptr": "*fp32", "out_ptr": "*i64"}
    else:
        signature |= dict.fromkeys(["p_ptr", "q_ptr", "noise_ptr"], "*fp32") | {"x_ptr": "*i64", "y_ptr": "*i64"}
        signature |= {"kept_ptr": "*u8"}
    constants = {"block": 1024} if kernel == "race_at" else {"block": 4096, "blocks": 16}
    compile_kernel("coupling", f"{kernel}_kernel", signature, constants, num_warps=8)


def test_sample_compiles_without_spills(compile_kernel):
    signature = {"weights_ptr": "*fp32", "uniform_ptr": "*fp32", "out_ptr": "*i64", "vocab_size": "i32"}
    signature |= {"uniform_stride": "i32"}
    compile_kernel("coupling", "sample_kernel", signature, {"block": 4096, "blocks": 16}, num_warps=8)
