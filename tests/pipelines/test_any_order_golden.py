"""Tokens of the pipelines equal those of the authors' implementations on random weights in their formats."""

import json

import pytest
import torch
from pipelines.arpg import tiny as tiny_arpg
from pipelines.lpd import tiny as tiny_lpd
from safetensors.torch import load_file

from arimage.convert import convert_arpg, convert_lpd
from arimage.decoding import GroupDecoding


def golden(folder, convert):
    """The converted pipeline, the authors' outputs and their settings."""
    pipe = convert(folder)
    pipe.set_progress_bar_config(disable=True)
    return pipe, load_file(folder / "expected.safetensors"), json.loads((folder / "config.json").read_text())


@pytest.fixture(scope="module")
def arpg():
    return golden(tiny_arpg.FOLDER, convert_arpg)


def tokens_of(pipe, expected, order, decoding, scale):
    settings = {"guidance_scale": scale, "top_k": 1, "output_type": "latent"}
    return pipe(class_labels=expected["class_labels"], order=order, decoding=decoding, **settings).images.flatten(1)


@torch.no_grad()
def test_logits_of_arpg_in_any_order_equal_the_original(arpg):
    pipe, expected, _ = arpg
    for name in ("cond", "uncond"):
        logits = pipe.transformer.predict(
            expected["tf_tokens"],
            order=expected["tf_orders"],
            class_labels=expected["class_labels"],
            unconditional=torch.full((3,), name == "uncond"),
        )
        torch.testing.assert_close(logits, expected[f"tf_logits_{name}"], atol=1e-3, rtol=0)


@pytest.mark.every(2)
@pytest.mark.parametrize("number", range(4))
def test_tokens_of_arpg_in_groups_equal_the_original(arpg, number):
    pipe, expected, config = arpg
    settings, sizes = config["generations"][number], tuple(expected[f"gen{number}_group_sizes"].tolist())
    decoding = GroupDecoding(settings["num_iter"], settings["sample_schedule"], settings["cfg_schedule"])
    assert decoding.sizes(36) == sizes
    order, scale = expected[f"gen{number}_order"], settings["guidance_scale"]
    for one in (decoding, GroupDecoding(sizes, guidance_schedule=settings["cfg_schedule"])):
        assert torch.equal(tokens_of(pipe, expected, order, one, scale), expected[f"gen{number}_tokens"])
    causal = GroupDecoding(sizes, guidance_schedule=settings["cfg_schedule"], attention="causal")
    same = torch.equal(tokens_of(pipe, expected, order, causal, scale), expected[f"gen{number}_tokens"])
    assert same == (max(sizes) == 1)


@pytest.mark.parametrize("decoding", ["ar", "sjd-coupled", "sjd-tree"])
def test_tokens_of_arpg_one_after_the_other_equal_the_original(arpg, decoding):
    pipe, expected, config = arpg
    tokens = tokens_of(pipe, expected, expected["gen3_order"], decoding, config["generations"][3]["guidance_scale"])
    assert torch.equal(tokens, expected["gen3_tokens"])


@pytest.fixture(scope="module")
def lpd():
    return golden(tiny_lpd.FOLDER, convert_lpd)


@torch.no_grad()
@pytest.mark.parametrize("number", range(2))
def test_logits_of_lpd_in_any_order_and_groups_equal_the_original(lpd, number):
    pipe, expected, config = lpd
    for name in ("cond", "uncond"):
        logits = pipe.transformer.predict(
            expected["tf_tokens"],
            order=expected["orders"],
            group_sizes=config["groups"][number],
            class_labels=expected["class_labels"],
            unconditional=torch.full((3,), name == "uncond"),
        )
        torch.testing.assert_close(logits, expected[f"tf_logits_groups{number}_{name}"], atol=1e-3, rtol=0)


@pytest.mark.every(2)
@pytest.mark.parametrize("schedule", ["linear", "constant"])
@pytest.mark.parametrize("scale", [1.0, 4.0])
@pytest.mark.parametrize("number", range(2))
def test_tokens_of_lpd_in_groups_equal_the_original(lpd, number, scale, schedule):
    pipe, expected, config = lpd
    decoding = GroupDecoding(config["groups"][number], guidance_schedule=schedule)
    tokens = tokens_of(pipe, expected, expected["orders"], decoding, scale)
    assert torch.equal(tokens, expected[f"greedy_groups{number}_cfg{scale:g}_{schedule}"])


@pytest.mark.every(2)
@pytest.mark.parametrize("decoding", ["ar", "sjd-coupled", "sjd-tree"])
@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_tokens_of_lpd_one_after_the_other_equal_the_original(lpd, scale, decoding):
    pipe, expected, _ = lpd
    tokens = tokens_of(pipe, expected, expected["orders"], decoding, scale)
    assert torch.equal(tokens, expected[f"greedy_groups1_cfg{scale:g}_constant"])
