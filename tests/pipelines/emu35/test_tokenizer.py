"""The image tokenizer of Emu3.5: the original's codes and pixels, half precision, slices and tiles."""

import pytest
import torch
from pipelines.emu35 import tiny as tiny_emu35
from pipelines.emu35.tiny import EXPECTED

from arimage.pipelines.emu35.ibq_emu35 import IBQModel


@pytest.fixture(scope="module")
def vq():
    return tiny_emu35.pipeline().vq


@torch.no_grad()
def test_codes_and_pixels_equal_the_original(vq):
    torch.testing.assert_close(vq.encode(EXPECTED["vq.pixels"]).latents, EXPECTED["vq.latents"], atol=1e-4, rtol=0)
    assert torch.equal(vq.encode_codes(EXPECTED["vq.pixels"]), EXPECTED["vq.codes"])
    decoded = vq.decode_codes(EXPECTED["vq.decode_codes"])
    torch.testing.assert_close(decoded, EXPECTED["vq.decoded"], atol=1e-4, rtol=0)


@torch.no_grad()
def test_encoding_stays_in_float32(vq, tmp_path):
    vq.save_pretrained(tmp_path)
    half = IBQModel.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert half.quantize.embedding.weight.dtype == half.encoder.conv_in.weight.dtype == torch.float32
    assert half.decoder.conv_in.weight.dtype == half.post_quant_conv.weight.dtype == torch.bfloat16
    assert torch.equal(
        half.encode_codes(EXPECTED["vq.pixels"].bfloat16().float()),
        vq.encode_codes(EXPECTED["vq.pixels"].bfloat16().float()),
    )
    decoded = half.decode_codes(EXPECTED["vq.decode_codes"])
    assert decoded.dtype == torch.bfloat16 and (decoded - EXPECTED["vq.decoded"]).abs().mean() < 0.05
