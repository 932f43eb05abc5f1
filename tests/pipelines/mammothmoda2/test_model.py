"""The language model of MammothModa2: its joint distribution, experts, and compilation."""

import pytest
import torch
from pipelines.mammothmoda2 import tiny as tiny_mammothmoda2
from pipelines.mammothmoda2.tiny import EXPECTED

from arimage.pipelines.mammothmoda2.transformer_mammothmoda2 import (
    MammothModa2Config,
    read_sequence,
)


@pytest.fixture(scope="module")
def network():
    return tiny_mammothmoda2.pipeline("dev", tokenizer=False).language_model


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"backbone": "qwen"}, "backbone is 'qwen'"),
        ({"gen_head_start": 400}, "gen_head_start 400: give at most gen_vocab_start_index, 304"),
        ({"vocab_size": 305}, "vocab_size is 305"),
        ({"row_end_id": 303}, "row_end_id is 303: give a generation token, 304 .. 383"),
        ({"gen_head_start": 0}, "gen_head_start is 0"),
        ({"condition_layers": []}, r"condition_layers are \[\]"),
        ({"condition_layers": [5]}, r"condition_layers are \[5\]: give some of -5 .. 4"),
    ],
)
def test_a_configuration_that_fits_no_model_is_refused(network, change, message):
    with pytest.raises(ValueError, match=message):
        MammothModa2Config(**network.config.to_dict() | change)


def test_rows_of_the_head_may_be_aligned_with_the_embeddings(network):
    """Which of the two the published Dev has is an open question, see the README.md next to its pipeline."""
    settings = network.config.to_dict()
    assert network.config.num_codes == 68
    assert MammothModa2Config(**settings | {"gen_head_start": 304}).num_codes == 72


@torch.no_grad()
def test_a_sequence_is_read_causally_by_every_attention():
    network = tiny_mammothmoda2.pipeline("preview", tokenizer=False).language_model
    ids = EXPECTED["preview"]["input_ids"][0]
    read = read_sequence(network, ids)
    torch.testing.assert_close(read_sequence(network, ids[:9]), read[:9])
    network.set_attn_implementation("eager")
    torch.testing.assert_close(read_sequence(network, ids), read)
