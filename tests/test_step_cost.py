"""`benchmarks/step_cost.py` on modules whose launches and bytes are counted by hand."""

from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import step_cost
import step_models
import torch
import torch.nn.functional as F
from torch import nn

import arimage.models
from arimage.decoding import AutoregressiveDecoding, Layout, Sampling, decoding_from_name
from arimage.decoding.names import PRESETS
from arimage.kernels.coupling import couple_at, couple_window, sample_at
from arimage.kernels.noise import normals
from arimage.kernels.operation import DEVICES
from arimage.kernels.probabilities import probabilities
from arimage.kernels.step.attention import attention
from arimage.kernels.step.embedding import embedding
from arimage.kernels.step.gate import gate
from arimage.kernels.step.keys import write_keys
from arimage.kernels.step.linear import linear
from arimage.kernels.step.qkv import qkv
from arimage.pipelines.llamagen.transformer_llamagen import LlamaGenTokenModel, LlamaGenTransformer


FLOAT, LONG = 4, 8
needs_triton = pytest.mark.skipif(not DEVICES, reason="triton is not installed")


@pytest.fixture(autouse=True)
def fake_cuda():
    with step_cost.fake_cuda():
        yield


def counted(function, parameters=()):
    """Launches and bytes of a call, outside of any model, and the counter."""
    counter = step_cost.StepCounter(parameters)
    with counter:
        function()
    return counter.launches["outside"], counter.bytes["outside"], counter


