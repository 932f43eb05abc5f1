"""torch.compile, around a component or in place, compiles the forward passes that make the tokens."""

import pytest
import tiny
import torch
from models.test_language_model import FIRST_CODE, GRID, pad_left
from transformers import LlamaConfig, LlamaForCausalLM

from arimage.decoding import Layout, Sampling, SpeculativeJacobiDecoding, decode
from arimage.models.compiled import compiled_like
from arimage.models.language_heads import CodeHead
from arimage.models.language_model import LanguageTokenModel


SEEDS = torch.arange(2)


class Counting:
    """A backend of torch.compile that runs the graphs as they are and counts compilations and runs."""

    def __init__(self):
        self.graphs = self.runs = 0

    def __call__(self, graph, example_inputs):
        self.graphs += 1

        def run(*inputs):
            self.runs += 1
            return graph.forward(*inputs)

        return run


@pytest.fixture
def counting():
    torch.compiler.reset()
    yield Counting()
    torch.compiler.reset()


def language_model():
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return tiny.randomise(LlamaForCausalLM(config), 3).requires_grad_(False)


def language_tokens(component, compiled=None):
    ids, mask = pad_left([[51, 52, 53], [56]])
    model = LanguageTokenModel(
        compiled_like(component, component.model),
        embed=lambda tokens: component.model.embed_tokens(tokens + FIRST_CODE),
        head=CodeHead(component.lm_head, FIRST_CODE, 40),
        layout=Layout(GRID),
        input_ids=ids,
        attention_mask=mask,
        row_end=50,
    )
    return decode(model, SpeculativeJacobiDecoding(window=4), Sampling(top_k=1), SEEDS, captured_steps=compiled).tokens


@pytest.mark.slow
@torch.no_grad()
def test_compiling_a_language_model_compiles_the_decoder_that_is_called(counting):
    expected = language_tokens(language_model())
    component = torch.compile(language_model(), backend=counting)
    assert torch.equal(language_tokens(component), expected)
    graphs, runs = counting.graphs, counting.runs
    assert graphs > 0
    assert torch.equal(language_tokens(component), expected)
    assert counting.graphs == graphs and counting.runs == 2 * runs, "a second call compiles again"


def test_compiling_in_place_what_is_not_called_is_refused(counting):
    component = language_model()
    component.compile(backend=counting)
    with pytest.raises(ValueError, match="LlamaForCausalLM .* LlamaModel"):
        compiled_like(component, component.model)
