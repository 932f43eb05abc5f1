"""The begin and the end of a step in plain loops, by the definition and in Triton."""

import pytest
import torch

from arimage.kernels.cursor import advance, close_step, open_step


SIZE = 15  # tokens of an image


def images(block):
    """Images at the begin, in the middle, one block before the end, and finished."""
    cursor = torch.tensor([block, 4 * block, SIZE - block, SIZE, SIZE])
    tokens = torch.randint(100, (5, SIZE + block), generator=torch.Generator().manual_seed(0))
    steps, accepted = torch.tensor([1, 3, 5, 7, SIZE]), torch.zeros(SIZE + 1, 5, dtype=torch.long)
    return tokens, cursor, cursor == SIZE, steps, accepted


@pytest.mark.parametrize("block", [1, 3])
def test_a_step_feeds_the_tokens_before_the_cursor(on_triton, block):
    tokens, cursor, finished, *_ = images(block)
    for positions, previous, fed in (
        open_step(cursor, finished, tokens, block),
        on_triton("cursor", "open_step", cursor, finished, tokens, block),
    ):
        for image in range(5):
            before = list(range(int(cursor[image]) - block, int(cursor[image])))
            assert positions[image].tolist() == [place + block for place in before]
            assert previous[image].tolist() == tokens[image, before].tolist()
            assert fed[image].tolist() == ([-1] * block if finished[image] else before)


def advanced(end, cursor, finished, steps, accepted):
    """What `advance` writes."""
    for image in range(5):
        accepted[steps[image], image] = end[image] - cursor[image]
        steps[image] += not finished[image]
    return end, end == SIZE, steps, accepted


@pytest.mark.parametrize("block", [1, 3])
def test_a_step_ends_with_its_tokens_one_block_further(on_triton, block):
    tokens, *state = images(block)
    positions = state[0][:, None] + torch.arange(block)
    sampled = 100 + torch.arange(5 * block).view(5, block)
    arguments = positions, sampled, tokens, *state, SIZE
    written = on_triton("cursor", "close_step", *arguments, written=range(2, 7))
    close_step(*arguments)
    assert tokens.gather(1, positions).equal(sampled) and (tokens >= 100).sum() == 5 * block
    expected = images(block)
    end = torch.tensor([2 * block, 5 * block, SIZE, SIZE, SIZE])
    for actual, ours, value in zip(written, (tokens, *state), (tokens, *advanced(end, *expected[1:])), strict=True):
        assert torch.equal(actual, value) and torch.equal(ours, value)


def test_a_step_counts_what_it_decided(on_triton):
    _, *state = images(1)
    end = torch.tensor([4, SIZE, SIZE, SIZE, SIZE])
    written = on_triton("cursor", "advance", end, *state, SIZE, written=range(1, 5))
    advance(end, *state, SIZE)
    for actual, ours, value in zip(written, state, advanced(end, *images(1)[1:]), strict=True):
        assert torch.equal(actual, value) and torch.equal(ours, value)


@pytest.mark.parametrize("kernel", ["open_step", "close_step", "advance"])
def test_the_ends_of_a_step_compile_without_spills(compile_kernel, kernel):
    longs = {"open_step": "cursor tokens positions previous fed", "advance": "end cursor steps accepted"}
    longs["close_step"] = "positions sampled tokens cursor steps accepted"
    signature = {f"{name}_ptr": "*i64" for name in longs[kernel].split()} | {"finished_ptr": "*u8"}
    numbers = {"open_step": "tokens_stride block", "advance": "accepted_stride size"}
    numbers["close_step"] = "tokens_stride accepted_stride block size"
    signature |= dict.fromkeys(numbers[kernel].split(), "i32")
    constants = {} if kernel == "advance" else {"padded": 4}
    compile_kernel("cursor", f"{kernel}_kernel", signature, constants, num_warps=1)
