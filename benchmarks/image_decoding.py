"""From tokens to pixels: seconds and peak memory of the image tokenizers, random weights of the published sizes.

The rows of a table are one tokenizer with other settings, timed in turn: as it is, with its weights in channels_last,
and, where it has them, with slicing and tiling; on a GPU also with the group norm and SiLU of torch instead of
Triton's. The peak of memory on a CPU is that of the process, with the weights of all rows. --profile prints what the
time goes to instead.

python benchmarks/image_decoding.py --tokenizer llamagen var --size 256 512 --batch-size 1 4 --dtype float32 bfloat16
"""

import copy
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from unittest.mock import patch

import torch
from diffusers import VQModel
from side_by_side import begin, cases, in_turn, make_parser, print_runs
from torch import nn
from torch.profiler import profile
from transformers import Emu3VQVAE, Emu3VQVAEConfig
from transformers.models.janus.configuration_janus import JanusVQVAEConfig
from transformers.models.janus.modeling_janus import JanusVQVAE

from arimage.kernels.group_norm import group_norm_silu
from arimage.pipelines.emu3.vq_emu3 import decode_image
from arimage.tokenizers import vq_llamagen
from arimage.tokenizers.tiling import TilingMixin
from arimage.tokenizers.vq_llamagen import LlamaGenVQModel
from arimage.tokenizers.vq_var import VARVQModel


# Tokenizer: pixels per token along a side, and the module.
TOKENIZERS: dict[str, tuple[int, Callable[[], nn.Module]]] = {
    "llamagen": (16, LlamaGenVQModel),
    "var": (16, VARVQModel),
    "chameleon": (
        16,
        lambda: VQModel(
            down_block_types=("DownEncoderBlock2D",) * 5,
            up_block_types=("UpDecoderBlock2D",) * 5,
            block_out_channels=(128, 128, 256, 256, 512),
            layers_per_block=2,
            latent_channels=256,
            num_vq_embeddings=8192,
        ),
    ),
    "janus": (16, lambda: JanusVQVAE(JanusVQVAEConfig())),
    "emu3": (8, lambda: Emu3VQVAE(Emu3VQVAEConfig())),
}
PARTS = {
    "conv": "convolution",
    "group_norm": "group norm",
    "silu": "SiLU",
    "sigmoid": "SiLU",
    "upsample": "upsampling",
    "attention": "attention",
    "bmm": "attention",
    "softmax": "attention",
}


def decode(vq: nn.Module, codes: torch.LongTensor) -> int:
    """Decode codes [B, h, w], and return how many images they are. VAR decodes latents of that size."""
    if isinstance(vq, VARVQModel):
        vectors = vq.lookup(codes)
        vq.decode_latents(vectors)
    elif isinstance(vq, LlamaGenVQModel):
        vq.decode(codes)
    elif isinstance(vq, Emu3VQVAE):
        decode_image(vq, codes)
    elif isinstance(vq, JanusVQVAE):
        vq.quantize.quant_state_dims = list(codes.shape[1:])
        vq.decode(codes.flatten(1))
    else:
        vectors = vq.quantize.embedding(codes).permute(0, 3, 1, 2)
        vq.decode(vectors, force_not_quantize=True)
    return len(codes)


def decode_separately(vq: nn.Module, codes: torch.LongTensor) -> int:
    with patch.object(vq_llamagen, "group_norm_silu", group_norm_silu.__wrapped__):
        return decode(vq, codes)


def settings(vq: nn.Module, tile: int) -> dict[str, Callable[[torch.LongTensor], int]]:
    """The rows of a table: functions of codes."""
    channels_last = copy.deepcopy(vq).to(memory_format=torch.channels_last)
    on_gpu = next(vq.parameters()).is_cuda
    rows: dict[str, Callable[[torch.LongTensor], int]]
    rows = {"whole": partial(decode, vq), "weights in channels_last": partial(decode, channels_last)}
    if not isinstance(vq, TilingMixin):
        return rows
    if on_gpu:
        rows["group norm and SiLU of torch"] = partial(decode_separately, vq)
    # Copies that share the weights, each with settings of its own.
    sliced, tiled = copy.copy(vq), copy.copy(vq)
    sliced.enable_slicing()
    tiled.enable_tiling(tile, tile)
    return rows | {"slicing": partial(decode, sliced), f"tiles of {tile}": partial(decode, tiled)}


def print_profile(call: Callable[[], int]) -> None:
    """The shares of the operators in the CPU time of a call, after one that is not counted."""
    call()
    with profile() as profiler:
        call()
    times = defaultdict(float)
    for event in profiler.key_averages():
        part = next((part for name, part in PARTS.items() if name in event.key), "others")
        times[part] += event.self_cpu_time_total
    shares = sorted(times.items(), key=lambda item: -item[1])
    print(", ".join(f"{part} {time / sum(times.values()):.1%}" for part, time in shares), flush=True)


@torch.inference_mode()
def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--tokenizer", nargs="+", choices=list(TOKENIZERS), default=["llamagen", "var"])
    parser.add_argument("--size", nargs="+", type=int, default=[256], help="sides of the images in pixels")
    parser.add_argument("--tile", type=int, default=512, help="sides of a tile in pixels")
    parser.add_argument("--profile", action="store_true", help="print what the time goes to, on a CPU")
    arguments = parser.parse_args()
    device = begin(arguments)
    for name in arguments.tokenizer:
        factor, build = TOKENIZERS[name]
        for dtype, batch in cases(arguments):
            vq = nn.Module.to(build().eval(), device, dtype)
            for size in arguments.size:
                codes = torch.randint(4096, (batch, size // factor, size // factor), device=device)
                print(f"\n{name}, {size} pixels, batch {batch}, {dtype}", flush=True)
                if arguments.profile:
                    print_profile(partial(decode, vq, codes))
                    continue
                rows = {title: partial(row, codes) for title, row in settings(vq, arguments.tile).items()}
                print_runs(in_turn(rows, arguments.repeats, device), "image", ["whole"])


if __name__ == "__main__":
    main()
