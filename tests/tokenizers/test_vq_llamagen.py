"""The visual tokenizer equals that of the authors, on random weights in their file format."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from arimage.convert.checkpoint import load_original
from arimage.convert.llamagen import llamagen_tokenizer_from_original
from arimage.tokenizers.vq_llamagen import LlamaGenVQModel


FIXTURES = Path(__file__).parents[1] / "fixtures"


@pytest.fixture(scope="module", params=["c2i", "t2i"])
def golden(request):
    folder = FIXTURES / f"llamagen_{request.param}"
    vq = llamagen_tokenizer_from_original(load_original(folder / f"vq_ds4_{request.param}.pt"))
    return vq, load_file(folder / "expected.safetensors")


def assert_close(actual, expected):
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_encoder_equals_the_original(golden):
    vq, expected = golden
    encoded = vq.encoder(expected["vq_image"])
    assert_close(encoded, expected["vq_encoder_out"])
    assert_close(vq.quant_conv(encoded), expected["vq_quant_conv_out"])


@torch.no_grad()
def test_codes_and_their_vectors_equal_the_original(golden):
    vq, expected = golden
    codes = vq.encode(expected["vq_image"])
    assert torch.equal(codes.flatten(1), expected["vq_indices"])
    assert_close(vq.lookup(codes), expected["vq_quant"])


@torch.no_grad()
def test_decoded_images_equal_the_original(golden):
    vq, expected = golden
    assert_close(vq.decode_latents(expected["vq_quant"]), expected["vq_reconstruction"])
    grid = expected["vq_quant"].shape[-2:]
    assert_close(vq.decode(expected["vq_indices"].unflatten(1, grid)), expected["vq_reconstruction"])
    greedy = next(expected[k] for k in ("greedy_tokens_cfg4", "greedy_tokens_cfg7.5") if k in expected)
    assert_close(vq.decode(greedy.unflatten(1, grid)), expected["vq_decode_greedy_cfg"])


def test_saved_and_loaded_again_it_decodes_the_same(golden, tmp_path):
    vq, expected = golden
    vq.save_pretrained(tmp_path)
    codes = expected["vq_indices"].unflatten(1, expected["vq_quant"].shape[-2:])
    with torch.no_grad():
        assert torch.equal(LlamaGenVQModel.from_pretrained(tmp_path).decode(codes), vq.decode(codes))


def test_images_that_are_no_multiple_of_the_scale_are_refused(golden):
    vq, _ = golden
    with pytest.raises(ValueError, match=r"18x16 pixels.*multiples of 4"):
        vq.encode(torch.zeros(1, 3, 18, 16))
