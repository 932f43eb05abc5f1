"""Attention of decoders whose heads share keys: folded heads give what transformers' attention gives."""

import pytest
import torch
from pipelines.emu3 import tiny as tiny_emu3

from arimage.models.attention_transformers import FOLDED, fold_heads
from arimage.models.layers import additive


@pytest.fixture
def decoder():
    return tiny_emu3.pipeline().model.model.text_model.eval()


def outputs(decoder, mask, count):
    embeds = torch.randn(2, count, decoder.config.hidden_size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return decoder(inputs_embeds=embeds, attention_mask=mask, use_cache=False).last_hidden_state


@pytest.mark.parametrize("count", [1, 5])
def test_folded_masks_give_the_outputs_of_plain_ones(decoder, count):
    visible = torch.ones(2, count, count, dtype=torch.bool).tril()
    visible[1, :, 1:2] &= torch.eye(count, dtype=torch.bool)[:, 1:2]
    expected = outputs(decoder, additive(visible, torch.float32), count)
    group = fold_heads(decoder.config)
    assert group == 2 and decoder.config._attn_implementation == FOLDED
    torch.testing.assert_close(outputs(decoder, additive(visible, torch.float32, group), count), expected)


@pytest.mark.parametrize("mask", [None, torch.ones(2, 5, dtype=torch.long), torch.tensor([[0, 1, 1, 1, 1]] * 2)])
def test_a_decoder_reads_text_as_before(decoder, mask):
    expected = outputs(decoder, mask, 5)
    fold_heads(decoder.config)
    assert torch.equal(outputs(decoder, mask, 5), expected)


def test_other_attention_is_left_alone(decoder):
    decoder.config._attn_implementation = "eager"
    assert fold_heads(decoder.config) == 1 and decoder.config._attn_implementation == "eager"
