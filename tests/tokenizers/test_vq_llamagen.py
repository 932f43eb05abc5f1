"""The visual tokenizer equals that of the authors, on random weights in their file format."""

import pytest
import torch
from pipelines.llamagen.tiny import FIXTURES
from safetensors.torch import load_file
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from arimage.convert.checkpoint import load_original
from arimage.convert.vqgan import llamagen_tokenizer_from_original
from arimage.tokenizers.vq_llamagen import LlamaGenVQModel


@pytest.fixture(scope="module", params=["c2i", "t2i"])
def golden(request):
    folder = FIXTURES / request.param
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


def test_images_that_are_no_multiple_of_the_scale_are_refused(golden):
    vq, _ = golden
    with pytest.raises(ValueError, match=r"18x16 pixels.*multiples of 4"):
        vq.encode(torch.zeros(1, 3, 18, 16))


@torch.no_grad()
def test_large_convolutions_work_in_channels_last_on_an_accelerator():
    formats = []
    with FakeTensorMode(), torch.device("cuda"):
        vq = LlamaGenVQModel(channels=8, channel_multipliers=(1, 1), latent_channels=8, norm_num_groups=2)
        for layer in vq.modules():
            if isinstance(layer, nn.Conv2d) and layer.kernel_size == (3, 3):
                layer.register_forward_pre_hook(
                    lambda _, args: formats.append(args[0].is_contiguous(memory_format=torch.channels_last))
                )
        vq.encode_latents(torch.empty(1, 3, 32, 32))
        vq.decode_latents(torch.empty(1, 8, 16, 16))
    assert formats and all(formats)
