"""Janus and Emu3 next to `generate` of transformers: the same random weights, the same settings, one process, in turn.

The language models have the widths of Janus-Pro-1B, Janus-Pro-7B and Emu3, but few layers (--layers) and an image
tokenizer that is not run; the vocabulary of Janus's text is cut, since no image needs it, while Emu3's, over which
transformers computes its logits, takes 6 GB in float32. Before anything is timed, the greedy tokens of transformers
are checked with our logits. A step is a forward pass with what it takes to sample from it. transformers takes a step
of Emu3 for every row end, ours none; its cache of Emu3 grows with the image, so that its first steps (--steps) are the
cheapest.

python benchmarks/compare_transformers.py --model janus-pro-1b emu3 --layers 4 --dtype bfloat16 --steps 64
"""

from collections.abc import Callable
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
from transformers import Emu3Config, Emu3ForConditionalGeneration, JanusConfig, JanusForConditionalGeneration
from transformers.utils import logging

from arimage.decoding import Decoding, Sampling
from arimage.pipelines.base import ARImagePipeline
from arimage.pipelines.emu3_prompts import BEGIN_OF_CODES, BEGIN_OF_IMAGE, BEGIN_OF_TEXT, CODE, END_OF_ROW
from arimage.pipelines.pipeline_emu3 import Emu3Pipeline
from arimage.pipelines.pipeline_janus import JanusPipeline


PROMPT, CHECKED = 32, 12
WIDTHS = {
    "janus-pro-1b": {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16},
    "janus-pro-7b": {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32},
    "emu3": {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8},
}
TEXT_VOCABULARY = {"janus-pro-1b": 1000, "janus-pro-7b": 1000, "emu3": 151854}
# Tokens along each side of an image: those of Janus, and of Emu3 at 512 pixels.
GRIDS = {"janus-pro-1b": 24, "janus-pro-7b": 24, "emu3": 64}


class Contestant(NamedTuple):
    """A pipeline, the arguments of a call of it, and transformers' tokens [B, steps] of the same call."""

    pipe: ARImagePipeline
    arguments: dict
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

    return Contestant(pipe, {"input_ids": ids}, theirs)


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
    model, columns = pipe.model, pipe.image_sizes[0][1] // pipe.vq.spatial_scale_factor
    vocabulary = model.config.vocabulary_map
    ids = prompt_ids(batch, vocabulary[BEGIN_OF_CODES], model.device)
    negative = ids[:1, ::2].clone()
    negative[:, -1] = ids[0, -1]
    first = vocabulary[CODE.format(0)]
    row_end = torch.tensor([vocabulary[END_OF_ROW]], device=ids.device)
    codes = first + torch.arange(model.config.vq_config.codebook_size, device=ids.device)

    def allowed(_, generated: torch.LongTensor) -> torch.LongTensor:
        return row_end if (len(generated) - PROMPT + 1) % (columns + 1) == 0 else codes

    def theirs(steps: int, **changes) -> torch.Tensor:
        options = {"do_sample": True, **sampling, "negative_prompt_ids": negative.expand(batch, -1)} | changes
        mask = torch.ones_like(ids)
        tokens = model.generate(
            ids, attention_mask=mask, prefix_allowed_tokens_fn=allowed, max_new_tokens=steps, **options
        )
        return tokens[:, PROMPT:] - first

    return Contestant(pipe, {"input_ids": ids, "negative_input_ids": negative}, theirs)


def compare(
    contestant: Contestant, decodings: dict[str, Decoding], sampling: Sampling, steps: int, repeats: int
) -> None:
    """Check and time the two."""
    pipe, arguments, theirs = contestant
    scale, batch = sampling.guidance_scale, len(arguments["input_ids"])

    def bind():
        return pipe.prepare(**arguments, guidance_scale=scale).model

    tokens = theirs(CHECKED, do_sample=False, temperature=None, top_k=None, top_p=None)
    check_gap(token_gap(bind(), tokens, scale), tokens.numel(), pipe.model.dtype)
    ours = {text: partial(run_steps, bind, decoding, sampling, batch, steps) for text, decoding in decodings.items()}
    their_steps = {"transformers": lambda: theirs(steps).shape[1]}
    print_runs(in_turn(their_steps | ours, repeats, pipe.model.device), "step", ["transformers", *list(ours)[:1]])


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", nargs="+", choices=WIDTHS, default=["janus-pro-1b", "emu3"])
    parser.add_argument("--layers", type=int, default=4)
    add_decodings(parser)
    parser.add_argument("--steps", type=int, default=64, help="timed steps of each call")
    add_sampling(parser, guidance_scale=5.0, top_k=2048)
    arguments = parser.parse_args()
    decodings, sampling = decodings_of(arguments), sampling_of(arguments)
    device = begin(arguments)
    logging.set_verbosity_error()
    settings = {name: getattr(arguments, name) for name in ("guidance_scale", "temperature", "top_k", "top_p")}
    for name in arguments.model:
        build, contest = (build_emu3, emu3) if name == "emu3" else (build_janus, janus)
        for dtype, batch in cases(arguments):
            print(f"\n{name} with {arguments.layers} layers, {dtype}, {batch} images")
            torch.manual_seed(0)
            torch.set_default_dtype(dtype)
            pipe = build(name, arguments.layers).to(device)
            torch.set_default_dtype(torch.float32)
            pipe.model.eval()
            compare(contest(pipe, batch, settings), decodings, sampling, arguments.steps, arguments.repeats)


if __name__ == "__main__":
    main()
