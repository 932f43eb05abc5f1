"""Classes by their names."""

import json

import pytest
import torch
from pipelines.llamagen import tiny as tiny_llamagen
from pipelines.var import tiny as tiny_var

from arimage import AutoPipeline, LlamaGenPipeline, VARPipeline
from arimage.auto import class_names


NAMES = [
    "tench",
    "golden retriever",
    "crane",
    "otter",
    "house finch, linnet",
    "crane",
    "tabby",
    "Eskimo dog",
    "piñata",
    "sea lion",
]
GREEDY = {"top_k": 1, "output_type": "latent"}


def build(kind):
    pipe = tiny_llamagen.class_pipeline() if kind is LlamaGenPipeline else tiny_var.pipeline("class")
    named = kind(**pipe.components, id2label=dict(enumerate(NAMES)))
    named.set_progress_bar_config(disable=True)
    return named


@pytest.fixture(scope="module", params=[LlamaGenPipeline, VARPipeline])
def pipe(request):
    return build(request.param)


def tokens(pipe, *arguments, **options):
    result = pipe(*arguments, **options, **GREEDY).tokens
    return result if isinstance(result, torch.Tensor) else torch.cat([part.flatten(1) for part in result], 1)


def test_names_stand_for_ids(pipe):
    assert pipe.get_label_ids("Golden Retriever") == [1]
    assert pipe.get_label_ids(["linnet", " house finch", "eskimo dog"]) == [4, 4, 7]
    assert pipe.get_label_ids(["pi\u00f1ata", "Pin\u0303ata"]) == [8, 8]
    expected = tokens(pipe, class_labels=[1, 3])
    assert len(expected.unique(dim=0)) == 2
    assert torch.equal(tokens(pipe, ["golden retriever", "otter"]), expected)
    assert torch.equal(tokens(pipe, class_labels=["golden retriever", 3]), expected)
    assert torch.equal(tokens(pipe, class_labels=("golden retriever", "otter")), expected)
    assert torch.equal(tokens(pipe, "otter", num_images_per_prompt=2), expected[[1, 1]])
    assert torch.equal(tokens(pipe, class_labels="otter"), expected[1:])


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("crane", r'"crane" is the name of the classes \[2, 5\]: give one of these ids'),
        ("golden retreiver", '"golden retreiver" is not the name of a class .*: the nearest is "golden retriever"'),
        ("sea lyon", 'the nearest is "sea lion"'),
        ("spaceship", '"spaceship" is not .*: none is similar'),
        ("", '"" is not the name'),
    ],
)
def test_other_names_are_refused_with_the_nearest(pipe, name, sentence):
    for condition in ({"prompt": name}, {"class_labels": [1, name]}, {"class_labels": name}):
        with pytest.raises(ValueError, match=sentence):
            pipe(**condition)


def test_names_and_ids_exclude_each_other(pipe):
    with pytest.raises(ValueError, match="generates classes: give class_labels"):
        pipe("otter", class_labels=1)


def test_names_are_kept(pipe, tmp_path, caplog):
    pipe.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "model_index.json").read_text())["id2label"]["7"] == "Eskimo dog"
    for other in (AutoPipeline.from_pretrained(tmp_path), type(pipe).from_pipe(pipe)):
        assert other.class_names == pipe.class_names == NAMES
    assert class_names(tmp_path) == NAMES
    assert not caplog.records


@pytest.mark.parametrize("names", [{}, {0: "tench"}, {i + 1: name for i, name in enumerate(NAMES)}])
def test_every_class_has_a_name(names):
    with pytest.raises(ValueError, match="id2label names"):
        LlamaGenPipeline(**tiny_llamagen.class_pipeline().components, id2label=names)
    with pytest.raises(ValueError, match="the transformer has none"):
        LlamaGenPipeline(**tiny_llamagen.text_pipeline().components, id2label={0: "tench"})
