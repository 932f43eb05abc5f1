"""A tiny RandAR under the names of published files."""

from pathlib import Path

import published_layouts as layouts
import torch
from pipelines.llamagen import tiny as tiny_llamagen
from safetensors.torch import save_file


def original_state(classes: int = 10, codes: int = 128, width: int = 32, layers: int = 2) -> dict[str, torch.Tensor]:
    """Random tensors of a RandAR by their original names."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) / shape[-1] ** 0.5

    state = {
        "cls_embedding.embedding_table.weight": random(classes + 1, width) * 6,
        "tok_embeddings.weight": random(codes, width) * 6,
        "pos_instruct_embeddings": random(1, width) * 6,
        "norm.weight": torch.ones(width),
        "output.weight": random(codes, width) * 3,
    }
    for layer in range(layers):
        shapes = {
            "attention.wqkv": (3 * width, width),
            "attention.wo": (width, width),
            "feed_forward.w1": (64, width),
            "feed_forward.w2": (width, 64),
            "feed_forward.w3": (64, width),
        }
        state |= {f"layers.{layer}.{name}.weight": random(*shape) for name, shape in shapes.items()}
        state |= {f"layers.{layer}.{name}.weight": torch.ones(width) for name in ("attention_norm", "ffn_norm")}
    return state


def write(root: Path) -> None:
    file = root / "ziqipang/RandAR/randar_0.3b_llamagen_360k_bs_1024_lr_0.0004.safetensors"
    file.parent.mkdir(parents=True)
    save_file(original_state(), file)
    layouts.copy(tiny_llamagen.FIXTURES / "c2i" / "vq_ds4_c2i.pt", root / "FoundationVision/LlamaGen/vq_ds16_c2i.pt")


MODELS = {
    "randar-0.3b-256": (write, {"class_labels": [1]}, "RandARPipeline", {"image_size": 96, "num_heads": 4}),
}
