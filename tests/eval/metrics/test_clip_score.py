"""The CLIP score, against the model itself."""

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


def test_a_clip_that_is_not_whole_is_refused(clip, tmp_path):
    with pytest.raises(ValueError, match="--clip is missing: hf download openai"):
        ClipExtractor(None)
    with pytest.raises(ValueError, match=r"lacks config.json, .*\*.safetensors of a CLIP model: hf download openai"):
        ClipExtractor(tmp_path)
    for path in clip.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    weights.pop("text_projection.weight")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="has no weights for text_projection.weight"):
        ClipExtractor(tmp_path)
