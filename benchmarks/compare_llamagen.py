"""LlamaGen next to its original: the same random weights of the published sizes, the same settings, one process, in
turn.

The original is a clone of https://github.com/FoundationVision/LlamaGen, whose `generate` runs unchanged:
class-conditional, guided, 256 pixels. Its weights are loaded by our converter. Before anything is timed, the
original's greedy tokens are checked with our logits. A step is a forward pass with what it takes to sample from it.
The original attends to a cache for the whole image at every step, ours to the part that is filled, so that timing the
first --steps alone favours ours a little. How many steps an image needs is not asked here: random weights do not tell.

git clone https://github.com/FoundationVision/LlamaGen
python benchmarks/compare_llamagen.py --reference LlamaGen --size b --dtype float32 bfloat16 --batch-size 1 4
python benchmarks/compare_llamagen.py --reference LlamaGen --dtype bfloat16 --batch-size 1 4 --decoding ar --int8
"""

from copy import deepcopy
from functools import partial

import torch
from side_by_side import (
    add_decodings,
    add_reference,
    add_sampling,
    begin,
    cases,
    check_gap,
    decodings_of,
    in_turn,
    make_parser,
    print_runs,
    run_steps,
    sampling_of,
    token_gap,
)
from torch import nn

from arimage.decoding import Decoding, Layout, Sampling
from arimage.models.quantized import quantize_linears
from arimage.pipelines.llamagen.convert import llamagen_transformer_from_original
from arimage.pipelines.llamagen.transformer_llamagen import LlamaGenTokenModel


SIDE, CHECKED = 16, 24
SIZES = ("b", "l", "xl", "xxl")


def build_original(size: str, dtype: torch.dtype, device: torch.device) -> nn.Module:
    from autoregressive.models.gpt import GPT_models

    original = GPT_models[f"GPT-{size.upper()}"](block_size=SIDE**2).to(device, dtype).eval()
    # Its own initialisation leaves the head at zero.
    nn.init.normal_(original.output.weight, std=0.02)

    # Whatever the number of steps, attention is that of a whole image.
    def setup_caches(max_batch_size, max_seq_length, dtype):
        type(original).setup_caches(original, max_batch_size, SIDE**2 + 1, dtype)

    original.setup_caches = setup_caches
    return original


def compare(
    original: nn.Module,
    batch: int,
    decodings: dict[str, Decoding],
    sampling: Sampling,
    steps: int,
    repeats: int,
    int8: bool,
) -> None:
    """Check and time the two with a batch of images, ours with weights in int8 too."""
    from autoregressive.models.generate import generate

    weight = original.output.weight
    transformer = llamagen_transformer_from_original(original.state_dict(), image_size=16 * SIDE, downsample=16)
    labels = 7 * torch.arange(batch, device=weight.device)
    scale = sampling.guidance_scale
    settings = {"cfg_scale": scale, "temperature": sampling.temperature, "top_p": sampling.top_p}

    def bind(network: nn.Module) -> LlamaGenTokenModel:
        condition = {"class_labels": labels}
        return LlamaGenTokenModel(network, condition, Layout((SIDE, SIDE)), guided=scale > 1)

    tokens = generate(original, labels, CHECKED, top_k=1, **settings).long()
    check_gap(token_gap(bind(transformer), tokens, scale), tokens.numel(), weight.dtype)
    networks = {"": transformer}
    if int8:
        networks["int8 "] = deepcopy(transformer)
        quantize_linears(networks["int8 "], torch.int8)
        gap = token_gap(bind(networks["int8 "]), tokens, scale)
        print(f"They are at most {gap:.4f} standard deviations below the largest logit in int8.")
    ours = {
        prefix + text: partial(run_steps, partial(bind, network), decoding, sampling, batch, steps)
        for prefix, network in networks.items()
        for text, decoding in decodings.items()
    }
    original_steps = {"original": lambda: generate(original, labels, steps, top_k=sampling.top_k, **settings).shape[1]}
    print_runs(in_turn(original_steps | ours, repeats, weight.device), "step", ["original", *list(ours)[:1]])


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--reference", required=True, help="folder of a clone of the original")
    parser.add_argument("--size", nargs="+", choices=SIZES, default=["b"])
    add_decodings(parser)
    parser.add_argument("--steps", type=int, default=SIDE**2, help=f"timed steps of each call, up to {SIDE**2}")
    parser.add_argument("--int8", action="store_true", help="ours with weights in int8 too")
    add_sampling(parser, guidance_scale=4.0, top_k=2000)
    arguments = parser.parse_args()
    decodings, sampling = decodings_of(arguments), sampling_of(arguments)
    add_reference(arguments.reference, "autoregressive/models/generate.py")
    device = begin(arguments)
    for size in arguments.size:
        for dtype, batch in cases(arguments):
            print(f"\nGPT-{size.upper()}, {dtype}, {batch} images")
            torch.manual_seed(0)
            original = build_original(size, dtype, device)
            compare(original, batch, decodings, sampling, arguments.steps, arguments.repeats, arguments.int8)


if __name__ == "__main__":
    main()
