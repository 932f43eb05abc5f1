"""From the published files of Lumina-DiMOO (https://github.com/Alpha-VLLM/Lumina-DiMOO) to a `LuminaDiMOOPipeline`."""

from pathlib import Path

import torch
from diffusers import VQModel
from transformers import PreTrainedTokenizerFast

from ...convert.checkpoint import OriginalTensors, pipeline_of, save_whole
from ...convert.folder import damaged_files, load_original_folder, read_config
from ...convert.paths import CheckpointError, check_vacant
from ...models.original_names import rename
from ...models.tokenizer_files import load_from_files
from ...models.weight_files import check_component
from .pipeline_lumina_dimoo import LuminaDiMOOPipeline
from .transformer_lumina_dimoo import LuminaDiMOOTransformer
from .vocabulary import FIRST_CODE, NUM_CODES


ROOT = "model.transformer."
EMBEDDING, HEAD = f"{ROOT}wte.weight", f"{ROOT}ff_out.weight"
# Ours and the original's, replaced from left to right.
NAMES = (
    ("attention_norm.", "attn_norm."),
    ("feed_forward_norm.", "ff_norm."),
    ("attention.qkv_proj.", "qkv_proj."),
    ("attention.out_proj.", "attn_out."),
    ("feed_forward.gate_proj.", "ff_proj."),
    ("feed_forward.up_proj.", "up_proj."),
    ("feed_forward.down_proj.", "ff_out."),
)
# Settings that no tensor shows, and the only ones that this transformer has.
FIXED = {
    "block_type": "llama",
    "activation_type": "silu",
    "layer_norm_type": "rms",
    "rope": True,
    "alibi": False,
    "input_emb_norm": False,
    "scale_logits": False,
    "weight_tying": False,
}


def _original_name(name: str) -> str:
    if name.startswith("blocks."):
        return ROOT + rename(name, NAMES)
    return {"embedding.weight": EMBEDDING, "head.weight": HEAD, "norm.weight": f"{ROOT}ln_f.weight"}[name]


def lumina_dimoo_from_original(
    state: dict[str, torch.Tensor], config: dict, *, source: str | Path = "the checkpoint"
) -> LuminaDiMOOTransformer:
    """The transformer whose tensors are `state`, in the dtype of its embedding and in evaluation mode.

    Of the head only the codes are kept, which are the tokens from 126,356 on, however many rows follow them.

    Args:
        config: the original's config.json.

    Raises:
        CheckpointError: if a setting is missing or unknown, there are no codes, or a tensor is missing, unknown or of
            an unexpected shape.
    """
    state = OriginalTensors(state, "Lumina-DiMOO", source)
    for name, value in FIXED.items():
        if config.get(name, value) != value:
            raise CheckpointError(
                f"config.json of {source} has {name} {config[name]!r} where {value!r} was expected: give an unaltered "
                "folder"
            )
    missing = [name for name in ("d_model", "n_heads", "n_layers", "mlp_hidden_size") if not config.get(name)]
    if missing:
        raise CheckpointError(f"config.json of {source} has no {missing[0]!r}: give an unaltered folder")
    width, heads = config["d_model"], config["n_heads"]
    with damaged_files(source), torch.device("meta"):
        transformer = LuminaDiMOOTransformer(
            hidden_size=width,
            num_layers=config["n_layers"],
            num_attention_heads=heads,
            num_key_value_heads=config.get("n_kv_heads"),
            intermediate_size=config["mlp_hidden_size"],
            norm_eps=config.get("rms_norm_eps", 1e-5),
            rope_theta=float(config.get("rope_theta", 500_000)),
        )
    for key, first in ((EMBEDDING, 0), (HEAD, FIRST_CODE)):
        rows = state.shape(key)[0]
        if rows < FIRST_CODE + NUM_CODES:
            raise CheckpointError(
                f"{source} has {key!r} with {rows:,} rows where at least {FIRST_CODE + NUM_CODES:,} were expected, "
                "codes included: give the folder of Lumina-DiMOO"
            )
        state[key] = state[key][first : FIRST_CODE + NUM_CODES]
    for layer in range(config["n_layers"]):
        _join_projections(state, f"{ROOT}blocks.{layer}.", width, heads, config.get("n_kv_heads") or heads)
    return state.fill(transformer, _original_name, dtype=state[EMBEDDING].dtype)


def _join_projections(state: OriginalTensors, block: str, width: int, heads: int, key_value_heads: int) -> None:
    """Replace the weights of queries, keys and values with one."""
    parts, head_dim = [], width // heads
    for name, count in (("q_proj", heads), ("k_proj", key_value_heads), ("v_proj", key_value_heads)):
        key = f"{block}{name}.weight"
        if state.shape(key) != (count * head_dim, width):
            raise CheckpointError(
                f"{state.source} has {key!r} of shape {tuple(state.shape(key))} where {(count * head_dim, width)} was "
                "expected: give the file of one unaltered model"
            )
        weight = state.pop(key)
        if name != "v_proj":
            # RoPE turns the two halves of a head there, neighbouring pairs here.
            weight = weight.unflatten(0, (count, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)
        parts.append(weight)
    state[f"{block}qkv_proj.weight"] = torch.cat(parts)


def convert_lumina_dimoo(folder: str | Path, *, out: str | Path | None = None) -> LuminaDiMOOPipeline:
    """The pipeline of a published folder, with the published sampling defaults and the transformer in the dtype of the
    files. The image tokenizer is float32.

    Args:
        folder: as the authors published it, with config.json, weights, the text tokenizer and the image tokenizer in
            vqvae.
        out: a new or empty folder to save the pipeline to. It appears when all of it is written, or not at all.

    Raises:
        CheckpointError: if the folder cannot be read, is not that of Lumina-DiMOO, or `out` is taken.
    """
    check_vacant(out)
    folder = Path(folder)
    config = read_config(folder, "llada", give="Lumina-DiMOO")
    with damaged_files(folder):
        tokenizer = load_from_files(PreTrainedTokenizerFast, folder)
        check_component(folder / "vqvae", VQModel)
        vq = VQModel.from_pretrained(folder / "vqvae", local_files_only=True, use_safetensors=True)
    transformer = lumina_dimoo_from_original(load_original_folder(folder), config, source=folder)
    pipeline = pipeline_of(LuminaDiMOOPipeline, folder, transformer, vq, tokenizer)
    save_whole(pipeline.save_pretrained, out)
    return pipeline
