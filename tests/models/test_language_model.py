"""The binding of transformers' decoders, against the plain decoder run on the whole sequence, row ends and all."""

import copy
import warnings
from itertools import cycle

import pytest
import torch
import torch.nn.functional as F
from families import BUILD, condition_of, having
from tiny import randomise
from transformers import ChameleonConfig, ChameleonModel, LlamaConfig, LlamaModel

from arimage.decoding import Layout, Sampling, decode, decoding_from_name
from arimage.models import language_model
from arimage.models.cache_transformers import cache_argument
from arimage.models.language_heads import CodeHead
from arimage.models.language_model import LanguageTokenModel


CODES, FIRST_CODE, ROW_END, VOCABULARY = 40, 4, 50, 64
GRID = (3, 4)
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
VQ = {"base_channels": 32, "channel_multiplier": [1], "num_res_blocks": 1, "embed_dim": 4, "latent_channels": 4}
PROMPTS = [[51, 52, 53, 54, 55], [56, 57], [58, 59, 60]]
NEGATIVE = [61, 62]
EXACT = ["sjd", "sjd-coupled", "sjd-gumbel", "sjd-tree", "sjd-lazy"]


def decoder_of(kind, **changes):
    if kind == "llama":
        model = LlamaModel(LlamaConfig(**SHAPE, **changes))
    else:
        model = ChameleonModel(ChameleonConfig(**SHAPE, vocabulary_map={"<image>": 63}, vq_config=VQ, **changes))
    model = randomise(model, 3)
    # Attention that is nearly uniform would not tell what it sees.
    for name, value in model.named_parameters():
        if "q_proj" in name:
            value.data *= 4
    return model.requires_grad_(False)


@pytest.fixture(scope="module", params=["llama", "chameleon"])
def network(request):
    """A decoder and its head."""
    head = torch.nn.Linear(SHAPE["hidden_size"], VOCABULARY, bias=False).requires_grad_(False)
    head.weight.copy_(torch.randn(head.weight.shape, generator=torch.Generator().manual_seed(5)) / 2)
    return decoder_of(request.param), head


