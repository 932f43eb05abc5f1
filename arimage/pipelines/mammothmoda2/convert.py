"""From the published files of MammothModa2-Preview and MammothModa2-Dev (https://github.com/bytedance/mammothmoda) to
a `MammothModa2Pipeline`."""

import logging
import re
from pathlib import Path

import torch
from accelerate import init_empty_weights
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler
from transformers import PreTrainedTokenizerFast

from ...convert.checkpoint import OriginalTensors, pipeline_of, save_whole
from ...convert.folder import damaged_files, load_original_folder, read_json
from ...convert.paths import CheckpointError, check_vacant
from ...convert.tiktoken_files import qwen_tokenizer, read_lines
from .decoder_mammothmoda2 import MammothModa2Transformer2DModel
from .pipeline_mammothmoda2 import MammothModa2Pipeline
from .prompts import CHAT_TEMPLATE, END_OF_IMAGE
from .transformer_mammothmoda2 import MammothModa2Config, MammothModa2LanguageModel


logger = logging.getLogger(__name__)

# The `model_type` of `llm_config`, and what it says about the language model.
BACKBONES = {"mammothmoda2_qwen2_5_vl": "qwen2", "mammothmoda2_qwen3_vl": "qwen3"}
# What the original has in common with transformers' configuration of a language model, and with our decoder.
TEXT_SETTINGS = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
    "hidden_act max_position_embeddings rms_norm_eps attention_bias gen_vocab_size gen_vocab_start_index".split()
)
DECODER_SETTINGS = (
    "patch_size in_channels hidden_size num_layers num_refiner_layers num_attention_heads num_kv_heads multiple_of "
    "ffn_dim_multiplier norm_eps axes_dim_rope timestep_scale".split()
)
QUERY_SETTINGS = {
    "num_queries": "num_queries",
    "num_layers": "num_query_layers",
    "num_heads": "num_query_heads",
    "norm_eps": "query_norm_eps",
}
# Of Dev, where its config.json has none.
CONDITION_LAYERS = (-2, -5, -8, -11, -14, -17)
PLACEHOLDERS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")

TABLE, VISION_TOKENS, TEMPLATE = "mammothu.tiktoken", "mammothu_vision_tokens.txt", "chat_template.jinja"
# The ids of the first special token and of the first generation token.
FIRST_SPECIAL, FIRST_GENERATED = 151643, 152064
SPECIAL_TOKENS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>"),
    *("<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>"),
    *("<|image_pad|>", "<|video_pad|>", "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>"),
    *("<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"),
)
# Dev has these too.
LATER_TOKENS = ("<tool_response>", "</tool_response>", "<think>", "</think>")
NUM_EXTRAS = 181
GENERATION_TOKENS = ("<|endofline|>", "<|endoffile|>", "<|gen_placeholder|>", "<|useless token|>", "<|beginoftext|>")

IGNORED = r"llm_model\.(lm_head|model\.visual)\..*|gen_tokenizer\..*"


def mammothmoda2_tokenizer_from_original(folder: str | Path, backbone: str) -> PreTrainedTokenizerFast:
    """The text tokenizer of a published folder.

    Args:
        backbone: "qwen2" or "qwen3", which has four more special tokens.

    Raises:
        CheckpointError: if a file is missing or damaged.
    """
    folder = Path(folder)
    names = [*SPECIAL_TOKENS, *(LATER_TOKENS if backbone == "qwen3" else ())]
    names += [f"<|extra_{i}|>" for i in range(NUM_EXTRAS)]
    names += [f"<|extra_margin_{i}|>" for i in range(FIRST_GENERATED - FIRST_SPECIAL - len(names))]
    names += [*GENERATION_TOKENS, *read_lines(folder / VISION_TOKENS)]
    special = {name: FIRST_SPECIAL + i for i, name in enumerate(names)}
    template = folder / TEMPLATE
    return PreTrainedTokenizerFast(
        tokenizer_object=qwen_tokenizer(folder / TABLE, special),
        bos_token="<|beginoftext|>",
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        padding_side="left",
        chat_template=template.read_text(encoding="utf-8") if template.is_file() else CHAT_TEMPLATE,
    )


