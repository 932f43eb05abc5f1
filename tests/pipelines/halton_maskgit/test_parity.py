"""Halton-MaskGIT agrees with the original implementation: the transformer, orders and counts, whole generations by
both samplers; and with an independent implementation of ReCAP and of editing."""

import json

import pytest
import torch
from families import close
from pipelines.halton_maskgit.tiny import FOLDER
from pipelines.llamagen.tiny import FIXTURES
from safetensors.torch import load_file

from arimage.convert import convert_halton_maskgit
from arimage.decoding import ConfidenceDecoding, HaltonDecoding, Layout, ReCAP, Sampling, decode, halton_order
from arimage.decoding.masked import confidence, halton
from arimage.pipelines.halton_maskgit.pipeline_halton_maskgit import CONFIDENCE
from arimage.pipelines.halton_maskgit.transformer_halton_maskgit import HaltonMaskGITModel


pytestmark = pytest.mark.usefixtures("no_grad")


CONFIG = json.loads((FOLDER / "config.json").read_text())
LABELS = torch.tensor(CONFIG["labels"])
HALTON = ["greedy", "readme", "topk", "noguide", "each", "masklogit_excluded", "edit"]
SETTINGS = CONFIG["halton"] | CONFIG["confidence"] | CONFIG["ours"] | CONFIG["recap"]


@pytest.fixture(scope="module")
def expected():
    return load_file(FOLDER / "expected.safetensors")


def convert(name, heads):
    return convert_halton_maskgit(FOLDER / name, FIXTURES / "c2i/vq_ds4_c2i.pt", num_heads=heads)


@pytest.fixture(scope="module")
def pipe():
    return convert("halton_tiny.pth", 5)


def test_the_transformer(pipe, expected):
    tokens, labels, states = expected["fwd_tokens"], expected["fwd_labels"], []
    handle = pipe.transformer.blocks[0].register_forward_hook(lambda *hook: states.append(hook[2]))
    close(pipe.transformer(tokens, labels), expected["fwd_logits_cond"])
    unconditional = torch.ones(3, dtype=torch.bool)
    close(pipe.transformer(tokens, labels, unconditional=unconditional), expected["fwd_logits_uncond"])
    close(pipe.transformer(tokens, torch.full_like(labels, 10)), expected["fwd_logits_uncond"])
    close(states[0], expected["fwd_layer0_cond"])
    close(states[1], expected["fwd_layer0_uncond"])
    handle.remove()


def test_the_transformer_of_the_other_file(expected):
    transformer = convert("halton_tiny_prefixed.pth", 4).transformer
    close(transformer(expected["other_fwd_tokens"], expected["other_fwd_labels"]), expected["other_fwd_logits_cond"])


@pytest.mark.parametrize("side", [8, 16, 24])
def test_the_order(expected, side):
    assert torch.equal(halton_order(side), expected[f"order_{side}"])


