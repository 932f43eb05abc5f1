"""Positions of several axes that are given to a language model, and grids before the image, against the plain decoder
run on the whole sequence."""

import pytest
import torch
from tiny import randomise
from transformers import GlmImageTextConfig, GlmImageTextModel

from arimage.decoding import Layout, Sampling, ZipARDecoding, decode
from arimage.models.language_heads import CodeHead
from arimage.models.language_model import LanguageTokenModel


CODES, VOCABULARY, AXES = 30, 40, 3
LAYOUT = Layout((2, 3), before=((1, 2),))
PROMPTS = [[31, 32, 33, 34], [35, 36], [31, 32, 33, 34], [35, 36]]
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
}
ROPE = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}


@pytest.fixture(scope="module")
def network():
    """A decoder with positions of three axes, and its head."""
    decoder = randomise(GlmImageTextModel(GlmImageTextConfig(**SIZES, eos_token_id=1, rope_parameters=ROPE)), 3)
    head = torch.nn.Linear(SIZES["hidden_size"], VOCABULARY, bias=False).requires_grad_(False)
    head.weight.copy_(torch.randn(head.weight.shape, generator=torch.Generator().manual_seed(5)) / 2)
    return decoder.requires_grad_(False), head


def numbers(*shape, seed=0):
    return torch.randint(12, shape, generator=torch.Generator().manual_seed(seed))


# The third prompt is the first one in other positions; the fourth is the second one in the same positions.
PROMPT_POSITIONS = [numbers(AXES, len(prompt), seed=seed) for seed, prompt in zip([1, 2, 3, 2], PROMPTS, strict=True)]
TOKEN_POSITIONS = numbers(AXES, LAYOUT.num_tokens, seed=4)


def inputs(prompts, positions):
    """Prompts, masks and positions, padded on the left."""
    length = max(map(len, prompts))
    ids, mask = torch.zeros(2, len(prompts), length, dtype=torch.long)
    # The positions of padding are never seen.
    at = torch.full((len(prompts), AXES, length), 7)
    for row, (prompt, place) in enumerate(zip(prompts, positions, strict=True)):
        ids[row, -len(prompt) :], mask[row, -len(prompt) :] = torch.tensor(prompt), 1
        at[row, :, -len(prompt) :] = place
    return {"input_ids": ids, "attention_mask": mask, "prompt_positions": at}


def bind(network, rows=(0, 1, 2, 3), **changes):
    decoder, lm_head = network
    arguments = inputs([PROMPTS[row] for row in rows], [PROMPT_POSITIONS[row] for row in rows])
    common = {"embed": decoder.embed_tokens, "head": CodeHead(lm_head, 0, CODES), "layout": LAYOUT}
    return LanguageTokenModel(decoder, **{**common, **arguments, "token_positions": TOKEN_POSITIONS, **changes})


def plain_logits(network, row, codes):
    """Logits [N, CODES] of every rank by one run of the decoder on the explicit sequence."""
    decoder, lm_head = network
    prompt, positions = PROMPTS[row], PROMPT_POSITIONS[row]
    after = positions[:, -1:] + 1 + TOKEN_POSITIONS
    hidden = decoder(
        input_ids=torch.tensor([[*prompt, *codes.tolist()]]),
        position_ids=torch.cat([positions, after], dim=1)[:, None],
        use_cache=False,
    ).last_hidden_state[0, len(prompt) - 1 : -1]
    return lm_head(hidden)[:, :CODES]


def logits_of(model, codes, chunk=3):
    cache, logits = model.prefill(len(codes))
    found = [logits[:, :, None]]
    for start in range(0, model.num_tokens - 1, chunk):
        ranks = torch.arange(start, min(start + chunk, model.num_tokens - 1)).expand(len(codes), -1)
        found.append(model.forward(codes.gather(1, ranks), ranks, cache))
    return torch.cat(found, dim=2)


def codes_of(rows):
    return numbers(len(PROMPTS), LAYOUT.num_tokens, seed=6)[list(rows)]


