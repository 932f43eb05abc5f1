"""The multi-scale tokenizer equals that of the authors, on random weights in their file format."""

import pytest
import torch
from pipelines.var.tiny import FOLDER
from safetensors.torch import load_file

from arimage.convert.checkpoint import load_original
from arimage.pipelines.var.convert import var_tokenizer_from_original
from arimage.tokenizers.vq_var import VARVQModel, phi_indices


SCALES = (1, 2, 3, 4)


@pytest.fixture(scope="module")
def vq():
    return var_tokenizer_from_original(load_original(FOLDER / "vae_ch32v64z8.pth"), scales=SCALES)


@pytest.fixture(scope="module")
def expected():
    return load_file(FOLDER / "expected.safetensors")


def maps(tokens, scales=SCALES):
    return [
        part.unflatten(1, (p, p)) for p, part in zip(scales, tokens.split([p * p for p in scales], 1), strict=True)
    ]


def flat(codes):
    return torch.cat([token_map.flatten(1) for token_map in codes], dim=1)


def assert_close(actual, expected):
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_encodings_and_codes_equal_the_original(vq, expected):
    assert_close(vq.quant_conv(vq.encoder(expected["vae_image"])), expected["vae_f"])
    codes = vq.encode(expected["vae_image"])
    assert [token_map.shape for token_map in codes] == [(2, p, p) for p in SCALES]
    assert torch.equal(flat(codes), expected["vae_tokens"])


@torch.no_grad()
@pytest.mark.parametrize("scales", [1, 2, 3, 4])
def test_the_first_scales_give_the_images_of_the_original(vq, expected, scales):
    codes = maps(expected["vae_tokens"])[:scales]
    assert_close(vq.latents(codes), expected["vae_fhat"][:, scales - 1])
    assert_close(vq.decode(codes).clamp(-1, 1), expected["vae_recon_per_scale"][:, scales - 1])


@torch.no_grad()
def test_teacher_forcing_inputs_equal_the_original(vq, expected):
    codes = maps(expected["tf_tokens"])
    assert_close(vq.inputs(codes), expected["tf_var_input"])
    assert_close(vq.inputs(codes[:2]), expected["tf_var_input"][:, : 4 + 9])


def test_scales_share_their_convolutions_as_in_the_original(vq, expected):
    assert vq.phi_index == expected["phi_index"].tolist()
    # The published ten scales, two of which are ties.
    assert phi_indices(10, 4) == [0, 0, 1, 1, 1, 2, 2, 3, 3, 3]
    assert phi_indices(10, 1) == [0] * 10
    assert phi_indices(7, 7) == list(range(7))


@torch.no_grad()
def test_the_quantiser_stays_in_float32(vq, expected):
    half = VARVQModel.from_config(vq.config)
    half.load_state_dict(vq.state_dict())
    half = half.to(torch.bfloat16)
    codes = maps(expected["vae_tokens"])
    for result in (half.latents(codes), half.inputs(codes)):
        assert result.dtype == torch.float32
    torch.testing.assert_close(half.latents(codes), vq.latents(codes), atol=0.05, rtol=0.05)
    assert half.decode(codes).dtype == torch.bfloat16


@pytest.mark.parametrize("size", [(16, 20), (32, 32)])
def test_images_of_another_size_are_refused(vq, size):
    with pytest.raises(
        ValueError, match=rf"{size[0]}x{size[1]} pixels do not fit this tokenizer: resize them to 16x16"
    ):
        vq.encode(torch.zeros(1, 3, *size))
