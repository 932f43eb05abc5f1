"""Logits and greedy codes equal those of the authors' implementation, on random weights in their file format."""

import json

import pytest
import torch
from pipelines.llamagen.tiny import FIXTURES
from safetensors.torch import load_file

from arimage.convert.checkpoint import load_original
from arimage.decoding import Layout
from arimage.pipelines.llamagen.convert import llamagen_transformer_from_original
from arimage.pipelines.llamagen.transformer_llamagen import LlamaGenTokenModel, LlamaGenTransformer


@pytest.fixture(scope="module", params=["c2i", "t2i"])
def golden(request):
    """The transformer, its condition, the authors' outputs and their configuration."""
    folder = FIXTURES / request.param
    config = json.loads((folder / "config.json").read_text())
    expected = load_file(folder / "expected.safetensors")
    transformer = llamagen_transformer_from_original(
        load_original(folder / config["gpt_file"]),
        image_size=4 * int(config["gpt"]["block_size"] ** 0.5),
        downsample=4,
        num_heads=config["gpt"]["n_head"],
    )
    if request.param == "c2i":
        condition = {"class_labels": expected["class_labels"]}
    else:
        condition = {"prompt_embeds": expected["caption_embs"], "prompt_attention_mask": expected["emb_masks"]}
    return transformer, condition, expected, config


def assert_close(actual, expected):
    torch.testing.assert_close(actual, expected, atol=2e-4, rtol=1e-4)


@torch.no_grad()
def greedy(model, batch_size, guidance_scale=1.0, last_guided=None):
    """Codes [B, N] of the greatest logits; guided up to the position `last_guided`, everywhere if None."""
    cache, logits = model.prefill(batch_size)
    codes = []
    for position in range(model.num_tokens):
        guided = logits[0]
        if len(logits) == 2 and (last_guided is None or position <= last_guided):
            guided = logits[1] + guidance_scale * (logits[0] - logits[1])
        codes.append(guided.argmax(-1))
        at = torch.full((batch_size, 1), position)
        logits = model.forward(codes[-1][:, None], at, cache)[:, :, 0]
    return torch.stack(codes, dim=1)


@torch.no_grad()
def test_teacher_forced_logits_equal_the_original_with_without_condition_and_guided(golden):
    transformer, condition, expected, config = golden
    none = torch.ones(2, dtype=torch.bool)
    with_condition = transformer.predict(expected["tf_tokens"], **condition)
    without = transformer.predict(expected["tf_tokens"], **condition, unconditional=none)
    assert_close(with_condition, expected["tf_logits_cond"])
    assert_close(without, expected["tf_logits_uncond"])
    guided = without + config["cfg_scales"][-1] * (with_condition - without)
    torch.testing.assert_close(guided, expected["tf_logits_cfg"], atol=1e-3, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("queries", [1, 5])
def test_cached_logits_equal_the_original_teacher_forced_ones(golden, queries):
    transformer, condition, expected, _ = golden
    model = LlamaGenTokenModel(transformer, condition, Layout((transformer.config.grid_size,) * 2), guided=True)
    cache, first = model.prefill(2)
    logits = [first[:, :, None]]
    positions = torch.arange(model.num_tokens - 1).expand(2, -1)
    for tokens, at in zip(
        expected["tf_tokens"][:, :-1].split(queries, dim=1), positions.split(queries, dim=1), strict=True
    ):
        logits.append(model.forward(tokens, at, cache))
    with_condition, without = torch.cat(logits, dim=2)
    assert_close(with_condition, expected["tf_logits_cond"])
    assert_close(without, expected["tf_logits_uncond"])


@torch.no_grad()
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_grouped_query_attention_is_the_same_cached_as_teacher_forced(kv_heads):
    torch.manual_seed(0)
    transformer = LlamaGenTransformer(
        grid_size=4,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        vocab_size=20,
        num_classes=3,
    ).eval()
    labels = torch.tensor([0, 2])
    model = LlamaGenTokenModel(transformer, {"class_labels": labels}, Layout((4, 4)))
    codes = greedy(model, 2)
    logits = transformer.predict(codes, class_labels=labels)
    assert len(codes.unique()) > 1
    assert torch.equal(logits.argmax(-1), codes)
