"""A drafter continues features, with a cache as without one, and shares the transformer's ends."""

import pytest
import tiny
import torch
from pipelines.llamagen import tiny as tiny_llamagen

from arimage.decoding import Layout
from arimage.pipelines.llamagen.transformer_llamagen import LlamaGenTokenModel


BATCH, FED = 2, 6


@pytest.fixture(params=["class", "text"])
@torch.no_grad()
def drafting(request):
    """A guided model and its drafter, codes, and the features that they were sampled from [2, B, N, D]."""
    transformer = tiny_llamagen.transformer(request.param)
    if request.param == "class":
        condition = {"class_labels": torch.tensor([1, 3])}
    else:
        embeds = torch.randn(BATCH, tiny.TEXT_LENGTH, tiny.TEXT_WIDTH, generator=torch.Generator().manual_seed(1))
        mask = torch.arange(tiny.TEXT_LENGTH) >= torch.tensor([[3], [7]])
        condition = {"prompt_embeds": embeds, "prompt_attention_mask": mask}
    model = LlamaGenTokenModel(transformer, condition, Layout((4, 4)), guided=True)
    codes = torch.randint(model.vocab_size, (BATCH, 16), generator=torch.Generator().manual_seed(0))
    _, features = transformer.predict(codes.repeat(2, 1), return_features=True, **model.condition)
    return model, tiny_llamagen.drafter(transformer), codes, features.unflatten(0, (2, BATCH))


def chain(model, cache, codes, features, start, stop):
    positions = torch.arange(start, stop).expand(BATCH, -1)
    return model.forward(codes[:, start:stop], features[:, :, start:stop], positions, cache)


@torch.no_grad()
def test_the_transformer_returns_what_its_head_reads(drafting):
    model, _, codes, features = drafting
    cache, logits, first = model.prefill(BATCH, return_features=True)
    positions = torch.arange(FED).expand(BATCH, -1)
    more_logits, more = model.forward(codes[:, :FED], positions, cache, return_features=True)
    seen = torch.cat([first[:, :, None], more], dim=2)
    assert torch.allclose(seen, features[:, :, : FED + 1], atol=1e-5)
    expected = torch.cat([logits[:, :, None], more_logits], dim=2)
    assert torch.allclose(model.transformer.head(seen), expected, atol=1e-5)


@torch.no_grad()
def test_a_step_with_a_cache_is_a_step_of_training(drafting):
    model, drafter, codes, features = drafting
    logits, drafted = drafter.predict(model.transformer, codes.repeat(2, 1), features.flatten(0, 1))
    draft_model = drafter.bind(model)
    cache = draft_model.open_cache(BATCH, 3)
    for start, stop in ((0, 1), (1, 4), (3, 16)):
        got_logits, got = chain(draft_model, cache, codes, features, start, stop)
        assert torch.allclose(got_logits, logits.unflatten(0, (2, BATCH))[:, :, start:stop], atol=1e-4)
        assert torch.allclose(got, drafted.unflatten(0, (2, BATCH))[:, :, start:stop], atol=1e-4)


@torch.no_grad()
def test_a_branch_in_scratch_slots_is_a_chain(drafting):
    model, drafter, codes, features = drafting
    draft_model = drafter.bind(model)
    plain, tree = (draft_model.open_cache(BATCH, 4) for _ in range(2))
    expected, _ = chain(draft_model, plain, codes, features, 0, FED)
    chain(draft_model, tree, codes, features, 0, FED - 2)
    slots = 16 + torch.tensor([[2, 0], [1, 3]])
    visible = torch.zeros(BATCH, 2, 20, dtype=torch.bool)
    visible[:, :, : FED - 2] = True
    visible.scatter_(2, slots[:, :1, None].expand(-1, 2, -1), True)
    visible[:, 1:].scatter_(2, slots[:, 1:, None], True)
    positions = torch.tensor([[FED - 2, FED - 1]]).expand(BATCH, -1)
    branch, _ = draft_model.forward(
        codes[:, FED - 2 : FED], features[:, :, FED - 2 : FED], positions, tree, visible=visible, slots=slots
    )
    assert torch.allclose(branch, expected[:, :, FED - 2 :], atol=1e-4)


@torch.no_grad()
def test_padding_leaves_nothing_behind(drafting):
    model, drafter, codes, features = drafting
    draft_model = drafter.bind(model)
    cache = draft_model.open_cache(BATCH, 2)
    logits, _ = draft_model.forward(codes[:, :3], features[:, :, :3], torch.full((BATCH, 3), -1), cache)
    assert not cache.stacks[0][:, :, :, cache.places[:-1]].any() and not logits.isnan().any()