def convert_mammothmoda2(folder: str | Path, *, out: str | Path | None = None) -> MammothModa2Pipeline:
    """The pipeline of a published folder, with the published sampling defaults and the weights in the dtype of the
    files.

    Args:
        folder: of MammothModa2-Preview or MammothModa2-Dev. Without the files of its text tokenizer the pipeline takes
            `input_ids`.
        out: a new or empty folder to save the pipeline to. It appears when all of it is written, or not at all.

    Raises:
        CheckpointError: if a file cannot be read, or a tensor is missing, unknown or of an unexpected shape; or `out`
            is taken.
    """
    check_vacant(out)
    folder = Path(folder)
    config = read_json(folder / "config.json")
    generation = read_json(folder / "t2i_generation_config.json")
    backbone = _backbone(folder, config)
    has_tokenizer = (folder / TABLE).is_file() or (folder / VISION_TOKENS).is_file()
    tokenizer = mammothmoda2_tokenizer_from_original(folder, backbone) if has_tokenizer else None
    state = load_original_folder(folder)
    parts: dict[str, dict[str, torch.Tensor]] = {"llm_model": {}, "gen_transformer": {}, "gen_vae": {}}
    for key, tensor in state.items():
        part = "gen_transformer" if key.startswith("gen_image_condition_refiner.") else key.partition(".")[0]
        joined = re.fullmatch(r"(gen_(?:transformer|image).*)\.in_proj_(weight|bias)", key)
        if joined is not None:
            # Queries, keys and values of torch's attention are one layer.
            for name, rows in zip("qkv", tensor.chunk(3), strict=True):
                parts[part][f"{joined[1]}.to_{name}.{joined[2]}"] = rows
        elif part in parts:
            parts[part][key] = tensor
        elif not re.fullmatch(IGNORED, key):
            raise CheckpointError(f"{folder} has {key!r}, unknown to MammothModa2: give an unaltered folder")
    with damaged_files(folder / "config.json"), init_empty_weights():
        language_model = MammothModa2LanguageModel(_language_config(config, generation, backbone, tokenizer))
        transformer = MammothModa2Transformer2DModel(**_decoder_settings(config, backbone))
        vae = AutoencoderKL.from_config(config["gen_vae_config"])
    refiner = (
        "gen_image_condition_refiner." if backbone == "qwen2" else "gen_transformer.time_caption_embed.image_embedder."
    )

    def in_language_model(name: str) -> str:
        return f"llm_model.{name}" if name.startswith("gen_head.") else f"llm_model.model.language_model.{name}"

    def in_transformer(name: str) -> str:
        if name.startswith("image_embedder."):
            return refiner + name.removeprefix("image_embedder.").replace(".to_out.0.", ".out_proj.")
        inner = "time_caption_embed." if name.startswith(("caption_embedder.", "timestep_embedder.")) else ""
        return f"gen_transformer.{inner}{name}"

    models = [
        OriginalTensors(tensors, "MammothModa2", folder).fill(
            model, original, dtype=_dtype(folder, tensors), ignored=IGNORED
        )
        for model, tensors, original in (
            (language_model, parts["llm_model"], in_language_model),
            (transformer, parts["gen_transformer"], in_transformer),
            (vae, parts["gen_vae"], lambda name: f"gen_vae.{name}"),
        )
    ]
    pipeline = pipeline_of(
        MammothModa2Pipeline,
        folder,
        *models,
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, time_shift_type="linear"),
        tokenizer=tokenizer,
        reads_answer_text=bool(config.get("gen_text_condition_with_answer")),
    )
    pipeline.generation_config |= _sampling(folder, generation)
    save_whole(pipeline.save_pretrained, out)
    return pipeline


