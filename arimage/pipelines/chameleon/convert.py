"""From the published files of Lumina-mGPT (https://github.com/Alpha-VLLM/Lumina-mGPT), Lumina-mGPT 2.0, Chameleon and
Anole to a `LuminaMGPTPipeline` or `AnolePipeline`."""

import re
from pathlib import Path

import torch
from diffusers import VQModel
from transformers import ChameleonConfig, ChameleonForConditionalGeneration, PreTrainedTokenizerFast
from transformers.models.chameleon.modeling_chameleon import ChameleonRotaryEmbedding

from ...convert.checkpoint import OriginalTensors, load_original, pipeline_of, save_whole
from ...convert.folder import damaged_files, load_original_folder, read_json
from ...convert.paths import CheckpointError, check_vacant
from ...convert.vqgan import vq_model_from_original
from .pipeline_anole import AnolePipeline
from .pipeline_lumina_mgpt import LuminaMGPTPipeline


# By the tokenizer's norms: Lumina-mGPT, and 2.0 with its MoVQGAN.
LUMINA_MGPT_SAMPLING = {
    "group": {"guidance_scale": 4.0, "temperature": 1.0, "top_k": 2000, "top_p": 1.0},
    "spatial": {"guidance_scale": 4.0, "temperature": 1.0, "top_k": 4096, "top_p": 1.0},
}
ANOLE_SAMPLING = {"guidance_scale": 3.0, "temperature": 0.7, "top_k": 0, "top_p": 0.9}
# Meta's names and transformers', replaced from top to bottom.
META_NAMES = (
    (r"^tok_embeddings\.", "model.embed_tokens."),
    (r"^output\.", "lm_head."),
    (r"^(norm|layers)\.", r"model.\1."),
    (r"\.attention\.w([qkvo])\.", r".self_attn.\1_proj."),
    (r"\.attention\.([qk])_normalization\.", r".self_attn.\1_norm."),
    (r"\.attention_norm\.", ".input_layernorm."),
    (r"\.ffn_norm\.", ".post_attention_layernorm."),
    (r"\.feed_forward\.w1\.", ".mlp.gate_proj."),
    (r"\.feed_forward\.w2\.", ".mlp.down_proj."),
    (r"\.feed_forward\.w3\.", ".mlp.up_proj."),
)