class Run:
    """A run with the random numbers of the file in place of ours."""

    def __init__(self, pipe, expected, name, monkeypatch, offset_of=None):
        self.numbers = {
            part: expected.get(f"{name}_{part}")
            for part in ("uniform", "offsets", "gumbel", "given", "probs", "codes")
        }
        self.pipe, self.probabilities, self.rows = pipe, torch.zeros(2, 65, 128), []
        for module in (halton, confidence):
            monkeypatch.setattr(module, "sample_at", self.sample_at)
        monkeypatch.setattr(halton, "uniforms", self.uniforms)
        monkeypatch.setattr(confidence, "exponentials", self.exponentials)

    def at(self, name, places, steps):
        """The numbers of a name at `places` [B, Q], in the image's step if there are some for every step."""
        numbers = self.numbers[name]
        if numbers.ndim == 3:
            numbers = numbers[steps, torch.arange(2)]
        return numbers.gather(1, places)

    def sample_at(self, probabilities, seeds, places, steps, purpose):
        # Of padding the first one is kept.
        self.probabilities.scatter_(1, places.flip(1)[..., None].expand_as(probabilities), probabilities.flip(1))
        if self.numbers["uniform"] is None:
            return probabilities.argmax(-1)
        sums = probabilities.double().cumsum(-1)
        wanted = self.at("uniform", places, steps).double()[..., None] * sums[..., -1:]
        return torch.searchsorted(sums, wanted, right=True)[..., 0].clamp(max=127)

    def uniforms(self, seeds, positions, steps, purpose, count):
        return (self.numbers["offsets"][:, None, None] + 0.5) / 64

    def exponentials(self, seeds, positions, steps, purpose, count):
        return (-self.at("gumbel", positions, steps)).exp()[..., None]

    def decode(self, decoding, settings, top_k=None):
        guidance = 1 + settings["w"]
        model = HaltonMaskGITModel(
            self.pipe.transformer, {"class_labels": LABELS}, Layout((8, 8)), CONFIDENCE, guided=guidance > 1
        )
        hook = self.pipe.transformer.blocks[1].register_forward_hook(lambda *hook: self.rows.append(hook[2].shape[1]))
        top_k = max(settings.get("top_k", 0), 0)
        sampling = Sampling(guidance_scale=guidance, top_k=top_k, forced=self.numbers["given"])
        out = decode(model, decoding, sampling, torch.arange(2))
        hook.remove()
        return out


def halton_of(settings):
    return HaltonDecoding(
        steps=settings["step"],
        randomize=settings["roll"],
        sharpness=(settings["sm_temp_min"], settings["sm_temp_max"]),
        sharpness_power=settings["temp_pow"],
        warmup_steps=settings["temp_warmup"],
    )


@pytest.mark.parametrize("name", HALTON)
def test_halton(pipe, expected, monkeypatch, name):
    run = Run(pipe, expected, name, monkeypatch)
    tokens = run.decode(halton_of(SETTINGS[name]), SETTINGS[name]).tokens
    assert torch.equal(tokens, expected[f"{name}_codes"])
    if name == "readme":
        close(run.probabilities[:, :64], expected["readme_probs"])
        close(pipe.decode_tokens(call_of(), tokens).clamp(-1, 1), expected["readme_image"])


def call_of():
    """What `decode_tokens` reads of a call."""
    from arimage.pipelines.call import GenerationCall

    call = GenerationCall(Sampling(), torch.arange(2), (32, 32))
    call.model = HaltonMaskGITModel.__new__(HaltonMaskGITModel)
    call.model.layout = Layout((8, 8))
    return call


def test_halton_with_the_other_file(expected, monkeypatch):
    settings = CONFIG["other"]["run"]
    run = Run(convert("halton_tiny_prefixed.pth", 4), expected, "other_run", monkeypatch)
    assert torch.equal(run.decode(halton_of(settings), settings).tokens, expected["other_run_codes"])


@pytest.mark.parametrize("name", ["conf_linear", "conf_none", "conf_kept", "conf_edit"])
def test_confidence(pipe, expected, monkeypatch, name):
    settings = SETTINGS[name]
    decoding = ConfidenceDecoding(
        steps=settings["step"],
        schedule=settings["sched_mode"],
        noise=settings["r_temp"] if settings["randomize"] == "linear" else 0,
        sharpness=settings["sm_temp"],
        redraw_known=name not in CONFIG["ours"],
    )
    run = Run(pipe, expected, name, monkeypatch)
    assert torch.equal(run.decode(decoding, settings).tokens, expected[f"{name}_codes"])


@pytest.mark.parametrize("name", CONFIG["recap"])
def test_recap(pipe, expected, monkeypatch, name):
    settings = SETTINGS[name]
    decoding = ReCAP(full_steps=settings["p"], partial_steps=settings["u"], sampler=halton_of(settings))
    run = Run(pipe, expected, name, monkeypatch)
    out = run.decode(decoding, settings)
    assert torch.equal(out.tokens, expected[f"{name}_codes"])
    close(run.probabilities[:, :64], expected[f"{name}_probs"])
    # And the register.
    assert run.rows == [places + 1 for places in settings["evaluated"]]
