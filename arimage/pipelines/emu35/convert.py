"""From the published files of Emu3.5 (https://github.com/baaivision/Emu3.5) to an `Emu35Pipeline`."""

from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from ...convert.checkpoint import OriginalTensors, load_original, pipeline_of, save_whole
from ...convert.folder import damaged_files, load_original_folder, read_config
from ...convert.paths import CheckpointError, check_vacant
from ...convert.tiktoken_files import SPECIAL_TOKENS, read_lines, tokenizer_from_ranks
from ...convert.vqgan import vq_model_from_original
from ...families import check_converter
from .ibq_emu35 import IBQModel
from .pipeline_emu35 import Emu35Pipeline
from .prompts import TOKENS, TRAINED_AREA


SAMPLING = {"temperature": 1.0, "top_k": 5120, "top_p": 1.0}
# Of text to image, and with reference images: of the base model, and of Emu3.5-Image.
GUIDANCE = {True: (2.0, 2.0), False: (5.0, 3.0)}
# Settings of config.json that there must be, and those with defaults in the authors' class.
NEEDED = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads "
    "max_position_embeddings".split()
)
SETTINGS = {"head_dim": 128, "hidden_act": "silu", "rms_norm_eps": 1e-5, "tie_word_embeddings": False}
VISION_TOKENS = "emu3_vision_tokens.txt"


def emu35_tokenizer_from_original(folder: str | Path) -> tuple[PreTrainedTokenizerFast, int]:
    """The text tokenizer of a folder with the authors' `emu3.tiktoken` and `emu3_vision_tokens.txt`, and the number of
    codes in the latter, which the tokenizer does not hold: with 131,072 of them it would load for many seconds."""
    folder = Path(folder)
    names = read_lines(folder / VISION_TOKENS)
    images = [TOKENS[name] for name in ("begin_of_codes", "begin_of_image", "end_of_image")]
    codes = [f"<|visual token {code:06d}|>" for code in range(len(names) - len(images))]
    if names != images + codes:
        raise CheckpointError(
            f"{folder / VISION_TOKENS} does not name {', '.join(images)} and then all visual tokens in order: "
            "download it again"
        )
    tokenizer = tokenizer_from_ranks(folder / "emu3.tiktoken", [*SPECIAL_TOKENS, *images])
    return tokenizer, len(codes)


def qwen3_from_original(
    state: dict[str, torch.Tensor], config: dict, *, source: str | Path = "the checkpoint"
) -> Qwen3ForCausalLM:
    """The language model with the original's `config`, in the dtype of its embedding and in evaluation mode."""
    if config.get("rope_scaling") is not None:
        raise CheckpointError(
            f"config.json of {source} has rope_scaling {config['rope_scaling']}, which no published Emu3.5 has: give "
            "an unaltered folder"
        )
    for name in NEEDED:
        if config.get(name) is None:
            raise CheckpointError(f"config.json of {source} has no {name!r}: give an unaltered folder")
    tokens = ("pad_token_id", "bos_token_id", "eos_token_id")
    settings = SETTINGS | {name: config[name] for name in (*NEEDED, *SETTINGS, *tokens) if name in config}
    with damaged_files(source), torch.device("meta"):
        rope = {"rope_type": "default", "rope_theta": config.get("rope_theta", 1e6)}
        model = Qwen3ForCausalLM(Qwen3Config(**settings, rope_parameters=rope))
    embedding = state.get("model.embed_tokens.weight")
    dtype = torch.float32 if embedding is None else embedding.dtype
    OriginalTensors(state, "Emu3.5", source).fill(model, str, dtype=dtype, ignored=r".*\.rotary_emb\.inv_freq")
    # What no checkpoint holds.
    model.model.rotary_emb = Qwen3RotaryEmbedding(model.config)
    model.config.dtype = dtype
    return model


def convert_emu35(
    folder: str | Path,
    *,
    vision_tokenizer: str | Path,
    image_area: int = TRAINED_AREA,
    base: bool = False,
    out: str | Path | None = None,
) -> Emu35Pipeline:
    """The pipeline of a published folder, with the published sampling defaults and the weights in the dtype of the
    files.

    Args:
        folder: of Emu3.5-Image or Emu3.5, as the authors published it.
        vision_tokenizer: the authors' Emu3.5-VisionTokenizer.
        image_area: pixels of an image that the model was trained for.
        base: whether the folder is Emu3.5, not Emu3.5-Image: they have other guidance scales.
        out: a new or empty folder to save the pipeline to. It appears when all of it is written, or not at all.

    Raises:
        CheckpointError: if a folder cannot be read, does not fit the other, or `out` is taken.
    """
    check_vacant(out)
    folder, vision_tokenizer = Path(folder), Path(vision_tokenizer)
    config = read_config(folder, "Emu3", "emu3", give="Emu3.5-Image or Emu3.5")
    check_converter("emu35", folder, "Emu3")
    read_config(vision_tokenizer, "Emu3p5VisionVQ", give="Emu3.5-VisionTokenizer")
    tokenizer, codes = emu35_tokenizer_from_original(folder)
    file = vision_tokenizer / "model.safetensors"
    vq = vq_model_from_original(load_original(file), model=IBQModel, source=file)
    if vq.config.num_vq_embeddings != codes:
        raise CheckpointError(
            f"{file} has {vq.config.num_vq_embeddings} codes where {folder / VISION_TOKENS} names {codes}: give the "
            "image tokenizer of this model"
        )
    model = qwen3_from_original(load_original_folder(folder), config, source=folder)
    guidance, edit_guidance = GUIDANCE[base]
    pipeline = pipeline_of(Emu35Pipeline, folder, model, vq, tokenizer, image_area, edit_guidance_scale=edit_guidance)
    pipeline.generation_config.update(SAMPLING, guidance_scale=guidance)
    save_whole(pipeline.save_pretrained, out)
    return pipeline