def _backbone(folder: Path, config: dict) -> str:
    language = config.get("llm_config")
    kind = language.get("model_type") if isinstance(language, dict) else None
    if config.get("model_type") != "mammothmoda2" or kind not in BACKBONES:
        raise CheckpointError(
            f"config.json of {folder} names the model types {config.get('model_type')!r} and {kind!r} where "
            f"'mammothmoda2' and one of {', '.join(BACKBONES)} were expected: give the folder of MammothModa2-Preview "
            "or MammothModa2-Dev"
        )
    mode = config.get("gen_condition_mode", "text_image")
    if mode != "text_image" or not config.get("gen_image_condition_refiner_config"):
        raise CheckpointError(
            f"{folder} has a decoder that does not read both text and image tokens through a Q-Former: give the "
            "folder of MammothModa2-Preview or MammothModa2-Dev"
        )
    return BACKBONES[kind]


def _language_config(
    config: dict, generation: dict, backbone: str, tokenizer: PreTrainedTokenizerFast | None
) -> MammothModa2Config:
    whole = config["llm_config"]
    text = whole | whole.get("text_config", {})
    first = generation["visual_token_start_id"]
    experts = re.fullmatch(r"ffn(?:-(\d+):(\d+))?", text["moe_type"])
    if experts is None:
        raise ValueError(f"moe_type is {text['moe_type']!r}, not ffn with a range of layers")
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "mrope") or text.get("use_sliding_window"):
        raise ValueError(f"the attention has {kind!r} positions or a sliding window, which is not supported")
    settings = {name: text[name] for name in TEXT_SETTINGS if text.get(name) is not None}
    settings.setdefault("head_dim", text["hidden_size"] // text["num_attention_heads"])
    return MammothModa2Config(
        **settings,
        backbone=backbone,
        # With equal indices on all three axes, which texts have, the positions are those of a single axis.
        rope_parameters={"rope_type": "default", "rope_theta": rope.get("rope_theta", text.get("rope_theta"))},
        # The rows of the head follow those of the text's head, as in the authors' code.
        gen_head_start=text["vocab_size"],
        expert_layers=[int(experts[1] or 0), int(experts[2] or text["num_hidden_layers"])],
        condition_layers=[-1] if backbone == "qwen2" else config.get("gen_condition_layers") or list(CONDITION_LAYERS),
        visual_token_start_id=first,
        row_end_id=generation["eol_token_id"],
        image_end_id=first - 1 if tokenizer is None else tokenizer.convert_tokens_to_ids(END_OF_IMAGE),
        placeholder_ids=[whole[name] for name in PLACEHOLDERS if whole.get(name) is not None],
    )


def _decoder_settings(config: dict, backbone: str) -> dict:
    given, queries = config["gen_dit_config"], config["gen_image_condition_refiner_config"]
    if given.get("out_channels") not in (None, given["in_channels"]):
        raise ValueError(f"gen_dit_config has {given['out_channels']} out_channels, not {given['in_channels']}")
    text = config["llm_config"] | config["llm_config"].get("text_config", {})
    return {
        **{name: given[name] for name in DECODER_SETTINGS if name in given},
        **{ours: queries[name] for name, ours in QUERY_SETTINGS.items() if name in queries},
        "text_feat_dim": text["hidden_size"],
        "projects_queries": backbone == "qwen2",
    }


def _sampling(folder: Path, generation: dict) -> dict:
    if generation.get("repetition_penalty") not in (None, 1):
        logger.warning("%s has a repetition_penalty, which is not applied", folder / "t2i_generation_config.json")
    names = ("temperature", "top_k", "top_p", "min_p")
    found = {name: generation[name] for name in names if generation.get(name) is not None}
    return found if generation.get("do_sample", True) else found | {"top_k": 1}


def _dtype(folder: Path, tensors: dict[str, torch.Tensor]) -> torch.dtype:
    if not tensors:
        raise CheckpointError(f"{folder} lacks the weights of a part of MammothModa2: give a complete folder")
    return next(iter(tensors.values())).dtype
