"""The table of published checkpoints has the sizes of their models."""

import pytest
import torch

from arimage.pipelines.cosmos.transformer_cosmos import CosmosTransformer
from arimage.pipelines.llamagen.convert import NUM_HEADS
from arimage.pipelines.llamagen.transformer_llamagen import LlamaGenTransformer
from arimage.pipelines.var.transformer_var import VARTransformer
from arimage.published.registry import PUBLISHED


def cosmos(entry):
    size = entry.repository.removeprefix("nvidia/Cosmos-Predict1-").removeprefix("nvidia/Cosmos-1.0-Autoregressive-")
    settings = {"hidden_size": 5120, "num_layers": 40, "yarn": True} if size[0] == "1" else {}
    if size.endswith("Video2World"):
        settings |= {"context_dim": 1024, "embeddings": 64064}
    assert ("text_encoder" in entry.files) == ("context_dim" in settings)
    return CosmosTransformer(**settings)


def llamagen(entry):
    sizes = {"b": (768, 12), "l": (1024, 24), "xl": (1280, 36), "xxl": (1536, 48), "3b": (3200, 24)}
    hidden_size, num_layers = sizes[entry.name.split("-")[2]]
    assert entry.options["num_heads"] == NUM_HEADS[hidden_size, num_layers]
    assert str(entry.image_size) in entry.files["transformer"].file
    text = "text_encoder" in entry.files
    return LlamaGenTransformer(
        conditioning="text" if text else "class",
        hidden_size=hidden_size,
        intermediate_size=-(-(8 * hidden_size // 3) // 256) * 256,
        num_layers=num_layers,
        num_attention_heads=entry.options["num_heads"],
        num_condition_tokens=120 if text else 1,
    )


def var(entry):
    depth = int(entry.name.split("-")[1].removeprefix("d"))
    scales = {256: (1, 2, 3, 4, 5, 6, 8, 10, 13, 16), 512: (1, 2, 3, 4, 6, 9, 13, 18, 24, 32)}[entry.image_size]
    assert entry.image_size == 16 * scales[-1]
    sizes = {"hidden_size": 64 * depth, "num_layers": depth, "num_attention_heads": depth}
    return VARTransformer(scales=scales, shared_adaln=entry.image_size == 512, **sizes)


FAMILIES = {"cosmos": cosmos, "llamagen": llamagen, "var": var}


@pytest.mark.every(3)
@pytest.mark.parametrize("entry", [it for it in PUBLISHED if it.family in FAMILIES], ids=lambda entry: entry.name)
def test_the_table_agrees_with_the_sizes_of_the_models(entry):
    with torch.device("meta"):
        transformer = FAMILIES[entry.family](entry)
    assert sum(p.numel() for p in transformer.parameters()) == pytest.approx(entry.parameters, rel=1e-3)
