"""The tiny random MammothModa2-Preview and -Dev of the fixtures: the authors' layout, and with a tokenizer of
characters."""

import base64
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from arimage import MammothModa2Pipeline
from arimage.convert import convert_mammothmoda2
from arimage.pipelines.mammothmoda2.prompts import CHAT_TEMPLATE as CHAT_TEMPLATE


FIXTURES = Path(__file__).parent / "fixtures"
TEXT_VOCABULARY = 152064
VARIANTS = ("preview", "dev")
EXPECTED = {variant: load_file(FIXTURES / variant / "expected.safetensors") for variant in VARIANTS}
IDS = {variant: json.loads((FIXTURES / variant / "tokens.json").read_text()) for variant in VARIANTS}


def character_tokenizer(variant: str = "preview") -> PreTrainedTokenizerFast:
    """One token a printable character, and special tokens with the ids of the fixtures."""
    ids = IDS[variant]
    special = {"<|endoftext|>": ids["pad"], "<|image_pad|>": ids["visual_ids"][0]}
    special |= {"<|im_start|>": ids["pad"] - 1, "<|im_end|>": ids["pad"] - 2}
    special |= {"<|endofline|>": ids["eol"], "<|image start|>": ids["boi"], "<|image token|>": ids["img"]}
    special |= {"<|image end|>": ids["eoi"]}
    vocabulary = {chr(32 + i): i for i in range(95)} | {"\n": 95} | special
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.add_special_tokens(list(special))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<|endoftext|>")


def pipeline(variant: str = "preview", tokenizer: bool = True) -> MammothModa2Pipeline:
    """Text to images of 3 x 4 tokens and 32 x 32 pixels where nothing is given."""
    parts = convert_mammothmoda2(FIXTURES / variant).components
    parts["tokenizer"] = character_tokenizer(variant) if tokenizer else None
    pipe = MammothModa2Pipeline(**parts, token_grid=(3, 4), image_size=32)
    pipe.generation_config["num_inference_steps"] = 2
    return pipe


def copy(folder: Path, variant: str, **changes: torch.Tensor | None) -> Path:
    """The fixtures of a variant, with some tensors changed or left out."""
    shutil.copytree(FIXTURES / variant, folder)
    state = load_file(folder / "model.safetensors") | changes
    save_file({key: value for key, value in state.items() if value is not None}, folder / "model.safetensors")
    return folder


def write_published(folder: Path) -> Path:
    """The fixtures of Preview in bfloat16, with the ids of the published tokens and a tokenizer of bytes."""
    table = "".join(f"{base64.b64encode(bytes([i])).decode()} {i}\n" for i in range(256))
    names = ["<|image start|>", "<|image token|>", "<|image end|>", *(f"<|visual token {i:06d}|>" for i in range(72))]
    state = load_file(FIXTURES / "preview" / "model.safetensors")
    text = "llm_model.model.language_model.embed_tokens.weight"
    wide = torch.zeros(TEXT_VOCABULARY, 48)
    wide[:256], wide[151643 : 151643 + 22] = state[text][:256], state[text][256:278]
    copy(folder, "preview", **{key: value.bfloat16() for key, value in (state | {text: wide}).items()})
    (folder / "mammothu.tiktoken").write_text(table)
    (folder / "mammothu_vision_tokens.txt").write_text("\n".join(names) + "\n")
    for name in ("expected.safetensors", "tokens.json"):
        (folder / name).unlink()
    config = json.loads((folder / "config.json").read_text())
    ids = {"vocab_size": TEXT_VOCABULARY, "gen_vocab_start_index": TEXT_VOCABULARY}
    config["llm_config"]["text_config"] |= ids
    config["llm_config"] |= {"gen_vocab_start_index": TEXT_VOCABULARY, "image_token_id": 151655}
    config["llm_config"] |= {"video_token_id": 151656, "vision_start_token_id": 151652, "vision_end_token_id": 151653}
    (folder / "config.json").write_text(json.dumps(config))
    file = folder / "t2i_generation_config.json"
    ids = {"visual_token_start_id": 152072, "visual_token_end_id": 168456, "eol_token_id": 152064}
    file.write_text(json.dumps(json.loads(file.read_text()) | ids))
    return folder


PIPELINES = {
    "mammothmoda2": (pipeline, {"special", "text", "fused"}),
    "mammothmoda2-dev": (lambda: pipeline("dev"), {"special", "twin", "shared steps"}),
}
