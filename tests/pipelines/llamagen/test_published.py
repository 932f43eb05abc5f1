"""The table of published checkpoints has the sizes of LlamaGen's."""

import pytest
import torch

from arimage.pipelines.llamagen.convert import NUM_HEADS
from arimage.pipelines.llamagen.transformer_llamagen import LlamaGenTransformer
from arimage.published.registry import PUBLISHED


ENTRIES = [entry for entry in PUBLISHED if entry.family == "llamagen"]


@pytest.mark.every(3)
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_the_table_agrees_with_the_sizes_of_the_models(entry):
    size = entry.name.split("-")[2]
    hidden_size, num_layers = {"b": (768, 12), "l": (1024, 24), "xl": (1280, 36), "xxl": (1536, 48), "3b": (3200, 24)}[
        size
    ]
    text = "text_encoder" in entry.files
    with torch.device("meta"):
        transformer = LlamaGenTransformer(
            conditioning="text" if text else "class",
            hidden_size=hidden_size,
            intermediate_size=-(-(8 * hidden_size // 3) // 256) * 256,
            num_layers=num_layers,
            num_attention_heads=entry.options["num_heads"],
            num_condition_tokens=120 if text else 1,
        )
    assert entry.options["num_heads"] == NUM_HEADS[hidden_size, num_layers]
    assert sum(p.numel() for p in transformer.parameters()) == pytest.approx(entry.parameters, rel=5e-4)
    assert str(entry.image_size) in entry.files["transformer"].file
