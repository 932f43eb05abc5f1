"""From the published folders of NextStep (https://github.com/stepfun-ai/NextStep-1) to a `NextStepPipeline`."""

from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL
from pydantic import BaseModel
from transformers import Qwen2Config, Qwen2Model, Qwen2TokenizerFast
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding

from ...convert.checkpoint import WRAPPINGS, OriginalTensors, load_original, pipeline_of, save_whole
from ...convert.continuous import autoencoder_from_original, denoising_head_from_original
from ...convert.folder import damaged_files, load_original_folder, read_json
from ...convert.paths import CheckpointError, check_vacant
from ...models.denoising_head import DenoisingHead
from ...models.tokenizer_files import load_from_files
from ...settings.schema import Side, check
from .flow import STEPS
from .pipeline_nextstep import NextStepPipeline
from .projector import NextStepProjector


# What config.json says of the language model.
SETTINGS = (
    "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads rms_norm_eps vocab_size "
    "max_position_embeddings".split()
)
PROJECTOR_NAMES = (("of_tokens.", "image_in_projector."), ("of_hidden.", "image_out_projector."))
# Of NextStep-1 alone: positions of images, which no published call uses.
POSITIONS = "gen_pos_embed"
# The shift and the guidance by reference images of the published editing calls.
EDITING = 3.2, 2.0
# Pixels per latent.
VAE_FACTOR = 8


class Sizes(BaseModel):
    """Settings of a published config.json under the names of either version."""

    patch_size: Side | None = None
    latent_patch_size: Side | None = None
    image_size: Side | None = None
    latent_size: Side | None = None


def convert_nextstep(
    folder: str | Path, *, vae: str | Path | None = None, editing: bool = False, out: str | Path | None = None
) -> NextStepPipeline:
    """The pipeline of a published folder, with the published sampling defaults and the weights in the dtype of the
    files; head and autoencoder are float32.

    Args:
        folder: of NextStep-1.1 or NextStep-1, as the authors published it.
        vae: the folder of the autoencoder, `checkpoint.pt` and `config.json`, by default `vae` in `folder`.
        editing: whether to set the defaults of the published calls of NextStep-1-Large-Edit.
        out: a new or empty folder to save the pipeline to. It appears when all of it is written, or not at all.

    Raises:
        CheckpointError: if a folder cannot be read, does not fit the other, or `out` is taken.
    """
    check_vacant(out)
    folder = Path(folder)
    config = read_json(folder / "config.json")
    with damaged_files(folder / "config.json"):
        check(Sizes, config, folder / "config.json")
    state = load_original_folder(folder)
    first = POSITIONS in state
    model, projector, head = nextstep_from_original(state, config, source=folder)
    autoencoder, norm_size = _load_vae(folder / "vae" if vae is None else Path(vae))
    with damaged_files(folder):
        tokenizer = load_from_files(Qwen2TokenizerFast, folder)
    components = (model, projector, head, autoencoder, tokenizer)
    pipeline = pipeline_of(
        NextStepPipeline,
        folder,
        *components,
        patch_size=config.get("patch_size") or config.get("latent_patch_size") or 2,
        image_size=VAE_FACTOR * (config.get("image_size") or config.get("latent_size") or 64),
        normalises_tokens=first,
        repeats_bos=not first,
        reference_norm_size=norm_size,
    )
    if first:
        pipeline.sampler = "em-1.0"
        pipeline.generation_config["num_diffusion_steps"] = STEPS[pipeline.sampler]
    if editing:
        pipeline.timesteps_shift, pipeline.image_guidance_scale = EDITING
    save_whole(pipeline.save_pretrained, out)
    return pipeline


def nextstep_from_original(
    state: dict[str, torch.Tensor], config: dict[str, Any], *, source: str | Path = "the checkpoint"
) -> tuple[Qwen2Model, NextStepProjector, DenoisingHead]:
    """The language model, the projector and the head whose tensors are `state`, in evaluation mode, the head in
    float32 and the others in the dtype of the files.

    Args:
        config: the original's config.json.

    Raises:
        CheckpointError: if a setting is missing or unknown, or a tensor is missing, unknown or of an unexpected shape.
    """
    missing = [name for name in SETTINGS if not isinstance(config.get(name), int | float)]
    if missing:
        raise CheckpointError(f"config.json of {source} has no {missing[0]!r}: give an unaltered folder")
    if config.get("rope_scaling") is not None:
        raise CheckpointError(
            f"config.json of {source} has rope_scaling {config['rope_scaling']}, which no published NextStep has: "
            "give an unaltered folder"
        )
    state = OriginalTensors(state, "NextStep", source)
    dtype = state["embed_tokens.weight"].dtype if "embed_tokens.weight" in state else torch.float32
    hidden_size, token_dim = state.shape("image_in_projector.weight")
    rope = {"rope_type": "default", "rope_theta": config.get("rope_theta", 10000.0)}
    with damaged_files(source), torch.device("meta"):
        model = Qwen2Model(Qwen2Config(**{name: config[name] for name in SETTINGS}, rope_parameters=rope))
        projector = NextStepProjector(token_dim=token_dim, hidden_size=hidden_size)
    head = denoising_head_from_original(state, "image_head.net.", learned_variance=False)
    names = [key for key in state if key.startswith(("image_in_projector.", "image_out_projector."))]
    of_projector = OriginalTensors({key: state.pop(key) for key in names}, state.kind, source)
    of_projector.fill(projector, PROJECTOR_NAMES, dtype=dtype)
    # The head of the language model predicts texts.
    state.fill(model, str, dtype=dtype, ignored=rf"lm_head\.weight|{POSITIONS}|.*\.rotary_emb\.inv_freq")
    # What no checkpoint holds.
    model.rotary_emb = Qwen2RotaryEmbedding(model.config)
    model.config.dtype = dtype
    return model, projector, head


def _load_vae(folder: Path) -> tuple[AutoencoderKL, int | None]:
    """The autoencoder of a folder, and the side of the patches over which it normalises the latents that it encodes,
    if it does."""
    file, config = folder / "checkpoint.pt", read_json(folder / "config.json")
    scaling, shift = (config.get(name) for name in ("scaling_factor", "shift_factor"))
    if not isinstance(scaling, int | float) or not isinstance(shift, int | float):
        raise CheckpointError(
            f"{folder / 'config.json'} has scaling_factor {scaling} and shift_factor {shift}: give an unaltered folder"
        )
    vae = autoencoder_from_original(
        load_original(file, WRAPPINGS), scaling_factor=scaling, shift_factor=shift, kind="NextStep's VAE", source=file
    )
    return vae, (config.get("psz") or 1) if config.get("encoder_norm", True) else None
