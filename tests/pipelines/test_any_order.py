"""The pipelines of models for any order: orders, groups, editing, and what is refused."""

import any_order
import pytest
import tiny
import torch
from families import LATENT
from pipelines.arpg import tiny as tiny_arpg
from pipelines.randar import tiny as tiny_randar

from arimage import AutoPipeline
from arimage.decoding import GroupDecoding
from arimage.models.llama_blocks import rotary_table


FAMILIES = list(any_order.FAMILIES)
GRID = 4
N = GRID**2
LABELS = [3, 1, 4]


def seeded(*seeds):
    return [torch.Generator().manual_seed(seed) for seed in seeds]


@pytest.fixture(scope="module", params=FAMILIES)
def pipe(request):
    return any_order.pipeline(request.param)


def order_of_call(pipe, **arguments):
    """The order [B, N] of a call."""
    layout = pipe.prepare(class_labels=LABELS, generator=seeded(0, 1, 2), **arguments).layout
    return torch.arange(N).expand(3, -1) if layout.order is None else layout.order


def test_an_order_is_that_of_the_seed_or_of_the_tensor(pipe):
    first, again = (order_of_call(pipe, order="random") for _ in range(2))
    assert torch.equal(first, again) and len(first.unique(dim=0)) == 3
    one = torch.randperm(N, generator=torch.Generator().manual_seed(0))
    assert torch.equal(order_of_call(pipe, order=one), one.expand(3, -1))
    assert torch.equal(order_of_call(pipe, order=first), first)
    assert torch.equal(order_of_call(pipe), order_of_call(pipe, order=pipe.order))


@torch.no_grad()
def test_groups_of_randar_continue_its_sequence():
    # What is known is the sequence that was trained, class, query 0, token 0, query 1, ...; the queries of a group
    # follow it.
    pipe, sizes = tiny_randar.pipeline(), (3, 1, 5, 7)
    output = pipe(
        class_labels=LABELS,
        generator=seeded(0, 1, 2),
        top_k=1,
        order="random",
        decoding=GroupDecoding(sizes),
        **LATENT,
    )
    order, start, table = order_of_call(pipe, order="random"), 0, rotary_table(8, (GRID, GRID), 0, 10000.0, "cpu")
    tokens, rotary = output.images.flatten(1).gather(1, order), table[order]
    for size in sizes:
        end, ranks = start + size, torch.arange(start + size)
        known, asked = 2 + 2 * ranks[:start], torch.where(ranks < start, 1 + 2 * ranks, 1 + start + ranks)
        sequence = torch.cat([torch.zeros(1, dtype=torch.long), known, asked])
        logits = pipe.transformer(
            tokens[:, :start],
            at=rotary[:, :start],
            query_at=rotary[:, :end],
            mask=(sequence <= sequence[:, None]).expand(3, -1, -1),
            condition={"class_labels": torch.tensor(LABELS)},
        )
        assert torch.equal(logits[:, start:].argmax(-1), tokens[:, start:end])
        start = end


def edit_of(*boxes):
    """An image per box (first row, last row + 1), the rows of tokens that are generated again, as arguments of a
    call."""
    side = GRID * tiny.SCALE_FACTOR
    masks = torch.zeros(len(boxes), side, side)
    for mask, (first, last) in zip(masks, boxes, strict=True):
        mask[first * tiny.SCALE_FACTOR : last * tiny.SCALE_FACTOR] = 1
    image = torch.rand(len(boxes), 3, side, side, generator=torch.Generator().manual_seed(0))
    return {"image": image, "mask_image": masks, "guidance_scale": 2.0}


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("pipe", "decoding", "order"),
    [
        ("arpg", "ar", "random"),
        ("arpg with places", "sjd-coupled", "farthest"),
        ("lpd", "sjd-tree", "locality"),
        ("randar", "sjd-coupled", "random"),
    ],
    indirect=["pipe"],
)
def test_images_that_keep_more_or_less_are_what_they_are_alone(pipe, decoding, order):
    settings, edit = {"decoding": decoding, "order": order, **LATENT}, edit_of((1, 2), (0, 3), (0, 4))
    output = pipe(class_labels=LABELS, generator=seeded(5, 6, 7), **settings, **edit)
    # The kept tokens and one more by the prefill.
    assert output.stats.accepted[0].tolist() == [N - GRID + 1, N - 3 * GRID + 1, 1]
    if decoding == "ar":
        assert output.stats.forward_passes == N
    for i, label in enumerate(LABELS):
        one = {name: value[i : i + 1] if name != "guidance_scale" else value for name, value in edit.items()}
        alone = pipe(class_labels=label, generator=seeded(5 + i), **settings, **one)
        assert torch.equal(alone.images[0], output.images[i])


