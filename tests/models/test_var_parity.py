"""Hidden states and logits equal those of the authors' implementation, on random weights in their file format."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from arimage.models.transformer_var import VARTransformer


FOLDER = Path(__file__).parents[1] / "fixtures" / "var"
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
