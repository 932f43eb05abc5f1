"""What the tiny Janus of the fixtures lacks: a tokenizer, a processor, and the layout that its authors publish."""

import json
import string
from pathlib import Path

import tiny
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import JanusImageProcessor, JanusProcessor, PreTrainedTokenizerFast

from arimage import JanusPipeline
from arimage.convert import convert_janus
from arimage.models.neighbours import NeighbourModel


FOLDER = Path(__file__).parent / "fixtures"
FIRST_SPECIAL = 150
SPECIAL_TOKENS = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜▁pad▁｜>",
    "<begin_of_image>",
    "<end_of_image>",
    "<image_placeholder>",
)
BOS, EOS, PAD, BOI, EOI, IMAGE = SPECIAL_TOKENS
TEMPLATE = (
    "{% for m in messages %}Q{% for part in m.content %}"
    "{{ '<image_placeholder>' if part.type == 'image' else part.text }}{% endfor %}A{% endfor %}"
)


def characters() -> Tokenizer:
    """A token a character, and the special ones where the model has them."""
    vocab = {character: i for i, character in enumerate(sorted(string.printable))}
    vocab |= {f"<{i}>": i for i in range(len(vocab), FIRST_SPECIAL)}
    vocab |= {token: FIRST_SPECIAL + i for i, token in enumerate(SPECIAL_TOKENS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    return tokenizer


def processor() -> JanusProcessor:
    """As in the layout of transformers, with a template of its own."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=characters(),
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        add_bos_token=True,
        extra_special_tokens={"image_token": IMAGE, "boi_token": BOI, "eoi_token": EOI},
    )
    pictures = JanusImageProcessor(size={"height": 64, "width": 64}, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    return JanusProcessor(pictures, tokenizer, chat_template=TEMPLATE, num_image_tokens=16)


def original_state() -> dict[str, torch.Tensor]:
    """The weights of the fixture by the names that the authors gave them, with what else their files hold."""
    state = {}
    for name, value in load_file(FOLDER / "model.safetensors").items():
        part, _, rest = name.removeprefix("model.").partition(".")
        if part == "lm_head":
            name = f"language_model.lm_head.{rest}"
        elif part == "language_model":
            name = f"language_model.model.{rest}"
        elif part in ("aligner", "generation_aligner"):
            layer = {"fc1": 0, "hidden_layers.0": 2}[rest.rpartition(".")[0]]
            name = f"{part.replace('generation', 'gen')}.layers.{layer}.{rest.rpartition('.')[2]}"
        elif part == "generation_embeddings":
            name = f"gen_embed.{rest}"
        elif part == "generation_head":
            name = f"gen_head.{rest.replace('proj_out', 'output_mlp_projector')}"
        elif part == "vqmodel":
            rest = rest.replace(".down.", ".conv_blocks.").replace(".up.", ".conv_blocks.").replace(".block.", ".res.")
            for i, block in enumerate(("block_1", "attn_1", "block_2")):
                rest = rest.replace(f".mid.{block}.", f".mid.{i}.")
            name = f"gen_vision_model.{rest}"
        else:
            name, value = _vision(rest, value)
        state[name] = value
    for layer in {name.split(".attn.")[0] for name in state if ".attn.q_proj." in name}:
        for kind in ("weight", "bias"):
            parts = [state.pop(f"{layer}.attn.{part}_proj.{kind}") for part in "qkv"]
            state[f"{layer}.attn.qkv.{kind}"] = torch.cat(parts)
    state["vision_model.vision_tower.attn_pool.latent"] = torch.ones(1, 1, 32)
    state["gen_vision_model.quantize.codebook_used"] = torch.zeros(65536)
    return state


def _vision(rest: str, value: torch.Tensor) -> tuple[str, torch.Tensor]:
    if rest == "embeddings.position_embedding.weight":
        return "vision_model.vision_tower.pos_embed", value[None]
    rest = rest.replace("embeddings.patch_embedding", "patch_embed.proj").replace("post_layernorm", "norm")
    rest = rest.replace("encoder.layers.", "blocks.").replace("layer_norm", "norm")
    rest = rest.replace("self_attn.projection_layer", "attn.proj").replace("self_attn", "attn")
    return f"vision_model.vision_tower.{rest}", value


def original_config() -> dict:
    """Which the authors leave to their code's defaults in part."""
    text = json.loads((FOLDER / "config.json").read_text())["text_config"]
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
    return {
        "architectures": ["MultiModalityCausalLM"],
        "model_type": "multi_modality",
        "torch_dtype": "float32",
        "vision_config": {
            "cls": "CLIPVisionTower",
            "params": {"image_size": 64, "model_name": "siglip_large_patch16_384"},
        },
        "aligner_config": {"cls": "MlpProjector", "params": {"depth": 2, "projector_type": "mlp_gelu"}},
        "gen_vision_config": {"cls": "VQ-16", "params": {"image_token_size": 256, "n_embed": 8}},
        "gen_aligner_config": {"cls": "MlpProjector", "params": {"depth": 2, "projector_type": "mlp_gelu"}},
        "gen_head_config": {"cls": "vision_head", "params": {"image_token_size": 256}},
        "language_config": {
            "model_type": "llama",
            "torch_dtype": "float32",
            "_attn_implementation": "flash_attention_2",
            "max_position_embeddings": 256,
            **{name: text[name] for name in names},
        },
    }


def write_original(folder: Path, state: dict[str, torch.Tensor] | None = None, shards: int = 0) -> Path:
    """The fixture as its authors publish their models, in one .bin file or in several .safetensors."""
    state = original_state() if state is None else state
    folder.mkdir()
    if shards:
        names = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
        where = {key: names[i % shards] for i, key in enumerate(state)}
        for name in names:
            save_file({key: value for key, value in state.items() if where[key] == name}, folder / name)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    else:
        torch.save(state, folder / "pytorch_model.bin")
    characters().save(str(folder / "tokenizer.json"))
    special = {
        name: {"__type": "AddedToken", "content": token, "special": True}
        for name, token in (("bos_token", BOS), ("eos_token", EOS), ("pad_token", EOS))
    }
    for name, content in {
        "config.json": original_config(),
        "tokenizer_config.json": {
            "add_bos_token": True,
            "add_eos_token": False,
            "tokenizer_class": "LlamaTokenizerFast",
        }
        | {"model_max_length": 16384, "unk_token": None, **special},
        "preprocessor_config.json": {"image_size": 64, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
        | {"min_size": 14, "rescale_factor": 1 / 255, "image_processor_type": "VLMImageProcessor"},
        "special_tokens_map.json": {"additional_special_tokens": [IMAGE], **special},
        "processor_config.json": {"num_image_tokens": 16, "processor_class": "VLChatProcessor"},
    }.items():
        (folder / name).write_text(json.dumps(content))
    return folder


def pipeline() -> JanusPipeline:
    model = convert_janus(FOLDER).model
    neighbours = tiny.randomise(NeighbourModel(model.config.vq_config.num_embeddings, rank=4), 0)
    return JanusPipeline(model, processor(), neighbours)


PIPELINES = {
    "janus": (pipeline, {"usual", "language", "text", "trained", "fused", "lines"}),
}
