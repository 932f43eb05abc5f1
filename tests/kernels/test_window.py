"""A window of drafts in plain loops, by the definition and in Triton."""

import pytest
import torch

from arimage.kernels.noise import uniforms
from arimage.kernels.window import reference


SIZE, VOCABULARY = 24, 5003
# An image at the begin, in the middle, where a window crosses the end, and a finished one.
CURSORS = torch.tensor([4, 12, 20, SIZE])


def slots(window, capacity=None):
    """Positions [B, capacity] of the drafts after the cursors, in any order, and tokens."""
    generator = torch.Generator().manual_seed(window)
    order = torch.stack([torch.randperm(window, generator=generator) for _ in CURSORS])
    positions = torch.zeros(len(CURSORS), capacity or window, dtype=torch.long)
    positions[:, :window] = CURSORS[:, None] + order
    return positions, torch.randint(VOCABULARY, (len(CURSORS), SIZE + 2 * window), generator=generator)


@pytest.mark.parametrize(("window", "block", "capacity"), [(1, 1, 1), (5, 1, 7), (8, 4, 8)])
def test_a_step_feeds_the_tokens_before_its_drafts(on_triton, window, block, capacity):
    positions, tokens = slots(window, capacity)
    for opened in (
        reference.open_window(positions, tokens, window, block, SIZE),
        on_triton("window", "open_window", positions, tokens, window, block, SIZE),
    ):
        for image in range(len(CURSORS)):
            at, ended, drafts, previous, fed = (values[image].tolist() for values in opened)
            assert at == positions[image, :window].tolist()
            assert ended == [place >= SIZE for place in at]
            assert drafts == [int(tokens[image, place]) for place in at]
            assert previous == [int(tokens[image, place - block]) for place in at]
            assert fed == [-1 if place >= SIZE else place - block for place in at]


