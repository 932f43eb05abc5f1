"""Tiny LlamaGen models under the names of published files."""

from pathlib import Path

import published_layouts as layouts
from pipelines.llamagen import tiny
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, T5Config, T5EncoderModel


def t5_encoder(folder: Path, width: int) -> Path:
    """A T5 encoder of this width and its tokenizer, which are written to a folder."""
    config = T5Config(vocab_size=8, d_model=width, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    T5EncoderModel(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({"<pad>": 0, "</s>": 1, "<unk>": 2, "heart": 3}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="</s>").save_pretrained(folder)
    return folder


def classes(root: Path) -> None:
    layouts.copy(tiny.FIXTURES / "c2i" / "c2i_tiny.pt", root / "FoundationVision/LlamaGen/c2i_B_256.pt")
    layouts.copy(tiny.FIXTURES / "c2i" / "vq_ds4_c2i.pt", root / "FoundationVision/LlamaGen/vq_ds16_c2i.pt")


def texts(root: Path) -> None:
    layouts.copy(tiny.FIXTURES / "t2i" / "t2i_tiny.pt", root / "peizesun/llamagen_t2i/t2i_XL_stage1_256.pt")
    layouts.copy(tiny.FIXTURES / "t2i" / "vq_ds4_t2i.pt", root / "peizesun/llamagen_t2i/vq_ds16_t2i.pt")
    folder = t5_encoder(root / "google/flan-t5-xl", 32)
    for name in ("README.md", "flax_model-00001-of-00002.msgpack", "pytorch_model-00001-of-00002.bin"):
        (folder / name).write_bytes(layouts.UNUSED)


MODELS = {
    "llamagen-c2i-b-256": (classes, {"class_labels": [1]}, "LlamaGenPipeline", {"image_size": 24, "num_heads": 4}),
    "llamagen-t2i-xl-256": (texts, {"prompt": "heart"}, "LlamaGenPipeline", {"image_size": 16, "num_heads": 4}),
}
