"""Logits, codes and pixels equal those of the authors' implementation, on random weights in their file format."""

import json
import random

import ftfy
import numpy as np
import pytest
import torch
from bs4 import BeautifulSoup
from pipelines.llamagen.tiny import FIXTURES
from safetensors.torch import load_file

from arimage.convert import convert_llamagen
from arimage.decoding import Layout
from arimage.pipelines.kinds.class_or_text import left_pad
from arimage.pipelines.llamagen.transformer_llamagen import LlamaGenTokenModel
from arimage.pipelines.text.captions import clean_caption


@pytest.fixture(scope="module", params=["c2i", "t2i"])
def golden(request):
    """The converted pipeline, the arguments of its call, the authors' outputs and their settings."""
    folder = FIXTURES / request.param
    config = json.loads((folder / "config.json").read_text())
    expected = load_file(folder / "expected.safetensors")
    grid = int(config["gpt"]["block_size"] ** 0.5)
    pipe = convert_llamagen(
        folder / config["gpt_file"], folder / config["vq_file"], 4 * grid, num_heads=config["gpt"]["n_head"]
    )
    if request.param == "c2i":
        arguments = {"class_labels": expected["class_labels"]}
    else:
        arguments = {
            "prompt_embeds": expected["t5_last_hidden_state"],
            "prompt_attention_mask": expected["t5_attention_mask"],
        }
    return pipe, arguments | {"top_k": 1}, expected, config


@pytest.mark.every(2)
@pytest.mark.parametrize("decoding", ["ar", "sjd-coupled"])
def test_greedy_codes_equal_the_original(golden, decoding):
    pipe, arguments, expected, config = golden
    off, on = config["cfg_scales"]
    # The original guides the steps up to the interval; its first step samples the second token.
    cases = [(off, None, ""), (on, None, ""), (on, config["cfg_interval"] + 2, f"_interval{config['cfg_interval']}")]
    for scale, guided_tokens, suffix in cases:
        output = pipe(
            **arguments, guidance_scale=scale, guided_tokens=guided_tokens, decoding=decoding, output_type="latent"
        )
        assert torch.equal(output.tokens.flatten(1), expected[f"greedy_tokens_cfg{scale:g}{suffix}"])


def test_pixels_equal_the_original_by_both_of_its_rules(golden):
    pipe, arguments, expected, config = golden
    scale = config["cfg_scales"][-1]
    decoded = pipe(**arguments, guidance_scale=scale, output_type="pt").images
    original = expected["vq_decode_greedy_cfg"]
    torch.testing.assert_close(decoded, (original / 2 + 0.5).clamp(0, 1), atol=1e-5, rtol=0)
    images = pipe(**arguments, guidance_scale=scale).images
    ours = np.stack([np.asarray(image) for image in images]).astype(int)
    for rule in ("ddp", "save_image"):
        theirs = expected[f"image_uint8_{rule}"].numpy().astype(int)
        assert ours.shape == theirs.shape
        # The three rules round to the nearest level and differ in nothing but ties and float32 rounding next to them.
        assert abs(ours - theirs).max() <= 1
        assert (ours != theirs).mean() < 1e-3


def test_text_is_padded_on_the_left_as_in_the_original():
    expected = load_file(FIXTURES / "t2i" / "expected.safetensors")
    embeds, mask = left_pad(expected["t5_last_hidden_state"], expected["t5_attention_mask"])
    assert torch.equal(embeds, expected["caption_embs"])
    assert mask.dtype == torch.bool and torch.equal(mask.long(), expected["emb_masks"])


CLEANING = json.loads((FIXTURES / "t2i" / "caption_cleaning.json").read_text())


@pytest.mark.parametrize("pair", CLEANING, ids=[pair["input"][:30] for pair in CLEANING])
def test_captions_are_cleaned_as_in_the_original(pair):
    assert clean_caption(pair["input"]) == pair["text_preprocessing"]


def test_plain_captions_need_no_libraries_for_markup():
    signs = [sign for sign in map(chr, range(32, 127)) if sign not in "<&"]
    generator = random.Random(0)
    for _ in range(200):
        text = "".join(generator.choices(signs, k=generator.randrange(60)))
        assert BeautifulSoup(text, features="html.parser").text == text == ftfy.fix_text(text)


@pytest.fixture
def transformer_golden(golden):
    """The transformer, its condition, the authors' outputs and their configuration."""
    pipe, arguments, expected, config = golden
    condition = {name: arguments[name] for name in ("class_labels",) if name in arguments} or {
        "prompt_embeds": expected["caption_embs"],
        "prompt_attention_mask": expected["emb_masks"],
    }
    return pipe.transformer, condition, expected, config


def assert_close(actual, expected):
    torch.testing.assert_close(actual, expected, atol=2e-4, rtol=1e-4)


@torch.no_grad()
def test_teacher_forced_logits_equal_the_original_with_without_condition_and_guided(transformer_golden):
    transformer, condition, expected, config = transformer_golden
    none = torch.ones(2, dtype=torch.bool)
    with_condition = transformer.predict(expected["tf_tokens"], **condition)
    without = transformer.predict(expected["tf_tokens"], **condition, unconditional=none)
    assert_close(with_condition, expected["tf_logits_cond"])
    assert_close(without, expected["tf_logits_uncond"])
    guided = without + config["cfg_scales"][-1] * (with_condition - without)
    torch.testing.assert_close(guided, expected["tf_logits_cfg"], atol=1e-3, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("queries", [1, 5])
def test_cached_logits_equal_the_original_teacher_forced_ones(transformer_golden, queries):
    transformer, condition, expected, _ = transformer_golden
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