@pytest.mark.parametrize("redrafts", [False, True])
@pytest.mark.parametrize(("window", "block"), [(1, 1), (5, 1), (8, 4), (40, 1)])
def test_a_step_decides_up_to_the_first_rejected_draft(on_triton, window, block, redrafts):
    generator = torch.Generator().manual_seed(1)
    for share in (0.0, 0.5, 1.0):
        positions, tokens = slots(window)
        kept = torch.rand(positions.shape, generator=generator) < share
        verified, others = torch.randint(VOCABULARY, (2, *positions.shape), generator=generator)
        redrafted = others if redrafts else None
        steps, accepted = torch.tensor([1, 3, 5, 6]), torch.zeros(SIZE + 1, len(CURSORS), dtype=torch.long)
        written = tokens.clone(), CURSORS.clone(), CURSORS == SIZE, steps, accepted
        arguments = positions, kept, verified, redrafted, *written, block, SIZE
        triton = on_triton("window", "close_window", *arguments, written=range(4, 9))
        end = reference.close_window(*arguments)
        for image, cursor in enumerate(CURSORS.tolist()):
            last = cursor
            while last < cursor + window - 1 and kept[image, positions[image] == last]:
                last += 1
            expected = min(last // block * block + block, SIZE)
            assert end[image] == expected
            for slot, place in enumerate(positions[image].tolist()):
                token = verified if place < expected or not redrafts else others
                assert written[0][image, place] == token[image, slot]
            assert accepted[[1, 3, 5, 6][image], image] == expected - cursor
            assert steps[image] == [2, 4, 6, 6][image]
        assert torch.equal(written[1], end) and torch.equal(written[2], end == SIZE)
        for actual, ours in zip(triton, (end, *written), strict=True):
            assert torch.equal(actual, ours)


def distributions(*shape, seed):
    weights = torch.rand(shape, generator=torch.Generator().manual_seed(seed))
    return weights / weights.sum(-1, keepdim=True)


def sliding(window, capacity, forced, numbers, keeps):
    positions, tokens = slots(window, capacity)
    allowed = (torch.arange(VOCABULARY) % 3 > 0).double().expand(len(CURSORS), -1)
    start, sums = (allowed / allowed.sum(-1, keepdim=True)).float(), allowed.cumsum(-1) / allowed.sum(-1, keepdim=True)
    q = distributions(len(CURSORS), capacity, VOCABULARY, seed=1)
    p = None if keeps else distributions(len(CURSORS), window, VOCABULARY, seed=2)
    uniform = torch.rand(len(CURSORS), window, 3, generator=torch.Generator().manual_seed(3))[..., 2]
    known = torch.full((len(CURSORS), SIZE), -1)
    known[:, 7::9] = 17
    end, steps = (CURSORS + 1 + window // 2).clamp(max=SIZE), torch.tensor([1, 3, 5, 6])
    places = positions, torch.ones_like(positions, dtype=torch.bool), tokens, q, p, end, start, sums.float()
    return *places, known if forced else None, uniform if numbers else None, end * 77, steps, 3, window, SIZE


@pytest.mark.parametrize(
    ("window", "capacity", "forced", "numbers", "keeps"),
    [(1, 1, False, True, False), (5, 7, False, True, False), (8, 8, True, True, False), (5, 5, True, False, True)],
)
def test_slots_of_decided_drafts_move_on_and_are_drafted(on_triton, window, capacity, forced, numbers, keeps):
    arguments = sliding(window, capacity, forced, numbers, keeps)
    before = [each.clone() if isinstance(each, torch.Tensor) else each for each in arguments]
    triton = on_triton("window", "slide_window", *arguments, written=range(4))
    reference.slide_window(*arguments)
    positions, fresh, tokens, q = arguments[:4]
    p, end, start, sums, known, uniform, seeds, steps = before[4:12]
    for image in range(len(CURSORS)):
        for slot in range(window):
            place = int(before[0][image, slot])
            entered = place < end[image]
            assert fresh[image, slot] == entered and positions[image, slot] == place + window * entered
            if not entered:
                kept = before[3] if keeps else p
                assert (
                    torch.equal(q[image, slot], kept[image, slot]) and tokens[image, place] == before[2][image, place]
                )
                continue
            place += window
            number = (
                uniform[image, slot]
                if numbers
                else uniforms(seeds[image, None], torch.tensor([[place]]), steps[image, None], 3, 1)
            )
            token, weights = int((sums[image] <= number.squeeze()).sum()), start[image]
            if forced and known[image, min(place, SIZE - 1)] >= 0:
                token = int(known[image, min(place, SIZE - 1)])
                weights = torch.nn.functional.one_hot(torch.tensor(token), VOCABULARY).float()
            assert tokens[image, place] == token and torch.equal(q[image, slot], weights)
    assert torch.equal(q[:, window:], before[3][:, window:]) and fresh[:, window:].all()
    for actual, ours in zip(triton, (positions, fresh, tokens, q), strict=True):
        assert torch.equal(actual, ours)


@pytest.mark.parametrize("kernel", ["open_window", "close_window", "slide_window"])
def test_windows_compile_without_spills(compile_kernel, kernel):
    longs = {"open_window": "positions tokens at drafts previous fed"}
    longs["close_window"] = "positions verified redrafted tokens cursor steps accepted end"
    longs["slide_window"] = "positions tokens end forced seeds steps"
    others = {"open_window": {"ended": "*u8"}, "close_window": {"kept": "*u8", "finished": "*u8"}}
    others["slide_window"] = {"fresh": "*u8"} | dict.fromkeys(("q", "p", "start", "start_sums", "uniform"), "*fp32")
    numbers = {"open_window": "positions_stride tokens_stride window block size"}
    numbers["close_window"] = "tokens_stride accepted_stride window block size"
    numbers["slide_window"] = "tokens_stride slots window vocab_size size"
    signature = {f"{name}_ptr": "*i64" for name in longs[kernel].split()}
    signature |= {f"{name}_ptr": kind for name, kind in others[kernel].items()}
    signature |= dict.fromkeys(numbers[kernel].split(), "i32")
    if kernel == "slide_window":
        signature |= {"uniform_strides": ("i32", "i32"), "key": "i64"}
        constants, warps = {"bits": 15, "block": 4096}, 8
    else:
        constants, warps = {"padded": 32}, 1
    compile_kernel("window", f"{kernel}_kernel", signature, constants, num_warps=warps)
