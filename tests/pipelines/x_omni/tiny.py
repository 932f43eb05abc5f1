"""The tiny random X-Omni of the fixtures, in the authors' layout, with a tokenizer of characters and the other parts
of a tiny FLUX."""

from pathlib import Path

import tiny
import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler
from safetensors.torch import load_file
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import CLIPTextConfig, CLIPTextModel, PreTrainedTokenizerFast

from arimage import XOmniPipeline
from arimage.convert import convert_x_omni


FIXTURES = Path(__file__).parent / "fixtures"
EXPECTED = load_file(FIXTURES / "expected.safetensors")


def character_tokenizer() -> PreTrainedTokenizerFast:
    """One token a printable character."""
    vocabulary = {chr(32 + i): i for i in range(95)} | {"<|endoftext|>": 199}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<|endoftext|>")


def flux() -> dict:
    """What `diffusers.FluxPipeline` has besides the transformer."""
    tokenizer = tiny.text_tokenizer()
    shape = {"hidden_size": 20, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    clip = CLIPTextConfig(**shape, vocab_size=len(tokenizer), max_position_embeddings=tiny.TEXT_LENGTH)
    torch.manual_seed(0)
    vae = AutoencoderKL(
        block_out_channels=(8, 8, 8, 8),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=4,
        shift_factor=0.1,
    )
    return {
        "vae": vae.eval(),
        "scheduler": FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        "text_encoder": CLIPTextModel(clip).eval(),
        "tokenizer": tokenizer,
        "text_encoder_2": tiny.text_encoder(len(tokenizer), 24),
        "tokenizer_2": tokenizer,
    }


def pipeline() -> XOmniPipeline:
    """Text to images of 4 x 3 tokens and 64 x 48 pixels."""
    parts = convert_x_omni(FIXTURES).components
    pipe = XOmniPipeline(**parts | flux() | {"text_tokenizer": character_tokenizer()}, image_size=64)
    pipe.generation_config["num_inference_steps"] = 2
    return pipe


PIPELINES = {"x-omni": (pipeline, {"special", "text", "fused"})}
