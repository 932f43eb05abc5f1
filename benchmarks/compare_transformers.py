"""Janus, Emu3, Emu3.5 and GLM-Image next to `generate` of transformers: the same random weights, the same settings,
one process, in turn.

The language models have the widths of Janus-Pro-1B, Janus-Pro-7B, Emu3, Emu3.5 and GLM-Image, but few layers
(--layers) and an image tokenizer that is not run; the vocabularies of the text of all but Emu3 are cut, since no image
needs them, while Emu3's, over which transformers computes its logits, takes 6 GB in float32. Before anything is timed,
the greedy tokens of transformers are checked with our logits. A step is a forward pass with what it takes to sample
from it. transformers takes a step of Emu3 and Emu3.5 for every row end, ours none; its caches of these and of
GLM-Image grow with the image, so that its first steps (--steps) are the cheapest. The tokens of GLM-Image have no
guidance.

python benchmarks/compare_transformers.py --model janus-pro-1b emu3 glm-image --layers 4 --dtype bfloat16 --steps 64
python benchmarks/compare_transformers.py --model janus-pro-1b glm-image --dtype bfloat16 --decoding ar --int8
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from side_by_side import (
    add_decodings,
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
from transformers import (
    Emu3Config,
    Emu3ForConditionalGeneration,
    GlmImageConfig,
    GlmImageForConditionalGeneration,
    JanusConfig,
    JanusForConditionalGeneration,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.utils import logging

from arimage.decoding import Decoding, Layout, Sampling
from arimage.models.language_model import LanguageTokenModel
from arimage.models.quantized import quantize_linears
from arimage.pipelines.emu3.pipeline_emu3 import Emu3Pipeline
from arimage.pipelines.emu3.prompts import BEGIN_OF_CODES, BEGIN_OF_IMAGE, BEGIN_OF_TEXT, CODE, END_OF_ROW
from arimage.pipelines.emu35.ibq_emu35 import IBQModel
from arimage.pipelines.emu35.pipeline_emu35 import Emu35Pipeline
from arimage.pipelines.emu35.prompts import TOKENS
from arimage.pipelines.glm_image.transformer_glm_image import bind_prompts
from arimage.pipelines.janus.pipeline_janus import JanusPipeline


PROMPT, CHECKED = 32, 12
WIDTHS = {
    "janus-pro-1b": {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16},
    "janus-pro-7b": {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32},
    "emu3": {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8},
    "emu3.5": {"hidden_size": 5120, "intermediate_size": 25600, "num_attention_heads": 64, "num_key_value_heads": 8},
    "glm-image": {
        "hidden_size": 4096,
        "intermediate_size": 13696,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
    },
}
TEXT_VOCABULARY = {"janus-pro-1b": 1000, "janus-pro-7b": 1000, "emu3": 151854, "emu3.5": 1000, "glm-image": 1000}
# Tokens along each side of an image: those of Janus, of Emu3 at 512 pixels, and of Emu3.5 and GLM-Image at 1024.
GRIDS = {"janus-pro-1b": 24, "janus-pro-7b": 24, "emu3": 64, "emu3.5": 64, "glm-image": 32}


class Contestant(NamedTuple):
    """How our model is bound to the images of a call, the network, and transformers' tokens [B, steps] of the same
    call."""

    bind: Callable[[], LanguageTokenModel]
    network: PreTrainedModel
    theirs: Callable[..., torch.Tensor]


def prompt_ids(batch: int, last: int, device: torch.device) -> torch.LongTensor:
    """Token ids [B, PROMPT] that begin with 0 and end with `last`."""
    ids = torch.arange(10, 10 + PROMPT, device=device).repeat(batch, 1)
    ids[:, 0], ids[:, -1] = 0, last
    return ids


def build_janus(name: str, layers: int) -> JanusPipeline:
    width, grid = WIDTHS[name], GRIDS[name]
    text = {**width, "num_hidden_layers": layers, "vocab_size": TEXT_VOCABULARY[name], "pad_token_id": 1}
    # None of its images is read, nor decoded to pixels.
    vision = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_image_tokens": grid**2}
    vq = {"base_channels": 32, "channel_multiplier": [1] * 5, "num_res_blocks": 1, "num_patches": grid}
    vq |= {"image_token_embed_dim": width["hidden_size"], "projection_dim": width["hidden_size"]}
    vision["projection_dim"] = width["hidden_size"]
    model = JanusForConditionalGeneration(JanusConfig(text_config=text, vision_config=vision, vq_config=vq))
    config = model.generation_config
    config.bos_token_id, config.pad_token_id, config.generation_kwargs = 0, 1, {"boi_token_id": 2}
    return JanusPipeline(model)


def janus(pipe: JanusPipeline, batch: int, sampling: dict) -> Contestant:
    model, grid = pipe.model, pipe.grid[0]
    ids = prompt_ids(batch, pipe.begin_of_image, model.device)

    def theirs(steps: int, **changes) -> torch.Tensor:
        # It reads there how many tokens an image has; the cache is that of a whole image.
        model.model.vision_model.config.num_image_tokens = steps
        options = {"do_sample": True, **sampling, "max_length": PROMPT + grid**2} | changes
        return model.generate(ids, attention_mask=torch.ones_like(ids), generation_mode="image", **options)

    arguments = {"input_ids": ids, "guidance_scale": sampling["guidance_scale"]}
    return Contestant(lambda: pipe.prepare(**arguments).model, model, theirs)


def build_emu3(name: str, layers: int) -> Emu3Pipeline:
    first = TEXT_VOCABULARY[name]
    special = (BEGIN_OF_TEXT, "<image>", "<|endoftext|>", BEGIN_OF_IMAGE, BEGIN_OF_CODES, END_OF_ROW)
    vocabulary = {token: i for i, token in enumerate(special)}
    codes = {CODE.format(code): first + code for code in range(32768)}
    text = {**WIDTHS[name], "num_hidden_layers": layers, "vocab_size": first + len(codes)}
    text |= {"bos_token_id": 0, "pad_token_id": 2, "eos_token_id": None}
    vq = {"base_channels": 32, "channel_multiplier": [1] * 4, "num_res_blocks": 1, "codebook_size": len(codes)}
    config = Emu3Config(text_config=text, vq_config=vq, vocabulary_map=vocabulary | codes, image_token_id=1)
    return Emu3Pipeline(Emu3ForConditionalGeneration(config), image_area=(8 * GRIDS[name]) ** 2)


def emu3(pipe: Emu3Pipeline, batch: int, sampling: dict) -> Contestant:
    vocabulary = pipe.model.config.vocabulary_map
    ids = [vocabulary[name] for name in (BEGIN_OF_CODES, END_OF_ROW, CODE.format(0))]
    return with_row_ends(pipe, batch, sampling, *ids, codes=pipe.model.config.vq_config.codebook_size)


def build_emu35(name: str, layers: int) -> Emu35Pipeline:
    codes, first = 131072, TEXT_VOCABULARY[name]
    rope = {"rope_type": "default", "rope_theta": 1e6}
    text = {**WIDTHS[name], "num_hidden_layers": layers, "vocab_size": first + codes, "rope_parameters": rope}
    text |= {"bos_token_id": 0, "pad_token_id": 2, "eos_token_id": None}
    # No image is decoded to pixels: only the codebook and the 16 pixels per token count.
    levels = {"block_out_channels": [32] * 5, "down_block_types": ["DownEncoderBlock2D"] * 5}
    levels |= {"up_block_types": ["UpDecoderBlock2D"] * 5}
    vq = IBQModel(**levels, latent_channels=32, vq_embed_dim=256, num_vq_embeddings=codes)
    token_ids = {name: i for i, name in enumerate(TOKENS)} | {"first_code": first}
    model = Qwen3ForCausalLM(Qwen3Config(**text))
    return Emu35Pipeline(model, vq, image_area=(16 * GRIDS[name]) ** 2, token_ids=token_ids)


def emu35(pipe: Emu35Pipeline, batch: int, sampling: dict) -> Contestant:
    ids = [pipe.config.token_ids[name] for name in ("begin_of_codes", "row_end", "first_code")]
    return with_row_ends(pipe, batch, sampling, *ids, codes=pipe.vq.config.num_vq_embeddings)


def with_row_ends(
    pipe: Emu3Pipeline | Emu35Pipeline,
    batch: int,
    sampling: dict,
    begin_of_codes: int,
    end_of_row: int,
    first: int,
    codes: int,
) -> Contestant:
    model, columns = pipe.model, pipe.image_sizes[0][1] // (16 if isinstance(pipe, Emu35Pipeline) else 8)
    ids = prompt_ids(batch, begin_of_codes, model.device)
    negative = ids[:1, ::2].clone()
    negative[:, -1] = ids[0, -1]
    row_end = torch.tensor([end_of_row], device=ids.device)
    code_ids = first + torch.arange(codes, device=ids.device)

    def allowed(_, generated: torch.LongTensor) -> torch.LongTensor:
        return row_end if (len(generated) - PROMPT + 1) % (columns + 1) == 0 else code_ids

    def theirs(steps: int, **changes) -> torch.Tensor:
        options = {"do_sample": True, **sampling, "negative_prompt_ids": negative.expand(batch, -1)} | changes
        mask = torch.ones_like(ids)
        tokens = model.generate(
            ids, attention_mask=mask, prefix_allowed_tokens_fn=allowed, max_new_tokens=steps, **options
        )
        return tokens[:, PROMPT:] - first

    arguments = {"input_ids": ids, "negative_input_ids": negative, "guidance_scale": sampling["guidance_scale"]}
    return Contestant(lambda: pipe.prepare(**arguments).model, model, theirs)


def build_glm_image(name: str, layers: int) -> GlmImageForConditionalGeneration:
    codes, head = 16384, 16512
    vocab_size = head + TEXT_VOCABULARY[name]
    # Half of the dimensions of a head are rotated, two per frequency, by time, row and column.
    frequencies = WIDTHS[name]["hidden_size"] // WIDTHS[name]["num_attention_heads"] // 4
    times, rows = frequencies // 4, frequencies * 3 // 8
    text = {**WIDTHS[name], "num_hidden_layers": layers, "vocab_size": vocab_size, "pad_token_id": head}
    text["rope_parameters"] = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [times, rows, frequencies - times - rows],
    }
    # Prompts have no pictures.
    vision = {"hidden_size": 32, "depth": 1, "num_heads": 2, "intermediate_size": 32}
    vq = {"embed_dim": 8, "num_embeddings": codes, "latent_channels": 32}
    config = GlmImageConfig(text_config=text, vision_config=vision, vq_config=vq, image_token_id=vocab_size - 1)
    model = GlmImageForConditionalGeneration(config)
    # Special tokens are never greedy, and none ends an image.
    model.lm_head.weight.data[codes:] = 0
    model.generation_config.eos_token_id = None
    return model


def glm_image(model: GlmImageForConditionalGeneration, batch: int, sampling: dict) -> Contestant:
    side, small = GRIDS["glm-image"], 16
    ids = prompt_ids(batch, model.config.image_start_token_id, torch.device("cpu"))
    mask, layout = torch.ones_like(ids), Layout((side, side), before=[(small, small)])
    grids = {
        "image_grid_thw": torch.tensor([[1, side, side], [1, small, small]]).repeat(batch, 1),
        "images_per_sample": torch.full((batch,), 2),
    }
    inputs = {name: value.to(model.device) for name, value in ({"attention_mask": mask} | grids).items()}

    def theirs(steps: int, **changes) -> torch.Tensor:
        options = {"do_sample": True, **sampling, **inputs, "max_new_tokens": steps} | changes
        return model.generate(ids.to(model.device), **options)[:, PROMPT:]

    return Contestant(lambda: bind_prompts(model, ids, mask, (), (), layout, model.device), model, theirs)


def compare(
    contestant: Contestant,
    rounded: Contestant | None,
    decodings: dict[str, Decoding],
    sampling: Sampling,
    batch: int,
    steps: int,
    repeats: int,
) -> None:
    """Check and time the two, and ours with `rounded` weights, if any."""
    bind, network, theirs = contestant
    tokens = theirs(CHECKED, do_sample=False, temperature=None, top_k=None, top_p=None)
    check_gap(token_gap(bind(), tokens, sampling.guidance_scale), tokens.numel(), network.dtype)
    binds = {"": bind}
    if rounded:
        binds["int8 "] = rounded.bind
        gap = token_gap(rounded.bind(), tokens, sampling.guidance_scale)
        print(f"They are at most {gap:.4f} standard deviations below the largest logit in int8.")
    ours = {
        prefix + text: partial(run_steps, bind, decoding, sampling, batch, steps)
        for prefix, bind in binds.items()
        for text, decoding in decodings.items()
    }
    their_steps = {"transformers": lambda: theirs(steps).shape[1]}
    print_runs(in_turn(their_steps | ours, repeats, network.device), "step", ["transformers", *list(ours)[:1]])


FAMILIES = {"emu3": (build_emu3, emu3), "emu3.5": (build_emu35, emu35), "glm-image": (build_glm_image, glm_image)}
SETTINGS = ("guidance_scale", "temperature", "top_k", "top_p")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", nargs="+", choices=WIDTHS, default=["janus-pro-1b", "emu3"])
    parser.add_argument("--layers", type=int, default=4)
    add_decodings(parser)
    parser.add_argument("--steps", type=int, default=64, help="timed steps of each call")
    parser.add_argument("--int8", action="store_true", help="ours with the weights of layers in int8 too")
    add_sampling(parser, guidance_scale=5.0, top_k=2048)
    arguments = parser.parse_args()
    decodings, guided = decodings_of(arguments), sampling_of(arguments)
    device = begin(arguments)
    logging.set_verbosity_error()
    for name in arguments.model:
        build, contest = FAMILIES.get(name, (build_janus, janus))
        sampling = replace(guided, guidance_scale=1.0) if name == "glm-image" else guided
        settings = {setting: getattr(sampling, setting) for setting in SETTINGS}
        for dtype, batch in cases(arguments):
            print(f"\n{name} with {arguments.layers} layers, {dtype}, {batch} images")
            torch.manual_seed(0)
            torch.set_default_dtype(dtype)
            made = build(name, arguments.layers).to(device)
            torch.set_default_dtype(torch.float32)
            contestant = contest(made, batch, settings)
            contestant.network.eval()
            rounded = None
            if arguments.int8:
                rounded = contest(deepcopy(made), batch, settings)
                quantize_linears(rounded.network, torch.int8)
            compare(contestant, rounded, decodings, sampling, batch, arguments.steps, arguments.repeats)


if __name__ == "__main__":
    main()
