"""Kernel launches and bytes of one decoding step at the sizes of published models, counted without a GPU or any
weights.

Components and inputs are fake CUDA tensors, which have shapes but no memory. Every operator that a step calls is
counted:

- One launch per operator, whatever it is made of (a sort, a top-k and a sum over blocks are several kernels in truth).
  Views and `empty` launch nothing.
- The bytes of an operator are those of its tensors, inputs read and outputs written, elements of an expanded tensor
  once. An in-place operator reads and writes its tensor; `copy_`, `fill_`, `full_like` and `out=` only write it.
- `gather`, indexing and embeddings read the indices and only the elements that they look up. `scatter_`, `index_put_`
  and `index_fill_` read the indices and the new values and write only the elements that they touch; the forms that are
  not in place copy the whole tensor first.
- Attention is one launch that reads queries, the keys and values that it is given (filled or not) and the mask, and
  writes its output. A bool mask costs one launch more, which converts it to the dtype of the queries, as PyTorch does.
- A kernel of `arimage.kernels` is one launch of Triton, which reads its inputs and writes its outputs, once each: what
  it reads again lies in the cache. A product after an RMSNorm counts as one, also over 17 to 72 rows, where the norm
  is a launch of its own. Of the tokens and counts of an image it touches as many as it has positions.
  Coupling counts as if all drafts were rejected; of an accepted one it reads only two numbers. What is copied or
  filled for a kernel counts as any other operator.
- The kernels of a step look up embeddings and rotations, write the keys and values of the fed tokens only, and read
  those before the middle of the image.

`captured` is what is launched once the steps are captured, see `CapturedState`: one graph per step. A prefill, and a
step that reads the device, are not captured. Attention is limited as in captured steps.

`model` is the forward passes of the model (and of its refiner, teacher or drafter) and their denoising heads;
`outside` is everything else. The floor reads every weight that the forward pass uses once, and the keys and values of
the prompt and half of the image (of a next-scale model: of the scales so far). The ratio is all bytes over the floor.
Where `pruned` leaves out cells of a scale, the floor reads the keys and values of the others only; where
`guided_scales` leaves out unconditional rows, it still reads theirs.
Launches are those at the first of the batch sizes.

python benchmarks/step_cost.py --model llamagen-xl-256 --decoding ar sjd-coupled:window=32 --batch-size 1 8
python benchmarks/step_cost.py --write-table    # writes step_cost.tsv, which the tests compare with
"""

import argparse
import csv
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from shapes import Bound
from step_models import MODELS
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from arimage.decoding import acceptance, decoding_from_text
from arimage.decoding.contract.state import attention_limit, captured_multiple
from arimage.decoding.run.batch import INTERVAL


