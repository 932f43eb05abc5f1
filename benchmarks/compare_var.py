"""VAR next to its original: the same random weights of the published sizes, the same settings, one process, in turn.

The original is a clone of https://github.com/FoundationVision/VAR, whose `autoregressive_infer_cfg` runs unchanged:
classes, guided, 256 pixels, with and without the image decoder. In bfloat16 it runs under autocast, as in its own
demo. Its weights are loaded by our converter, and its greedy tokens are checked with our logits before anything is
timed.

git clone https://github.com/FoundationVision/VAR
python benchmarks/compare_var.py --reference VAR --depth 16 --dtype float32 bfloat16 --batch-size 1 4
"""

import contextlib
import io

import torch
from side_by_side import (
    add_reference,
    add_sampling,
    begin,
    cases,
    check_gap,
    greedy_gap,
    guided,
    in_turn,
    make_parser,
    print_runs,
    sampling_of,
)
from torch import nn

from arimage.decoding import Sampling, ScaleModel
from arimage.decoding.next_scale import scale_sampling
from arimage.pipelines.var.convert import var_tokenizer_from_original, var_transformer_from_original
from arimage.pipelines.var.pipeline_var import VARPipeline


SCALES = (1, 2, 3, 4, 5, 6, 8, 10, 13, 16)


def build_original(depth: int, device: torch.device) -> tuple[nn.Module, nn.Module]:
    """The image tokenizer and the transformer, in float32."""
    from models.var import VAR
    from models.vqvae import VQVAE

    vq = VQVAE(vocab_size=4096, z_channels=32, ch=160, v_patch_nums=SCALES)
    # It prints its settings.
    with contextlib.redirect_stdout(io.StringIO()):
        width = {"depth": depth, "embed_dim": 64 * depth, "num_heads": depth}
        var = VAR(vq, **width, attn_l2_norm=True, patch_nums=SCALES)
        # As it starts a training, but with blocks and a head that count.
        var.init_weights(init_adaln=1, init_adaln_gamma=1, init_head=1, init_std=-1)
    return vq.to(device).eval(), var.to(device).eval()


@torch.no_grad()
def scale_gap(model: ScaleModel, maps: list[torch.LongTensor], sampling: Sampling) -> float:
    """The largest `greedy_gap` of the greedy maps [B, n] of another implementation."""
    cache, logits = model.prefill(len(maps[0]))
    latents, gaps = None, []
    for scale, tokens in enumerate(maps):
        if scale:
            logits = model.forward(scale, latents, cache)
        strength = scale_sampling(sampling, scale, model).guidance_scale
        gaps.append(greedy_gap(guided(logits, strength), tokens))
        latents = model.accumulate(scale, latents, model.vectors(scale, tokens))
    return max(gaps)


def compare(var: nn.Module, vae: nn.Module, dtype: torch.dtype, batch: int, sampling: Sampling, repeats: int) -> None:
    """Check and time the two with a batch of images."""
    labels = 7 * torch.arange(batch, device=var.lvl_1L.device)
    device = labels.device
    pipe = VARPipeline(
        var_transformer_from_original(var.state_dict(), dtype=dtype),
        var_tokenizer_from_original(vae.state_dict(), scales=SCALES).to(dtype),
    )
    pipe.set_progress_bar_config(disable=True)
    settings = {name: getattr(sampling, name) for name in ("guidance_scale", "top_k", "top_p")}

    def original(top_k: int = sampling.top_k) -> int:
        with torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
            cfg = sampling.guidance_scale - 1
            var.autoregressive_infer_cfg(batch, labels, cfg=cfg, top_k=top_k, top_p=sampling.top_p)
        return batch

    def original_tokens(**changes) -> int:
        vae.fhat_to_img = torch.clone
        original(**changes)
        del vae.fhat_to_img
        return batch

    def ours(output_type: str = "pt") -> int:
        pipe(class_labels=labels, **settings, output_type=output_type)
        return batch

    maps = []
    hook = vae.quantize.embedding.register_forward_pre_hook(lambda _, inputs: maps.append(inputs[0]))
    original_tokens(top_k=1)
    hook.remove()
    model = pipe.prepare(class_labels=labels, **settings).model
    check_gap(scale_gap(model, maps, sampling), model.num_tokens * batch, dtype)
    whole = {"original": original, "ours": ours}
    tokens = {"original, no pixels": original_tokens, "ours, no pixels": lambda: ours("latent")}
    runs = in_turn(whole | tokens, repeats, device)
    for group in (whole, tokens):
        print_runs({name: runs[name] for name in group}, "image", list(group)[:1])


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--reference", required=True, help="folder of a clone of the original")
    parser.add_argument("--depth", nargs="+", type=int, default=[16], help="published: 16, 20, 24, 30")
    add_sampling(parser, guidance_scale=2.5, top_k=900, top_p=0.96)
    arguments = parser.parse_args()
    sampling = sampling_of(arguments)
    if sampling.temperature != 1:
        parser.error("--temperature is not 1: the original has none, leave it out")
    add_reference(arguments.reference, "models/var.py")
    device = begin(arguments)
    for depth in arguments.depth:
        torch.manual_seed(0)
        vae, var = build_original(depth, device)
        for dtype, batch in cases(arguments):
            print(f"\nVAR-d{depth}, {dtype}, {batch} images")
            compare(var, vae, dtype, batch, sampling, arguments.repeats)


if __name__ == "__main__":
    main()
