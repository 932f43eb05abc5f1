"""From a published folder of X-Omni (https://github.com/X-Omni-Team/X-Omni) to an `XOmniPipeline`."""

from pathlib import Path

import torch
from accelerate import init_empty_weights
from diffusers import FluxTransformer2DModel
from transformers import PreTrainedTokenizerBase, Qwen2TokenizerFast

from ...convert.checkpoint import NORM_NUM_GROUPS, OriginalTensors, load_original, pipeline_of, save_whole
from ...convert.folder import damaged_files, load_original_folder, read_config, read_json
from ...convert.paths import CheckpointError, check_vacant
from ...models.tokenizer_files import load_from_files
from .pipeline_x_omni import XOmniPipeline
from .projector_x_omni import XOmniProjector
from .transformer_x_omni import XOmniConfig, XOmniLanguageModel


KIND = "X-Omni"
# What the original has in common with transformers' configuration of a Qwen2.
TEXT_SETTINGS = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads hidden_act "
    "max_position_embeddings rms_norm_eps num_mm_adap_layers num_mm_head_layers mm_special_tokens".split()
)
# Ours and the original's, replaced from top to bottom.
LANGUAGE_NAMES = (
    ("gen_head.", "mm_head."),
    ("gen_embed_tokens.", "model.mm_embed_tokens."),
    ("embed_tokens.", "model.lm_embed_tokens."),
    ("text_norm.", "model.lm_norm."),
)
PROJECTOR_NAMES = (("codebook.", "quantize.embedding."), ("conv_in.", "post_quant_conv."), ("blocks.", "post_conv."))
DECODER_SETTINGS = (
    "patch_size in_channels out_channels num_layers num_single_layers attention_head_dim num_attention_heads "
    "joint_attention_dim pooled_projection_dim guidance_embeds axes_dims_rope".split()
)


def convert_x_omni(folder: str | Path, *, out: str | Path | None = None) -> XOmniPipeline:
    """The pipeline of a published folder, with the published settings and the weights in the dtype of the files.

    Args:
        folder: of X-Omni-En, -Zh, -SFT or -PT. Its image tokenizer's SigLIP is not needed. Without the files of the
            text tokenizer the pipeline takes `input_ids`, and without the folder `diffusers` it has no transformer of
            a decoder. The other parts of the decoder are those of FLUX.1-dev.
        out: a new or empty folder to save the pipeline to. It appears when all of it is written, or not at all.

    Raises:
        CheckpointError: if a file cannot be read, or a tensor is missing, unknown or of an unexpected shape; or `out`
            is taken.
    """
    check_vacant(out)
    folder = Path(folder)
    config = read_config(folder, "x-omni", give="an X-Omni")
    language_model = _language_model(folder, config)
    with damaged_files(folder / "config.json"):
        encoder, decoder = config["vision_config"]["encoder"], config["vision_config"]["decoder"]
        projector_file, decoder_folder = folder / encoder["projector_path"], folder / decoder["model_path"]
    transformer, embed = (None, None) if not decoder_folder.is_dir() else _transformer(decoder_folder)
    projector = _projector(projector_file, embed)
    pipeline = pipeline_of(
        XOmniPipeline, folder, language_model, projector, _tokenizer(folder), transformer=transformer
    )
    names = {"num_inference_steps": "num_inference_steps", "cfg_scale": "decoder_guidance_scale"}
    pipeline.generation_config |= {ours: decoder[name] for name, ours in names.items() if name in decoder}
    save_whole(pipeline.save_pretrained, out)
    return pipeline


def _language_model(folder: Path, config: dict) -> XOmniLanguageModel:
    tensors = OriginalTensors(load_original_folder(folder), KIND, folder)
    with damaged_files(folder / "config.json"), init_empty_weights():
        if config.get("use_sliding_window") or config.get("rope_scaling"):
            raise ValueError("the attention has a sliding window or scaled positions, which is not supported")
        model = XOmniLanguageModel(
            XOmniConfig(
                **{name: config[name] for name in TEXT_SETTINGS},
                gen_vocab_size=config["mm_vocab_size"],
                num_codes=config["image_vocab_size"],
                rope_parameters={"rope_type": "default", "rope_theta": config["rope_theta"]},
                tie_word_embeddings=False,
            )
        )

    def original_name(name: str) -> str:
        for ours, original in LANGUAGE_NAMES:
            if name.startswith(ours):
                return original + name.removeprefix(ours)
        return "model.mm_norm.weight" if name == "norm.weight" else f"model.{name}"

    # The head of text generates nothing.
    dtype = tensors[next(iter(tensors))].dtype
    return tensors.fill(model, original_name, dtype=dtype, ignored=r"lm_head\.weight")


def _projector(file: Path, embed: torch.Tensor | None) -> XOmniProjector:
    tensors = OriginalTensors(load_original(file), f"projector of {KIND}", file)
    if embed is not None:
        tensors["embed.weight"] = embed
    codes, dimension = tensors.shape("quantize.embedding.weight")
    channels = tensors.shape("post_quant_conv.weight", 4)[0]
    if channels % NORM_NUM_GROUPS or (embed is not None and embed.shape[1] != channels):
        raise CheckpointError(
            f"{file} has features of {channels} channels, which fit neither the norms nor the decoder: give the file "
            "of an unaltered model"
        )
    with torch.device("meta"):
        projector = XOmniProjector(
            codebook_size=codes,
            codebook_dim=dimension,
            channels=channels,
            num_blocks=tensors.count("post_conv."),
            decoder_dim=None if embed is None else len(embed),
            norm_num_groups=NORM_NUM_GROUPS,
        )
    dtype = tensors["quantize.embedding.weight"].dtype
    # The way from pixels to tokens.
    return tensors.fill(projector, PROJECTOR_NAMES, dtype=dtype, ignored=r"(pre|quant)_conv\..*")


def _transformer(folder: Path) -> tuple[FluxTransformer2DModel, torch.Tensor]:
    """A plain FLUX of the published decoder, and the layer that reads semantic features."""
    config = read_json(folder / "config.json")
    state = {
        key: tensor for file in sorted(folder.glob("*.safetensors")) for key, tensor in load_original(file).items()
    }
    tensors = OriginalTensors(state, f"decoder of {KIND}", folder)
    tensors.shape("siglip_embed.weight")
    embed = tensors.pop("siglip_embed.weight")
    with damaged_files(folder / "config.json"), init_empty_weights():
        transformer = FluxTransformer2DModel(**{name: config[name] for name in DECODER_SETTINGS if name in config})
    return tensors.fill(transformer, lambda name: name, dtype=embed.dtype), embed


def _tokenizer(folder: Path) -> PreTrainedTokenizerBase | None:
    if not any((folder / name).is_file() for name in ("tokenizer.json", "vocab.json")):
        return None
    with damaged_files(folder):
        return load_from_files(Qwen2TokenizerFast, folder)
