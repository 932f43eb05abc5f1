"""The tiny random MammothModa2-Preview and -Dev of the fixtures: the authors' layout, and with a tokenizer of
characters."""

import json
from pathlib import Path

from safetensors.torch import load_file
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from arimage import MammothModa2Pipeline
from arimage.convert import convert_mammothmoda2


FIXTURES = Path(__file__).parent / "fixtures" / "mammothmoda2"
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
    pipe.set_progress_bar_config(disable=True)
    return pipe
