"""The table of published checkpoints has the sizes of Cosmos's."""

import pytest
import torch

from arimage.pipelines.cosmos.transformer_cosmos import CosmosTransformer
from arimage.published.registry import PUBLISHED


ENTRIES = [entry for entry in PUBLISHED if entry.family == "cosmos"]


@pytest.mark.every(2)
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_the_table_agrees_with_the_sizes_of_video_models(entry):
    size = entry.repository.removeprefix("nvidia/Cosmos-Predict1-").removeprefix("nvidia/Cosmos-1.0-Autoregressive-")
    settings = {"hidden_size": 5120, "num_layers": 40, "yarn": True} if size[0] == "1" else {}
    if size.endswith("Video2World"):
        settings |= {"context_dim": 1024, "embeddings": 64064}
    assert ("text_encoder" in entry.files) == ("context_dim" in settings)
    with torch.device("meta"):
        transformer = CosmosTransformer(**settings)
    assert sum(p.numel() for p in transformer.parameters()) == pytest.approx(entry.parameters, rel=1e-3)
