"""The name of a checkpoint's own decoding stands for the checkpoint's settings, wherever a name is given."""

from dataclasses import dataclass

import pytest
from pipelines.llamagen import tiny as tiny_llamagen

from arimage import AutoPipeline
from arimage.app.engine.models import describe
from arimage.app.engine.types import Limits, Request
from arimage.app.engine.validation import check
from arimage.decoding import GroupAcceptance, SpeculativeJacobiDecoding, decoding_from_text
from arimage.eval.bench.measure import choose_decodings
from arimage.eval.runs.generate import make_config


OWN = SpeculativeJacobiDecoding(window=1, init="left")
# What a text means to a checkpoint with this decoding.
MEANINGS = {
    "sjd-coupled": OWN,
    "sjd-coupled:window=7": SpeculativeJacobiDecoding(window=7, init="left"),
    "sjd-coupled:init=above": SpeculativeJacobiDecoding(window=1, init="above"),
    "sjd": SpeculativeJacobiDecoding(refresh="independent"),
    "sjd-gumbel:window=5": SpeculativeJacobiDecoding(window=5, refresh="gumbel"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    pipe, folder = tiny_llamagen.text_pipeline(), tmp_path_factory.mktemp("own")
    pipe.decoding = OWN
    pipe.save_pretrained(folder)
    return folder


@pytest.fixture
def pipe(folder):
    return AutoPipeline.from_pretrained(folder)


def used(pipe, **call):
    """The decoding that a call uses."""
    found = []
    pipe("a red heart", callback_on_step_end=lambda pipe, *_: found.append(pipe.current_call.decoding) or {}, **call)
    return found[0]


@pytest.mark.every(2)
@pytest.mark.parametrize("text", MEANINGS)
def test_a_name_means_the_same_at_every_entrance(pipe, text):
    expected = MEANINGS[text]
    assert used(pipe, decoding=text) == expected
    info = describe("model", pipe, Limits())
    assert check(Request("model", "a red heart", decoding=text), pipe, info, Limits()).decoding == expected
    assert choose_decodings(pipe, {"prompt": ["a red heart"]}, [text], {})[0] == {text: expected}
    rows = [{"prompt": "a red heart"}]
    config = make_config(pipe, rows, model="model", source="", seed=0, batch_size=1, decoding=text)
    assert config["decoding"]["window"] == expected.window and config["decoding"]["init"] == expected.init
    pipe.decoding = text
    assert pipe.decoding == expected


def test_a_changed_default_does_not_change_what_the_name_means(pipe, tmp_path):
    pipe.decoding = SpeculativeJacobiDecoding(window=9)
    assert pipe.as_decoding("sjd-coupled") == OWN
    other = type(pipe).from_pipe(pipe)
    assert other.decoding == SpeculativeJacobiDecoding(window=9) and other.as_decoding("sjd-coupled") == OWN
    # A saved pipeline is a checkpoint of its own.
    pipe.save_pretrained(tmp_path)
    saved = AutoPipeline.from_pretrained(tmp_path)
    assert saved.decoding == saved.as_decoding("sjd-coupled") == SpeculativeJacobiDecoding(window=9)


def test_a_checkpoint_without_settings_of_its_own_has_those_of_the_presets():
    assert tiny_llamagen.text_pipeline().as_decoding("sjd-coupled") == SpeculativeJacobiDecoding()


def test_an_exact_name_never_means_a_lossy_decoding(folder, tmp_path):
    pipe = AutoPipeline.from_pretrained(folder)
    pipe.decoding = SpeculativeJacobiDecoding(window=1, relax=2.0)
    pipe.save_pretrained(tmp_path)
    loaded = AutoPipeline.from_pretrained(tmp_path)
    assert not loaded.decoding.exact and loaded.as_decoding("sjd-coupled") == SpeculativeJacobiDecoding()


def test_a_part_of_the_acceptance_changes_that_of_the_checkpoint():
    own = SpeculativeJacobiDecoding(window=1, acceptance=GroupAcceptance(size=4, max_distance=0.2))
    changed = decoding_from_text("gsd:acceptance.size=5", own)
    assert changed == SpeculativeJacobiDecoding(window=1, acceptance=GroupAcceptance(size=5, max_distance=0.2))
    assert decoding_from_text("gsd", own) == own and decoding_from_text("lantern", own).window == 32
    exact = decoding_from_text("gsd:acceptance=ExactAcceptance", own)
    assert exact == SpeculativeJacobiDecoding(window=1)


def test_a_decoding_that_is_not_hashable_is_refused(pipe):
    @dataclass
    class Mine:
        settings: list

        def start(self, model, sampling, seeds): ...

        def step(self, state): ...

    for use in (lambda: pipe("a red heart", decoding=Mine([1])), lambda: setattr(pipe, "decoding", Mine([1]))):
        with pytest.raises(ValueError, match="decoding is .*hashable"):
            use()
