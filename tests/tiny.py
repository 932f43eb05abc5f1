"""Tiny pipelines with random weights: quick on a CPU, and sharp enough that every condition gives other codes."""

from pathlib import Path

import torch
from diffusers import AutoencoderKL, DiffusionPipeline
from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, PreTrainedTokenizerFast, T5Config, T5EncoderModel

from arimage.tokenizers.upscaler import ImageUpscaler
from arimage.tokenizers.vq_llamagen import LlamaGenVQModel
from arimage.tokenizers.vq_var import VARVQModel
from arimage.training.tokens.text import train_text_tokenizer


CODES = 48
TEXT_LENGTH = 12
TEXT_WIDTH = 16
NUM_CLASSES = 10
SCALE_FACTOR = 2
SCALES = (1, 2, 3, 4)
# Nobody watches.
DiffusionPipeline._progress_bar_config = {"disable": True}


def randomise(module: torch.nn.Module, seed: int) -> torch.nn.Module:
    """Set every weight at random, so wide that logits differ by whole units, and the module to evaluation mode."""
    generator = torch.Generator().manual_seed(seed)
    for name, value in module.state_dict().items():
        if value.ndim > 1 or "embedding" in name:
            fan_in = value[0].numel()
            # Embeddings have no fan-in: each row is a vector of its own.
            scale = 1.0 if "embedding" in name or "shared" in name or "null" in name else 1.5 / fan_in**0.5
            value.copy_(torch.randn(value.shape, generator=generator) * scale)
        elif name.endswith("bias"):
            value.copy_(torch.randn(value.shape, generator=generator) * 0.1)
    return module.eval()


def autoencoder(seed: int, **settings) -> AutoencoderKL:
    """Images to latents of 3 channels and half the size."""
    types = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    shape = {"block_out_channels": (8, 8), "latent_channels": 3, "norm_num_groups": 4}
    return randomise(AutoencoderKL(**types, **shape, **settings), seed)


def text_tokenizer(max_length: int = TEXT_LENGTH) -> PreTrainedTokenizerFast:
    captions = ["a red heart", "a blue book, flat style", "green tree", "grinning cat face"]
    return train_text_tokenizer(captions, 300, max_length)


def text_encoder(vocab_size: int, width: int = TEXT_WIDTH, seed: int = 0) -> T5EncoderModel:
    config = T5Config(
        vocab_size=vocab_size,
        d_model=width,
        d_kv=8,
        num_heads=2,
        d_ff=32,
        num_layers=1,
        pad_token_id=0,
        eos_token_id=1,
    )
    return randomise(T5EncoderModel(config), seed + 2)


def save_clip(folder: Path, text_length: int = 12) -> Path:
    """Save a CLIP so sharp that every text and picture has features of its own."""
    tokenizer = text_tokenizer(text_length)
    tokenizer.save_pretrained(folder)
    tower = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = tower | {
        "vocab_size": len(tokenizer),
        "max_position_embeddings": text_length,
        "bos_token_id": 0,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    vision = tower | {"image_size": 32, "patch_size": 8}
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=16))
    randomise(model, 0).save_pretrained(folder)
    size = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
    CLIPImageProcessor(**size).save_pretrained(folder)
    return folder


def image_tokenizer(codes: int = CODES, seed: int = 0) -> LlamaGenVQModel:
    model = LlamaGenVQModel(
        channels=8,
        channel_multipliers=(1, 2),
        layers_per_block=1,
        latent_channels=16,
        codebook_size=codes,
        codebook_dim=4,
        norm_num_groups=4,
    )
    return randomise(model, seed + 1)


def scale_tokenizer(seed: int = 0) -> VARVQModel:
    model = VARVQModel(
        channels=8,
        channel_multipliers=(1, 2),
        layers_per_block=1,
        codebook_size=CODES,
        codebook_dim=4,
        scales=SCALES,
        norm_num_groups=4,
    )
    return randomise(model, seed + 1)


def any_order_settings(grid: int) -> dict:
    """Of a transformer of classes whose tokens come in any order."""
    return {
        "grid_size": grid,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": CODES,
        "num_classes": NUM_CLASSES,
    }


def upscaler(seed: int = 0, scale: int = 2) -> ImageUpscaler:
    return randomise(ImageUpscaler(channels=(4, 6), num_blocks=1, scale=scale), seed + 5)