def chameleon_from_original(
    state: dict[str, torch.Tensor],
    config: dict,
    vq_state: dict[str, torch.Tensor],
    vq: VQModel,
    *,
    source: str | Path = "the checkpoint",
) -> ChameleonForConditionalGeneration:
    """The language model whose tensors are `state` by transformers' names, in the dtype of its embedding and in
    evaluation mode. Query and key norms may have a row for each shard that the weights were trained on instead of one
    for each head. The image tokenizer `vq_state` completes it."""
    widths = list(vq.config.block_out_channels)
    channels = vq_state["encoder.conv_in.weight"].shape[0]
    resolution = 512
    typed = ChameleonConfig.from_dict(
        {
            **{key: value for key, value in config.items() if key != "mask_image_logits"},
            "vq_config": {
                "embed_dim": vq.config.vq_embed_dim,
                "num_embeddings": vq.config.num_vq_embeddings,
                "latent_channels": vq.config.latent_channels,
                "resolution": resolution,
                "base_channels": channels,
                "channel_multiplier": [width // channels for width in widths],
                "num_res_blocks": vq.config.layers_per_block,
                "attn_resolutions": [
                    resolution // 2**level for level, kind in enumerate(vq.config.down_block_types) if "Attn" in kind
                ],
            },
        }
    )
    language = {key: tensor for key, tensor in state.items() if not key.startswith("model.vqmodel.")}
    state = OriginalTensors(language, "Chameleon", source)
    heads = {"q": typed.num_attention_heads, "k": typed.num_key_value_heads}
    for key, tensor in state.items():
        if match := re.search(r"\.([qk])_norm\.(weight|bias)$", key):
            shards = state.shape(key)[0]
            if heads[match[1]] % shards:
                raise CheckpointError(
                    f"{source} has {key!r} with {shards} rows, which {heads[match[1]]} heads cannot share: give the "
                    "file of an unaltered model"
                )
            state[key] = tensor.repeat_interleave(heads[match[1]] // shards, dim=0)
    state |= {
        f"model.vqmodel.{key}": tensor
        for key, tensor in vq_state.items()
        if key.startswith(("encoder.", "quantize.", "quant_conv.", "post_quant_conv."))
    }
    with torch.device("meta"):
        model = ChameleonForConditionalGeneration(typed)
    key = "model.embed_tokens.weight"
    state.shape(key)
    model = state.fill(model, str, dtype=state[key].dtype, ignored=r".*\.rotary_emb\.inv_freq")
    # What no checkpoint holds.
    model.model.rotary_emb = ChameleonRotaryEmbedding(typed)
    return model


def chameleon_state_from_meta(
    state: dict[str, torch.Tensor], parameters: dict, *, source: str | Path = "the checkpoint"
) -> tuple[dict[str, torch.Tensor], dict]:
    """Tensors by transformers' names, and the settings of a config.json, of a Chameleon in Meta's own format that is
    not sharded, from its tensors and the settings of params.json and consolidate_params.json."""
    try:
        heads, layers, eps = (parameters[name] for name in ("n_heads", "n_layers", "norm_eps"))
    except KeyError as error:
        raise CheckpointError(f"params.json next to {source} has no {error}: give an unaltered folder") from error
    state = OriginalTensors(state, "Chameleon", source)
    vocab_size, hidden_size = state.shape("tok_embeddings.weight")
    head_dim = hidden_size // heads
    converted = {}
    for key, tensor in state.items():
        if re.search(r"\.(w[qk]|[qk]_normalization)\.", key):
            # RoPE turns neighbouring pairs there, the two halves of a head in transformers.
            tensor = tensor.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)
            tensor = tensor if tensor.ndim == 2 else tensor[None]
        for theirs, ours in META_NAMES:
            key = re.sub(theirs, ours, key)
        if key != "rope.freqs":
            converted[key] = tensor
    return converted, {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": state.shape("layers.0.feed_forward.w1.weight")[0],
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": parameters.get("n_kv_heads") or heads,
        "rms_norm_eps": eps,
        "rope_theta": parameters.get("rope_theta", 10000.0),
        "swin_norm": parameters.get("swin_norm", False),
        "bos_token_id": 0,
        "pad_token_id": 1,
    }


def convert_lumina_mgpt(
    folder: str | Path, *, tokenizer: str | Path | None = None, image_size: int = 768, out: str | Path | None = None
) -> LuminaMGPTPipeline:
    """The pipeline of a folder as `Alpha-VLLM/Lumina-mGPT-7B-768` or `Alpha-VLLM/Lumina-mGPT-2.0`, with the published
    sampling defaults.

    Args:
        folder: config.json, weights (safetensors or .bin, sharded or not) in the layout of the authors' code or of
            transformers, and the text tokenizer.
        tokenizer: Meta's folder with vqgan.ckpt and text_tokenizer.json, or of 2.0 the file movqgan_270M.ckpt.
        image_size: side in pixels of the square that the weights were trained for: 512, 768 or 1024. It is the default
            size of the pipeline.
        out: a new or empty folder to save the pipeline to. It appears when all of it is written, or not at all.

    Raises:
        CheckpointError: if a file is missing, cannot be read or does not fit the others, or `out` is taken.
    """
    return _convert(LuminaMGPTPipeline, folder, tokenizer, image_size, out)


def convert_anole(
    folder: str | Path, *, tokenizer: str | Path | None = None, image_size: int = 512, out: str | Path | None = None
) -> AnolePipeline:
    """The pipeline of a folder with Anole, or another Chameleon, with the published sampling defaults.

    Args:
        folder: as `GAIR/Anole-7b-v0.1` in Meta's format: models/7b with params.json and consolidated.pth, and
            tokenizer; or in the layout of transformers: config.json, weights (safetensors or .bin, sharded or not) and
            the text tokenizer.
        tokenizer: Meta's folder with vqgan.ckpt and text_tokenizer.json, where it is not in the folder and the weights
            hold no image decoder, as those of leloy/Anole-7b-v0.1-hf do.
        image_size: side in pixels of the images; that of all published ones.
        out: a new or empty folder to save the pipeline to. It appears when all of it is written, or not at all.

    Raises:
        CheckpointError: if a file is missing, cannot be read or does not fit the others, or `out` is taken.
    """
    return _convert(AnolePipeline, folder, tokenizer, image_size, out)


def _convert(pipeline_class, folder, tokenizer, image_size, out):
    folder = Path(folder)
    check_vacant(out)
    if whole := sorted(folder.glob("models/*/consolidated.pth")):
        parameters, shared = (
            read_json(whole[0].with_name(name)) for name in ("params.json", "consolidate_params.json")
        )
        parameters |= parameters.get("model", {}) | shared
        with damaged_files(whole[0].parent):
            state, config = chameleon_state_from_meta(load_original(whole[0]), parameters, source=whole[0])
        tokenizer = folder / "tokenizer" if tokenizer is None else tokenizer
    else:
        config = read_json(folder / "config.json")
        state = load_original_folder(folder)
    vq_state, vq_source = _image_tokenizer(state, folder, tokenizer)
    vq = vq_model_from_original(vq_state, source=vq_source)
    with damaged_files(folder):
        text_tokenizer, vocabulary = _text_tokenizer(folder, tokenizer)
    vocabulary = config.get("vocabulary_map") or vocabulary
    if vocabulary is None:
        raise CheckpointError(f"{folder} has neither a vocabulary_map in config.json nor tokenizer.json: add one")
    if "<image>" not in vocabulary and "<reserved08707>" in vocabulary:
        # The placeholder of an image in transformers.
        vocabulary["<image>"] = vocabulary.pop("<reserved08707>")
    config["vocabulary_map"] = vocabulary
    with damaged_files(folder):
        transformer = chameleon_from_original(state, config, vq_state, vq, source=folder)
    source = f"{folder} with {vq_source}"
    pipeline = pipeline_of(pipeline_class, source, transformer, vq, text_tokenizer, image_size)
    if pipeline_class is AnolePipeline:
        pipeline.generation_config.update(ANOLE_SAMPLING)
    else:
        pipeline.generation_config.update(LUMINA_MGPT_SAMPLING[vq.config.norm_type])
    save_whole(pipeline.save_pretrained, out)
    return pipeline


def _image_tokenizer(state, folder: Path, tokenizer) -> tuple[dict[str, torch.Tensor], Path]:
    if tokenizer is not None:
        path = Path(tokenizer)
        path = path / "vqgan.ckpt" if path.is_dir() else path
        return load_original(path), path
    prefix = "model.vqmodel."
    held = {key.removeprefix(prefix): tensor for key, tensor in state.items() if key.startswith(prefix)}
    if "decoder.conv_in.weight" not in held:
        raise CheckpointError(
            f"{folder} holds no image decoder: give Meta's folder with vqgan.ckpt, or of Lumina-mGPT 2.0 the file "
            "movqgan_270M.ckpt, as --tokenizer (tokenizer=)"
        )
    return held, folder


def _text_tokenizer(folder: Path, tokenizer) -> tuple[PreTrainedTokenizerFast | None, dict[str, int] | None]:
    """The text tokenizer of the folder, else Meta's, and its vocabulary; None for each that no file holds. A tokenizer
    needs merges."""
    path, specials = folder / "tokenizer.json", {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    if not path.is_file():
        path = Path(tokenizer or folder) / "text_tokenizer.json"
    elif (settings := folder / "tokenizer_config.json").is_file():
        given = read_json(settings)
        specials = {name: given.get(name) for name in specials}
        specials = {name: value["content"] if isinstance(value, dict) else value for name, value in specials.items()}
    if not path.is_file():
        return None, None
    contents = read_json(path)
    added = {token["content"]: token["id"] for token in contents.get("added_tokens", [])}
    vocabulary = contents["model"]["vocab"] | added
    if contents["model"]["type"] == "BPE" and not contents["model"].get("merges"):
        return None, vocabulary
    specials = {name: value for name, value in specials.items() if value is not None}
    return PreTrainedTokenizerFast(tokenizer_file=str(path), **specials), vocabulary
