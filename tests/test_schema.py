"""What files hold is checked by schemas, and every mistake is one sentence that names file, setting and remedy."""

from typing import Annotated

import pytest
import torch
from pydantic import BaseModel
from pydantic.dataclasses import dataclass

from arimage.settings.schema import COMPLETE, Count, Flag, Positive, Share, Text, check, checked, read_object


@dataclass(frozen=True, config=COMPLETE)
class Part:
    steps: Count
    betas: tuple[Share, Share] = (0.9, 0.95)
    restarts: tuple[tuple[Count, Positive], ...] = ()


class Whole(BaseModel):
    model_config = COMPLETE
    part: Part
    name: Text | None = None
    sizes: Count | list[Count] = 1


@pytest.mark.parametrize(
    ("value", "mistake"),
    [
        ([], r"it is \[\]: give a table of settings"),
        ({}, "part is missing: add it"),
        ({"part": {}}, "part.steps is missing: add it"),
        ({"part": {"steps": 0}}, "part.steps is 0: give at least 1"),
        ({"part": {"steps": 10**30}}, r"part.steps is 10+: give at most 1000000"),
        ({"part": {"steps": True}}, "part.steps is True: give a whole number"),
        ({"part": {"steps": "1"}}, "part.steps is '1': give a whole number"),
        ({"part": {"steps": 1, "betas": [0.9]}}, r"part.betas\[1\] is missing: add it"),
        ({"part": {"steps": 1, "betas": [0.9, float("nan")]}}, r"part.betas\[1\] is nan: give a finite number"),
        ({"part": {"steps": 1, "betas": "ab"}}, "part.betas is 'ab': give a list"),
        ({"part": {"steps": 1, "restarts": [[5, 0]]}}, r"part.restarts\[0\]\[1\] is 0: give more than 0"),
        ({"part": {"steps": 1, "stesp": 2}}, "part.stesp is not a setting: leave it out, or correct its name"),
        ({"part": {"steps": 1}, "name": ""}, "name is '': give a text that is not empty"),
        ({"part": {"steps": 1}, "sizes": "x"}, "sizes is 'x': give a whole number"),
    ],
)
def test_a_mistake_is_one_sentence(value, mistake):
    with pytest.raises(ValueError, match=f"^mine.toml: {mistake}$"):
        check(Whole, value, "mine.toml")


def test_sound_settings_are_taken_as_they_are():
    found = check(
        Whole, {"part": {"steps": 3, "betas": [0, 1], "restarts": [[5, 1e-3]]}, "sizes": [1, 2]}, "mine.toml"
    )
    assert found.part == Part(3, (0, 1), ((5, 1e-3),)) and found.sizes == [1, 2] and found.name is None


def test_the_arguments_of_a_constructor_are_checked():
    class Network:
        @checked
        def __init__(self, width: Count = 8, sizes: tuple[Count, ...] = (1, 2), deep: Flag = False):
            self.settings = width, sizes, deep

    assert Network(sizes=[3]).settings == (8, (3,), False)
    with pytest.raises(ValueError, match="^width is -1: give at least 1$"):
        Network(-1)
    with pytest.raises(ValueError, match="^deep is 1: give true or false$"):
        Network(deep=1)
    with pytest.raises(TypeError, match="height"):
        Network(height=2)


@pytest.mark.parametrize("text", [None, "", "{", "[]", "5", "null", "[" * 100_000, '{"a":' * 100_000])
def test_a_file_that_holds_no_json_object_is_refused(tmp_path, text):
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match="config.json .*JSON.*: get"):
        read_object(path)


def test_no_bound_of_what_counts_data_is_below_a_trillion():
    """Of rows, images, prompts, classes, shards and steps. What is bounded by the memory of a request keeps its
    bound."""
    pytest.importorskip("datasets", reason="the extra `train` is not installed")
    from arimage.eval.protocol import Protocol
    from arimage.eval.runs.run_folder import Config, Source
    from arimage.pipelines.var.transformer_var import VARTransformer
    from arimage.training.adapters.lora import LoraSettings
    from arimage.training.loop import OptimizerSettings

    most = 2**40
    settings = {"steps": most, "learning_rate": 1e-3, "warmup_steps": most, "restarts": [[most, 1e-3]]}
    assert check(OptimizerSettings, settings, "here").steps == most
    LoraSettings(steps=most)
    source = Source(per_prompt=most, classes=most, per_class=most)
    for model, names in ((Config, ("images", "prompts")), (Protocol, ("first", "images", "per_prompt"))):
        for name in names:
            field = model.model_fields[name]
            assert check(Annotated[field.annotation, name, *field.metadata], most, name) == most
    assert source.classes == most
    with torch.device("meta"):
        assert VARTransformer(num_classes=10**7, hidden_size=64, num_layers=1).config.num_classes == 10**7
