"""A window of drafts in plain loops, by the definition and in Triton."""

import pytest
import torch

from arimage.kernels.noise import uniforms
from arimage.kernels.window import Drafting, close_window, open_window, slide_window


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
        open_window(positions, tokens, window, block, SIZE),
        on_triton("window", "open_window", positions, tokens, window, block, SIZE),
    ):
        for image in range(len(CURSORS)):
            at, ended, drafts, previous, fed = (values[image].tolist() for values in opened)
            assert at == positions[image, :window].tolist()
            assert ended == [place >= SIZE for place in at]
            assert drafts == [int(tokens[image, place]) for place in at]
            assert previous == [int(tokens[image, place - block]) for place in at]
            assert fed == [-1 if place >= SIZE else place - block for place in at]


@pytest.mark.every(2)
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
        end = close_window(*arguments)
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
    """The arguments of `slide_window`, with drafts from a distribution."""
    positions, tokens = slots(window, capacity)
    allowed = (torch.arange(VOCABULARY) % 3 > 0).float().expand(len(CURSORS), -1)
    count = allowed.sum(-1, keepdim=True)
    q = distributions(len(CURSORS), capacity, VOCABULARY, seed=1)
    p = None if keeps else distributions(len(CURSORS), window, VOCABULARY, seed=2)
    uniform = torch.rand(len(CURSORS), window, 3, generator=torch.Generator().manual_seed(3))[..., 2]
    known = torch.full((len(CURSORS), SIZE), -1)
    known[:, 7::9] = 17
    end, steps = (CURSORS + 1 + window // 2).clamp(max=SIZE), torch.tensor([1, 3, 5, 6])
    places = positions, torch.ones_like(positions, dtype=torch.bool), tokens, q, p, end
    drafting = Drafting(allowed / count, allowed.cumsum(-1) / count, known if forced else None)
    return *places, drafting, None, uniform if numbers else None, end * 77, steps, 3, window, SIZE


def slid(on_triton, arguments, drafted):
    """Slide a window, and check it where `drafted(image, slot, position)` is the draft, and its distribution or None
    if that is one-hot."""
    arguments = *arguments[:6], *arguments[6], *arguments[7:]
    positions, fresh, tokens, q, p, end, *rest = (a.clone() if isinstance(a, torch.Tensor) else a for a in arguments)
    written = positions, fresh, tokens, q
    triton = on_triton("window", "slide_window", *arguments, written=range(4))
    slide_window(*written, p, end, *rest)
    for actual, ours in zip(triton, written, strict=True):
        assert torch.equal(actual, ours)
    before, _, old_tokens, old_q = arguments[:4]
    window = rest[-2]
    for image in range(len(CURSORS)):
        for slot in range(window):
            place = int(before[image, slot])
            entered = place < end[image]
            assert fresh[image, slot] == entered and positions[image, slot] == place + window * entered
            if entered:
                token, weights = drafted(image, slot, place + window)
                weights = torch.eye(VOCABULARY)[token] if weights is None else weights
                assert tokens[image, place + window] == token and torch.equal(q[image, slot], weights)
            else:
                assert torch.equal(q[image, slot], (old_q if p is None else p)[image, slot])
                assert tokens[image, place] == old_tokens[image, place]
    assert torch.equal(q[:, window:], old_q[:, window:]) and fresh[:, window:].all()


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("window", "capacity", "forced", "numbers", "keeps"),
    [(1, 1, False, True, False), (5, 7, False, True, False), (8, 8, True, True, False), (5, 5, True, False, True)],
)
def test_slots_of_decided_drafts_move_on_and_are_drafted(on_triton, window, capacity, forced, numbers, keeps):
    arguments = sliding(window, capacity, forced, numbers, keeps)
    (start, sums, known, *_), _, uniform, seeds, steps = arguments[6:11]

    def drafted(image, slot, place):
        if forced and known[image, min(place, SIZE - 1)] >= 0:
            return 17, None
        if numbers:
            number = uniform[image, slot]
        else:
            number = uniforms(seeds[image, None], torch.tensor([[place]]), steps[image, None], 3, 1).squeeze()
        return int((sums[image] <= number).sum()), start[image]

    slid(on_triton, arguments, drafted)


@pytest.mark.every(2)
@pytest.mark.parametrize("given", [False, True])
def test_drafts_may_be_copies_of_a_neighbour(on_triton, given):
    columns, window = 3, 8
    places, rest = list(sliding(window, window, True, True, False)[:6]), sliding(window, window, True, True, False)[6:]
    # The token above, from row to row until it is not among those that are drafted.
    neighbour = (torch.arange(SIZE + 1) - columns).repeat(len(CURSORS), 1)
    neighbour[:, :columns] = neighbour[:, -1] = SIZE
    context = torch.arange(len(CURSORS) * 7).view(-1, 7) if given else None
    last, known = places[0].amax(1), rest[0].forced
    copying = rest[0]._replace(neighbour=neighbour, jumps=(window - 1) // columns, context=context)

    def drafted(image, _, place):
        if known[image, min(place, SIZE - 1)] >= 0:
            return 17, None
        rank = place - columns if place < SIZE else SIZE
        while rank != SIZE and rank > last[image]:
            rank -= columns
        if given and rank == SIZE:
            return int(context[image, place % 7]), None
        return int(places[2][image, min(rank, int(last[image]))]), None

    slid(on_triton, (*places, copying, last, *rest[2:]), drafted)


@pytest.mark.parametrize("kernel", ["open_window", "close_window", "slide_window", "slide_window of copies"])
def test_windows_compile_without_spills(compile_kernel, kernel):
    kernel, _, copies = kernel.partition(" ")
    longs = {"open_window": "positions tokens at drafts previous fed"}
    longs["close_window"] = "positions verified redrafted tokens cursor steps accepted end"
    longs["slide_window"] = "positions tokens end forced neighbour context last seeds steps"
    others = {"open_window": {"ended": "*u8"}, "close_window": {"kept": "*u8", "finished": "*u8"}}
    others["slide_window"] = {"fresh": "*u8"} | dict.fromkeys(("q", "p", "start", "start_sums", "uniform"), "*fp32")
    numbers = {"open_window": "positions_stride tokens_stride window block size"}
    numbers["close_window"] = "tokens_stride accepted_stride window block size"
    numbers["slide_window"] = "jumps tokens_stride slots window vocab_size size given"
    signature = {f"{name}_ptr": "*i64" for name in longs[kernel].split()}
    signature |= {f"{name}_ptr": kind for name, kind in others[kernel].items()}
    signature |= dict.fromkeys(numbers[kernel].split(), "i32")
    if kernel == "slide_window":
        signature |= {"uniform_strides": ("i32", "i32"), "key": "i64"}
        absent = ["uniform"] if copies else ["neighbour", "context", "last"]
        constants, warps = {"bits": 15, "block": 4096} | {f"{name}_ptr": None for name in absent}, 8
        signature = {name: kind for name, kind in signature.items() if name not in constants}
    else:
        constants, warps = {"padded": 32}, 1
    compile_kernel("window", f"{kernel}_kernel", signature, constants, num_warps=warps)
