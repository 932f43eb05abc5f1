"""The VAR transformer: what its forward passes have in common, what a token may see, and how training starts."""

import pytest
import tiny
import torch
import torch.nn.functional as F
from pipelines.var import tiny as tiny_var

from arimage.pipelines.var.transformer_var import VARScaleModel, VARTransformer


BATCH = 3
PLAIN, SHARED, UNNORMED = {}, {"shared_adaln": True}, {"qk_norm": False}
COUNTS = [side**2 for side in tiny.SCALES]


def condition_of(kind):
    if kind == "class":
        return {"class_labels": torch.tensor([1, 7, 3])}
    embeds = torch.randn(BATCH, tiny.TEXT_LENGTH, tiny.TEXT_WIDTH, generator=torch.Generator().manual_seed(0))
    mask = torch.arange(tiny.TEXT_LENGTH) < torch.tensor([[3], [12], [1]])
    return {"prompt_embeds": embeds, "prompt_attention_mask": mask.long()}


@pytest.fixture(
    params=[("class", PLAIN), ("text", PLAIN), ("class", SHARED), ("text", SHARED), ("class", UNNORMED)], ids=str
)
def transformer(request):
    kind, changes = request.param
    return tiny_var.transformer(kind, **changes)


@pytest.fixture
def condition(transformer):
    return condition_of(transformer.config.conditioning)


def test_a_model_of_texts_asks_for_their_width():
    with pytest.raises(ValueError, match="caption_dim"):
        tiny_var.transformer("text", caption_dim=None)


@pytest.fixture
def latents():
    """Those after each scale but the last."""
    vq, generator = tiny.scale_tokenizer(), torch.Generator().manual_seed(0)
    codes = [torch.randint(tiny.CODES, (BATCH, side, side), generator=generator) for side in tiny.SCALES]
    return [vq.latents(codes[:count]).detach() for count in range(1, len(codes))]


def inputs_of(latents):
    vq = tiny.scale_tokenizer()
    return torch.cat(
        [vq.scale_input((side, side), each) for side, each in zip(tiny.SCALES[1:], latents, strict=True)], dim=1
    )


def assert_close(actual, expected):
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.every(6)
@torch.no_grad()
@pytest.mark.parametrize("prefilled", range(len(tiny.SCALES)))
def test_passes_over_a_cache_give_the_teacher_forced_logits(transformer, condition, latents, prefilled):
    model = VARScaleModel(transformer, tiny.scale_tokenizer(), condition, guided=True)
    none = torch.ones(BATCH, dtype=torch.bool)
    inputs = inputs_of(latents)
    expected = torch.stack(
        [transformer.predict(inputs, **condition), transformer.predict(inputs, **condition, unconditional=none)]
    ).split(COUNTS, dim=2)
    cache, logits = model.prefill(BATCH, latents[:prefilled])
    assert_close(logits, expected[prefilled])
    for scale in range(prefilled + 1, len(tiny.SCALES)):
        assert_close(model.forward(scale, latents[scale - 1], cache), expected[scale])


@torch.no_grad()
def test_what_lies_in_the_padding_of_a_text_does_not_matter(latents):
    transformer, condition = tiny_var.transformer("text"), condition_of("text")
    padding = condition["prompt_attention_mask"][..., None] == 0
    changed = {**condition, "prompt_embeds": condition["prompt_embeds"].masked_fill(padding, torch.nan)}
    logits = [transformer.predict(inputs_of(latents), **text) for text in (condition, changed)]
    assert torch.equal(*logits)


@pytest.mark.every(2)
def test_training_starts_from_uniform_distributions_and_reaches_every_weight(transformer, condition, latents):
    transformer = VARTransformer.from_config(transformer.config).train()
    transformer.init_weights()
    inputs, unconditional = inputs_of(latents), torch.tensor([False, True, False])
    assert (transformer.predict(inputs, **condition) == 0).all()
    optimizer = torch.optim.SGD(transformer.parameters(), lr=0.1)
    targets = torch.randint(tiny.CODES, (BATCH * sum(COUNTS),))
    losses = []
    # The zero head hides the others for a step.
    for _ in range(3):
        optimizer.zero_grad()
        losses.append(
            F.cross_entropy(
                transformer.predict(inputs, **condition, unconditional=unconditional).flatten(0, 1), targets
            )
        )
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < losses[0]
    unreached = [name for name, weight in transformer.named_parameters() if not weight.grad.abs().sum() > 0]
    assert unreached == []


def test_wrong_shapes_are_refused():
    with pytest.raises(ValueError, match="conditioning"):
        VARTransformer(conditioning="image")
    with pytest.raises(ValueError, match="hidden_size"):
        VARTransformer(hidden_size=10, num_attention_heads=3)
