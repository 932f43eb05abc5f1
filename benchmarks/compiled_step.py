"""The kernels that `pipe.compile()` leaves of one decoding step on an H100, found without a GPU or any weights.

Dynamo and inductor compile a step of fake CUDA tensors, half-way through the image, up to the code that launches the
kernels. Nothing is compiled for the device and nothing runs. The step is compiled with few layers and with more of
them: the difference is what each layer launches, and the rest is launched once. Attention is PyTorch's
memory-efficient kernel, which a GPU takes for a mask. Everything else is what inductor decides, but autotuning, which
needs the device.

A kernel copies the cache if a tensor of the cache is among its arguments, and it goes through at least half as many
elements as there are keys of one layer that queries attend to. No step should have such a kernel.

It reaches into private parts of PyTorch 2.14, and the whole process believes that there is a GPU: run it as a script.

python benchmarks/compiled_step.py --model llamagen-xl-384 janus-pro-7b --decoding ar sjd-coupled:window=16
python benchmarks/compiled_step.py --model llamagen-xl-384 --layers 1 2 --kernels    # names them all
"""

import argparse
import logging
import math
import os
import re
from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import NamedTuple

import pretended_gpu
import step_cost
import torch
from shapes import Bind, Bound
from step_models import MODELS
from torch._inductor.graph import GraphLowering

from arimage.decoding import Decoding, decoding_from_text
from arimage.decoding.run.captured_steps import CapturedSteps
from arimage.models.fused import Fused, projections


# The families that keep keys and values, and a decoding of each.
DEFAULT = {
    "llamagen-xl-384": "ar",
    "arpg-l-256": "sjd-coupled",
    "randar-l-256": "sjd-coupled",
    "lpd-l-256": "groups:groups=4",
    "cosmos-4b": "ar",
    "latent-llama": "ar",
    "var-d30": "next-scale",
    "infinity-2b": "next-scale",
    "janus-pro-7b": "ar",
    "glm-image": "ar",
    "emu3-gen": "ar",
}


class Generated(Exception):
    """Carries out of inductor what it has generated, with the sizes of the tensors that it is called with, by name."""

    def __init__(self, code: str, sizes: dict[str, tuple[int, ...]]):
        super().__init__("generated")
        self.code, self.sizes = code, sizes


def generate(function: Callable, *args) -> Generated:
    """What inductor generates for the first call of a compiled function in a call of `function`."""
    codegen, found = GraphLowering.codegen, []

    def stop(self):
        sizes = {
            name: tuple(map(int, value.get_size()))
            for name, value in self.graph_inputs.items()
            if hasattr(value, "get_size")
        }
        found.append(Generated(codegen(self)[0].value, sizes))
        raise found[0]

    GraphLowering.codegen = stop
    try:
        function(*args)
    except Exception:
        if not found:
            raise
    finally:
        GraphLowering.codegen = codegen
    return found[0]


class Launch(NamedTuple):
    """A kernel, the elements that it goes through if inductor has generated it, and the names of its arguments."""

    name: str
    elements: int
    arguments: frozenset[str]


def launches(code: str) -> list[Launch]:
    """The kernels that generated code launches, in order. Another name of a tensor is replaced by its first."""
    found, names = [], {}

    def tensors(text: str) -> frozenset[str]:
        return frozenset(names.get(name, name) for name in re.findall(r"\b(?:arg|buf)\d+(?:_1)?\b", text))

    for line in code[code.index("def call(self") : code.index("\nrunner =")].splitlines():
        line = line.strip()
        if match := re.match(r"(buf\d+) = (?:reinterpret_tensor\()?((?:arg|buf)\d+(?:_1)?)\b(?!\[)", line):
            names[match[1]] = names.get(match[2], match[2])
        elif match := re.match(r"(triton_\w+)\.run\((.*), stream", line):
            sizes = [int(size) for size in match[2].split(", ") if size.isdigit()]
            found.append(Launch(match[1], math.prod(sizes), tensors(match[2])))
        elif not line.startswith("assert") and (
            match := re.search(r"(extern_kernels\.\w+|torch\.ops\.[\w.]+|aten\.[\w.]+)\((.*)", line)
        ):
            found.append(Launch(match[1], 0, tensors(match[2])))
    return found


def half_way(bound: Bound, decoding: Decoding, batch: int):
    """A state whose next step is half-way through the image."""
    state = step_cost.begin(bound, decoding, batch)
    if state.refillable:
        return step_cost.half_way(bound, decoding, batch)
    steps = 0
    while not state.over:
        decoding.step(state)
        steps += 1
    state = step_cost.begin(bound, decoding, batch)
    for _ in range(steps // 2):
        decoding.step(state)
    return state


class Compiled(NamedTuple):
    """The kernels of a step, and those that touch a whole layer of the cache."""

    launches: list[Launch]
    copies: list[Launch]


def compiled(bind: Bind, decoding: Decoding, batch: int, fuse: bool) -> Compiled:
    bound = bind(batch)
    if fuse:
        for layers in [layers for network in bound.networks for layers in projections(network)]:
            Fused(layers)
    state, taken = half_way(bound, decoding, batch), half_way(bound, decoding, batch)
    decoding.step(taken)
    layer, attended = state.cache.keys[0], taken.cache.attended
    with pretended_gpu.available():
        if bound.model.kind == "causal_latents":
            # Pipelines compile its forward passes, not the steps, which call a head many times.
            bound.networks[0].compile(fullgraph=True, dynamic=False)
            generated = generate(decoding.step, state)
        else:
            step = CapturedSteps()._compile(type(decoding).step, True)
            generated = generate(step, decoding, state)
    torch.compiler.reset()
    found = launches(generated.code)
    cached = {name for name, size in generated.sizes.items() if size[-4:] == layer.shape}
    least = layer[:, :, :attended].numel() / 2
    return Compiled(found, [launch for launch in found if launch.elements >= least and launch.arguments & cached])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=MODELS, default=list(DEFAULT))
    parser.add_argument("--decoding", nargs="+", help="name:setting=value,...; by default one per model")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--layers", nargs=2, type=int, default=[2, 4], help="few and more layers, 2 and 4 by default")
    parser.add_argument("--fuse", action="store_true", help="after fuse_projections()")
    parser.add_argument("--kernels", action="store_true", help="print all kernels of the step with more layers too")
    args = parser.parse_args()
    few, many = args.layers
    print(
        "| model | decoding | launches per layer | once | copies of the cache |\n|---|---|---:|---:|---:|", flush=True
    )
    # Inductor says that it keeps what it has not finished.
    logging.getLogger("torch._inductor.utils").setLevel(logging.ERROR)
    with TemporaryDirectory() as folder, step_cost.fake_cuda():
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        for model in args.model:
            for text in args.decoding or [DEFAULT.get(model, "ar")]:
                steps = [
                    compiled(MODELS[model].build(layers), decoding_from_text(text), args.batch_size, args.fuse)
                    for layers in args.layers
                ]
                counts = [len(step.launches) for step in steps]
                each = (counts[1] - counts[0]) / (many - few)
                cells = [model, text, f"{each:g}", f"{counts[0] - few * each:g}", str(len(steps[1].copies))]
                print("| " + " | ".join(cells) + " |", flush=True)
                if args.kernels:
                    for launch in steps[1].launches:
                        mark = " (a copy)" if launch in steps[1].copies else ""
                        print(f"    {launch.name[:100]} {launch.elements:,}{mark}")


if __name__ == "__main__":
    main()