def test_kept_tokens_are_a_group_of_their_own(pipe):
    settings = {"class_labels": LABELS, "generator": seeded(0, 1, 2), "order": "locality", **LATENT}
    output = pipe(decoding=GroupDecoding(3), **settings, **edit_of((1, 3), (1, 3), (0, 2)))
    sizes = GroupDecoding(3).sizes(N, N // 2)
    assert sizes == (N // 2, *GroupDecoding(3).sizes(N // 2)) and len(sizes) == 4
    assert output.stats.accepted.tolist() == [[size] * 3 for size in sizes]
    everything = pipe(decoding=GroupDecoding(3), **settings, **edit_of(*[(0, 4)] * 3))
    assert everything.stats.forward_passes == 3
    with pytest.raises(ValueError, match="keep 4 to 8 tokens.*groups"):
        pipe(decoding=GroupDecoding(3), **settings, **edit_of((1, 3), (1, 3), (0, 3)))


def test_images_that_keep_more_or_less_have_the_groups_that_they_have_alone(pipe):
    settings, edit = {"decoding": GroupDecoding(3), "order": "locality", **LATENT}, edit_of((1, 3), (0, 4), (0, 3))
    output = pipe(class_labels=LABELS, generator=seeded(5, 6, 7), batch_size=1, **settings, **edit)
    for i, label in enumerate(LABELS):
        one = {name: value[i : i + 1] if name != "guidance_scale" else value for name, value in edit.items()}
        alone = pipe(class_labels=label, generator=seeded(5 + i), **settings, **one)
        assert torch.equal(alone.images[0], output.images[i])


@pytest.mark.every(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_order_is_saved(family, tmp_path):
    pipe = any_order.pipeline(family)
    pipe.order, pipe.decoding = "random", GroupDecoding((4, 12))
    pipe.save_pretrained(tmp_path)
    loaded = AutoPipeline.from_pretrained(tmp_path)
    assert loaded.order == "random" and loaded.decoding == pipe.decoding
    assert type(loaded).from_pipe(loaded).order == "random"
    first, second = (one(class_labels=[1, 2], generator=seeded(0, 1), **LATENT).images for one in (loaded, pipe))
    assert torch.equal(first, second)


@torch.no_grad()
def test_only_a_model_that_reads_words_attends_to_them_by_place():
    order = torch.stack([torch.arange(N), torch.arange(N).flip(0)])
    embeds, mask = torch.randn(1, 8, tiny.TEXT_WIDTH).expand(2, -1, -1), torch.ones(2, 8)
    for reads_words in (False, True):
        transformer = tiny_arpg.transformer("text", num_condition_tokens=8, reads_words=reads_words)
        text = {"prompt_embeds": embeds, "prompt_attention_mask": mask}
        first = transformer.predict(torch.zeros(2, N).long(), order=order, **text)[:, 0]
        assert torch.allclose(first[0], first[1], atol=1e-5) != reads_words
    with pytest.raises(ValueError, match="^reads_words is true, and a class has no words: leave it out$"):
        tiny_arpg.transformer("class", reads_words=True)


def test_without_an_image_tokenizer_calls_return_tokens():
    pipe = tiny_arpg.pipeline()
    bare = type(pipe)(pipe.transformer)
    bare.set_progress_bar_config(disable=True)
    first, second = (one(class_labels=[1, 2], generator=seeded(0, 1), **LATENT).images for one in (bare, pipe))
    assert torch.equal(first, second)
    with pytest.raises(ValueError, match="output_type"):
        bare(class_labels=1)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"order": "spiral"}, "order"),
        ({"order": torch.arange(N).expand(2, -1)}, "order"),
        ({"order": torch.zeros(N, dtype=torch.long)}, "order"),
        ({"decoding": GroupDecoding((3, 4))}, "groups have 7 tokens"),
        (
            {"decoding": GroupDecoding((3, 4)), "order": "locality", **edit_of((0, 2), (1, 3), (0, 4))},
            "groups have 7 tokens",
        ),
        ({"decoding": "zipar"}, "raster"),
    ],
)
def test_what_does_not_fit_is_refused(pipe, settings, named):
    with pytest.raises(ValueError, match=named):
        pipe(class_labels=LABELS, **settings)
    with pytest.raises(ValueError, match="order"):
        pipe.order = "spiral"


@pytest.mark.parametrize("family", [tiny_arpg, tiny_randar])
def test_heads_that_share_keys_generate_what_training_predicts(family):
    network, kind = family.transformer(num_key_value_heads=1), family.CLASSES[1]
    assert network.config.num_attention_heads > 1
    pipe = kind(network, tiny.image_tokenizer())
    tokens = pipe(class_labels=3, decoding="ar", top_k=1, order="raster", **LATENT).tokens.flatten(1)
    with torch.no_grad():
        logits = network.predict(tokens, class_labels=torch.tensor([3]))
    assert torch.equal(logits.argmax(-1), tokens)
    pipe(class_labels=LABELS, decoding="groups", **LATENT)