SHOWN = ("llamagen-xl-256", "llamagen-xl-512", "var-d30", "janus-pro-7b", "lumina-mgpt-7b-768")
DECODINGS = ("ar", "sjd-coupled:window=16", "sjd-coupled:window=32", "sjd-coupled:window=64")
DECODINGS += ("sjd-lazy", "sjd-tree", "pjd", "zipar", "line-cache")
# The rows of the committed table: every decoding, and every family. path-jacobi and path-speculative read the device
# in a step, which fake tensors cannot.
TABLE = Path(__file__).with_name("step_cost.tsv")
COLUMNS = ("model", "decoding", "of a")
COLUMNS += ("launches in the model", "launches outside", "launches captured", "bytes in the model", "bytes outside")
COMMITTED = {name: published.decodings for name, published in MODELS.items() if published.decodings}
LOOKUPS = {"gather", "index", "index_select", "embedding"}
SCATTERS = {"scatter", "index_put", "index_fill", "index_copy"}
# The arguments of kernels that are written without being read, and those of which only as many elements are touched as
# other arguments have.
OVERWRITTEN = {"slide_window": {"q"}}
TOUCHED = {
    "open_step": {"tokens": ["cursor"]},
    "close_step": {"tokens": ["positions"], "accepted": ["cursor"]},
    "advance": {"accepted": ["cursor"]},
    # Drafts, and the tokens before them.
    "open_window": {"tokens": ["positions", "positions"]},
    "close_window": {"tokens": ["positions"], "accepted": ["cursor"]},
    "slide_window": dict.fromkeys(["tokens", "forced", "neighbour", "context"], ["positions"]),
}
# What a model is called for.
FORWARDS = ("prefill", "forward", "prefill_group", "forward_group", "predict", "denoise")
FORWARDS += ("forward_places", "forward_lazily", "denoise_lazily")
WRITES = {"copy_", "fill_", "zero_", "full_like", "zeros_like", "ones_like", "new_full", "new_zeros", "new_ones"}
FREE = {"_unsafe_view", "lift_fresh", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


def tensors(values) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def size(tensor: torch.Tensor) -> int:
    """Bytes of its distinct elements."""
    return tensor.itemsize * math.prod(n for n, step in zip(tensor.shape, tensor.stride(), strict=True) if step)


def touched(name: str, args: tuple) -> int:
    """Elements of args[0] that a scatter writes."""
    target = args[0]
    if name == "scatter":
        return args[2].numel()
    if name == "index_put":
        indices = dict(enumerate(args[1]))
    else:
        indices = {args[1] % target.ndim: args[2]}
    indices = {axis: index for axis, index in indices.items() if index is not None}
    looked_up = math.prod(torch.broadcast_shapes(*(index.shape for index in indices.values())))
    return looked_up * math.prod(n for axis, n in enumerate(target.shape) if axis not in indices)


def written(operator, args: tuple) -> list[torch.Tensor]:
    """The tensors that an operator changes in place."""
    return tensors(
        # The last of `args` are left out if they are defaults.
        [value for argument, value in zip(operator._schema.arguments, args, strict=False) if argument.is_write]
    )


def named(operator, args: tuple) -> dict[str, Any]:
    """The arguments of an operator. The last of `args` are left out if they are defaults."""
    values = {argument.name: argument.default_value for argument in operator._schema.arguments}
    return values | dict(zip(values, args, strict=False))


def kernel_bytes(operator, args: tuple, results) -> int:
    """Bytes that a kernel of `arimage.kernels` moves."""
    name = operator._schema.name.removeprefix("arimage::")
    values = {key: value for key, value in named(operator, args).items() if value is not None}
    partly = {key: others for key, others in TOUCHED.get(name, {}).items() if key in values}
    overwritten = OVERWRITTEN.get(name, set())
    moved = sum(map(size, tensors([value for key, value in values.items() if key not in {*partly, *overwritten}])))
    moved += sum(map(size, tensors(results)))
    moved += sum(
        size(tensor) for tensor in written(operator, args) if all(tensor is not values[key] for key in partly)
    )
    return moved + sum(values[key].itemsize * values[o].numel() for key, others in partly.items() for o in others)


def is_view(operator) -> bool:
    returned = operator._schema.returns
    return bool(returned) and all(value.alias_info and not value.alias_info.is_write for value in returned)


class StepCounter(TorchDispatchMode):
    """Counts what is called while it is entered.

    Args:
        parameters: those of the model.
        slots: how many slots of the image are in use, where a kernel finds that on the device; None for all.

    Attributes:
        launches, bytes: by place, "model" or "outside".
        weights: bytes of each parameter, or part of one, that was read as a whole.
        flop: see `Cost`.
    """

    def __init__(self, parameters: Iterable[nn.Parameter] = (), slots: int | None = None):
        super().__init__()
        self.slots = slots
        self.launches, self.bytes, self.weights, self.flop = Counter(), Counter(), {}, 0
        self._storages = {parameter.untyped_storage()._cdata for parameter in parameters}
        self._place, self._attention = "outside", AttentionCounter(self)

    def __enter__(self):
        self._attention.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._attention.__exit__(*error)

    def inside(self, function: Callable) -> Callable:
        """`function`, counted as the model."""

        def counted(*args, **kwargs):
            before, self._place = self._place, "model"
            try:
                return function(*args, **kwargs)
            finally:
                self._place = before

        return counted

    def add(self, launches: int, moved: int) -> None:
        self.launches[self._place] += launches
        self.bytes[self._place] += moved

    def read(self, values) -> int:
        """Bytes of the tensors among `values`, whose parameters are taken down."""
        for tensor in tensors(values):
            storage = tensor.untyped_storage()._cdata
            if storage in self._storages:
                key = storage, tensor.storage_offset()
                self.weights[key] = max(self.weights.get(key, 0), size(tensor))
        return sum(map(size, tensors(values)))

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        results = operator(*args, **kwargs)
        if operator._overloadpacket in flop_registry:
            self.flop += flop_registry[operator._overloadpacket](*args, **kwargs, out_val=results)
        name = operator._schema.name.removeprefix("aten::")
        if operator.namespace == "prim" or name in FREE or is_view(operator):
            return results
        base = name.removesuffix("_")
        if name.startswith("arimage::step_"):
            moved = self.step_kernel(name.removeprefix("arimage::step_"), named(operator, args), results)
        elif name in LOOKUPS:
            # As many elements of the source as there are in the result.
            moved = 2 * size(results) + self.read(args[1:])
        elif base in SCATTERS:
            copied = 0 if name.endswith("_") else size(args[0]) + size(results)
            moved = copied + touched(base, args) * args[0].itemsize + self.read(args[1:])
        elif operator.namespace == "arimage":
            self.read(args)
            moved = kernel_bytes(operator, args, results)
        else:
            inputs = args[1:] if name in WRITES else args, {k: v for k, v in kwargs.items() if k != "out"}
            moved = self.read(inputs) + sum(map(size, tensors(results)))
        self.add(1, moved)
        return results

    def step_kernel(self, name: str, values: dict[str, Any], results) -> int:
        """Bytes of a kernel of `arimage.kernels.step`, whose operations are counted too."""
        states, moved = next(iter(values.values())), sum(map(size, tensors(results)))
        keys, of_cache = values.pop("keys", None), values.pop("values", None)
        if name == "embedding":
            values.pop("weight")
            moved += size(results[0])
        if name in ("attention", "normed_attention"):
            visible, seen, first = values["visible"], values["seen"], values["first"]
            read = keys.shape[2] - first
            read = seen.shape[1] + (read if self.slots is None else min(read, self.slots))
            if visible is not None:
                read += first - values["prefix_end"]
            self.flop += 4 * results.numel() * read
            moved += sum(size(cached[:, :, :read]) for cached in (keys, of_cache))
        if name in ("unit_attention", "text_attention"):
            read = keys.shape[2] if name == "text_attention" else values["stop"]
            self.flop += 4 * results.numel() * read
            moved += sum(size(cached[:, :, :read]) for cached in (keys, of_cache))
        # Keys and values are written: of as many heads as the cache has, or a part of the states.
        written = dict.fromkeys(("qkv", "normed_attention", "unit_attention", "write_keys"), 2).get(name, 0)
        moved += written * len(states) * of_cache.shape[1] * of_cache.shape[3] * of_cache.itemsize if written else 0
        if name == "unit_heads":
            moved += 2 * size(states) // 3
        if name == "head_norms":
            # What is copied, too; the values and the keys are written.
            del values["past_keys"], values["past_values"]
            moved += sum(size(each) + size(each[:, :, : values["first"]]) for each in (keys, of_cache))
        if "positions" in values and values.get("table") is not None:
            # As many rotations as there are positions.
            moved += len(values["positions"]) * size(values.pop("table")[0])
        weights = tensors([values.get(key) for key in ("weight", "up", "weights")])
        self.flop += 2 * len(states) * sum(weight.numel() for weight in weights)
        return moved + self.read(list(values.values()))


class AttentionCounter(TorchFunctionMode):
    """Takes the place of attention, which has no fused form on fake tensors."""

    def __init__(self, counter: StepCounter):
        self.counter = counter

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is not F.scaled_dot_product_attention:
            return function(*args, **(kwargs or {}))
        query, key, value = args[:3]
        mask = (kwargs or {}).get("attn_mask")
        moved = sum(map(size, (query, key, value, query)))
        if mask is not None and mask.dtype == torch.bool:
            self.counter.add(1, size(mask) * (1 + query.itemsize))
            moved += size(mask) * query.itemsize
        elif mask is not None:
            moved += size(mask)
        self.counter.add(1, moved)
        self.counter.flop += 4 * query.numel() * key.shape[2]
        # In the layout of the fused kernels, in which the heads of a token lie together.
        return torch.empty_like(query.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)


class Cost(NamedTuple):
    """Launches and bytes of a step, in the model and outside of it, its launches once it is captured, the bytes of the
    floor and the keys and values among them, and the operations of matrix products and attention, two per product and
    sum."""

    launches: tuple[int, int]
    captured: int
    bytes: tuple[int, int]
    floor: int
    cached: int
    flop: int

    @property
    def ratio(self) -> float:
        return sum(self.bytes) / self.floor


@contextmanager
def fake_cuda():
    """Tensors on a CUDA device that need no memory."""
    with FakeTensorMode(), torch.device("cuda"), torch.no_grad():
        yield


def count(
    bound: Bound, run: Iterable[bool], filled: Callable[[], int], drafter=None, slots: int | None = None
) -> Cost:
    """The cost of `run`, which yields after each step whether it can be captured. Attention has to read `filled()`
    bytes of keys and values. `drafter` is the `DraftModel` of a state, and `slots` those of the image in use."""
    counter = StepCounter((parameter for network in bound.networks for parameter in network.parameters()), slots)
    # Those that draft an image, or decode the rest of it.
    others = (getattr(bound.model, name, None) for name in ("refiner", "teacher", "drafter"))
    for model in filter(None, (bound.model, *others, drafter)):
        for name in FORWARDS:
            if hasattr(type(model), name):
                setattr(model, name, counter.inside(getattr(type(model), name).__get__(model)))
    captured = before = 0
    with counter:
        for replayed in run:
            total = counter.launches.total()
            captured, before = captured + (1 if replayed else total - before), total
    launches, moved = (
        tuple(values[place] for place in ("model", "outside")) for values in (counter.launches, counter.bytes)
    )
    cached = filled()
    return Cost(launches, captured, moved, sum(counter.weights.values()) + cached, cached, counter.flop)


def slot_bytes(cache) -> int:
    """Bytes of the keys and values of one slot of all rows."""
    return sum(layer[:, :, :1].numel() * layer.itemsize for layer in (*cache.keys, *cache.values))


def begin(bound: Bound, decoding, batch: int):
    """The state of `decoding` after its prefill."""
    # A known table of neighbours would be compared with the codebook, which reads the host.
    acceptance._tables.clear()
    state = decoding.start(bound.model, bound.sampling, torch.zeros(batch, dtype=torch.long))
    state.allocate()
    # As before steps are captured.
    state.stack_sampling()
    return state


def half_way(bound: Bound, decoding, batch: int):
    """A state whose steps attend to half of the image, whatever it holds."""
    state = begin(bound, decoding, batch)
    if state.reach is not None:
        size = bound.model.num_tokens
        end = size // 2 + INTERVAL * state.reach[1]
        # Some caches have fewer slots than the image has tokens.
        state.cache.attended_slots = attention_limit(end, min(size, state.cache.slots), captured_multiple(size))
    # Kernels find on the device how far an image is. The tokens before do not matter, but are tokens.
    for name in ("cursor", "positions"):
        if hasattr(state, name):
            getattr(state, name).add_(bound.model.num_tokens // 2)
    state.token_buffer.clamp_(min=0)
    return state


def token_cost(bound: Bound, decoding, batch: int) -> Cost:
    """The cost of a step, half-way through the image."""
    state = half_way(bound, decoding, batch)
    filled = slot_bytes(state.cache) * (state.cache.prompt + bound.slots // 2)
    return count(bound, step(decoding, state), lambda: filled, getattr(state, "drafter", None), bound.slots // 2)


def step(decoding, state) -> Iterator[bool]:
    """Take a step; see `count`."""
    replayed = state.step_variant is not None
    decoding.step(state)
    yield replayed


def scale_costs(bound: Bound, decoding, batch: int) -> dict[str, Cost]:
    """The cost of every scale, the first with its prefill, and of the image. Scales of one shape, which a film has
    several passes over, are added up."""
    states = []

    def start():
        states.append(begin(bound, decoding, batch))
        yield False

    def filled():
        return slot_bytes(states[0].cache) * states[0].cache.attended

    every: dict[str, list[Cost]] = {}
    for shape in bound.model.scales[: getattr(decoding, "stop_after", None)]:
        run = step(decoding, states[0]) if states else start()
        every.setdefault(f"scale {'x'.join(map(str, shape))}", []).append(count(bound, run, filled))
    every["all scales"] = [cost for costs in every.values() for cost in costs]
    return {label: together(costs) for label, costs in every.items()}


def together(costs: list[Cost]) -> Cost:
    """The cost of several steps; of keys and values the most that one reads."""
    launches, moved = (
        tuple(map(sum, zip(*values, strict=True)))
        for values in ([cost.launches for cost in costs], [cost.bytes for cost in costs])
    )
    return Cost(
        launches,
        sum(cost.captured for cost in costs),
        moved,
        sum(cost.floor for cost in costs),
        max(cost.cached for cost in costs),
        sum(cost.flop for cost in costs),
    )


def image_cost(bound: Bound, decoding, batch: int) -> Cost:
    """The cost of a whole image, prefill included."""

    def run():
        state = begin(bound, decoding, batch)
        yield False
        while not state.over:
            yield from step(decoding, state)

    return count(bound, run(), lambda: 0)


def committed_rows(model: str) -> Iterator[tuple[str | int, ...]]:
    """The rows that `TABLE` has for a model, counted now, for two layers and two images: of a step half-way through
    the image, or of a whole image if every step has shapes of its own."""
    bound = MODELS[model].build(2)(2)
    for text in COMMITTED[model]:
        decoding = decoding_from_text(text)
        steps_alike = begin(bound, decoding, 2).refillable
        cost = (token_cost if steps_alike else image_cost)(bound, decoding, 2)
        yield model, text, "step" if steps_alike else "image", *cost.launches, cost.captured, *cost.bytes


def read_table() -> list[tuple[str | int, ...]]:
    """The rows of `TABLE`."""
    with open(TABLE, encoding="utf-8", newline="") as file:
        return [(*row[:3], *map(int, row[3:])) for row in list(csv.reader(file, delimiter="\t"))[1:]]


def write_table() -> None:
    counted = [row for model in COMMITTED for row in committed_rows(model)]
    with open(TABLE, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, delimiter="\t", lineterminator="\n")
        writer.writerows([COLUMNS, *counted])


def rows(name: str, decodings: list[str], batch_sizes: list[int]) -> Iterable[tuple[str, list[Cost]]]:
    """A label and the costs at each batch size of every row of the table of a model."""
    bind = MODELS[name].build(MODELS[name].layers)
    bounds = [bind(batch) for batch in batch_sizes]
    if hasattr(bounds[0].model, "scales"):
        for text in [text for text in decodings if text.startswith(("next-scale", "fastvar"))] or ["next-scale"]:
            decoding = decoding_from_text(text)
            costs = [scale_costs(bound, decoding, batch) for bound, batch in zip(bounds, batch_sizes, strict=True)]
            yield from ((f"{text}, {label}", [cost[label] for cost in costs]) for label in costs[0])
        return
    for text in decodings:
        decoding = decoding_from_text(text)
        yield text, [token_cost(*case) for case in zip(bounds, [decoding] * len(bounds), batch_sizes, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=MODELS, default=SHOWN)
    parser.add_argument(
        "--decoding",
        nargs="+",
        default=list(DECODINGS),
        help="name:setting=value,...; next-scale models take next-scale, by default, and fastvar",
    )
    parser.add_argument("--batch-size", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--flop", action="store_true", help="print the TFLOP of every step too")
    parser.add_argument(
        "--cache", action="store_true", help="print the GB of the keys and values that the floor reads too"
    )
    parser.add_argument("--write-table", action="store_true", help=f"write {TABLE.name} and print nothing")
    args = parser.parse_args()
    if args.write_table:
        with fake_cuda():
            write_table()
        return
    columns = ["model", "decoding", "launches: model", "outside", "captured"]
    for batch in args.batch_size:
        columns += [f"batch {batch}: GB in the model", "outside", "floor", "ratio"]
        columns += ["TFLOP"] * args.flop + ["keys and values"] * args.cache
    print("| " + " | ".join(columns) + " |\n|---|---|" + "---:|" * (len(columns) - 2))
    with fake_cuda():
        for name in args.model:
            for label, costs in rows(name, args.decoding, args.batch_size):
                cells = [name, label, *map(str, (*costs[0].launches, costs[0].captured))]
                for cost in costs:
                    cells += [f"{moved / 1e9:.3f}" for moved in (*cost.bytes, cost.floor)] + [f"{cost.ratio:.2f}"]
                    cells += [f"{cost.flop / 1e12:.4g}"] * args.flop + [f"{cost.cached / 1e9:.3f}"] * args.cache
                print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
