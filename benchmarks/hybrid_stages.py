"""The seconds of the stages of MammothModa2: tokens, by several decodings in turn, hand-off, decoder and pixels.

The language model has the widths of Preview, and the decoder its own, both with random weights and few layers
(--layers, --decoder-layers); half of those of the language model have experts. The decodings take turns in one
process, with the same seeds. How many drafts random weights accept says nothing about the published ones: compare the
milliseconds of a pass.

python benchmarks/hybrid_stages.py --layers 4 --decoder-layers 2 --grid 16 --size 256
"""

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler
from side_by_side import begin, cases, make_parser, spread

from arimage import MammothModa2LanguageModel, MammothModa2Pipeline, MammothModa2Transformer2DModel
from arimage.pipelines.mammothmoda2.transformer_mammothmoda2 import MammothModa2Config


WIDTHS = {"hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4}
DECODER_WIDTHS = {"hidden_size": 2520, "num_attention_heads": 21, "num_kv_heads": 7, "axes_dim_rope": (40, 40, 40)}
# Those of FLUX, whose latents have 16 channels too.
VAE_WIDTHS = (128, 256, 512, 512)
# Text tokens; the published 152064 take 2 GB more in float32, and none but those of a prompt is read.
VOCABULARY = 1000
STAGES = ("tokens", "hand_off", "decoder", "pixels")


def build(layers: int, decoder_layers: int, grid: int, size: int) -> MammothModa2Pipeline:
    shape = {"vocab_size": VOCABULARY, "gen_vocab_start_index": VOCABULARY, "gen_head_start": VOCABULARY}
    shape |= {"row_end_id": VOCABULARY, "image_end_id": VOCABULARY + 7, "visual_token_start_id": VOCABULARY + 8}
    config = MammothModa2Config(
        backbone="qwen2", num_hidden_layers=layers, expert_layers=[layers // 2, layers], **WIDTHS, **shape
    )
    decoder = MammothModa2Transformer2DModel(
        num_layers=decoder_layers, text_feat_dim=config.hidden_size, projects_queries=True, **DECODER_WIDTHS
    )
    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * len(VAE_WIDTHS),
        up_block_types=("UpDecoderBlock2D",) * len(VAE_WIDTHS),
        block_out_channels=VAE_WIDTHS,
        layers_per_block=2,
        latent_channels=16,
    )
    pipe = MammothModa2Pipeline(
        MammothModa2LanguageModel(config).eval(),
        decoder.eval(),
        vae.eval(),
        FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, time_shift_type="linear"),
        token_grid=(grid, grid),
        image_size=size,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--decoder-layers", type=int, default=2)
    parser.add_argument("--decoding", nargs="+", default=["ar", "sjd-coupled"], help="name:setting=value,...")
    parser.add_argument("--grid", type=int, default=32, help="tokens along each side")
    parser.add_argument("--size", type=int, default=512, help="pixels along each side")
    parser.add_argument("--inference-steps", type=int, default=10, help="of the decoder")
    arguments = parser.parse_args()
    device = begin(arguments)
    for dtype, batch in cases(arguments):
        print(f"\n{arguments.layers} and {arguments.decoder_layers} layers, {dtype}, {batch} images")
        torch.manual_seed(0)
        pipe = build(arguments.layers, arguments.decoder_layers, arguments.grid, arguments.size).to(device, dtype)
        prompts = torch.randint(VOCABULARY, (batch, 32))
        prompts[:, -1] = VOCABULARY + 6
        call = {"input_ids": prompts, "negative_input_ids": prompts[:1, :20]}
        call |= {"num_inference_steps": arguments.inference_steps, "output_type": "pt"}
        runs = {text: [] for text in arguments.decoding}
        for repeat in range(-1, arguments.repeats):
            for text, found in runs.items():
                generator = torch.Generator().manual_seed(repeat + 1)
                stats = pipe(**call, decoding=text, generator=generator).stats
                if repeat >= 0:
                    found.append(stats)
        print("decoding | passes | ms a pass | " + " | ".join(f"s of {stage}" for stage in STAGES))
        for text, found in runs.items():
            passes = spread([stats.forward_passes for stats in found], 0)
            each = spread([1000 * stats.seconds["tokens"] / stats.forward_passes for stats in found])
            stages = [spread([stats.seconds[stage] for stats in found], 2) for stage in STAGES]
            print(" | ".join([text, passes, each, *stages]))


if __name__ == "__main__":
    main()
