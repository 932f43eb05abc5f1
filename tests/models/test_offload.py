"""Weights that are elsewhere, or in another dtype, except while their layer runs: offloading layer by layer, storage
in fp8."""

import accelerate
import pytest
import tiny
import torch
from diffusers.hooks import apply_layerwise_casting
from pipelines.distilled_decoding import tiny as tiny_distilled
from pipelines.llamagen import tiny as tiny_llamagen
from pipelines.var import tiny as tiny_var

from arimage.decoding import Layout
from arimage.models.language_model import code_head
from arimage.pipelines.llamagen.transformer_llamagen import LlamaGenTokenModel
from arimage.pipelines.var.transformer_var import VARScaleModel


BATCH = 2
FAMILIES = pytest.mark.parametrize("family", ["llamagen", "var"])
CONDITIONS = pytest.mark.parametrize("kind", ["class", "text"])


def condition_of(kind):
    if kind == "class":
        return {"class_labels": torch.tensor([1, 3])}
    embeds = torch.randn(BATCH, tiny.TEXT_LENGTH, tiny.TEXT_WIDTH, generator=torch.Generator().manual_seed(0))
    return {"prompt_embeds": embeds, "prompt_attention_mask": torch.ones(BATCH, tiny.TEXT_LENGTH, dtype=torch.long)}


def parts(family, kind):
    if family == "llamagen":
        return tiny_llamagen.transformer(kind), tiny.image_tokenizer()
    return tiny_var.transformer(kind), tiny.scale_tokenizer()


def run(transformer, vq, kind):
    """Logits of a prefill and of a forward pass, the codebook, pixels, and the tokens of pixels."""
    side = 2 * tiny.SCALES[-1]
    pixels = torch.rand(1, 3, side, side, generator=torch.Generator().manual_seed(0)) * 2 - 1
    tokens = vq.encode(pixels)
    if isinstance(transformer, type(tiny_llamagen.transformer("class"))):
        codebook = vq.code_vectors()
        model = LlamaGenTokenModel(transformer, condition_of(kind), Layout((4, 4)), guided=True, codebook=codebook)
        cache, first = model.prefill(BATCH)
        second = model.forward(torch.tensor([[3], [5]]), torch.zeros(BATCH, 1, dtype=torch.long), cache)
        return first, second, model.codebook, vq.decode(tokens), tokens
    model = VARScaleModel(transformer, vq, condition_of(kind), guided=True)
    cache, first = model.prefill(BATCH)
    latents = model.accumulate(0, None, model.vectors(0, torch.tensor([[3], [5]])))
    return first, model.forward(1, latents, cache), model.codebook, vq.decode(tokens), *tokens


@torch.no_grad()
@CONDITIONS
@FAMILIES
def test_layers_may_be_offloaded_one_by_one(family, kind):
    expected = run(*parts(family, kind), kind)
    offloaded = parts(family, kind)
    for part in offloaded:
        accelerate.cpu_offload(part, "cpu")
    for actual, wanted in zip(run(*offloaded, kind), expected, strict=True):
        assert torch.equal(actual, wanted)


@torch.no_grad()
@CONDITIONS
@FAMILIES
def test_weights_may_be_stored_in_fp8(family, kind):
    expected = run(*parts(family, kind), kind)[0]
    transformer, vq = parts(family, kind)
    transformer.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
    logits = run(transformer, vq, kind)[0]
    assert not torch.equal(logits, expected)
    # A weight is rounded by up to a sixteenth of itself.
    assert (logits - expected).norm() < 0.3 * expected.norm()


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
    assert torch.equal(code_head(lm_head, 3, 5)(hidden), lm_head(hidden)[..., 3:8])
