"""The tiny random Emu3 of the fixtures: with a tokenizer of characters, and as the authors would publish it."""

import base64
import json
import re
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import Emu3ForConditionalGeneration, PreTrainedTokenizerFast

from arimage.pipelines.emu3.pipeline_emu3 import Emu3Pipeline


FIXTURES = Path(__file__).parent / "fixtures"
CONFIG = json.loads((FIXTURES / "config.json").read_text())
EXPECTED = load_file(FIXTURES / "expected.safetensors")
VOCABULARY = CONFIG["vocabulary_map"]
# The tokenizer of the authors' folder below knows bytes and these, in this order.
MERGES = ("re", "he", "red", "ear", " a", " red", "hear", " h", " hear", "heart", " heart", "'S", "ar", "ue")


def character_tokenizer() -> PreTrainedTokenizerFast:
    """One token a printable character, and the special tokens of the fixtures' vocabulary."""
    vocabulary = {chr(32 + i): i for i in range(95)} | VOCABULARY
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.add_special_tokens(list(VOCABULARY))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<|endoftext|>")


def pipeline(tokenizer: bool = True) -> Emu3Pipeline:
    """Text to images of 4x4 codes where no size is given."""
    model = Emu3ForConditionalGeneration.from_pretrained(FIXTURES)
    pipe = Emu3Pipeline(model, character_tokenizer() if tokenizer else None, image_area=32 * 32)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def original_name(name: str) -> str:
    """How the authors call a tensor of transformers' image tokenizer."""
    name = re.sub(r"(down|up)_block\.", "", name)
    name = re.sub(r"attn_norms\.(\d)", r"attn.\1.norm", name).replace("middle_block.attn_norm", "mid.attn_1.norm")
    name = re.sub(r"\b([qkv])_proj\b", r"\1", name).replace("middle_block", "mid")
    return name.replace("out_proj", "proj_out")


def original_vision_state() -> dict[str, torch.Tensor]:
    shapes = json.loads((FIXTURES / "vision_tokenizer_shapes.json").read_text())
    named = {
        original_name(key.removeprefix("vqmodel.")): tensor
        for key, tensor in load_file(FIXTURES / "model.safetensors").items()
        if key.startswith("vqmodel.")
    }
    return {key: named.pop(key).reshape(shape) for key, shape in shapes.items()}


def write_vision_tokenizer(folder: Path, state: dict[str, torch.Tensor] | None = None) -> Path:
    folder.mkdir()
    save_file(original_vision_state() if state is None else state, folder / "model.safetensors")
    config = {"model_type": "Emu3VisionVQ", "codebook_size": 64, "embed_dim": 4, "z_channels": 4, "double_z": False}
    config |= {"in_channels": 3, "out_channels": 3, "temporal_downsample_factor": 4, "ch": 32, "dropout": 0.0}
    config |= {"ch_mult": [1, 1, 1, 1], "num_res_blocks": 1, "attn_resolutions": [3]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def original_vocabulary() -> dict[str, int]:
    """The special tokens of the authors' tokenizer, whose ids follow those of the text."""
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205))]
    names += ["<|image token|>", "<|image start|>", "<|image end|>", *(f"<|visual token {i:06d}|>" for i in range(64))]
    return {name: 256 + len(MERGES) + i for i, name in enumerate(names)}


def to_original(ids: torch.LongTensor) -> torch.LongTensor:
    """Token ids of the fixtures as those of the authors' folder."""
    table = torch.arange(len(VOCABULARY) + 98)
    for name, old in VOCABULARY.items():
        table[old] = original_vocabulary().get(name, 0)
    return table[ids]


def original_language_state() -> dict[str, torch.Tensor]:
    """The fixtures' language model with the rows of its vocabulary where the authors' tokenizer has them."""
    state = {
        key.removeprefix("text_model."): tensor
        for key, tensor in load_file(FIXTURES / "model.safetensors").items()
        if key.startswith("text_model.")
    }
    old = torch.tensor([i for i in range(172) if i < 98 or i > 98])
    for key in ("model.embed_tokens.weight", "lm_head.weight"):
        wide = torch.zeros(len(original_vocabulary()) + 256 + len(MERGES), 64)
        wide[to_original(old)] = state[key][old]
        state[key] = wide
    return state


def write_original(
    folder: Path, dtype: torch.dtype = torch.float32, image_area: int = 512 * 512, **changes: torch.Tensor | None
) -> Path:
    """The fixtures' language model as the authors publish Emu3-Stage1, with some of its tensors changed or left
    out."""
    folder.mkdir()
    ranks = [bytes([i]) for i in range(256)] + [merge.encode() for merge in MERGES]
    table = "".join(f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(ranks))
    (folder / "emu3.tiktoken").write_text(table)
    vision = [name for name in original_vocabulary() if re.match(r"<\|(image|visual)", name)]
    (folder / "emu3_vision_tokens.txt").write_text("\n".join(vision) + "\n")
    state = {key: tensor for key, tensor in (original_language_state() | changes).items() if tensor is not None}
    # Two files and their index, as large checkpoints have them.
    names = sorted(state)
    index = {}
    for part, keys in enumerate((names[:5], names[5:]), start=1):
        file = f"model-0000{part}-of-00002.safetensors"
        save_file({key: state[key].to(dtype) for key in keys}, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(keys, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    special = original_vocabulary()
    config = {key: CONFIG["text_config"][key] for key in ("hidden_size", "intermediate_size", "rms_norm_eps")}
    config |= {"model_type": "Emu3", "architectures": ["Emu3ForCausalLM"], "auto_map": {"AutoConfig": "a.Config"}}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "hidden_act": "silu"}
    config |= {"vocab_size": len(state["lm_head.weight"]) if "lm_head.weight" in state else 545}
    config |= {"max_position_embeddings": 256, "rope_theta": 1e6, "rope_scaling": None, "tie_word_embeddings": False}
    config |= {"pad_token_id": special["<|endoftext|>"], "bos_token_id": special["<|extra_203|>"]}
    config |= {"eos_token_id": special["<|extra_204|>"], "image_area": image_area, "attention_dropout": 0.1}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


PIPELINES = {"emu3": (pipeline, {"usual", "language", "text", "trained", "fused", "lines"})}