def expected_logits(network, rows):
    return torch.stack([plain_logits(network, row, codes) for row, codes in zip(rows, codes_of(rows), strict=True)])


def close(actual, expected):
    torch.testing.assert_close(actual, expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("merged", [False, True])
def test_logits_are_those_of_the_explicit_sequence(network, merged):
    model, rows = bind(network), range(len(PROMPTS))
    if merged:
        model.merge_prompts()
    close(logits_of(model, codes_of(rows))[0], expected_logits(network, rows))
    rows = [2, 1, 1]
    close(logits_of(model.take(torch.tensor(rows)), codes_of(rows))[0], expected_logits(network, rows))


def test_only_prompts_in_equal_positions_share_a_prefill(network):
    model, counts = bind(network), []
    model.merge_prompts()
    with network[0].register_forward_pre_hook(
        lambda module, args, kwargs: counts.append(kwargs["position_ids"].shape), with_kwargs=True
    ):
        model.prefill(len(PROMPTS))
    assert counts == [(AXES, 3, 4)]


def test_each_group_has_its_own_positions(network):
    rows = [0, 1, 2, 3]
    logits = logits_of(bind(network, branches=2), codes_of([0, 1]))
    expected = [[plain_logits(network, row, codes_of([row % 2])[0]) for row in pair] for pair in (rows[:2], rows[2:])]
    close(logits, torch.stack([torch.stack(group) for group in expected]))


def test_replaced_images_have_their_own_positions(network):
    model, other = bind(network, [1, 3, 3]), bind(network, [2, 0])
    cache, _ = model.prefill(3)
    new, _ = other.prefill(2)
    images, first = torch.tensor([2, 0]), model._first
    cache.put(images, new)
    assert not model.put(images, other) and model._first is first
    rows, ranks = [0, 1, 2], torch.arange(LAYOUT.num_tokens - 1).expand(3, -1)
    codes = codes_of(rows)
    close(model.forward(codes[:, :-1], ranks, cache)[0], expected_logits(network, rows)[:, 1:])


def test_positions_in_a_row_are_those_that_a_model_counts_itself(network):
    length, counted = len(PROMPTS[0]), {"prompt_positions": None, "token_positions": None}
    in_a_row = {
        "prompt_positions": torch.arange(length).expand(1, AXES, length),
        "token_positions": torch.arange(LAYOUT.num_tokens).expand(AXES, -1),
    }
    found = [logits_of(bind(network, [0], **positions), codes_of([0])) for positions in (counted, in_a_row)]
    assert torch.equal(*found)


def test_calls_share_memory_only_with_equal_positions_and_grids(network):
    model = bind(network)
    assert model.put_key == bind(network, [1]).put_key
    others = {"token_positions": TOKEN_POSITIONS + 1}, {"layout": Layout((2, 3), before=((2, 1),))}
    for changes in (*others, {"prompt_positions": None, "token_positions": None}):
        assert model.put_key != bind(network, **changes).put_key


def test_what_does_not_fit_is_refused(network):
    for missing in ("prompt_positions", "token_positions"):
        with pytest.raises(ValueError, match="give both, or none"):
            bind(network, **{missing: None})
    for changes in (
        {"token_positions": TOKEN_POSITIONS[:, :-1]},
        {"token_positions": TOKEN_POSITIONS[:2]},
        {"prompt_positions": PROMPT_POSITIONS[0][None]},
    ):
        with pytest.raises(ValueError, match="positions are"):
            bind(network, **changes)
    none = {"prompt_positions": None, "token_positions": None}
    for changes in ({"layout": Layout((2, 4))}, none):
        with pytest.raises(ValueError, match="give no row_end"):
            bind(network, row_end=39, **changes)
    with pytest.raises(ValueError, match="ZipARDecoding cannot .* several grids"):
        decode(bind(network), ZipARDecoding(), Sampling(), torch.arange(len(PROMPTS)))
