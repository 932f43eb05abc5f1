"""From the published files of Janus and Janus-Pro (https://github.com/deepseek-ai/Janus), or from their transformers
layout, to a `JanusPipeline`."""

import math
import re
from pathlib import Path

import torch
from accelerate import init_empty_weights
from tokenizers import Tokenizer
from transformers import (
    GenerationConfig,
    JanusConfig,
    JanusForConditionalGeneration,
    JanusImageProcessor,
    JanusProcessor,
    LlamaConfig,
    PreTrainedTokenizerFast,
)

from ...convert.checkpoint import OriginalTensors, save_whole
from ...convert.folder import damaged_files, load_model, load_original_folder, read_json
from ...convert.paths import CheckpointError, check_vacant
from ...models.tokenizer_files import check_tokenizer_files
from .pipeline_janus import JanusPipeline


# Names of the two speakers in a prompt; no file holds them.
ROLES = {"janus": ("User", "Assistant"), "janus-pro": ("<|User|>", "<|Assistant|>")}
# The padding of unconditional prompts, and the tokens around and for an image.
PAD_TOKEN = "<｜▁pad▁｜>"
IMAGE_TOKENS = {
    "image_token": "<image_placeholder>",
    "boi_token": "<begin_of_image>",
    "eoi_token": "<end_of_image>",
}
# Of every SigLIP that the original builds; the tensors do not show it.
NUM_VISION_HEADS = 16
ALIGNER_NAMES = (("fc1.", "layers.0."),)
# The parts of a model: ours, the original's, and how names inside them change, from top to bottom.
PARTS = (
    ("lm_head.", "language_model.lm_head.", ()),
    ("model.language_model.", "language_model.model.", ()),
    ("model.aligner.", "aligner.", ALIGNER_NAMES),
    ("model.generation_aligner.", "gen_aligner.", ALIGNER_NAMES),
    ("model.generation_embeddings.", "gen_embed.", ()),
    ("model.generation_head.", "gen_head.", (("proj_out.", "output_mlp_projector."),)),
    (
        "model.vision_model.",
        "vision_model.vision_tower.",
        (
            ("embeddings.patch_embedding.", "patch_embed.proj."),
            ("embeddings.position_embedding.weight", "pos_embed"),
            ("encoder.layers.", "blocks."),
            ("self_attn.projection_layer.", "attn.proj."),
            ("self_attn.", "attn."),
            ("post_layernorm.", "norm."),
            ("layer_norm", "norm"),
        ),
    ),
    (
        "model.vqmodel.",
        "gen_vision_model.",
        (
            ("encoder.down.", "encoder.conv_blocks."),
            ("decoder.up.", "decoder.conv_blocks."),
            (".block.", ".res."),
            ("mid.block_1.", "mid.0."),
            ("mid.attn_1.", "mid.1."),
            ("mid.block_2.", "mid.2."),
        ),
    ),
)
# The head that pools the vision tower's output serves nothing here.
IGNORED = (
    r"vision_model\.vision_tower\.attn_pool\..*|gen_vision_model\.quantize\.codebook_used|.*\.rotary_emb\.inv_freq"
)


