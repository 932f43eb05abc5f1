"""Tiny Lumina-mGPT and Anole pipelines with random weights, and a vocabulary with letters for words."""

import json
import re
import shutil
import string
from pathlib import Path

import torch
from diffusers import VQModel
from safetensors.torch import load_file, save_file
from tiny import randomise
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import ChameleonConfig, ChameleonForConditionalGeneration, PreTrainedTokenizerFast

from arimage.pipelines.chameleon.pipeline_anole import AnolePipeline
from arimage.pipelines.chameleon.pipeline_lumina_mgpt import LuminaMGPTPipeline


CODES = 48
VERSION_2 = "2.0"
# Random weights in the published layouts: of Lumina-mGPT, and of a MoVQGAN with 64 codes.
FIXTURE = Path(__file__).parent / "fixtures"
MOVQGAN = FIXTURE / "movqgan.ckpt"
META_NAMES = {
    "model.embed_tokens": "tok_embeddings",
    "lm_head": "output",
    "model.norm": "norm",
    "model.layers": "layers",
    "self_attn.q_norm": "attention.q_normalization",
    "self_attn.k_norm": "attention.k_normalization",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    **{f"self_attn.{letter}_proj": f"attention.w{letter}" for letter in "qkvo"},
}


def vocabulary(version: str = "1.0", codes: int = CODES) -> dict[str, int]:
    """Names of all tokens: special ones, letters and codes, in the order of the version."""
    if version == VERSION_2:
        names = [f"<MOVQGAN{code:05d}>" for code in range(codes)]
    else:
        letters = str.maketrans(string.digits, "ABCDEFGHIJ")
        names = [f"IMGIMG{code}Z".translate(letters) for code in range(codes)]
    special = ["<eoss>", "<racm3:break>", "<reserved08706>", "<image>", "<reserved08799>"]
    sizes = [f"<reserved{8800 + count:05d}>" for count in range(1, 9)]
    rest = [*special, *sizes, *string.printable]
    first = ["<s>", "<pad>", "</s>", "<unk>"]
    order = [*first, *rest, *names] if version == VERSION_2 else [*first, *names, *rest]
    return {name: token for token, name in enumerate(order)}


def tokenizer(names: dict[str, int]) -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel(names, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>", pad_token="<pad>")


def vq_model(version: str = "1.0") -> VQModel:
    """8 pixels per token of Lumina-mGPT 2.0, 16 of the others."""
    # Spatial norms have 32 groups.
    levels, channels = (4, 32) if version == VERSION_2 else (5, 4)
    model = VQModel(
        down_block_types=["DownEncoderBlock2D"] * levels,
        up_block_types=["UpDecoderBlock2D"] * levels,
        block_out_channels=[channels] * levels,
        layers_per_block=1,
        latent_channels=4,
        vq_embed_dim=4,
        num_vq_embeddings=CODES,
        norm_num_groups=channels // 2,
        norm_type="spatial" if version == VERSION_2 else "group",
    )
    return randomise(model, 1)


def transformer(names: dict[str, int], **changes) -> ChameleonForConditionalGeneration:
    settings = {
        "vocab_size": len(names),
        "vocabulary_map": names,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "vq_config": {
            "base_channels": 32,
            "channel_multiplier": [1],
            "num_res_blocks": 1,
            "embed_dim": 4,
            "latent_channels": 4,
            "num_embeddings": CODES,
        },
    }
    model = randomise(ChameleonForConditionalGeneration(ChameleonConfig(**settings | changes)), 3)
    # Embeddings wide enough that every prompt gives other codes.
    model.model.embed_tokens.weight.data.mul_(4)
    return model.requires_grad_(False)


def pipeline(version: str = "1.0") -> LuminaMGPTPipeline:
    """Images of 64 pixels by default, on a grid of 4x4 codes, or 8x8 in Lumina-mGPT 2.0."""
    names = vocabulary(version)
    pipe = LuminaMGPTPipeline(transformer(names), vq_model(version), tokenizer(names), image_size=64)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def anole_pipeline() -> AnolePipeline:
    names = vocabulary()
    pipe = AnolePipeline(transformer(names), vq_model(), tokenizer(names), image_size=64)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def write_version_2(folder: Path) -> Path:
    """What `convert_lumina_mgpt` takes beside `MOVQGAN`: a folder in the layout of Lumina-mGPT 2.0, whose vocabulary
    is that of its text tokenizer."""
    names = vocabulary(VERSION_2, codes=64)
    model = transformer(names)
    model.config.vocabulary_map = None
    model.config.save_pretrained(folder)
    state = {key: value for key, value in model.state_dict().items() if "vqmodel" not in key}
    # One norm for all heads.
    state = {key: value[:1] if "_norm." in key else value for key, value in state.items()}
    save_file({key: value.contiguous() for key, value in state.items()}, folder / "model.safetensors")
    tokenizer(names).backend_tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def write_meta(folder: Path) -> Path:
    """The fixture as Meta writes it, whose RoPE turns neighbouring pairs."""
    model = folder / "models" / "7b"
    model.mkdir(parents=True)
    state = {"rope.freqs": torch.zeros(4)}
    for key, tensor in load_file(FIXTURE / "model.safetensors").items():
        if re.search(r"[qk]_(proj|norm)", key):
            tensor = tensor.flatten() if "norm" in key else tensor
            tensor = tensor.unflatten(0, (-1, 2, 4)).transpose(1, 2).flatten(0, 2)
        for ours, theirs in META_NAMES.items():
            key = key.replace(ours, theirs)
        state[key] = tensor
    torch.save(state, model / "consolidated.pth")
    settings = {"dim": 32, "n_layers": 2, "n_heads": 4, "norm_eps": 1e-5, "swin_norm": False, "qk_normalization": True}
    (model / "params.json").write_text(json.dumps({"model": settings}))
    (model / "consolidate_params.json").write_text(json.dumps({"model_parallel_size": 1}))
    shutil.copytree(FIXTURE / "tokenizer", folder / "tokenizer")
    return folder


def plain_logits(pipe: LuminaMGPTPipeline, prefix: list[int], codes: torch.LongTensor, row_end: int | None):
    """Logits [N, CODES] of every code of a map [h, w] after the tokens `prefix`, by one run over the whole
    sequence."""
    first = pipe.transformer.config.vocabulary_map["IMGIMGAZ" if pipe.scale_factor == 16 else "<MOVQGAN00000>"]
    sequence, before = list(prefix), []
    for row in codes.tolist():
        for code in row:
            before.append(len(sequence) - 1)
            sequence.append(first + code)
        if row_end is not None:
            sequence.append(row_end)
    hidden = pipe.transformer.model(input_ids=torch.tensor([sequence]), use_cache=False).last_hidden_state[0]
    return pipe.transformer.lm_head(hidden)[before, first : first + CODES]


PIPELINES = {
    "lumina": (pipeline, {"usual", "language", "text", "trained", "fused", "lines", "shared steps"}),
    "lumina-2": (lambda: pipeline(VERSION_2), {"usual", "language", "trained", "twin", "shared steps"}),
    "anole": (anole_pipeline, {"usual", "language", "text", "trained", "fused", "lines", "shared steps"}),
}