X, IDS, FOUND = 35 * FLOAT, 10 * LONG, 10 * FLOAT
# On x [5, 7], ids [5, 2] and row [1, 7]: the launches and bytes of each call.
CALLS = {
    "views": (lambda x, ids, row: x.t()[1:].unsqueeze(0).expand(3, -1, -1), 0, 0),
    "two": (lambda x, ids, row: x + x.clone(), 2, 5 * X),
    "one row to all": (lambda x, ids, row: x + row.expand(5, -1), 1, 2 * X + 7 * FLOAT),
    "in place": (lambda x, ids, row: x.add_(1), 1, 2 * X),
    "out": (lambda x, ids, row: torch.neg(row, out=row), 1, 2 * 7 * FLOAT),
    "cat": (lambda x, ids, row: torch.cat([x, row]), 1, 2 * X + 2 * 7 * FLOAT),
    "gather": (lambda x, ids, row: x.gather(1, ids), 1, IDS + 2 * FOUND),
    "scatter in place": (lambda x, ids, row: x.scatter_(1, ids, 1.0), 1, IDS + FOUND),
    "index": (lambda x, ids, row: x[ids], 1, IDS + 2 * 7 * FOUND),
    "rows in place": (lambda x, ids, row: x.__setitem__(ids[:, 0], x), 1, IDS // 2 + 2 * X),
}


@pytest.mark.parametrize("name", CALLS)
def test_launches_and_bytes_of_an_operator(name):
    call, launches, moved = CALLS[name]
    x, ids, row = torch.zeros(5, 7), torch.zeros(5, 2, dtype=torch.long), torch.zeros(1, 7)
    assert counted(lambda: call(x, ids, row))[:2] == (launches, moved)


@pytest.mark.parametrize(
    ("mask", "launches", "extra"), [(None, 1, 0), (torch.float, 1, 48 * 4), (torch.bool, 2, 48 * 9)]
)
def test_attention_is_one_launch_and_a_bool_mask_one_more(mask, launches, extra):
    query, keys = torch.zeros(2, 3, 4, 8), torch.zeros(2, 3, 6, 8)
    mask = None if mask is None else torch.zeros(2, 1, 4, 6, dtype=mask)

    def attend():
        attended = F.scaled_dot_product_attention(query, keys, keys, attn_mask=mask)
        # No copy, as after the fused kernels.
        attended.transpose(1, 2).flatten(2)

    assert counted(attend)[:2] == (launches, FLOAT * (2 * 192 + 2 * 288) + extra)


P, DRAFTS = 6 * 7 * FLOAT, 6
# On p [2, 3, 7], logits [2, 2, 3, 7] in bfloat16, x [2, 3] and noise [2, 3, 2].
KERNELS = {
    # The count is filled, then read and written.
    "couple_window": (
        lambda p, logits, x, noise: couple_window(p, p, x, noise, x > 0),
        3,
        2 * P + DRAFTS * (2 * LONG + 2 * FLOAT + 1) + DRAFTS * (LONG + 1) + DRAFTS + 3 * 2 * LONG,
    ),
    "sample_at": (lambda p, logits, x, noise: sample_at(p, x[:, 0], x, None, 0), 1, P + (2 * DRAFTS + 2) * LONG),
    "couple_at": (
        lambda p, logits, x, noise: couple_at(p, p, x, x[0, :2], x, x[0, :2], 1),
        1,
        2 * P + (3 * DRAFTS + 4) * LONG + DRAFTS * (1 + 3 * FLOAT),
    ),
    "probabilities": (lambda p, logits, x, noise: probabilities(logits, 3.0, 0.9, 5, 0.9), 1, 2 * P),
    "probabilities with min-p by row": (
        lambda p, logits, x, noise: probabilities(logits, 3.0, 0.9, x[:, 0], 0.9, min_p=noise[:, 0, 0]),
        3,
        2 * P + 2 * (5 * FLOAT + LONG),
    ),
    "normals": (
        lambda p, logits, x, noise: normals(x[0, :2], x, None, 3, 5),
        1,
        (2 + DRAFTS) * LONG + 5 * DRAFTS * FLOAT,
    ),
}


@needs_triton
@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_is_one_launch_that_reads_its_inputs_and_writes_its_outputs(name):
    call, launches, moved = KERNELS[name]
    p, logits = torch.zeros(2, 3, 7), torch.zeros(2, 2, 3, 7, dtype=torch.bfloat16)
    x, noise = torch.zeros(2, 3, dtype=torch.long), torch.zeros(2, 3, 2)
    assert counted(lambda: call(p, logits, x, noise))[:2] == (launches, moved)


HALF = 2
# Rows, queries of each of two images, and the width.
ROWS, QUERIES, WIDTH, HEADS, PLACES = 4, 3, 128, 2, 40
CACHED = ROWS * QUERIES * WIDTH * HALF  # what the fed tokens have in one layer


def step_inputs(half=torch.bfloat16):
    return {
        "x": torch.zeros(ROWS * QUERIES, WIDTH, dtype=half),
        "gain": torch.zeros(WIDTH, dtype=half),
        "weight": torch.zeros(3 * WIDTH, WIDTH, dtype=half),
        "keys": torch.zeros(ROWS, HEADS, PLACES, WIDTH // HEADS, dtype=half),
        "places": torch.zeros(2 * QUERIES, dtype=torch.long),
    }


@needs_triton
def test_the_kernels_of_a_step_read_what_they_need_only():
    x, gain, weight, keys, places = step_inputs().values()
    table, seen = torch.zeros(100, WIDTH // HEADS // 2, 2), torch.zeros(ROWS, 5, dtype=torch.bool)

    def launched(function, *arguments, slots=None, **options):
        counter = step_cost.StepCounter([weight], slots)
        with counter:
            function(*arguments, **options)
        assert counter.launches["outside"] == 1
        return counter.bytes["outside"], counter

    turns = table, places, WIDTH // HEADS
    moved, counter = launched(qkv, x, gain, 1e-5, [weight], *turns, keys, keys.clone(), places, [], [])
    rotations = 2 * QUERIES * WIDTH // HEADS * FLOAT
    # It reads the states, and writes queries, keys and values of as many.
    assert moved == 4 * CACHED + (WIDTH + 3 * WIDTH**2) * HALF + 2 * 2 * QUERIES * LONG + rotations
    assert sum(counter.weights.values()) == 3 * WIDTH**2 * HALF
    assert counter.flop == 2 * ROWS * QUERIES * 3 * WIDTH**2
    moved, counter = launched(attention, x.unflatten(1, (HEADS, -1)), keys, keys, seen, 9, 16, places, slots=8)
    # Of the places before the image it reads those of the prompt only.
    attended = 2 * CACHED + ROWS * 5 + 2 * QUERIES * LONG + 2 * ROWS * WIDTH * (5 + 8) * HALF
    assert moved == attended and counter.flop == 4 * ROWS * QUERIES * WIDTH * (5 + 8)
    query = x.unflatten(1, (HEADS, -1))
    moved, _ = launched(attention, query, keys, keys, seen, 9, 16, places, None, table, places, slots=8)
    assert moved == attended + 2 * QUERIES * LONG + rotations
    visible = torch.zeros(2 * QUERIES, PLACES - 16 + 6, dtype=torch.bool)
    moved, _ = launched(attention, query, keys, keys, seen, 9, 16, places, visible, slots=8)
    assert moved == attended + visible.numel() + 2 * ROWS * WIDTH * (16 - 9) * HALF
    moved, _ = launched(write_keys, query, query, table, places, keys, keys.clone(), places)
    assert moved == 4 * CACHED + 2 * 2 * QUERIES * LONG + rotations
    moved, _ = launched(gate, x, x)
    assert moved == 3 * CACHED
    moved, counter = launched(linear, x, weight[:WIDTH], residual=x)
    assert moved == 3 * CACHED + WIDTH**2 * HALF and counter.flop == 2 * ROWS * QUERIES * WIDTH**2
    tokens = torch.zeros(2, QUERIES, dtype=torch.long)
    moved, counter = launched(embedding, tokens, tokens, None, torch.zeros(PLACES, dtype=torch.long), weight, 2)
    # An embedding is read and written; the slot and the place of each token are written.
    assert moved == 2 * CACHED + (2 + 2) * 2 * QUERIES * LONG + PLACES * LONG and not counter.weights


# And the most launches of a step outside of its layers.
PER_LAYER = {
    "janus-pro-7b": (5, 8),
    "emu3-gen": (5, 5),
    "emu3.5-image": (5, 5),
    "anole-7b": (5, 5),
    "mammothmoda2-preview": (5, 5),
    "x-omni-en": (5, 4),
    "glm-image": (7, 4),
    "cosmos-5b": (9, 6),
    "rar-b-256": (5, 20),
}


@needs_triton
@pytest.mark.parametrize("name", PER_LAYER)
def test_launches_of_a_layer_by_the_kernels_of_a_step(name):
    per_layer, others = PER_LAYER[name]
    for decoding in ("ar", "sjd-coupled:window=32"):
        parsed = step_cost.decoding_from_text(decoding)
        bounds = (step_models.MODELS[name].build(layers)(1) for layers in (1, 2))
        one, two = (step_cost.token_cost(bound, parsed, 1).launches[0] for bound in bounds)
        assert two - one == per_layer and one - per_layer <= others


@needs_triton
@pytest.mark.parametrize(("decoding", "ratio"), [("ar", 1.01), ("sjd-coupled:window=16", 1.06)])
def test_a_layer_of_llamagen_xl_takes_five_launches(decoding, ratio):
    bound = step_models.MODELS["llamagen-xl-384"].build(2)(1)
    cost = step_cost.token_cost(bound, step_cost.decoding_from_text(decoding), 1)
    assert cost.launches[0] == 2 * 5 + 2
    # Of two layers only, the logits weigh more.
    assert cost.bytes[0] / cost.floor < ratio + 0.02


def test_the_model_is_counted_apart_and_its_weights_once():
    embedding, linear = nn.Embedding(11, 6), nn.Linear(6, 5)

    class Model:
        def forward(self, tokens):
            hidden = embedding(tokens)
            return linear(linear.weight[1:2] + hidden), linear(hidden)

    model, tokens = Model(), torch.zeros(3, dtype=torch.long)
    parameters = [*embedding.parameters(), *linear.parameters()]
    counter = step_cost.StepCounter(parameters)
    forward = counter.inside(model.forward)
    # A network within another is counted once, as the model too.
    outer = counter.inside(lambda: forward(tokens))
    with counter:
        first, second = outer()
        first - second
    assert counter.launches == {"model": 4, "outside": 1}
    hidden, output = 18 * FLOAT, 15 * FLOAT
    look_up, add = 3 * LONG + 2 * hidden, 6 * FLOAT + 2 * hidden
    assert counter.bytes == {"model": look_up + add + 2 * (35 * FLOAT + hidden + output), "outside": 3 * output}
    # A row of the weight was read apart from the whole of it, and no row of the embedding as a whole.
    assert sum(counter.weights.values()) == (30 + 6 + 5) * FLOAT


def bound(batch):
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_layers": 1, "num_attention_heads": 2, "vocab_size": 24}
    network = LlamaGenTransformer(grid_size=4, **shape).eval()
    condition = {"class_labels": torch.zeros(batch, dtype=torch.long)}
    model = LlamaGenTokenModel(network, condition, Layout((4, 4)), guided=True)
    return step_cost.Bound(model, Sampling(guidance_scale=3.0), 16, (network,))


def test_the_floor_of_a_step_is_its_weights_and_half_of_the_image():
    cost = step_cost.token_cost(bound(3), decoding_from_name("ar"), 3)
    weights = 4 * 16 * 16 + 3 * 16 * 32 + 3 * 16 + 24 * 16
    # Keys and values of the class and of 8 tokens, in 6 rows.
    assert cost.floor == FLOAT * (weights + 2 * 9 * 6 * 16)
    assert cost.ratio == sum(cost.bytes) / cost.floor > 1


@pytest.mark.slow
def test_pruned_scales_cost_less_and_the_others_as_much():
    bound = step_models.MODELS["var-d30"].build(2)(1)
    whole, half, none = (
        step_cost.scale_costs(bound, decoding_from_name("next-scale", pruned=shares), 1)
        for shares in ((), (0.5, 0.5), (0.0,))
    )
    flop, halved = (np.array([cost.flop for cost in costs.values()]) for costs in (whole, half))
    assert (halved[:-3] == flop[:-3]).all()
    # The head reads all cells, and the attention fewer of the scale before too.
    head = 2 * np.array([13**2, 16**2]) * 2 * 1920 * 4096
    layers, fewer = flop[-3:-1] - head, halved[-3:-1] - head
    assert (fewer < 0.51 * layers).all() and (fewer > 0.45 * layers).all()
    assert [cost.cached for cost in whole.values()][:-3] == [cost.cached for cost in half.values()][:-3]
    slot = 2 * 2 * 2 * 1920 * 2  # keys and values, layers, rows, bfloat16
    assert whole["all scales"].cached == 680 * slot and half["all scales"].cached == (680 - 85 - 128) * slot
    assert none["all scales"].flop == whole["all scales"].flop


@needs_triton
@pytest.mark.parametrize(
    ("model", "few", "many", "scales"),
    [("var-d30", 5, 9, ("2x2", "8x8")), pytest.param("infinity-2b", 7, 13, ("2x2", "8x8"), marks=pytest.mark.slow)]
    + [pytest.param("infinitystar-480p", 5, 10, ("1x2x3", "1x5x9"), marks=pytest.mark.slow)],
)
def test_launches_of_a_layer_at_a_scale_of_few_cells_and_of_many(model, few, many, scales):
    shapes = step_models.MODELS[model].build(1)(1).model.scales
    stop = 1 + ["x".join(map(str, shape)) for shape in shapes].index(scales[1])
    decoding = decoding_from_name("next-scale", stop_after=stop)
    one, two = (step_cost.scale_costs(step_models.MODELS[model].build(layers)(1), decoding, 1) for layers in (1, 2))
    found = [two[f"scale {scale}"].launches[0] - one[f"scale {scale}"].launches[0] for scale in scales]
    times = [shapes[:stop].count(tuple(map(int, scale.split("x")))) for scale in scales]
    assert found == [few * times[0], many * times[1]]


TABLE = {row[:3]: row[3:] for row in step_cost.read_table()}
REMEDY = "If that is meant, run `python benchmarks/step_cost.py --write-table` and commit its table."


def faults(model, rows) -> list[str]:
    """Where `rows` of a model differ from `TABLE`, have more launches, or move over 2 % more bytes. Only two layers
    are counted, so one launch more in each of them can be less than 2 %."""
    table, now = {key: cost for key, cost in TABLE.items() if key[0] == model}, {row[:3]: row[3:] for row in rows}
    found = [f"{key} is in one of them only" for key in table.keys() ^ now.keys()]
    for key in table.keys() & now.keys():
        for column, before, after in zip(step_cost.COLUMNS[3:], table[key], now[key], strict=True):
            if after > before * (1 if "launches" in column else 1.02):
                found.append(f"{key}: {after} {column}, not {before}")
    return found


# One of each kind of model.
QUICK = ("llamagen-xl-256", "var-dd-d16", "arpg-l-256", "janus-pro-7b", "cosmos-5b")


@pytest.mark.every(5)
@needs_triton
@pytest.mark.parametrize(
    "model", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in step_cost.COMMITTED]
)
def test_no_step_costs_more_than_the_committed_table_says(model):
    found = faults(model, step_cost.committed_rows(model))
    assert not found, "\n".join([*found, REMEDY])


def test_the_table_has_every_decoding_and_every_family():
    # Two read the device in a step, which fake tensors cannot.
    assert {key[1].partition(":")[0] for key in TABLE} == PRESETS.keys() - {"path-jacobi", "path-speculative"}
    # Other sizes of one family.
    others = {"llamagen-xl-384", "llamagen-xl-512", "emoji-var"}
    assert {key[0] for key in TABLE} == step_cost.COMMITTED.keys() == step_cost.MODELS.keys() - others
    package = Path(arimage.__file__).parent
    folders = {path.parent.name for path in package.glob("pipelines/*/pipeline_*.py")}
    assert folders == set(step_models.FOLDERS)
    shapes = [import_module(f"shapes.{folder}") for folder in folders]
    files = [path.relative_to(package).with_suffix("") for path in package.rglob("transformer_*.py")]
    transformers = {".".join(("arimage", *path.parts)) for path in files}
    used = {getattr(value, "__module__", None) for module in shapes for value in vars(module).values()}
    assert len(transformers) > 10 and transformers <= used


@needs_triton
def test_one_more_operator_in_a_step_is_noticed(monkeypatch):
    step = AutoregressiveDecoding.step
    monkeypatch.setattr(AutoregressiveDecoding, "step", lambda self, state: (step(self, state), state.steps + 0))
    assert len(faults("cosmos-5b", step_cost.committed_rows("cosmos-5b"))) == 1
