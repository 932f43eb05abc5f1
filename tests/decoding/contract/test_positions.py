"""A decoding says how many positions of an image its settings make a step evaluate."""

import pytest
import torch
from presets import FOR_TOKENS

from arimage.decoding import Layout, Sampling, decode, decoding_from_name, decoding_from_text


TREES = ("eagle", "eagle-lantern")


def evaluated(decoding, model) -> int:
    """The largest number of positions in a forward pass of the model."""
    counts, forward = [0], model.forward

    def counting(tokens, *inputs, **options):
        counts.append(tokens.shape[1])
        return forward(tokens, *inputs, **options)

    model.forward = counting
    decode(model, decoding, Sampling(), torch.arange(3))
    return max(counts)


@pytest.mark.every(3)
@pytest.mark.parametrize(
    "text",
    [
        *FOR_TOKENS,
        "sjd:window=4",
        "sjd-coupled:window=100",
        "sjd-tree:window=5,width=4,depth=3",
        "sjd-tree:window=100,width=3,depth=90",
        "sjd-lazy:window=6,tokens=3,chain=2",
        "pjd:window=2,context=1",
        "pjd:window=100,context=2",
        "zipar:window=1",
        "zipar:window=2",
        "eagle:nodes=4,width=2,depth=2",
        "eagle:nodes=20,width=4,depth=1",
    ],
)
def test_a_step_evaluates_as_many_positions_as_the_decoding_says(text, table_model):
    decoding, name = decoding_from_text(text), text.partition(":")[0]
    # Of the table, only small ones are normalised over all their images.
    model = table_model(grid=(3, 4), vocab_size=2, truncated=name in ("zipar", "pjd"))
    said = decoding.positions(model.layout)
    found = evaluated(decoding, model)
    if said is None:
        assert found == 1
    elif name in TREES:
        # The drafter evaluates the others.
        assert found <= said
    else:
        assert found == said


def test_rows_in_flight_count():
    assert decoding_from_text("pjd:window=128,context=1").positions(Layout((90, 90))) == 90 * 90
    assert decoding_from_name("pjd").positions(Layout((90, 90))) == 4 * 16
    assert decoding_from_text("sjd-tree:window=128,width=128,depth=8").positions(Layout((16, 16))) == 128 + 127 * 8
    assert decoding_from_text("eagle:nodes=128,width=128,depth=128").positions(Layout((16, 16))) > 128**2
    assert decoding_from_text("path-jacobi:window=9").positions(Layout((1, 4))) == 4