def janus_from_original(
    state: dict[str, torch.Tensor], language_config: dict, *, source: str | Path = "the checkpoint"
) -> JanusForConditionalGeneration:
    """The model whose tensors are `state`, in the dtype of its token embedding and in evaluation mode.

    Args:
        language_config: of the same name in the original's `config.json`.
    """
    state = OriginalTensors(state, "Janus model", source)
    tower, vq = "vision_model.vision_tower", "gen_vision_model"
    width, _, patch_size, _ = state.shape(f"{tower}.patch_embed.proj.weight", 4)
    num_patches = state.shape(f"{tower}.pos_embed", 3)[1]
    base_channels, *widths = state.encoder_widths(f"{vq}.encoder.conv_blocks.", "res.0")
    num_embeddings, embed_dim = state.shape(f"{vq}.quantize.embedding.weight")
    config = JanusConfig(
        text_config=LlamaConfig(
            **{
                name: value
                for name, value in language_config.items()
                if name != "torch_dtype" and not name.startswith("_")
            }
        ),
        vision_config={
            "hidden_size": width,
            "patch_size": patch_size,
            "image_size": patch_size * math.isqrt(num_patches),
            "num_image_tokens": num_patches,
            "num_hidden_layers": state.count(f"{tower}.blocks."),
            "num_attention_heads": NUM_VISION_HEADS,
            "mlp_ratio": state.shape(f"{tower}.blocks.0.mlp.fc1.weight")[0] / width,
            "projection_dim": state.shape("aligner.layers.0.weight")[0],
            "depth": state.count("aligner.layers."),
        },
        vq_config={
            "embed_dim": embed_dim,
            "num_embeddings": num_embeddings,
            "latent_channels": state.shape(f"{vq}.encoder.conv_out.weight", 4)[0],
            "base_channels": base_channels,
            "channel_multiplier": [width // base_channels for width in widths],
            "num_res_blocks": state.count(f"{vq}.encoder.conv_blocks.0.res."),
            "projection_dim": state.shape("gen_aligner.layers.0.weight")[0],
            "num_hidden_layers": state.count("gen_aligner.layers."),
            "image_token_embed_dim": state.shape("gen_head.output_mlp_projector.weight")[1],
        },
        tie_word_embeddings=False,
    )
    # Buffers that are in no file keep what the modules put there.
    with init_empty_weights():
        model = JanusForConditionalGeneration(config)

    state[f"{tower}.pos_embed"] = state[f"{tower}.pos_embed"].squeeze(0)
    for key in [key for key in state if key.startswith(tower) and ".attn.qkv." in key]:
        for name, part in zip("qkv", state.pop(key).tensor_split(3), strict=True):
            state[key.replace("qkv", f"{name}_proj")] = part
    dtype = state["language_model.model.embed_tokens.weight"].dtype
    return state.fill(model, _original_name, dtype=dtype, ignored=IGNORED)


def _original_name(name: str) -> str:
    ours, original, changes = next(part for part in PARTS if name.startswith(part[0]))
    name = name.removeprefix(ours)
    for change in changes:
        name = name.replace(*change)
    # Activations lie between the linear layers.
    name = re.sub(r"^hidden_layers\.(\d+)", lambda match: f"layers.{2 * int(match[1]) + 2}", name)
    return original + name


def chat_template(roles: tuple[str, str]) -> str:
    """The prompt of a conversation, as Jinja: the user's images and words, then the assistant's, by turns."""
    user, assistant = roles
    return (
        "{% for message in messages %}"
        f"{{{{ '{user}' if message.role == 'user' else '{assistant}' }}}}: "
        "{% for part in message.content %}"
        "{{ '<image_placeholder>\\n' if part.type == 'image' else part.text | trim }}"
        "{% endfor %}"
        "{{ '\\n\\n' if message.role == 'user' else eos_token }}"
        "{% endfor %}"
        f"{{% if add_generation_prompt %}}{assistant}:{{% endif %}}"
    )


def _original_processor(folder: Path, config: JanusConfig, template: str) -> JanusProcessor:
    vocabulary = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for token in (PAD_TOKEN, *IMAGE_TOKENS.values()):
        if vocabulary.token_to_id(token) is None:
            raise CheckpointError(f"{folder / 'tokenizer.json'} has no {token!r}: give the tokenizer of a Janus")
    # This class takes tokenizer.json as it is; the one that tokenizer_config.json names would make up parts of it.
    tokenizer = PreTrainedTokenizerFast.from_pretrained(
        folder, local_files_only=True, add_bos_token=True, pad_token=PAD_TOKEN, extra_special_tokens=IMAGE_TOKENS
    )
    size = config.vision_config.image_size
    settings = read_json(folder / "preprocessor_config.json")
    names = ("image_mean", "image_std", "min_size", "rescale_factor", "do_normalize")
    image_processor = JanusImageProcessor(
        size={"height": size, "width": size}, **{name: settings[name] for name in names if name in settings}
    )
    return JanusProcessor(
        image_processor,
        tokenizer,
        chat_template=chat_template(ROLES[template]),
        use_default_system_prompt=True,
        num_image_tokens=config.vision_config.num_image_tokens,
    )


def convert_janus(folder: str | Path, *, template: str | None = None, out: str | Path | None = None) -> JanusPipeline:
    """The pipeline of a published checkpoint, with the published sampling defaults.

    Args:
        folder: as deepseek-ai or deepseek-community published it, with config, weights and tokenizer.
            Without a tokenizer, the transformers layout gives a pipeline that takes `input_ids` only.
        template: "janus" for Janus-1.3B or "janus-pro": how prompts are written. By default the template in the
            folder; the layout of deepseek-ai has none, and is then taken for a Janus-Pro.
        out: a new or empty folder to save the pipeline to. It appears when all of it is written, or not at all.

    Raises:
        CheckpointError: if the folder is not a complete Janus, or `out` is taken.
    """
    check_vacant(out)
    if template not in (None, *ROLES):
        raise CheckpointError(f"template is {template!r}: choose among {', '.join(ROLES)}")
    folder = Path(folder)
    config = read_json(folder / "config.json")
    model_type = config.get("model_type")
    if model_type == "janus":
        model, processor = _load_transformers(folder)
        if template is not None and processor is not None:
            processor.chat_template = chat_template(ROLES[template])
    elif model_type == "multi_modality" and "gen_head_config" in config:
        for name in ("tokenizer.json", "preprocessor_config.json"):
            if not (folder / name).is_file():
                raise CheckpointError(f"{folder} has no {name}: give the whole folder of a published Janus")
        state = load_original_folder(folder)
        with damaged_files(folder):
            model = janus_from_original(state, config["language_config"], source=folder)
            processor = _original_processor(folder, model.config, template or "janus-pro")
        tokenizer = processor.tokenizer
        ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        model.config.text_config.update(ids)
        model.config.image_token_id = tokenizer.image_token_id
        model.generation_config = GenerationConfig(**ids, generation_kwargs={"boi_token_id": tokenizer.boi_token_id})
    else:
        raise CheckpointError(
            f"{folder} holds a model of type {model_type!r}, expected 'janus' or the 'multi_modality' of Janus: give "
            "the folder of a published Janus"
        )
    pipeline = JanusPipeline(model=model, processor=processor)
    save_whole(pipeline.save_pretrained, out)
    return pipeline


def _load_transformers(folder: Path) -> tuple[JanusForConditionalGeneration, JanusProcessor | None]:
    model = load_model(JanusForConditionalGeneration, folder)
    processor = None
    if (folder / "tokenizer.json").is_file():
        with damaged_files(folder):
            check_tokenizer_files(folder, JanusProcessor)
            processor = JanusProcessor.from_pretrained(folder, local_files_only=True)
        # Files that name another class of tokenizer lose it.
        processor.tokenizer.add_bos_token = True
    return model, processor
