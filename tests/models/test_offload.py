"""Weights that are elsewhere, or in another dtype, except while their layer runs: offloading layer by layer, storage
in fp8."""

import accelerate
import pytest
import torch
from diffusers.hooks import apply_layerwise_casting
from pipelines.distilled_decoding import tiny as tiny_distilled

from arimage.models.language_heads import CodeHead


@torch.no_grad()
@pytest.mark.parametrize("how", ["sequential", "group"])
def test_places_of_a_student_may_be_offloaded(how):
    pipe, offloaded = (tiny_distilled.pipeline("llamagen", place_embeddings=True) for _ in range(2))
    if how == "group":
        offloaded.enable_group_offload("cpu")
    else:
        accelerate.cpu_offload(offloaded.transformer, "cpu", offload_buffers=True)
    found, wanted = (
        each(class_labels=3, output_type="latent", generator=torch.Generator().manual_seed(0)).tokens
        for each in (offloaded, pipe)
    )
    assert torch.equal(found, wanted)


@torch.no_grad()
def test_a_head_whose_weight_is_elsewhere_runs_as_a_module():
    lm_head, hidden = torch.nn.Linear(8, 20, bias=False), torch.randn(2, 8)
    apply_layerwise_casting(lm_head, torch.float8_e4m3fn, torch.float32)
    assert torch.equal(CodeHead(lm_head, 3, 5)(hidden), lm_head(hidden)[..., 3:8])
