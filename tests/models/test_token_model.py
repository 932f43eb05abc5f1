"""The cache's side of the `TokenModel` contract: slots, visibility, padding and moves, on a tiny guided LlamaGen."""

import pytest
import torch
from pipelines.llamagen import tiny as tiny_llamagen

from arimage.decoding import Layout
from arimage.pipelines.llamagen.transformer_llamagen import LlamaGenTokenModel


BATCH, FED = 2, 5


@pytest.fixture
def bound():
    """A guided model, its cache after a prefill with scratch slots, and codes."""
    transformer = tiny_llamagen.class_pipeline().transformer
    grid = (transformer.config.grid_size,) * 2
    with torch.no_grad():
        model = LlamaGenTokenModel(transformer, {"class_labels": torch.tensor([1, 3])}, Layout(grid), guided=True)
        cache, _ = model.prefill(BATCH, scratch=4)
        generator = torch.Generator().manual_seed(0)
        codes = torch.randint(model.vocab_size, (BATCH, model.num_tokens), generator=generator)
        yield model, cache, codes


def chain(model, cache, codes, start, stop):
    positions = torch.arange(start, stop).expand(BATCH, -1)
    return model.forward(codes[:, start:stop], positions, cache)


def test_what_lies_in_unused_slots_does_not_matter(bound):
    model, cache, codes = bound
    expected = chain(model, model.prefill(BATCH, scratch=4)[0], codes, 0, FED)
    # Finite, since dense attention multiplies what it does not see by zero.
    for stack in cache.stacks:
        stack[:, :, :, cache.prefix_end :] = 1e4
    assert torch.equal(chain(model, cache, codes, 0, FED), expected)


def test_attention_up_to_what_is_filled_is_the_same(bound):
    model, cache, codes = bound
    expected = chain(model, cache, codes, 0, FED)
    cache, _ = model.prefill(BATCH, scratch=4)
    cache.attended_slots = FED
    limited = chain(model, cache, codes, 0, FED)
    assert cache.attended == cache.size - model.num_tokens + FED
    torch.testing.assert_close(limited, expected)


def test_writing_again_overwrites(bound):
    model, cache, codes = bound
    chain(model, cache, codes.flip(1), 0, FED + 2)
    expected = chain(model, model.prefill(BATCH, scratch=4)[0], codes, 0, FED)
    assert torch.equal(chain(model, cache, codes, 0, FED), expected)


def test_a_branch_in_scratch_slots_is_a_chain_once_it_is_moved(bound):
    model, cache, codes = bound
    other = model.prefill(BATCH, scratch=4)[0]
    chain(model, other, codes, 0, 2)
    expected_branch = chain(model, other, codes, 2, 4)
    expected_after = chain(model, other, codes, 4, 6)

    chain(model, cache, codes, 0, 2)
    slots = model.num_tokens + torch.tensor([[2, 0], [1, 3]])
    visible = torch.zeros(BATCH, 2, model.num_tokens + 4, dtype=torch.bool)
    visible[:, :, :2] = True
    for image, (first, second) in enumerate(slots.tolist()):
        visible[image, :, first] = True
        visible[image, 1, second] = True
    positions = torch.tensor([[2, 3]]).expand(BATCH, -1)
    branch = model.forward(codes[:, 2:4], positions, cache, visible=visible, slots=slots)
    assert torch.allclose(branch, expected_branch, atol=1e-5)

    cache.move(slots, positions)
    assert torch.allclose(chain(model, cache, codes, 4, 6), expected_after, atol=1e-5)
