"""torch.compile, around a component or in place, compiles the forward passes that make the tokens."""

import pytest
import tiny
import torch
from models.test_language_model import FIRST_CODE, GRID, pad_left
from pipelines.llamagen import tiny as tiny_llamagen
from pipelines.var import tiny as tiny_var
from transformers import LlamaConfig, LlamaForCausalLM

from arimage.decoding import Layout, NextScaleDecoding, Sampling, SpeculativeJacobiDecoding, decode
from arimage.decoding.run.captured_steps import CapturedSteps
from arimage.models.compiled import compiled_like
from arimage.models.language_model import LanguageTokenModel, code_head
from arimage.pipelines.llamagen.transformer_llamagen import LlamaGenTokenModel
from arimage.pipelines.var.transformer_var import VARScaleModel


SEEDS = torch.arange(2)
SAMPLING = Sampling(guidance_scale=2.0, top_k=1)
LABELS = {"class_labels": torch.tensor([1, 3])}


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


def compiled(module, how, backend):
    if how == "in place":
        module.compile(backend=backend)
        return module
    return torch.compile(module, backend=backend)


def llamagen(transformer):
    model = LlamaGenTokenModel(transformer, LABELS, Layout((4, 4)), guided=True)
    return decode(model, SpeculativeJacobiDecoding(window=4), SAMPLING, SEEDS)


def var(transformer):
    model = VARScaleModel(transformer, tiny.scale_tokenizer(), LABELS, guided=True)
    return decode(model, NextScaleDecoding(), SAMPLING, SEEDS)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "how"),
    [
        ("llamagen", "in place"),
        pytest.param("var", "around", marks=pytest.mark.slow),
        pytest.param("llamagen", "around", marks=pytest.mark.slow),
        pytest.param("var", "in place", marks=pytest.mark.slow),
    ],
)
def test_every_forward_pass_is_that_of_the_compiled_transformer(family, how, counting):
    make, decoded = {"llamagen": (tiny_llamagen.transformer, llamagen), "var": (tiny_var.transformer, var)}[family]
    expected = decoded(make("class"))
    state = decoded(compiled(make("class"), how, counting))
    assert torch.equal(state.tokens, expected.tokens)
    assert counting.graphs > 0 and counting.runs == state.forward_passes


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
        head=code_head(component.lm_head, FIRST_CODE, 40),
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


@pytest.mark.slow
@torch.no_grad()
def test_the_decoder_of_a_language_model_may_be_compiled_in_place(counting):
    component, expected = language_model(), language_tokens(language_model())
    component.model.compile(backend=counting)
    assert torch.equal(language_tokens(component), expected)
    assert counting.runs > 0


@pytest.mark.slow
@torch.no_grad()
def test_the_whole_step_of_a_language_model_with_row_ends_is_one_graph(counting):
    expected = language_tokens(language_model())
    compiled = CapturedSteps(backend=counting)
    assert torch.equal(language_tokens(language_model(), compiled), expected)
    assert counting.graphs == 1


def test_compiling_in_place_what_is_not_called_is_refused(counting):
    component = language_model()
    component.compile(backend=counting)
    with pytest.raises(ValueError, match="LlamaForCausalLM .* LlamaModel"):
        compiled_like(component, component.model)
