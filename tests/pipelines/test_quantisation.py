"""Language models with weights of 8 and 4 bits: they are loaded as transformers' users do, and every decoding runs on
them."""

import pytest
import torch
from diffusers import PipelineQuantizationConfig
from pipelines.chameleon import tiny as tiny_chameleon
from pipelines.emu3 import tiny as tiny_emu3
from pipelines.emu35 import tiny as tiny_emu35
from pipelines.janus import tiny as tiny_janus
from transformers import (
    ChameleonForConditionalGeneration,
    Emu3ForConditionalGeneration,
    JanusForConditionalGeneration,
    Qwen3ForCausalLM,
    TorchAoConfig,
)

from arimage import AutoPipeline
from arimage.convert import convert_janus


pytest.importorskip("torchao")
from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig  # noqa: E402


PROMPTS = ["a red heart", "cat"]
# The name of the quantised component, its class and the size of a small image.
FAMILIES = {
    "janus": ("model", JanusForConditionalGeneration, {}),
    "emu3": ("model", Emu3ForConditionalGeneration, {"height": 32, "width": 40, "guidance_scale": 3.0}),
    "emu3.5": ("model", Qwen3ForCausalLM, {"height": 32, "width": 48, "guidance_scale": 3.0}),
    "lumina": ("transformer", ChameleonForConditionalGeneration, {"height": 32, "width": 64, "guidance_scale": 3.0}),
}
WEIGHTS = {"int8": Int8WeightOnlyConfig(), "int4": IntxWeightOnlyConfig(weight_dtype=torch.int4)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("quantised")
    convert_janus(tiny_janus.write_original(root / "published")).save_pretrained(root / "janus")
    tiny_emu3.pipeline().save_pretrained(root / "emu3")
    tiny_emu35.pipeline().save_pretrained(root / "emu3.5")
    tiny_chameleon.pipeline().save_pretrained(root / "lumina")
    return root


def load(folder, part, weights, kept=("model.vqmodel", "lm_head"), **options):
    config = TorchAoConfig(weights, modules_to_not_convert=list(kept))
    return AutoPipeline.from_pretrained(
        folder, quantization_config=PipelineQuantizationConfig(quant_mapping={part: config}), **options
    )


def quantised(model):
    """The names of the linear layers whose weights are packed."""
    return {
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and type(module.weight) is not torch.nn.Parameter
    }


def greedy(pipe, size, **options):
    pipe.set_progress_bar_config(disable=True)
    return pipe(PROMPTS, top_k=1, output_type="latent", **size, **options).tokens


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_decoding_generates_the_same_greedy_codes_with_quantised_weights(folders, family, weights):
    part, _, size = FAMILIES[family]
    pipe = load(folders / family, part, WEIGHTS[weights])
    names = quantised(getattr(pipe, part))
    assert any("self_attn" in name for name in names) and not any("vqmodel" in name for name in names)
    expected = greedy(pipe, size)
    for decoding in ("ar", "sjd", "sjd-coupled", "sjd-tree"):
        assert torch.equal(greedy(pipe, size, decoding=decoding), expected)
    if weights == "int4":
        # Few bits say something else, or nothing was quantised.
        assert not torch.equal(greedy(AutoPipeline.from_pretrained(folders / family), size), expected)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_quantised_weights_are_saved_as_they_are(folders, family, weights, tmp_path):
    part, _, size = FAMILIES[family]
    pipe = load(folders / family, part, WEIGHTS[weights])
    pipe.save_pretrained(tmp_path)
    again = AutoPipeline.from_pretrained(tmp_path)
    assert quantised(getattr(again, part)) == quantised(getattr(pipe, part))
    assert torch.equal(greedy(again, size), greedy(pipe, size))
    full, saved = (path / part / "model.safetensors" for path in (folders / family, tmp_path))
    assert saved.stat().st_size < full.stat().st_size
