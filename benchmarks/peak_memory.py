"""The memory of a film at the sizes of published models, counted without a GPU or any weights.

The passes and the decoding to frames run on fake CUDA tensors, which have shapes but no memory, and every tensor is
counted from the operator that makes it until it is freed. Attention counts as a fused kernel, which allocates its
output only. The allocator's rounding, libraries and CUDA itself come on top, about a gigabyte.

python benchmarks/peak_memory.py    # the table of benchmarks/notes/memory.md
"""

import argparse
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from shapes import build
from shapes.infinitystar import infinitystar
from step_cost import begin, fake_cuda
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from arimage.decoding import decoding_from_text
from arimage.models.quantized import quantize_linears
from arimage.pipelines.infinitystar.vq_infinitystar import InfinityStarVideoTokenizer
from arimage.pipelines.published_parts import T5_XL_ENCODER


LAYERS = 36
# Pixel class, finest grid and frames.
FILMS = {
    "480p, 81 frames": ("0.40M", (30, 53), 81),
    "480p, 161 frames": ("0.40M", (30, 53), 161),
    "720p, 81 frames": ("0.90M", (45, 80), 81),
}


class Peak(TorchDispatchMode):
    """Counts the bytes of the tensors that operators make, and the most at a time."""

    def __init__(self):
        super().__init__()
        self.live = self.most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        # Views, and what is written in place.
        given = {storage._cdata for storage in storages(args, kwargs)}
        results = function(*args, **(kwargs or {}))
        for storage in storages(results):
            if storage._cdata not in given:
                self.live += storage.nbytes()
                self.most = max(self.most, self.live)
                weakref.finalize(storage, self.free, storage.nbytes())
        return results

    def free(self, size: int) -> None:
        self.live -= size


def storages(*values: Any) -> list[Any]:
    return [leaf.untyped_storage() for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


class FusedAttention(TorchFunctionMode):
    """Takes the place of attention, which has no fused form on fake tensors."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is F.scaled_dot_product_attention:
            return torch.empty_like(args[0])
        return function(*args, **(kwargs or {}))


def peak_of(run: Callable[[], Any]) -> int:
    """The most bytes that `run` has at a time, without what there was before."""
    with Peak() as peak, FusedAttention():
        run()
    return peak.most


def weights_of(network: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*network.parameters(), *network.buffers()))


def measure(pixels: str, finest: tuple[int, int], frames: int, batch: int, decoding: str) -> dict[str, int]:
    """Bytes of the weights in bfloat16 and in int8, and the most that the passes and the decoding to frames need
    besides."""
    found = {}
    chosen = decoding_from_text(decoding)
    with fake_cuda():
        vq = build(InfinityStarVideoTokenizer)
        for name in ("bfloat16", "int8"):
            bound = infinitystar(LAYERS, pixels, finest, vq.num_latent_frames(frames))(batch)
            [transformer] = bound.networks
            if name == "int8":
                quantize_linears(transformer, torch.int8)
            found[f"transformer, {name}"] = weights_of(transformer)

            def passes(bound=bound):
                state = begin(bound, chosen, batch)
                while not state.over:
                    chosen.step(state)

            found[f"passes, {name}"] = peak_of(passes)
        found["text encoder"], found["tokenizer"] = 2 * T5_XL_ENCODER, weights_of(vq)
        latents = torch.empty(batch, 64, vq.num_latent_frames(frames), *finest, dtype=torch.bfloat16)
        found["frames"] = peak_of(lambda: vq.decode_latents(latents))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--decoding", default="next-scale")
    args = parser.parse_args()
    print("| GB | transformer | passes | tokenizer | frames | all on the GPU | offloaded | int8, offloaded |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for label, film in FILMS.items():
        found = measure(*film, args.batch_size, args.decoding)
        frames = found["tokenizer"] + found["frames"]
        resident = found["transformer, bfloat16"] + found["text encoder"] + found["tokenizer"]
        totals = (
            resident + max(found["passes, bfloat16"], found["frames"]),
            *(max(found[f"transformer, {name}"] + found[f"passes, {name}"], frames) for name in ("bfloat16", "int8")),
        )
        parts = [found[name] for name in ("transformer, bfloat16", "passes, bfloat16", "tokenizer", "frames")]
        print(f"| {label} | {' | '.join(f'{size / 1e9:.1f}' for size in (*parts, *totals))} |", flush=True)


if __name__ == "__main__":
    main()
