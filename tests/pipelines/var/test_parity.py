"""Hidden states and logits equal those of the authors' implementation, on random weights in their file format."""

import json

import pytest
import torch
from pipelines.var.tiny import FOLDER
from safetensors.torch import load_file

from arimage.convert import convert_var
from arimage.decoding import NextScaleDecoding, Sampling, decode, next_scale
from arimage.pipelines.var.transformer_var import VARScaleModel


@pytest.fixture(scope="module")
def golden():
    pipe = convert_var(FOLDER / "var_d2.pth", FOLDER / "vae_ch32v64z8.pth")
    return pipe.transformer, load_file(FOLDER / "expected.safetensors"), pipe.vq


def assert_close(actual, expected):
    torch.testing.assert_close(actual, expected, atol=2e-4, rtol=1e-4)


class OriginalNoise(Sampling):
    """Samples from each distribution as the original does, and keeps the tokens in `sampled`."""

    def probabilities(self, logits, positions, *marks):
        probabilities = super().probabilities(logits, positions, *marks)
        codes = torch.multinomial(probabilities.flatten(0, 1), 1, replacement=True, generator=self.generator)
        self.sampled.append(codes.view(positions.shape))
        return probabilities


@torch.no_grad()
@pytest.mark.parametrize("mode", ["sampled", "smooth"])
def test_tokens_sampled_with_the_noise_of_the_original_are_its_own(golden, mode, monkeypatch):
    transformer, expected, vq = golden
    settings = json.loads((FOLDER / "config.json").read_text())["sample"]
    generator, sampled = torch.Generator().manual_seed(settings["g_seed"]), []
    monkeypatch.setattr(OriginalNoise, "generator", generator, raising=False)
    monkeypatch.setattr(OriginalNoise, "sampled", sampled, raising=False)
    monkeypatch.setattr(next_scale, "sample_at", lambda *_: sampled[-1])
    monkeypatch.setattr(
        next_scale,
        "exponentials",
        lambda seeds, at, purpose, step, count: torch.empty(*at.shape, count).exponential_(generator=generator),
    )
    model = VARScaleModel(transformer, vq, {"class_labels": expected["class_labels"]}, guided=True)
    sampling = OriginalNoise(1 + settings["cfg"], top_k=settings["top_k"], top_p=settings["top_p"])
    state = decode(model, NextScaleDecoding(more_smooth=mode == "smooth"), sampling, torch.arange(2))
    assert torch.equal(torch.cat(sampled, dim=1), expected[f"{mode}_tokens"])
    images = (vq.decode_latents(state.latents) / 2 + 0.5).clamp(0, 1)
    torch.testing.assert_close(images, expected[f"{mode}_image"], atol=1e-4, rtol=0)


@torch.no_grad()
def test_cached_logits_equal_the_original_teacher_forced_ones(golden):
    transformer, expected, vq = golden
    model = VARScaleModel(transformer, vq, {"class_labels": expected["class_labels"]}, guided=True)
    cache, logits = model.prefill(2)
    everything, latents = [logits], None
    for scale, tokens in enumerate(expected["tf_tokens"].split([1, 4, 9, 16], dim=1)[:-1]):
        latents = model.accumulate(scale, latents, model.vectors(scale, tokens))
        everything.append(model.forward(scale + 1, latents, cache))
    with_condition, without = torch.cat(everything, dim=2)
    assert_close(with_condition, expected["tf_logits_cond"])
    assert_close(without, expected["tf_logits_uncond"])


@pytest.mark.parametrize("filters", ["k0_p0", "k10_p0", "k0_p0.8", "k20_p0.9", "k1_p0"])
def test_the_sampling_probabilities_are_the_original_filter(golden, filters):
    top_k, top_p = filters.removeprefix("k").split("_p")
    sampling = Sampling(top_k=int(top_k), top_p=float(top_p) or 1.0)
    probabilities = sampling.probabilities(golden[1]["filter_logits"][None], torch.zeros(2, 3, dtype=torch.long))
    torch.testing.assert_close(probabilities, golden[1][f"filter_probs_{filters}"])
