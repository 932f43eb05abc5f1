"""The language model of MammothModa2: its joint distribution, experts, and compilation."""

import pytest
import torch
from decoding.test_exactness import assert_follows
from pipelines.mammothmoda2 import tiny as tiny_mammothmoda2
from pipelines.mammothmoda2.tiny import EXPECTED

from arimage.decoding import Layout, Sampling, decode, decoding_from_name
from arimage.pipelines.mammothmoda2.transformer_mammothmoda2 import (
    MammothModa2Config,
    bind_prompts,
    read_sequence,
    with_headers,
)


CODES = 3


@pytest.fixture(scope="module")
def network():
    return tiny_mammothmoda2.pipeline("dev", tokenizer=False).language_model


def bind(network, grid=(2, 2), count=1, codes=CODES):
    ids, mask = (EXPECTED["dev"][name][:1].repeat(count, 1) for name in ("input_ids", "attention_mask"))
    return bind_prompts(network, *with_headers(ids, mask, 10), Layout(grid), codes, branches=2)


@torch.no_grad()
def joint(model, sampling):
    """The probability of every image of two rows and two columns, by teacher forcing under guidance."""
    images = torch.cartesian_prod(*[torch.arange(CODES)] * 4)
    model = model.take(torch.zeros(len(images), dtype=torch.long))
    cache, first = model.prefill(len(images))
    others = model.forward(images[:, :-1], torch.arange(3).expand(len(images), -1), cache)
    logits = torch.cat([first[:, :, None], others], dim=2)
    steps = sampling.probabilities(logits, torch.arange(4).expand(len(images), -1))
    return steps.gather(2, images[..., None]).prod(dim=1).flatten().double()


# That each decoding is exact is what tests/decoding shows; here it reads the logits of this model.
@pytest.mark.slow
@pytest.mark.parametrize("name", ["sjd-coupled", "sjd-tree"])
def test_images_follow_the_joint_distribution_of_the_model(network, name):
    sampling, count = Sampling(guidance_scale=1.5, temperature=2.0), 4000
    model = bind(network)
    expected = joint(model, sampling)
    assert expected.sum() == pytest.approx(1) and expected.max() < 0.5
    model.merge_prompts()
    decoded = decode(
        model.take(torch.zeros(count, dtype=torch.long)), decoding_from_name(name), sampling, torch.arange(count)
    )
    assert_follows(decoded.tokens, expected, CODES)


def test_only_headers_are_seen_without_a_condition():
    ids = torch.tensor([[1, 2, 3, 4], [0, 5, 3, 4]])
    rows, mask = with_headers(ids, torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1]]), 2)
    assert rows.tolist() == [[1, 2, 3, 4], [4, 5, 3, 4], [4, 4, 3, 4], [4, 4, 3, 4]]
    assert mask.int().tolist() == [[1, 1, 1, 1], [0, 1, 1, 1], [0, 0, 1, 1], [0, 0, 1, 1]]


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
