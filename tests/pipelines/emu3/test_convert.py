"""The published layouts of Emu3, converted: the same codes and pixels, the same text tokens, and what is refused."""

import json
import shutil

import pytest
import torch
from pipelines.emu3 import tiny as tiny_emu3
from pipelines.emu3.tiny import EXPECTED, FIXTURES

from arimage import AutoPipeline
from arimage.convert import CheckpointError, convert_emu3
from arimage.pipelines.emu3.convert import emu3_tokenizer_from_original


DEFAULTS = {"guidance_scale": 3.0, "temperature": 1.0, "top_k": 2048, "top_p": 1.0}


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """The authors' two folders."""
    root = tmp_path_factory.mktemp("original")
    return tiny_emu3.write_original(root / "Emu3-Gen"), tiny_emu3.write_vision_tokenizer(root / "VisionTokenizer")


def generate(pipe, ids, negative_ids):
    pipe.tokenizer = None
    pipe.set_progress_bar_config(disable=True)
    options = {"height": 32, "width": 40, "top_k": 1, "output_type": "pt"}
    return pipe(input_ids=ids[None], negative_input_ids=negative_ids[None], **options)


def assert_golden(out):
    assert torch.equal(out.tokens[0], EXPECTED["image_codes"])
    expected = (EXPECTED["decoded_pixels"] / 2 + 0.5).clamp(0, 1)
    torch.testing.assert_close(out.images, expected, atol=1e-5, rtol=0)


def test_the_layout_of_transformers_generates_the_images_of_the_original(tmp_path):
    convert_emu3(FIXTURES, out=tmp_path / "pipe")
    loaded = AutoPipeline.from_pretrained(tmp_path / "pipe")
    assert loaded.tokenizer is None and loaded.config.image_area == 720 * 720
    assert loaded.generation_config.items() >= DEFAULTS.items()
    assert_golden(generate(loaded, EXPECTED["prompt_ids"], EXPECTED["negative_prompt_ids"]))


def test_the_tokenizer_next_to_the_weights_is_taken_along(tmp_path):
    shutil.copytree(FIXTURES, tmp_path / "hf")
    tiny_emu3.character_tokenizer().save_pretrained(tmp_path / "hf")
    pipe = convert_emu3(tmp_path / "hf", image_area=24 * 24)
    pipe.set_progress_bar_config(disable=True)
    assert pipe("a red heart", output_type="latent").images.shape == (1, 3, 3)


def test_the_authors_layout_generates_the_images_of_the_original(original, tmp_path):
    folder, vision_tokenizer = original
    convert_emu3(folder, vision_tokenizer=vision_tokenizer, out=tmp_path / "pipe")
    loaded = AutoPipeline.from_pretrained(tmp_path / "pipe")
    assert loaded.config.image_area == 512 * 512 and loaded.generation_config.items() >= DEFAULTS.items()
    tokenizer = loaded.tokenizer
    ids, negative_ids = (tiny_emu3.to_original(EXPECTED[name]) for name in ("prompt_ids", "negative_prompt_ids"))
    assert_golden(generate(loaded, ids, negative_ids))
    loaded.tokenizer = tokenizer
    assert loaded(["a red heart", "tree"], height=24, width=40, output_type="pt").images.shape == (2, 3, 24, 40)


def test_weights_keep_the_dtype_of_the_files(original, tmp_path):
    pipe = convert_emu3(
        tiny_emu3.write_original(tmp_path / "half", torch.bfloat16), vision_tokenizer=original[1], out=tmp_path / "out"
    )
    assert pipe.model.lm_head.weight.dtype == pipe.model.model.text_model.dtype == torch.bfloat16
    assert pipe.vq.dtype == torch.float32
    assert json.loads((tmp_path / "out" / "model" / "config.json").read_text())["dtype"] == "bfloat16"


def test_special_tokens_follow_the_text_in_the_authors_order(original):
    tokenizer = emu3_tokenizer_from_original(original[0])
    expected = tiny_emu3.original_vocabulary()
    assert tokenizer.get_vocab().items() >= expected.items() and len(tokenizer) == 256 + 14 + len(expected)
    text = "<|extra_203|>a red<|image start|>1*2<|image token|>"
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert [ids[0], ids[3], ids[-1]] == [
        expected[name] for name in ("<|extra_203|>", "<|image start|>", "<|image token|>")
    ]
    assert tokenizer.decode(ids) == text
    # An accent of its own is joined to its letter first.
    assert tokenizer("e\u0301").input_ids == tokenizer("\u00e9").input_ids
    assert (tokenizer.pad_token, tokenizer.boi_token, tokenizer.padding_side) == (
        "<|endoftext|>",
        "<|image start|>",
        "left",
    )


def test_folders_that_do_not_fit_are_refused(original, tmp_path):
    folder, vision_tokenizer = original
    with pytest.raises(CheckpointError, match="Emu3-VisionTokenizer as --vision-tokenizer"):
        convert_emu3(folder)
    with pytest.raises(CheckpointError, match="holds its image tokenizer already"):
        convert_emu3(FIXTURES, vision_tokenizer=vision_tokenizer)
    with pytest.raises(CheckpointError, match="names the model type 'Emu3VisionVQ' where 'emu3' or 'Emu3' was"):
        convert_emu3(vision_tokenizer, vision_tokenizer=vision_tokenizer)
    with pytest.raises(CheckpointError, match="config.json cannot be read"):
        convert_emu3(tmp_path / "absent")
