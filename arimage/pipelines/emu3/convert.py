"""From the published files of Emu3 (https://github.com/baaivision/Emu3), the authors' or those for transformers, to an
`Emu3Pipeline`."""

import re
from pathlib import Path

import torch
from transformers import (
    AutoTokenizer,
    Emu3Config,
    Emu3ForCausalLM,
    Emu3ForConditionalGeneration,
    Emu3TextConfig,
    Emu3VQVAE,
    Emu3VQVAEConfig,
    PreTrainedTokenizerFast,
)

from ...convert.checkpoint import OriginalTensors, load_original, pipeline_of, save_whole
from ...convert.folder import damaged_files, load_model, read_config, read_json
from ...convert.paths import CheckpointError, check_vacant
from ...convert.tiktoken_files import SPECIAL_TOKENS, read_lines, tokenizer_from_ranks
from ...families import check_converter
from ...models.original_names import rename
from ...models.tokenizer_files import check_tokenizer_files
from .pipeline_emu3 import Emu3Pipeline
from .prompts import BEGIN_OF_CODES, BEGIN_OF_IMAGE


EMU3_SAMPLING = {"guidance_scale": 3.0, "temperature": 1.0, "top_k": 2048, "top_p": 1.0}
# What the language model's original config.json has in common with transformers'.
TEXT_SETTINGS = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads hidden_act "
    "max_position_embeddings rms_norm_eps rope_theta rope_scaling pad_token_id bos_token_id eos_token_id "
    "tie_word_embeddings".split()
)
# The settings of the original image tokenizer, and of transformers'.
TOKENIZER_SETTINGS = {
    "codebook_size": "codebook_size",
    "embed_dim": "embed_dim",
    "z_channels": "latent_channels",
    "double_z": "double_latent",
    "in_channels": "in_channels",
    "out_channels": "out_channels",
    "temporal_downsample_factor": "temporal_downsample_factor",
    "ch": "base_channels",
    "ch_mult": "channel_multiplier",
    "num_res_blocks": "num_res_blocks",
    "attn_resolutions": "attn_resolutions",
}
# transformers' names and the original's, replaced from top to bottom.
TOKENIZER_NAMES = (
    (".down_block.", "."),
    (".up_block.", "."),
    (".middle_block.attn_norm.", ".mid.attn_1.norm."),
    (".middle_block.", ".mid."),
    (".q_proj.", ".q."),
    (".k_proj.", ".k."),
    (".v_proj.", ".v."),
    (".out_proj.", ".proj_out."),
)
# The one that stands for an image in transformers. It keeps the authors' name, since "<image>" in a prompt is text.
IMAGE_TOKEN = "<|extra_0|>"


def emu3_vq_from_original(
    state: dict[str, torch.Tensor], config: dict, *, source: str | Path = "the image tokenizer's file"
) -> Emu3VQVAE:
    """The image tokenizer with the original's tensors and `config`, in float32 and in evaluation mode."""
    if config.get("model_type") == "Emu3p5VisionVQ":
        raise CheckpointError(f"{source} is the image tokenizer of Emu3.5: give the folder of Emu3-VisionTokenizer")
    missing = TOKENIZER_SETTINGS.keys() - config.keys()
    if missing:
        raise CheckpointError(f"config.json next to {source} has no {min(missing)!r}: give an unaltered folder")
    settings = {theirs: config[original] for original, theirs in TOKENIZER_SETTINGS.items()}
    # Attention is that of the deepest level.
    with damaged_files(source), torch.device("meta"):
        settings["hidden_size"] = config["ch"] * config["ch_mult"][-1]
        vq = Emu3VQVAE(Emu3VQVAEConfig(**settings))
    # The 1x1 convolutions of attention are linear layers in transformers.
    state = OriginalTensors(state, "Emu3 image tokenizer", source)
    for key in state:
        if re.search(r"\.attn.*\.(q|k|v|proj_out)\.weight", key):
            state[key] = state[key].flatten(1)
    return state.fill(vq, _original_name, dtype=torch.float32)


def _original_name(name: str) -> str:
    return re.sub(r"\.attn_norms\.(\d+)\.", r".attn.\1.norm.", rename(name, TOKENIZER_NAMES))


