"""Rows decoded side by side: what a query sees, what it costs, and whose distribution the images follow."""

import math
import re

import pytest
import torch
from decoding.pairwise import each_once
from decoding.test_exactness import assert_follows
from pipelines.llamagen import tiny as tiny_llamagen

from arimage.decoding import (
    AutoregressiveDecoding,
    Layout,
    ParallelJacobiDecoding,
    Sampling,
    ZipARDecoding,
    decode,
)
from arimage.models.llama_blocks import rotary_table
from arimage.pipelines.llamagen.transformer_llamagen import LlamaGenTokenModel


SEEDS = torch.tensor([0, 1, -1, 2**31, 2**32 + 5, -(2**63), 2**63 - 1, 77])
GRIDS = [(1, 1), (1, 6), (6, 1), (2, 4), (3, 3), (4, 2)]
DECODINGS = [
    *(ZipARDecoding(window, adaptive) for window in (1, 2) for adaptive in (False, True)),
    *(
        ParallelJacobiDecoding(window, context, refresh)
        for window, context, refresh in (
            (1, 1, "coupled"),
            (9, 1, "coupled"),
            (3, 2, "independent"),
            (2, 3, "coupled"),
        )
    ),
]
EVERY_DECODING = pytest.mark.parametrize("decoding", DECODINGS, ids=str)


def recorded(model):
    """A `TokenModel`, and the list of what it will be asked and answer."""
    forward, asked = model.forward, []

    def note(tokens, positions, cache, *, visible, slots):
        logits = forward(tokens, positions, cache, visible=visible, slots=slots)
        asked.append({"tokens": tokens, "positions": positions, "visible": visible, "slots": slots, "logits": logits})
        return logits

    model.forward = note
    return model, asked


def truncated_joint(model, sampling, window):
    """Probabilities [V ** N] of the images of "zipar": each token given those before it that are decided by then, and
    0 for the others."""
    size, columns = model.num_tokens, model.layout.columns
    at = torch.arange(size)
    decided_in = at.div(columns, rounding_mode="floor") * min(window, columns) + at % columns
    images = torch.cartesian_prod(*[torch.arange(model.vocab_size)] * size).view(-1, size)
    joint = torch.ones(len(images), dtype=torch.float64)
    for i in range(size):
        seen = images[:, :i] * (decided_in[:i] < decided_in[i])
        row = (seen * model.vocab_size ** torch.arange(i - 1, -1, -1)).sum(1)
        distribution = sampling.probabilities(model.tables[i][:, row, None], at[i].expand(len(images), 1))[
            :, 0
        ].double()
        joint *= distribution.gather(1, images[:, i, None])[:, 0]
    return joint / joint.sum()


def look_only_at(model, neighbours):
    """Give the model other tables, in which a token depends only on its `neighbours`, pairs of rows down and columns
    right."""
    columns, tables = model.layout.columns, []
    for i, table in enumerate(model.tables):
        row, column = divmod(i, columns)
        kept = [
            (row + down) * columns + column + right
            for down, right in neighbours
            if row + down >= 0 and 0 <= column + right < columns
        ]
        places = model.vocab_size ** torch.arange(i - 1, -1, -1)
        prefixes = torch.arange(table.shape[1])[:, None].div(places, rounding_mode="floor") % model.vocab_size
        tables.append(table[:, (prefixes[:, kept] * places[kept]).sum(1)])
    model.tables, model._rows = tables, torch.cat(tables, dim=1)
    return model


def sample_images(model, decoding, sampling, size):
    return decode(model, decoding, sampling, torch.arange(size) + (5 << 32)).tokens


def follows(tokens, joint):
    """Whether images of two tokens are samples of `joint`."""
    try:
        assert_follows(tokens, joint, 2)
    except AssertionError as error:
        return not re.match("chi-square|total variation|an impossible image", str(error))
    return True


# Settings at which nothing is missing.


