"""What the caches share: one test per operation, on every cache."""

import pytest
import torch

from arimage.decoding import Layout
from arimage.models.cache import GrowingCache, SlotCache
from arimage.models.cache_transformers import LanguageCache


LAYERS, IMAGES, BRANCHES, HEADS, WIDTH, PREFIX = 2, 3, 2, 2, 4, 5
LAYOUT = Layout((2, 3))
SLOTS = LAYOUT.num_tokens
SETTINGS = {
    "prefix_length": PREFIX, "slots": SLOTS, "filled": 0, "branches": BRANCHES, "dtype": torch.float32,
    "device": torch.device("cpu"),
}  # fmt: skip


def states(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, LAYERS, IMAGES * BRANCHES, HEADS, count, WIDTH, generator=generator)


def write(cache, given):
    """Let every layer write; return what the queries attend to, [2, layers, rows, heads, length, head_dim]."""
    attended = [cache.write(layer, given[0, layer], given[1, layer]) for layer in range(LAYERS)]
    return torch.stack([torch.stack(layers) for layers in zip(*attended, strict=True)])


def filled(kind):
    """A cache with a prompt and all image tokens in it, what was written, and what the last forward pass attends
    to."""
    given = states(PREFIX + SLOTS)
    prompt, image = given.split([PREFIX, SLOTS], dim=4)
    slots = torch.arange(SLOTS).expand(IMAGES, -1)
    if kind in ("growing", "slots"):
        cache = (GrowingCache if kind == "growing" else SlotCache)(LAYERS, IMAGES * BRANCHES, HEADS, WIDTH, **SETTINGS)
    if kind == "growing":
        cache.write_next_at(0, PREFIX)
        assert write(cache, prompt).shape[4] == cache.attended == PREFIX
        cache.write_next_at(PREFIX, SLOTS)
        return cache, given, write(cache, image)
    if kind == "slots":
        prompt_places = torch.arange(cache.prefix_end - PREFIX, cache.prefix_end)
        cache.write_next_at(prompt_places.expand(IMAGES * BRANCHES, -1), cache.prefix_end)
    else:
        cache = LanguageCache(
            IMAGES * BRANCHES,
            PREFIX,
            places=PREFIX + 3,
            batch_size=IMAGES,
            layout=LAYOUT,
            scratch=0,
            branches=BRANCHES,
            has_row_ends=True,
            compact=True,
            together=1 if kind == "language" else LAYERS,
            device=torch.device("cpu"),
        )
    write(cache, prompt)
    cache.allocate()
    cache.write_next_at(cache.index(slots))
    return cache, given, write(cache, image)


def image_slots(cache):
    """Keys and values of the image slots, [2, layers, rows, heads, slots, head_dim]."""
    both = torch.stack([torch.stack(list(layers)) for layers in (cache.keys, cache.values)])
    return both[:, :, :, :, cache.index_of[:SLOTS]]


KINDS = pytest.mark.parametrize("kind", ["slots", "growing", "language", "language of one stack"])


@KINDS
def test_queries_attend_to_all_that_was_written(kind):
    cache, given, attended = filled(kind)
    assert attended.shape[4] == cache.attended
    places = torch.cat([torch.arange(cache.prefix_end - PREFIX, cache.prefix_end), cache.index_of[:SLOTS]])
    assert torch.equal(attended[..., places, :], given)
    attended[..., places, :] = 0
    assert not attended.any()


@KINDS
def test_a_move_copies_slots_of_each_image_and_nothing_to_nowhere(kind):
    cache, given, _ = filled(kind)
    expected = image_slots(cache).unflatten(2, (BRANCHES, IMAGES))
    expected[:, :, :, 0, :, 1] = expected[:, :, :, 0, :, 4]
    expected[:, :, :, 2, :, 0] = expected[:, :, :, 2, :, 3]
    cache.move(torch.tensor([[4, 5], [2, 3], [5, 3]]), torch.tensor([[1, -1], [-1, -1], [-1, 0]]))
    assert torch.equal(image_slots(cache), expected.flatten(2, 3))


@pytest.mark.parametrize("kind", ["slots", "language", "language of one stack"])
def test_likeness_adds_the_cosines_of_the_keys_in_some_slots(kind):
    cache, given, _ = filled(kind)
    slots = torch.tensor([[4, 5, 0], [2, 3, 1], [5, 3, 4]])
    likeness = cache.likeness(slots)
    keys = given[0, ..., PREFIX:, :].unflatten(1, (BRANCHES, IMAGES))
    for image in range(IMAGES):
        # [layers, branches, heads, M, head_dim]
        own = torch.nn.functional.normalize(keys[:, :, image][..., slots[image], :], dim=-1)
        torch.testing.assert_close(likeness[image], (own @ own.mT).sum((0, 1, 2, 4)))


def test_the_likeness_of_empty_slots_is_zero_in_float16():
    cache = SlotCache(LAYERS, IMAGES, HEADS, WIDTH, **SETTINGS | {"branches": 1, "dtype": torch.float16})
    assert torch.equal(cache.likeness(torch.arange(3).expand(IMAGES, -1)), torch.zeros(IMAGES, 3))


@KINDS
def test_expanded_images_are_copies(kind):
    cache, _, _ = filled(kind)
    images = torch.tensor([0, 0, 2, 1, 1])
    expected = image_slots(cache).unflatten(2, (BRANCHES, IMAGES))[:, :, :, images].flatten(2, 3)
    cache.expand(images)
    assert torch.equal(image_slots(cache), expected)
    # Copies are independent of each other.
    cache.move(torch.tensor([[4]] * 5), torch.tensor([[-1], [1], [-1], [-1], [-1]]))
    before, after = (slots.unflatten(2, (BRANCHES, -1)) for slots in (expected, image_slots(cache)))
    assert [torch.equal(before[:, :, :, i], after[:, :, :, i]) for i in range(5)] == [True, False, True, True, True]


@KINDS
def test_images_that_are_put_leave_nothing_of_those_before(kind):
    cache, _, _ = filled(kind)
    other, _, _ = filled(kind)
    for layer in (*cache.keys, *cache.values):
        layer.view(BRANCHES, IMAGES, *layer.shape[1:])[:, 1:] = torch.nan
    other.expand(torch.tensor([2, 0]))
    cache.put(torch.tensor([1, 2]), other)
    before, after = image_slots(other), image_slots(cache)
    assert torch.equal(after.unflatten(2, (BRANCHES, IMAGES))[:, :, :, 1:].flatten(2, 3), before)
    assert not any(layer.isnan().any() for layer in (*cache.keys, *cache.values))
