"""The VAR transformer: what its forward passes have in common, what a token may see, and how training starts."""

import pytest
import tiny
import torch
import torch.nn.functional as F
from pipelines.var import tiny as tiny_var

from arimage.models.modulated_blocks import Attention
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
def test_without_guidance_there_are_the_logits_with_the_condition_only(transformer, condition, latents):
    _, one = VARScaleModel(transformer, tiny.scale_tokenizer(), condition).prefill(BATCH, latents)
    _, two = VARScaleModel(transformer, tiny.scale_tokenizer(), condition, guided=True).prefill(BATCH, latents)
    assert len(one) == 1
    assert_close(one[0], two[0])
    assert not torch.allclose(two[0], two[1], atol=0.1)


def test_a_scale_sees_itself_and_those_before(transformer, condition, latents):
    inputs = inputs_of(latents).requires_grad_()
    logits = transformer.predict(inputs, **condition).split(COUNTS, dim=1)
    for scale in range(len(COUNTS)):
        seen = torch.autograd.grad(logits[scale][:, 0].sum(), inputs, retain_graph=True)[0].abs().sum((0, 2)) > 0
        assert torch.equal(seen, torch.arange(len(seen)) < sum(COUNTS[: scale + 1]) - 1)


@torch.no_grad()
def test_no_condition_says_nothing_of_the_text(latents):
    transformer, condition = tiny_var.transformer("text"), condition_of("text")
    other = {name: value.flip(0) for name, value in condition.items()}
    none = torch.ones(BATCH, dtype=torch.bool)
    logits = [transformer.predict(inputs_of(latents), **text, unconditional=none) for text in (condition, other)]
    assert_close(*logits)


@torch.no_grad()
def test_what_lies_in_the_padding_of_a_text_does_not_matter(latents):
    transformer, condition = tiny_var.transformer("text"), condition_of("text")
    padding = condition["prompt_attention_mask"][..., None] == 0
    changed = {**condition, "prompt_embeds": condition["prompt_embeds"].masked_fill(padding, torch.nan)}
    logits = [transformer.predict(inputs_of(latents), **text) for text in (condition, changed)]
    assert torch.equal(*logits)


@torch.no_grad()
def test_every_token_of_a_text_is_seen_as_such(latents):
    transformer, condition = tiny_var.transformer("text"), condition_of("text")
    embeds = condition["prompt_embeds"].clone()
    embeds[1, 0] += 1
    changed_text = {**condition, "prompt_embeds": embeds}
    changed = transformer.predict(inputs_of(latents), **changed_text)
    logits = transformer.predict(inputs_of(latents), **condition)
    assert torch.equal(logits[::2], changed[::2])
    # Not by the mean alone.
    vector, (_, prefix) = transformer.embed_condition(**condition)[0], transformer.embed_condition(**changed_text)
    transformer.embed_condition = lambda **_: (vector, prefix)
    assert not torch.allclose(transformer.predict(inputs_of(latents), **condition)[1], logits[1], atol=1e-3)


@torch.no_grad()
def test_shared_modulation_is_one_layer_for_all_blocks_with_an_offset_for_each(latents):
    shared, apart = tiny_var.transformer("class", **SHARED), tiny_var.transformer("class")
    weights = shared.state_dict()
    weight, bias = (weights.pop(f"shared_modulation.{name}") for name in ("weight", "bias"))
    for layer in range(len(shared.blocks)):
        weights[f"blocks.{layer}.modulation.weight"] = weight
        weights[f"blocks.{layer}.modulation.bias"] = weights[f"blocks.{layer}.modulation.bias"] + bias
    apart.load_state_dict(weights)
    condition = condition_of("class")
    assert_close(*(model.predict(inputs_of(latents), **condition) for model in (shared, apart)))


@torch.no_grad()
@pytest.mark.parametrize("qk_norm", [True, False])
def test_attention_is_what_the_paper_says(qk_norm):
    attention = tiny.randomise(Attention(12, 3, qk_norm, 0.0), seed=0)
    hidden = torch.randn(2, 5, 12)
    query, key, value = attention.qkv_proj(hidden).unflatten(-1, (3, 3, 4)).permute(2, 0, 3, 1, 4)
    if qk_norm:
        attention.log_query_scale[0] = 9.0
        scale = attention.log_query_scale.exp()
        scale[0] = 100
        scores = scale * F.cosine_similarity(query[..., :, None, :], key[..., None, :, :], dim=-1)
    else:
        scores = query @ key.mT / 4 / 4**0.5
    expected = attention.out_proj((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))
    assert_close(attention(hidden, None), expected)


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


@pytest.mark.every(2)
def test_it_survives_saving_and_loading(transformer, condition, latents, tmp_path):
    transformer.save_pretrained(tmp_path)
    loaded = VARTransformer.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(*(model.predict(inputs_of(latents), **condition) for model in (transformer, loaded)))


def test_wrong_shapes_are_refused():
    with pytest.raises(ValueError, match="conditioning"):
        VARTransformer(conditioning="image")
    with pytest.raises(ValueError, match="hidden_size"):
        VARTransformer(hidden_size=10, num_attention_heads=3)


def test_conditions_and_images_must_be_as_many():
    model = VARScaleModel(tiny_var.transformer("class"), tiny.scale_tokenizer(), condition_of("class"))
    with pytest.raises(ValueError, match="batch_size"):
        model.prefill(2)


@pytest.mark.every(3)
@torch.no_grad()
@pytest.mark.parametrize("prefilled", [0, 2])
def test_equal_conditions_are_prefilled_once(transformer, condition, latents, prefilled):
    rows, found = [], []
    latents = [torch.cat([latent, latent.flip(0)]) for latent in latents]
    every = {name: value.repeat_interleave(2, dim=0) for name, value in condition.items()}
    transformer.blocks[0].register_forward_hook(lambda *call: rows.append(len(call[-1])))
    for merge in (True, False):
        model = VARScaleModel(transformer, tiny.scale_tokenizer(), every, guided=True)
        if merge:
            model.merge_prompts([i // 2 for i in range(2 * BATCH)])
        cache, logits = model.prefill(2 * BATCH, latents[:prefilled])
        found.append((logits, model.forward(prefilled + 1, latents[prefilled], cache)))
    for actual, expected in zip(*found, strict=True):
        assert_close(actual, expected)
    assert rows == [BATCH + 1 if prefilled == 0 else 4 * BATCH, *[4 * BATCH] * 3]
