"""Everything equals the authors' implementation, on random weights in their file formats: that of the 2B, and that of
the 8B, whose cells are 2 x 2 cells of the latents."""

import json

import numpy as np
import pytest
import torch
from pipelines.infinity.tiny import FIXTURES
from safetensors.torch import load_file

from arimage.convert import convert_infinity
from arimage.pipelines.infinity.schedules import SCHEDULES
from arimage.pipelines.infinity.transformer_infinity import rotary_table


class Golden:
    """A pipeline from the authors' files, and what their code gives."""

    def __init__(self, name):
        folder = FIXTURES / name
        self.config = json.loads((folder / "config.json").read_text())
        self.expected = load_file(folder / "expected.safetensors")
        self.pipe = convert_infinity(folder / self.config["model_file"], vae=folder / self.config["vae_file"])
        # One of the ratios is in the fixture.
        self.ratio = next(name.partition("_")[0] for name in self.expected if name.startswith("ratio"))
        self.schedule = SCHEDULES[tuple(self.config["schedules"][self.ratio.removeprefix("ratio")][-1])]

    def __getitem__(self, name):
        return self.expected[f"{self.ratio}_{name}"]


@pytest.fixture(scope="module", params=["plain", "patchify"])
def golden(request):
    return Golden(request.param)


def assert_close(actual, expected, atol=1e-4):
    # Logits are up to 10, and sums of float32 in another order differ by some 1e-5 of that.
    torch.testing.assert_close(actual, expected, atol=atol, rtol=2e-5)


def of_run(golden, run):
    """The arguments of a greedy run of the authors' sampler."""
    given = {name: golden.expected.get(f"{run['name']}_{name}") for name in ("prompt_embeds", "prompt_attention_mask")}
    negative = golden.expected.get(f"{run['name']}_negative_prompt_embeds")
    height, width = golden.config["schedules"][f"{run['ratio']:g}"][-1]
    return {
        **given,
        "negative_prompt_embeds": negative,
        "guidance_scale": run["cfg"],
        "temperature": run["tau"],
        "cfg_insertion_layer": run["insert"][0],
        "top_k": 1,
        "height": 16 * height,
        "width": 16 * width,
    }


@pytest.mark.every(2)
@torch.no_grad()
def test_images_are_encoded_and_decoded_as_in_the_original(golden):
    vq = golden.pipe.vq
    maps = vq.encode(golden["image"].float() / 127.5 - 1, golden.schedule.scales)
    assert torch.equal(torch.cat([bits.flatten(1, 2) for bits in maps], dim=1), golden["labels"].long())
    assert_close(vq.latents(maps, golden.schedule.scales[-1]), golden["latents"], atol=1e-5)
    assert_close(vq.inputs(maps), golden["inputs"], atol=1e-5)
    assert_close(vq.decode(maps).clamp(-1, 1)[..., ::4, ::4], golden["reconstruction_stride4"])


@torch.no_grad()
def test_teacher_forced_logits_are_those_of_the_original(golden):
    transformer, expected = golden.pipe.transformer, golden.expected
    rotary = rotary_table(golden.schedule, transformer.head_dim, torch.device("cpu"))
    assert_close(rotary.permute(2, 0, 1), golden["rope"], atol=1e-5)
    for name, unconditional in (("logits_cond", None), ("logits_uncond", torch.ones(1, dtype=torch.bool))):
        count = len(golden[name])
        condition = {
            "prompt_embeds": expected["prompt_embeds"][:count],
            "prompt_attention_mask": expected["prompt_attention_mask"][:count],
            "unconditional": unconditional,
        }
        assert_close(transformer.predict(golden["inputs"], golden.schedule, **condition), golden[name])


@pytest.mark.every(2)
def test_greedy_bits_and_pixels_of_the_pipeline_are_those_of_the_original(golden):
    for run in golden.config["runs"]:
        output = golden.pipe(**of_run(golden, run), output_type="pt")
        bits = torch.cat([part.flatten(1, 2) for part in output.tokens], dim=1)
        assert torch.equal(bits, golden.expected[f"{run['name']}_bits"].long()), run["name"]
        if f"{run['name']}_pixels_stride4" in golden.expected:
            assert_close(2 * output.images[..., ::4, ::4] - 1, golden.expected[f"{run['name']}_pixels_stride4"])
        if f"{run['name']}_image_bgr" in golden.expected:
            (image,) = golden.pipe(**of_run(golden, run)).images
            ours = torch.tensor(np.asarray(image)).flip(-1).int()
            assert (ours - golden.expected[f"{run['name']}_image_bgr"][0]).abs().max() <= 1
