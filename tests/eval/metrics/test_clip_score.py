"""The CLIP score, against the model itself."""

import json
import os

import numpy as np
import pytest
import tiny
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import CLIPImageProcessor, CLIPModel

from arimage.eval.metrics.clip_score import PREFIX, ClipExtractor, clip_scores
from arimage.eval.metrics.features import extract, image_paths


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    return tiny.save_clip(tmp_path_factory.mktemp("clip"))


def test_clip_scores_are_the_cosines_of_the_model(clip, pictures):
    prompts = ["a red heart", "a blue book", "green tree", "cat", "book", "tree, flat style", "a", "a red heart " * 9]
    extractor = ClipExtractor(clip)
    paths = image_paths(pictures)
    ours = clip_scores(extract(paths, extractor, batch_size=3), prompts, extractor, batch_size=3)
    model = CLIPModel.from_pretrained(clip).eval()
    pixels = CLIPImageProcessor.from_pretrained(clip)(
        [Image.open(path).convert("RGB") for path in paths], return_tensors="pt"
    )
    theirs = []
    for i, prompt in enumerate(prompts):
        ids = tiny.text_tokenizer(20)(PREFIX + prompt, truncation=True, max_length=12, return_tensors="pt")
        with torch.no_grad():
            out = model(input_ids=ids.input_ids, pixel_values=pixels.pixel_values[i : i + 1])
            theirs.append(float(out.logits_per_image / model.logit_scale.exp()))
    assert np.std(theirs) > 0.05
    assert ours == pytest.approx(np.array(theirs), abs=1e-5)


def test_clip_scores_are_computed_in_float32_whatever_the_file_holds(clip, tmp_path):
    CLIPModel.from_pretrained(clip).half().save_pretrained(tmp_path)
    for path in clip.iterdir():
        if not (tmp_path / path.name).exists():
            (tmp_path / path.name).write_bytes(path.read_bytes())
    extractor = ClipExtractor(tmp_path)
    found = extractor.of_texts(["a red heart"]), extractor([Image.new("RGB", (40, 30), "red")])
    whole = ClipExtractor(clip)
    expected = whole.of_texts(["a red heart"]), whole([Image.new("RGB", (40, 30), "red")])
    assert [one.dtype for one in found] == [torch.float32] * 2
    # What is left is the rounding of the weights.
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def other_shape(path):
    weights = load_file(path)
    weights["text_projection.weight"] = weights["text_projection.weight"][:, :-1].contiguous()
    save_file(weights, path, metadata={"format": "pt"})


def without_a_weight(path):
    weights = load_file(path)
    save_file({name: weights[name] for name in weights if name != "text_projection.weight"}, path)


def setting(**changes):
    return lambda path: path.write_text(json.dumps(json.loads(path.read_text()) | changes))


DAMAGES = {
    "weights cut": ("model.safetensors", cut),
    "weights empty": ("model.safetensors", lambda path: path.write_bytes(b"")),
    "weights a pipe": ("model.safetensors", lambda path: (path.unlink(), os.mkfifo(path))),
    "a weight of another shape": ("model.safetensors", other_shape),
    "a weight missing": ("model.safetensors", without_a_weight),
    "no weights": ("model.safetensors", lambda path: path.unlink()),
    "config cut": ("config.json", cut),
    "config of another kind": ("config.json", lambda path: path.write_text("[]")),
    "config with a text": ("config.json", setting(projection_dim="many")),
    "config with a list": ("config.json", setting(vision_config=[1])),
    "too deep": ("config.json", lambda path: path.write_text("[" * 10**5)),
    "preprocessor cut": ("preprocessor_config.json", cut),
    "preprocessor of another kind": ("preprocessor_config.json", lambda path: path.write_text("[]")),
    "preprocessor of another size": ("preprocessor_config.json", setting(crop_size={"height": 24, "width": 24})),
    "preprocessor with a text": ("preprocessor_config.json", setting(size="large")),
    "tokenizer cut": ("tokenizer.json", cut),
    "tokenizer empty": ("tokenizer.json", lambda path: path.write_text("{}")),
    "tokenizer gone": ("tokenizer.json", lambda path: path.unlink()),
    "settings of the tokenizer cut": ("tokenizer_config.json", cut),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_damaged_files_of_clip_are_refused_in_one_sentence(clip, kind, tmp_path, capfd):
    for path in clip.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    name, damage = DAMAGES[kind]
    damage(tmp_path / name)
    capfd.readouterr()
    with pytest.raises(ValueError) as caught:  # noqa: PT011 the sentence is looked at below
        ClipExtractor(tmp_path)
    sentence, printed = str(caught.value), capfd.readouterr()
    with pytest.raises(ValueError, match="--clip is missing: .*hf download openai"):
        ClipExtractor(None)
    assert str(tmp_path) in sentence and ("hf download" in sentence or "again" in sentence)
    assert "\n" not in sentence and len(sentence) < len(2 * str(tmp_path)) + 400 and not printed.err