@pytest.mark.every(3)
@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_a_window_that_covers_the_row_is_autoregressive(table_model, grid, adaptive):
    model, sampling = table_model(grid=grid, vocab_size=2, branches=2), Sampling(guidance_scale=1.5, top_p=0.95)
    expected = decode(model, AutoregressiveDecoding(), sampling, SEEDS)
    for window in (grid[1], 99):
        state = decode(model, ZipARDecoding(window, adaptive), sampling, SEEDS)
        assert torch.equal(state.tokens, expected.tokens)
        assert state.forward_passes == model.num_tokens


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("grid", "sampling", "window", "refresh"),
    [
        tuple(choice.values())
        for choice in each_once(
            {
                "grid": [(2, 3), (3, 2), (2, 2, 2)],
                "sampling": [Sampling(), Sampling(guidance_scale=1.7, temperature=1.3, top_k=2, top_p=0.9)],
                "window": [1, 3],
                "refresh": ["coupled", "independent"],
            }
        )
    ],
    ids=str,
)
def test_a_context_that_covers_the_row_is_exact(table_model, grid, sampling, window, refresh):
    model = table_model(grid=grid, vocab_size=2, branches=1 if sampling.guidance_scale == 1 else 2)
    tokens = sample_images(model, ParallelJacobiDecoding(window, grid[-1], refresh), sampling, 10_000)
    assert follows(tokens, model.joint(sampling))


def test_an_adaptive_window_is_exact_where_a_draft_waits_for_the_complete_row(table_model):
    model = table_model(grid=(2, 3), vocab_size=2, truncated=True)
    for window in (1, 2):
        tokens = sample_images(model, ZipARDecoding(window, adaptive=True), Sampling(), 10_000)
        assert follows(tokens, model.joint(Sampling())) == (window == 2)


# Settings at which tokens are missing.


GUIDED = Sampling(guidance_scale=2.5, top_p=0.9)


@pytest.mark.parametrize(
    ("grid", "window", "sampling"), [((2, 3), 1, Sampling()), ((2, 3), 2, GUIDED), ((3, 2), 1, Sampling())], ids=str
)
def test_tokens_follow_the_distribution_given_what_is_decided(table_model, grid, window, sampling):
    branches = 1 if sampling.guidance_scale == 1 else 2
    model = table_model(grid=grid, vocab_size=2, branches=branches, truncated=True)
    joint = truncated_joint(model, sampling, window)
    # One draft per row keeps the rows in step.
    for decoding in (ZipARDecoding(window), ParallelJacobiDecoding(1, window)):
        tokens = sample_images(model, decoding, sampling, 10_000)
        assert follows(tokens, joint)
    assert not follows(tokens, model.joint(sampling))


LEFT_AND_ABOVE = ((0, -1), (-1, 0), (-1, -1))


@pytest.mark.every(2)
@pytest.mark.parametrize(("window", "context", "refresh"), [(2, 1, "coupled"), (3, 2, "independent")])
def test_parallel_jacobi_is_exact_for_a_model_that_looks_left_and_above(table_model, window, context, refresh):
    model = look_only_at(table_model(grid=(3, 3), vocab_size=2, truncated=True), LEFT_AND_ABOVE)
    tokens = sample_images(model, ParallelJacobiDecoding(window, context, refresh), Sampling(), 5_000)
    assert follows(tokens, model.joint(Sampling()))


@pytest.mark.parametrize(("window", "adaptive"), [(1, True), (2, False)])
def test_zipar_is_exact_for_a_model_that_looks_no_further_than_the_window(table_model, window, adaptive):
    neighbours = (*LEFT_AND_ABOVE, (-1, 1))[: 2 + window]
    model = look_only_at(table_model(grid=(2, 4), vocab_size=2, truncated=True), neighbours)
    state = decode(model, ZipARDecoding(window, adaptive), Sampling(), torch.arange(10_000))
    assert follows(state.tokens, model.joint(Sampling()))
    # No draft is rejected: a row begins one step after its draft.
    assert state.forward_passes == 4 + window + adaptive


@pytest.mark.slow
def test_how_far_off_a_truncated_context_is(table_model):
    # The figures of the docstrings: total variation on a table where every token matters as much as any other.
    model = table_model(grid=(2, 3), vocab_size=2, truncated=True)
    joint, size = model.joint(Sampling()), 10_000
    floor = 2 * float((2 * joint * (1 - joint) / (math.pi * size)).sqrt().sum() / 2)
    for window, limit in ((1, 0.25), (2, 0.18), (3, 1e-6)):
        zipar = float((truncated_joint(model, Sampling(), window) - joint).abs().sum() / 2)
        assert limit - 0.02 < zipar < limit
    for context, limit in ((1, 0.19), (2, 0.06), (3, 0)):
        tokens = sample_images(model, ParallelJacobiDecoding(3, context), Sampling(), size)
        counts = torch.bincount((tokens * 2 ** torch.arange(5, -1, -1)).sum(1), minlength=64)
        assert float((counts / size - joint).abs().sum() / 2) < limit + floor


