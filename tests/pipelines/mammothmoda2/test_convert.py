"""The published layout of MammothModa2, converted: the same tokens, the same text tokens, and what is refused."""

import json

import pytest
import torch
from pipelines.mammothmoda2 import tiny as tiny_mammothmoda2
from pipelines.mammothmoda2.tiny import EXPECTED, FIXTURES, write_published

from arimage import AutoPipeline, MammothModa2Pipeline
from arimage.convert import CheckpointError, convert_mammothmoda2
from arimage.pipelines.mammothmoda2.convert import mammothmoda2_tokenizer_from_original
from arimage.pipelines.mammothmoda2.decoder_mammothmoda2 import valid_heads


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    return write_published(tmp_path_factory.mktemp("published") / "MammothModa2-Preview")


@pytest.mark.parametrize("variant", ["preview", "dev"])
def test_settings_are_read_from_the_files(variant):
    pipe, expected = convert_mammothmoda2(FIXTURES / variant), EXPECTED[variant]
    assert pipe.generation_config == {
        "guidance_scale": 7.0,
        "temperature": 1.0,
        "top_k": 2048,
        "top_p": 1.0,
        "num_inference_steps": 50,
        "decoder_guidance_scale": 9.0,
    } | {name: value for name, value in pipe.generation_config.items() if name == "min_p"}
    config = pipe.language_model.config
    assert (config.backbone, config.num_codes) == (
        "qwen2" if variant == "preview" else "qwen3",
        expected["cond_logits"].shape[-1],
    )
    assert config.condition_layers == ([-1] if variant == "preview" else [-2, -3, -5])
    assert config.expert_layers == [2, 4] and len(config.placeholder_ids) == 4
    assert pipe.transformer.config.projects_queries == (variant == "preview")
    assert pipe.config.token_grid == [32, 32] and pipe.tokenizer is None and not pipe.config.reads_answer_text


def test_a_published_folder_generates_from_text(published, tmp_path):
    convert_mammothmoda2(published, out=tmp_path / "pipe")
    pipe = AutoPipeline.from_pretrained(tmp_path / "pipe", dtype=torch.float32)
    assert type(pipe) is MammothModa2Pipeline
    settings = {"height": 32, "width": 32, "token_grid": (10, 10), "num_inference_steps": 1, "top_k": 1}
    out = pipe("a red heart", **settings)
    assert out.tokens.shape == (1, 10, 10) and out.images[0].size == (32, 32)
    with pytest.raises(ValueError, match="give rows and columns from 10 to 99"):
        pipe("a red heart", token_grid=(9, 10))
    # The weights are those of the files: the published ones are in half precision.
    assert convert_mammothmoda2(published).language_model.dtype == torch.bfloat16


def test_text_tokens_are_the_authors(published):
    tokenizer = mammothmoda2_tokenizer_from_original(published, "qwen2")
    names = {"<|endoftext|>": 151643, "<|im_start|>": 151644, "<|vision_start|>": 151652, "<|image_pad|>": 151655}
    names |= {"<|file_sep|>": 151664, "<|extra_0|>": 151665, "<|extra_180|>": 151845, "<|extra_margin_0|>": 151846}
    names |= {"<|extra_margin_217|>": 152063, "<|endofline|>": 152064, "<|beginoftext|>": 152068}
    names |= {"<|image start|>": 152069, "<|image end|>": 152071, "<|visual token 000000|>": 152072}
    assert {name: tokenizer.convert_tokens_to_ids(name) for name in names} == names
    # One token a digit, and composed characters.
    assert tokenizer("32*32", add_special_tokens=False).input_ids == [ord(c) for c in "32*32"]
    assert tokenizer("e\u0301").input_ids == tokenizer("\u00e9").input_ids
    later = mammothmoda2_tokenizer_from_original(published, "qwen3")
    assert later.convert_tokens_to_ids(["<tool_response>", "<|extra_0|>", "<|endofline|>"]) == [151665, 151669, 152064]


def test_the_published_template_is_used(published, tmp_path):
    folder = write_published(tmp_path / "Preview")
    (folder / "chat_template.jinja").write_text("{{ messages[0].content[0].text }}<|image token|>")
    pipe = convert_mammothmoda2(folder)
    assert pipe.tokenizer.chat_template.startswith("{{ messages[0]")
    assert convert_mammothmoda2(published).tokenizer.chat_template.startswith("{% if messages[0].role != 'system'")


def test_the_q_former_has_heads_that_divide_its_width():
    assert [valid_heads(width, max(width // 128, 1)) for width in (3584, 2520, 48)] == [28, 20, 1]


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("config.json", {"model_type": "qwen"}, "names the model types 'qwen'"),
        ("config.json", {"gen_condition_mode": "text"}, "does not read both text and image tokens"),
        ("config.json", {"gen_image_condition_refiner_config": None}, "does not read both text and image tokens"),
        ("config.json", {"gen_dit_config": {"hidden_size": 48}}, "cannot be loaded"),
        ("config.json", {"gen_vae_config": None}, "cannot be loaded"),
        ("t2i_generation_config.json", {"visual_token_start_id": 1}, "visual_token_start_id is 1: give a generation"),
    ],
)
def test_other_settings_are_refused(file, change, message, tmp_path):
    folder = tiny_mammothmoda2.copy(tmp_path / "preview", "preview")
    (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | change))
    with pytest.raises(CheckpointError, match=message):
        convert_mammothmoda2(folder)


def test_a_text_tokenizer_in_part_is_refused(tmp_path):
    folder = tiny_mammothmoda2.copy(tmp_path / "preview", "preview")
    (folder / "mammothu.tiktoken").write_text("IQ== 0\n")
    with pytest.raises(CheckpointError, match=r"mammothu_vision_tokens.txt is not a file"):
        convert_mammothmoda2(folder)
    (folder / "mammothu_vision_tokens.txt").write_text("<|image end|>\n")
    with pytest.raises(CheckpointError, match="image_end_id is 152069: give a generation token, 280"):
        convert_mammothmoda2(folder)
    (folder / "mammothu.tiktoken").write_text("IQ== 151643\n")
    with pytest.raises(CheckpointError, match="too many for the special tokens after them"):
        convert_mammothmoda2(folder)
    (folder / "mammothu.tiktoken").write_text("")
    with pytest.raises(CheckpointError, match="mammothu.tiktoken is empty"):
        convert_mammothmoda2(folder)


def test_an_ignored_penalty_is_told(tmp_path, caplog):
    folder = tiny_mammothmoda2.copy(tmp_path / "preview", "preview")
    file = folder / "t2i_generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"repetition_penalty": 1.1, "do_sample": False}))
    assert convert_mammothmoda2(folder).generation_config["top_k"] == 1
    assert "repetition_penalty, which is not applied" in caplog.text
