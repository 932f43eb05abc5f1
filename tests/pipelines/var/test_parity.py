"""Hidden states and logits equal those of the authors' implementation, on random weights in their file format."""

import json

import pytest
import torch
from pipelines.var.tiny import FOLDER
from safetensors.torch import load_file

from arimage.convert import convert_var
from arimage.decoding import NextScaleDecoding, Sampling, decode, next_scale
from arimage.pipelines.var.transformer_var import VARScaleModel, VARTransformer
from arimage.tokenizers.vq_var import VARVQModel


NAMES = {
    "pos_start": "start_position",
    "pos_1LC": "position_embedding",
    "lvl_embed.": "level_embedding.",
    "word_embed.": "input_projection.",
    "class_emb.": "class_embedding.",
    "head_nm.ada_lin.1.": "head_modulation.",
    ".ada_lin.1.": ".modulation.",
    ".attn.proj.": ".attention.out_proj.",
    ".attn.mat_qkv.": ".attention.qkv_proj.",
    ".ffn.": ".feed_forward.",
}


def load_transformer(folder=FOLDER):
    """The authors' random weights, renamed."""
    config = json.loads((folder / "config.json").read_text())
    original = torch.load(folder / config["var_file"], weights_only=True)
    sizes = config["var"]
    transformer = VARTransformer(
        num_classes=sizes["num_classes"],
        vocab_size=config["vae"]["vocab_size"],
        codebook_dim=config["vae"]["z_channels"],
        scales=tuple(config["patch_nums"]),
        hidden_size=sizes["embed_dim"],
        num_layers=sizes["depth"],
        num_attention_heads=sizes["num_heads"],
    )
    weights = {}
    for name in [name for name in original if name not in ("lvl_1L", "attn_bias_for_masking")]:
        renamed = name
        for theirs, ours in NAMES.items():
            renamed = renamed.replace(theirs, ours)
        weights[renamed] = original[name]
    for layer in range(sizes["depth"]):
        attention = f"blocks.{layer}.attn."
        biases = [weights.pop(attention + bias) for bias in ("q_bias", "zero_k_bias", "v_bias")]
        weights[f"blocks.{layer}.attention.qkv_proj.bias"] = torch.cat(biases)
        weights[f"blocks.{layer}.attention.log_query_scale"] = weights.pop(attention + "scale_mul_1H11")[0]
    transformer.load_state_dict(weights)
    return transformer.eval()


def load_quantiser(folder=FOLDER):
    """The authors' random codebook and convolutions in a tokenizer without their encoder and decoder."""
    config = json.loads((folder / "config.json").read_text())
    vq = VARVQModel(
        channels=4,
        channel_multipliers=(1,),
        layers_per_block=1,
        codebook_size=config["vae"]["vocab_size"],
        codebook_dim=config["vae"]["z_channels"],
        scales=tuple(config["patch_nums"]),
        norm_num_groups=1,
    )
    original = torch.load(folder / config["vae_file"], weights_only=True)
    phi = "quantize.quant_resi.qresi_ls."
    vq.phi.load_state_dict({name.removeprefix(phi): original[name] for name in original if name.startswith(phi)})
    vq.codebook.load_state_dict({"weight": original["quantize.embedding.weight"]})
    return vq.eval()


@pytest.fixture(scope="module")
def golden():
    return load_transformer(), load_file(FOLDER / "expected.safetensors")


def assert_close(actual, expected):
    torch.testing.assert_close(actual, expected, atol=2e-4, rtol=1e-4)


@torch.no_grad()
def test_hidden_states_after_the_first_block_equal_the_original(golden):
    transformer, expected = golden
    hidden = []
    hook = transformer.blocks[0].register_forward_hook(lambda module, inputs, output: hidden.append(output))
    transformer.predict(expected["tf_var_input"], class_labels=expected["class_labels"])
    hook.remove()
    assert_close(hidden[0], expected["tf_hidden_after_block0"])