# What a query sees.


@pytest.mark.every(4)
@EVERY_DECODING
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_every_query_sees_what_is_decided_before_it_and_its_own_row(table_model, grid, decoding):
    model, record = recorded(table_model(grid=grid, vocab_size=2, truncated=True))
    size, columns, decided = math.prod(grid), grid[1], []
    decode(model, decoding, Sampling(), SEEDS, on_step=lambda state, step: decided.append(state.decided.clone()))
    for before, asked in zip(decided, record, strict=False):
        queries = asked["positions"].shape[1]
        for image in range(len(SEEDS)):
            stand_ins = 0
            fed = []
            for query in range(queries):
                at, slot = int(asked["positions"][image, query]), int(asked["slots"][image, query])
                if at < 0:
                    continue
                unknown = asked["tokens"][image, query] == -1
                row = (at + unknown.long()) // columns
                own = set(range(at + 1)) & set(range(int(row) * columns, size))
                expected = {i for i in range(at + 1) if before[image, i]} | ({size} if unknown else own)
                assert set(asked["visible"][image, query].nonzero().flatten().tolist()) == expected
                assert slot == (size if unknown else at)
                stand_ins += int(unknown)
                fed.append(slot)
            # Nothing is written twice, and what is decided lies in the cache for whoever sees it.
            assert len(fed) == len(set(fed)) and stand_ins <= 1


@torch.no_grad()
@pytest.mark.parametrize(
    "decoding", [ZipARDecoding(1), ZipARDecoding(2), ZipARDecoding(2, True), ParallelJacobiDecoding(3, 1)], ids=str
)
def test_a_step_gives_what_a_recomputation_without_a_cache_gives(decoding):
    transformer = tiny_llamagen.transformer("class")
    model, record = recorded(LlamaGenTokenModel(transformer, {"class_labels": torch.tensor([3])}, Layout((4, 4))))
    decode(model, decoding, Sampling(), SEEDS[:1])
    # One sequence of all queries of all steps; a query attends to the latest that was written to each slot it sees.
    queries, latest, attends = [], {}, []
    for asked in record:
        live = (asked["positions"][0] >= 0).nonzero().flatten().tolist()
        for j in live:
            latest[int(asked["slots"][0, j])] = len(queries)
            queries.append((asked["tokens"][0, j], asked["positions"][0, j], asked["logits"][0, 0, j]))
        for j in live:
            attends.append([latest[slot] for slot in asked["visible"][0, j].nonzero().flatten().tolist()])
    mask = torch.zeros(1, len(queries) + 1, len(queries) + 1, dtype=torch.bool)
    mask[:, :, 0] = True
    for query, seen in enumerate(attends):
        mask[0, query + 1, [place + 1 for place in seen]] = True
    tokens, positions, logits = (torch.stack(values) for values in zip(*queries, strict=True))
    table = rotary_table(transformer.head_dim, (4, 4), 1, transformer.config.rope_theta, torch.device("cpu"))
    recomputed = transformer(
        tokens[None],
        rotary=table[None, torch.cat([torch.zeros(1, dtype=torch.long), positions + 1])],
        mask=mask,
        condition={"class_labels": torch.tensor([3])},
        first_query=1,
    )
    assert torch.allclose(recomputed[0], logits, atol=1e-4)


# What it costs, and what every decoding promises.


@pytest.mark.every(3)
@pytest.mark.parametrize("window", [1, 2, 3, 8])
@pytest.mark.parametrize("grid", [(1, 6), (6, 1), (3, 4), (5, 2)])
def test_rows_begin_a_window_apart(table_model, grid, window):
    rows, columns = grid
    model, window = table_model(grid=grid, vocab_size=2, truncated=True), min(window, columns)
    assert decode(model, ZipARDecoding(window), Sampling(), SEEDS).forward_passes == columns + (rows - 1) * window
