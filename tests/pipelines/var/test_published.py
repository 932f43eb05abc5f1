"""The table of published checkpoints has the sizes of VAR's."""

import pytest
import torch

from arimage.pipelines.var.transformer_var import VARTransformer
from arimage.published.registry import PUBLISHED


ENTRIES = [entry for entry in PUBLISHED if entry.family == "var"]


@pytest.mark.every(2)
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_the_table_agrees_with_the_sizes_of_next_scale_models(entry):
    depth = int(entry.name.split("-")[1].removeprefix("d"))
    scales = {256: (1, 2, 3, 4, 5, 6, 8, 10, 13, 16), 512: (1, 2, 3, 4, 6, 9, 13, 18, 24, 32)}[entry.image_size]
    with torch.device("meta"):
        transformer = VARTransformer(
            scales=scales,
            hidden_size=64 * depth,
            num_layers=depth,
            num_attention_heads=depth,
            shared_adaln=entry.image_size == 512,
        )
    assert sum(p.numel() for p in transformer.parameters()) == pytest.approx(entry.parameters, rel=5e-4)
    assert entry.image_size == 16 * scales[-1]
