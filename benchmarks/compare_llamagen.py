"""LlamaGen next to its original: the same random weights of the published sizes, the same settings, one process, in turn.

The original is a clone of https://github.com/FoundationVision/LlamaGen, whose `generate` runs unchanged: class-conditional,
guided, 256 pixels. Its weights are loaded by our converter. Before anything is timed, the original's greedy tokens are
checked with our logits. A step is a forward pass with what it takes to sample from it; both attend to a cache for the whole
image, of which --steps bounds the steps that are timed. How many steps an image needs is not asked here: random weights do
not tell.

git clone https://github.com/FoundationVision/LlamaGen
python benchmarks/compare_llamagen.py --reference LlamaGen --size b --dtype float32 bfloat16 --batch-size 1 4
"""

from functools import partial

import torch
from side_by_side import (
    add_reference,
    add_sampling,
    begin,
    check_gap,
    in_turn,
    make_parser,
    named_decodings,
    print_runs,
    run_steps,
    sampling_of,
    token_gap,
)
from torch import nn

from arimage.convert.llamagen import llamagen_transformer_from_original
from arimage.decoding import Layout
from arimage.models.transformer_llamagen import LlamaGenTokenModel


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


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--reference", required=True, help="folder of a clone of the original")
    parser.add_argument("--size", nargs="+", choices=SIZES, default=["b"])
    parser.add_argument(
        "--decoding", nargs="+", default=["ar", "sjd-coupled:window=8", "sjd-coupled:window=32"], help="of ours"
    )
    parser.add_argument("--steps", type=int, default=SIDE**2, help=f"timed steps of each call, up to {SIDE**2}")
    add_sampling(parser, guidance_scale=4.0, top_k=2000)
    arguments = parser.parse_args()
    decodings, sampling = named_decodings(arguments.decoding), sampling_of(arguments)
    add_reference(arguments.reference, "autoregressive/models/generate.py")
    from autoregressive.models.generate import generate

    device = begin(arguments)
    scale, steps = sampling.guidance_scale, arguments.steps
    settings = {"cfg_scale": scale, "temperature": sampling.temperature, "top_p": sampling.top_p}
    for size in arguments.size:
        for dtype in (getattr(torch, name) for name in arguments.dtype):
            torch.manual_seed(0)
            original = build_original(size, dtype, device)
            transformer = llamagen_transformer_from_original(original.state_dict(), image_size=256, downsample=16)
            for batch in arguments.batch_size:
                labels = torch.arange(batch, device=device) * 7
                print(f"\nGPT-{size.upper()}, {dtype}, {batch} images")

                def bind(labels=labels, transformer=transformer):
                    condition = {"class_labels": labels}
                    return LlamaGenTokenModel(transformer, condition, Layout((SIDE, SIDE)), guided=scale > 1)

                def theirs(labels=labels, original=original):
                    return generate(original, labels, steps, top_k=sampling.top_k, **settings).shape[1]

                tokens = generate(original, labels, CHECKED, top_k=1, **settings).long()
                with torch.no_grad():
                    check_gap(token_gap(bind(), tokens, scale), tokens.numel(), dtype)
                calls = {
                    text: partial(run_steps, bind, decoding, sampling, batch, steps)
                    for text, decoding in decodings.items()
                }
                runs = in_turn({"original": theirs, **calls}, arguments.repeats, device)
                print_runs(runs, "step", ["original", *list(calls)[:1]])


if __name__ == "__main__":
    main()