@torch.no_grad()
def test_teacher_forced_logits_equal_the_original_with_and_without_condition(golden):
    transformer, expected = golden
    condition = {"class_labels": expected["class_labels"]}
    none = torch.ones(2, dtype=torch.bool)
    assert_close(transformer.predict(expected["tf_var_input"], **condition), expected["tf_logits_cond"])
    without = transformer.predict(expected["tf_var_input"], **condition, unconditional=none)
    assert_close(without, expected["tf_logits_uncond"])


@torch.no_grad()
def test_logits_of_the_first_scales_are_those_of_all(golden):
    transformer, expected = golden
    logits = transformer.predict(expected["tf_var_input"][:, : 4 + 9], class_labels=expected["class_labels"])
    assert_close(logits, expected["tf_logits_cond"][:, : 1 + 4 + 9])


class Watched:
    """A `ScaleModel` that records its inputs and outputs."""

    def __init__(self, model):
        self.model, self.inputs, self.logits, self.latents = model, [], [], []

    def __getattr__(self, name):
        return getattr(self.model, name)

    def prefill(self, batch_size):
        cache, logits = self.model.prefill(batch_size)
        self.logits.append(logits)
        return cache, logits

    def forward(self, scale, latents, cache):
        self.inputs.append(self.model.vq.scale_input(self.model.scales[scale], latents))
        self.logits.append(self.model.forward(scale, latents, cache))
        return self.logits[-1]

    def accumulate(self, scale, latents, vectors):
        self.latents.append(self.model.accumulate(scale, latents, vectors))
        return self.latents[-1]


def decode_greedily(golden, guidance_scale):
    transformer, expected = golden
    labels = {"class_labels": expected["class_labels"]}
    model = Watched(VARScaleModel(transformer, load_quantiser(), labels, guided=True))
    return model, decode(model, NextScaleDecoding(), Sampling(guidance_scale, top_k=1), torch.arange(2))


@torch.no_grad()
@pytest.mark.parametrize("cfg", [1.5, 4.0])
def test_greedy_codes_equal_the_original(golden, cfg):
    _, state = decode_greedily(golden, 1 + cfg)
    assert torch.equal(state.tokens, golden[1][f"greedy_cfg{cfg:g}_tokens"])
    assert state.forward_passes == 4 and state.finished.all()


@torch.no_grad()
def test_everything_between_the_greedy_codes_equals_the_original(golden):
    model, state = decode_greedily(golden, 2.5)
    expected = {name.removeprefix("greedy_cfg1.5_"): value for name, value in golden[1].items()}
    assert_close(torch.cat([logits.flatten(0, 1) for logits in model.logits], dim=1), expected["logits_pre_cfg"])
    assert_close(torch.cat(model.inputs, dim=1), expected["next_maps"])
    assert_close(torch.stack(model.latents, dim=1), expected["fhat"])
    assert_close(state.latents, expected["fhat"][:, -1])
    guided = []
    for scale, (with_condition, without) in enumerate(model.logits):
        guided.append(without + (1 + 1.5 * scale / 3) * (with_condition - without))
    assert_close(torch.cat(guided, dim=1), expected["logits_cfg"])


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
    transformer, expected = golden
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
    vq = convert_var(FOLDER / "var_d2.pth", FOLDER / "vae_ch32v64z8.pth").vq
    model = VARScaleModel(transformer, vq, {"class_labels": expected["class_labels"]}, guided=True)
    sampling = OriginalNoise(1 + settings["cfg"], top_k=settings["top_k"], top_p=settings["top_p"])
    state = decode(model, NextScaleDecoding(more_smooth=mode == "smooth"), sampling, torch.arange(2))
    assert torch.equal(torch.cat(sampled, dim=1), expected[f"{mode}_tokens"])
    images = (vq.decode_latents(state.latents) / 2 + 0.5).clamp(0, 1)
    torch.testing.assert_close(images, expected[f"{mode}_image"], atol=1e-4, rtol=0)


@torch.no_grad()
def test_cached_logits_equal_the_original_teacher_forced_ones(golden):
    transformer, expected = golden
    vq = load_quantiser()
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
