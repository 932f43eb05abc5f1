"""What the published checkpoints of several families share: patterns of files, parameters, bytes and arguments."""

from typing import Literal

from .family import FOLDER, Argument, path


# In the layout of transformers.
SAFETENSORS = ("*.json", "*.jinja", "*.safetensors")
PICKLES = ("*.json", "pytorch_model*.bin")
# In the layout of BAAI.
EMU_FILES = ("*.json", "*.safetensors", "emu3.tiktoken", "emu3_vision_tokens.txt")
# Parameters of LlamaGen's image tokenizer, and of the encoder of flan-t5-xl.
LLAMAGEN_VQ, T5_XL_ENCODER = 71_900_000, 1_223_500_000
T5_XL_FILES = 11_400_000_000
T5_XL_PATTERNS = ("*token*.json", "config.json", "model*", "spiece.model")
SUBFOLDER = Argument("subfolder", "Where the weights lie in the transformer's folder.", str | None, None)
T5_XL = path("text_encoder", "Folder of flan-t5-xl and its tokenizer.", FOLDER, default=None)
FLOATS = Literal["float32", "bfloat16"]
DTYPE = Argument("dtype", "Of the transformer's weights; bfloat16 halves the files.", FLOATS, "float32")