def pad_left(prompts):
    length = max(map(len, prompts))
    ids = torch.tensor([[0] * (length - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return ids, mask


def bind(network, prompts=PROMPTS, guided=True, row_end=ROW_END, grid=GRID, static=False):
    decoder, lm_head = network
    ids, mask = pad_left(prompts + [NEGATIVE] * len(prompts) if guided else prompts)
    model = LanguageTokenModel(
        decoder,
        embed=lambda codes: decoder.embed_tokens(codes + FIRST_CODE),
        head=CodeHead(lm_head, FIRST_CODE, CODES),
        layout=Layout(grid),
        input_ids=ids,
        attention_mask=mask,
        row_end=row_end,
        branches=2 if guided else 1,
        codebook=torch.randn(CODES, 4, generator=torch.Generator().manual_seed(1)),
    )
    if static:
        # As on an accelerator.
        model._room_for_row_ends = lambda ends, given_slots: LanguageTokenModel._room_for_row_ends(
            model, torch.empty_like(ends, device="meta"), given_slots
        )
    return model


def plain_logits(network, prompt, codes, row_end, grid=GRID):
    """Logits [N, CODES] of every position by one run of the decoder on the explicit sequence."""
    decoder, lm_head = network
    sequence, kept = list(prompt), []
    for position, code in enumerate(codes):
        kept.append(len(sequence) - 1)
        sequence.append(int(code) + FIRST_CODE)
        if row_end is not None and position % grid[1] == grid[1] - 1:
            sequence.append(row_end)
    hidden = decoder(input_ids=torch.tensor([sequence]), use_cache=False).last_hidden_state[0]
    return lm_head(hidden)[kept, FIRST_CODE : FIRST_CODE + CODES]


def expected_logits(network, codes, guided=True, row_end=ROW_END):
    branches = [PROMPTS, [NEGATIVE] * len(PROMPTS)] if guided else [PROMPTS]
    return torch.stack(
        [
            torch.stack(
                [plain_logits(network, prompt, row, row_end) for prompt, row in zip(prompts, codes, strict=True)]
            )
            for prompts in branches
        ]
    )


def random_codes(seed=0):
    return torch.randint(CODES, (len(PROMPTS), GRID[0] * GRID[1]), generator=torch.Generator().manual_seed(seed))


def close(actual, expected):
    torch.testing.assert_close(actual, expected, atol=2e-4, rtol=1e-4)


@pytest.mark.every(4)
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("row_end", [ROW_END, None])
@pytest.mark.parametrize("guided", [False, True])
@pytest.mark.parametrize("chunk", [1, 7])
def test_logits_are_those_of_the_explicit_sequence(network, chunk, guided, row_end, static):
    model, codes = bind(network, guided=guided, row_end=row_end, static=static), random_codes()
    cache, logits = model.prefill(len(PROMPTS))
    found = [logits[:, :, None]]
    for start in range(0, model.num_tokens - 1, chunk):
        positions = torch.arange(start, min(start + chunk, model.num_tokens - 1)).expand(len(PROMPTS), -1)
        found.append(model.forward(codes.gather(1, positions), positions, cache))
    close(torch.cat(found, dim=2), expected_logits(network, codes, guided, row_end))


@pytest.mark.parametrize("static", [False, True])
def test_writing_again_overwrites_and_padding_leaves_nothing_behind(network, static):
    model, codes, other = bind(network, static=static), random_codes(), random_codes(1)
    positions = torch.arange(9).expand(len(PROMPTS), -1)
    cache, _ = model.prefill(len(PROMPTS), scratch=2)
    model.forward(other[:, :9], positions, cache)
    model.forward(codes[:, :9], positions, cache)
    # Each image has padding elsewhere, at the end of a row too.
    hole = torch.zeros_like(positions, dtype=torch.bool).scatter(1, torch.tensor([[7, 3], [2, 7], [8, 0]]), True)
    padded = torch.where(hole, other[:, :9], codes[:, :9])
    assert model.forward(padded, torch.where(hole, -1, positions), cache).isfinite().all()
    assert model.forward(other[:, :9], torch.full_like(positions, -1), cache).isfinite().all()
    close(
        model.forward(codes[:, 8:9], positions[:, 8:9], cache)[:, :, 0],
        expected_logits(network, codes)[:, :, 9],
    )


@pytest.mark.parametrize("static", [False, True])
def test_a_branch_over_a_row_end_is_a_chain_once_it_is_moved(network, static):
    model, codes, other = bind(network, static=static), random_codes(), random_codes(1)
    batch, scratch = len(PROMPTS), 5
    expected, expected_other = expected_logits(network, codes), expected_logits(network, other_from(codes, other, 2))
    cache, _ = model.prefill(batch, scratch=scratch)
    positions = torch.arange(2).expand(batch, -1)
    model.forward(codes[:, :2], positions, cache)
    # Two branches at positions 2, 3, 4; the second of `other`. Position 3 ends a row.
    size = model.num_tokens
    order = torch.tensor([[0, 1, 2, 3, 4, -1], [4, 2, 0, 1, 3, -1], [3, 4, 1, 0, 2, -1]])
    slots = torch.where(order < 0, -1, size + order)
    at = torch.tensor([2, 3, 4, 2, 3, -1]).expand(batch, -1)
    tokens = torch.cat([codes[:, 2:5], other[:, 2:4], other[:, :1]], dim=1)
    ancestors = torch.tensor([[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 1, 1]])
    visible = torch.zeros(batch, 6, size + scratch, dtype=torch.bool)
    visible[:, :, :2] = True
    for image in range(batch):
        visible[image, :5, slots[image, :5]] = ancestors.bool()
    logits = model.forward(tokens, at, cache, visible=visible, slots=slots)
    close(logits[:, :, :3], expected[:, :, 3:6])
    close(logits[:, :, 3:5], expected_other[:, :, 3:5])

    cache.move(slots[:, :3], at[:, :3])
    close(model.forward(codes[:, 5:6], at[:, :1] + 3, cache), expected[:, :, 6:7])
    # The scratch slots now hold codes that end no row.
    tokens, at = codes[:, 5:7], torch.tensor([[5, 6]]).expand(batch, -1)
    visible = F.pad(torch.arange(size) <= 4, (0, scratch)).repeat(batch, 2, 1)
    for image in range(batch):
        visible[image, :, slots[image, 1]] = True
        visible[image, 1, slots[image, 4]] = True
    logits = model.forward(tokens, at, cache, visible=visible, slots=slots[:, [1, 4]])
    close(logits, expected[:, :, 6:8])


def other_from(codes, other, start):
    return torch.cat([codes[:, :start], other[:, start:]], dim=1)


def test_a_row_that_begins_early_begins_with_the_row_end_alone(network):
    model, codes = bind(network), random_codes()
    decoder, lm_head = network
    batch, size = len(PROMPTS), model.num_tokens
    cache, _ = model.prefill(batch, scratch=1)
    model.forward(codes[:, :2], torch.arange(2).expand(batch, -1), cache)
    visible = F.pad(torch.arange(size) < 2, (0, 1), value=True).repeat(batch, 1, 1)
    logits = model.forward(
        torch.full((batch, 1), -1),
        torch.full((batch, 1), 3),
        cache,
        visible=visible,
        slots=torch.full((batch, 1), size),
    )
    for image, prompt in enumerate(PROMPTS):
        ids = [*prompt, *(codes[image, :2] + FIRST_CODE).tolist(), ROW_END]
        positions = [*range(len(prompt) + 2), len(prompt) + 4]
        hidden = decoder(
            input_ids=torch.tensor([ids]),
            position_ids=torch.tensor([positions]),
            # Without it positions that skip are taken for several sequences.
            attention_mask=torch.ones(1, len(ids)),
            use_cache=False,
        ).last_hidden_state[0, -1]
        close(logits[0, image, 0], lm_head(hidden)[FIRST_CODE : FIRST_CODE + CODES])


def run(network, decoding, prompts=PROMPTS, seeds=None, sampling=None, **binding):
    seeds = torch.arange(len(prompts)) if seeds is None else seeds
    sampling = Sampling(guidance_scale=2.0, top_k=1) if sampling is None else sampling
    decoding = decoding_from_name(decoding) if isinstance(decoding, str) else decoding
    return decode(bind(network, prompts, **binding), decoding, sampling, seeds)


@pytest.mark.every(6)
@pytest.mark.parametrize(("name", "static"), list(zip(EXACT, cycle([False, True]), strict=False)))
def test_exact_decodings_agree_with_autoregressive_decoding(network, name, static):
    expected = run(network, "ar")
    state = run(network, name, static=static)
    assert torch.equal(state.tokens, expected.tokens)
    # Drafts of so few tokens pass by luck only.
    assert state.steps.min() < expected.forward_passes
    assert torch.equal(run(network, name, row_end=None).tokens, run(network, "ar", row_end=None).tokens)


@pytest.mark.every(4)
@pytest.mark.parametrize("name", ["ar", "sjd-coupled", "sjd-tree", "zipar"])
def test_an_image_does_not_depend_on_its_batch(network, name):
    sampling, seeds = Sampling(guidance_scale=2.0, top_k=20), torch.tensor([3, 1, 4])
    together = run(network, name, seeds=seeds, sampling=sampling).tokens
    for image, prompt in enumerate(PROMPTS):
        alone = run(network, name, [prompt], seeds[image, None], sampling).tokens
        assert torch.equal(alone[0], together[image])


@pytest.mark.parametrize("grid", [(1, 5), (5, 1)])
def test_any_grid(network, grid):
    expected = run(network, "ar", grid=grid).tokens
    assert torch.equal(run(network, "sjd-tree", grid=grid).tokens, expected)
    logits = plain_logits(network, PROMPTS[0], expected[0], ROW_END, grid)
    unguided = plain_logits(network, NEGATIVE, expected[0], ROW_END, grid)
    assert torch.equal((2 * logits - unguided).argmax(-1), expected[0])


def test_a_packed_head_makes_all_logits():
    class Packed(torch.nn.Module):
        weight = torch.randint(-100, 100, (VOCABULARY, 4), dtype=torch.int8)

        def forward(self, hidden):
            return hidden @ (self.weight / 100).T

    hidden = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    expected = Packed()(hidden)[..., FIRST_CODE : FIRST_CODE + CODES]
    assert torch.equal(CodeHead(Packed(), FIRST_CODE, CODES)(hidden), expected)


def test_bfloat16_and_eager_attention(network):
    decoder, lm_head = decoder_of("llama", attn_implementation="eager"), network[1]
    codes = random_codes()
    model = bind((decoder, lm_head))
    cache, _ = model.prefill(len(PROMPTS))
    positions = torch.arange(model.num_tokens - 1).expand(len(PROMPTS), -1)
    close(
        model.forward(codes[:, :-1], positions, cache),
        expected_logits((decoder_of("llama"), lm_head), codes)[:, :, 1:],
    )
    half = (decoder.to(torch.bfloat16), torch.nn.Linear(1, 1))
    half[1].weight = torch.nn.Parameter(lm_head.weight.to(torch.bfloat16), requires_grad=False)
    model = bind(half)
    cache, logits = model.prefill(len(PROMPTS))
    assert logits.dtype == cache.keys[0].dtype == torch.bfloat16
    assert model.forward(codes[:, :-1], positions, cache).isfinite().all()


def test_prompts_may_be_embeddings(network):
    ids, mask = pad_left(PROMPTS)
    decoder, lm_head = network
    common = {
        "embed": decoder.embed_tokens,
        "head": CodeHead(lm_head, 0, VOCABULARY),
        "layout": Layout(GRID),
        "attention_mask": mask,
    }
    given = LanguageTokenModel(decoder, inputs_embeds=decoder.embed_tokens(ids), **common)
    expected = LanguageTokenModel(decoder, input_ids=ids, **common)
    assert torch.equal(given.prefill(3)[1], expected.prefill(3)[1])


@pytest.mark.parametrize("part", [1, 2, 4])
def test_long_prompts_are_prefilled_in_parts(network, monkeypatch, part):
    codes = random_codes()
    ranks = torch.arange(codes.shape[1]).expand(len(codes), -1)

    def logits():
        model = bind(network)
        cache, first = model.prefill(len(PROMPTS))
        return first, model.forward(codes, ranks, cache)

    expected, sizes = logits(), []
    monkeypatch.setattr(language_model, "PREFILL_TOKENS", part)
    additive = language_model.additive
    monkeypatch.setattr(language_model, "additive", lambda *args: sizes.append(args[0].shape[1]) or additive(*args))
    for actual, whole in zip(logits(), expected, strict=True):
        close(actual, whole)
    assert max(sizes[:-1]) == part and sum(sizes[:-1]) == max(map(len, PROMPTS))


def test_what_does_not_fit_is_refused(network):
    decoder, lm_head = network
    ids, mask = pad_left(PROMPTS)
    arguments = {"embed": decoder.embed_tokens, "head": lm_head, "layout": Layout(GRID)}
    with pytest.raises(ValueError, match="one of the two"):
        LanguageTokenModel(decoder, **arguments)
    with pytest.raises(ValueError, match="3 prompts are not 2 branches"):
        LanguageTokenModel(decoder, input_ids=ids, branches=2, **arguments)
    with pytest.raises(ValueError, match="pad prompts on the left"):
        LanguageTokenModel(decoder, input_ids=ids, attention_mask=mask.flip(1), **arguments)
    with pytest.raises(ValueError, match="batch_size"):
        LanguageTokenModel(decoder, input_ids=ids, **arguments).prefill(2)
    flexible = decoder_of("llama", attn_implementation="flex_attention")
    with pytest.raises(ValueError, match="load it with attn_implementation="):
        LanguageTokenModel(flexible, input_ids=ids, **arguments)
    for layout in (Layout((2, 3, 4)), Layout((1, 2), torch.tensor([[1, 0]]))):
        with pytest.raises(ValueError, match="layout"):
            LanguageTokenModel(decoder, input_ids=ids, **{**arguments, "layout": layout})


def with_forward(decoder, name):
    """The decoder, whose forward calls its cache `name` and knows no other arguments than these."""
    kind, installed = type(decoder), cache_argument(decoder)

    def forward(self, inputs_embeds, position_ids, attention_mask, use_cache, cache):
        embedded = {"inputs_embeds": inputs_embeds, "position_ids": position_ids, "attention_mask": attention_mask}
        return kind.forward(self, **embedded, use_cache=use_cache, **{installed: cache})

    def earlier(self, inputs_embeds, position_ids, attention_mask, use_cache, past_key_values):
        return forward(self, inputs_embeds, position_ids, attention_mask, use_cache, past_key_values)

    other = copy.copy(decoder)
    other.__class__ = type(kind.__name__, (kind,), {"forward": forward if name == "cache" else earlier})
    return other


@pytest.mark.parametrize(
    ("name", "compiled"),
    [
        ("cache", False),
        ("past_key_values", False),
        pytest.param("cache", True, marks=pytest.mark.slow),
        pytest.param("past_key_values", True, marks=pytest.mark.slow),
    ],
)
def test_the_cache_goes_by_the_name_that_the_decoder_has_for_it(network, name, compiled):
    decoder, lm_head = network
    other = with_forward(decoder, name)
    if compiled:
        other = torch.compile(other, backend="eager")
    codes, found = random_codes(), []
    for one in (decoder, other):
        model = bind((one, lm_head))
        cache, logits = model.prefill(len(PROMPTS))
        found.append((logits, model.forward(codes[:, :3], torch.arange(3).expand(3, -1), cache)))
    for actual, expected in zip(*found, strict=True):
        close(actual, expected)


@pytest.mark.every(2)
@pytest.mark.parametrize("family", having("language"))
def test_no_family_passes_an_argument_that_transformers_will_drop(family):
    pipe = BUILD[family]()
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        pipe(**condition_of(pipe), guidance_scale=3.0, output_type="latent")