def emu3_tokenizer_from_original(folder: str | Path) -> PreTrainedTokenizerFast:
    """The text tokenizer of a folder with the authors' `emu3.tiktoken` and `emu3_vision_tokens.txt`."""
    folder = Path(folder)
    special = [*SPECIAL_TOKENS, *read_lines(folder / "emu3_vision_tokens.txt")]
    # Names that transformers' Emu3Processor needs.
    named = {
        "image_token": IMAGE_TOKEN,
        "boi_token": BEGIN_OF_IMAGE,
        "eoi_token": "<|image end|>",
        "image_wrapper_token": BEGIN_OF_CODES,
        "eof_token": "<|extra_201|>",
    }
    return tokenizer_from_ranks(folder / "emu3.tiktoken", special, extra_special_tokens=named)


def convert_emu3(
    folder: str | Path,
    *,
    vision_tokenizer: str | Path | None = None,
    image_area: int | None = None,
    out: str | Path | None = None,
) -> Emu3Pipeline:
    """The pipeline of a published folder, with the published sampling defaults and the weights in the dtype of the
    files.

    Args:
        folder: of Emu3-Gen or Emu3-Stage1, as the authors published it or as it is published for transformers,
            according to its config.json. The latter may be without text tokenizer: the pipeline then takes
            `input_ids`.
        vision_tokenizer: the authors' Emu3-VisionTokenizer, needed with the authors' layout only.
        image_area: pixels of an image that the model was trained for, by default that in the authors' config.json, or
            720 * 720.
        out: a new or empty folder to save the pipeline to. It appears when all of it is written, or not at all.

    Raises:
        CheckpointError: if a folder cannot be read, does not fit the other, or `out` is taken.
    """
    check_vacant(out)
    folder = Path(folder)
    config = read_config(folder, "emu3", "Emu3", give="Emu3-Gen or Emu3-Stage1")
    if config["model_type"] == "emu3":
        if vision_tokenizer is not None:
            raise CheckpointError(f"{folder} holds its image tokenizer already: leave out {vision_tokenizer}")
        model = load_model(Emu3ForConditionalGeneration, folder)
        tokenizer = None
        if (folder / "tokenizer.json").is_file():
            with damaged_files(folder):
                check_tokenizer_files(folder, PreTrainedTokenizerFast)
                tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    else:
        check_converter("emu3", folder, "Emu3")
        if vision_tokenizer is None:
            raise CheckpointError(
                f"{folder} is of the authors' layout, without its image tokenizer: give the folder of "
                "Emu3-VisionTokenizer as --vision-tokenizer (vision_tokenizer=)"
            )
        tokenizer = emu3_tokenizer_from_original(folder)
        model = _assemble(folder, config, Path(vision_tokenizer), tokenizer)
    area = image_area or config.get("image_area", 720 * 720)
    pipeline = pipeline_of(Emu3Pipeline, folder, model, tokenizer, image_area=area)
    pipeline.generation_config.update(EMU3_SAMPLING)
    save_whole(pipeline.save_pretrained, out)
    return pipeline


def _assemble(
    folder: Path, config: dict, vision_tokenizer: Path, tokenizer: PreTrainedTokenizerFast
) -> Emu3ForConditionalGeneration:
    file = vision_tokenizer / "model.safetensors"
    vq = emu3_vq_from_original(load_original(file), read_json(vision_tokenizer / "config.json"), source=file)
    with damaged_files(folder / "config.json"):
        text_config = Emu3TextConfig(**{name: config[name] for name in TEXT_SETTINGS if name in config})
    language = load_model(Emu3ForCausalLM, folder, config=text_config)
    # transformers looks its image token up by this name.
    vocabulary = tokenizer.get_vocab() | {"<image>": tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)}
    whole = Emu3Config(text_config=text_config.to_dict(), vq_config=vq.config.to_dict(), vocabulary_map=vocabulary)
    with torch.device("meta"):
        model = Emu3ForConditionalGeneration(whole)
    model.model.text_model, model.lm_head, model.model.vqmodel = language.model, language.lm_head, vq
    model.config.dtype = language.dtype
    return model.eval()
