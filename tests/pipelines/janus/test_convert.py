import json
import shutil

import pytest
import torch
from pipelines.janus import tiny as tiny_janus
from safetensors.torch import load_file
from transformers import JanusForConditionalGeneration

from arimage.convert import convert_janus
from arimage.convert.checkpoint import CheckpointError
from arimage.pipelines.janus.pipeline_janus import JanusPipeline


@pytest.fixture(scope="module")
def expected():
    return load_file(tiny_janus.FOLDER / "expected.safetensors")


@pytest.fixture(scope="module")
def weights():
    return load_file(tiny_janus.FOLDER / "model.safetensors")


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return tiny_janus.write_original(tmp_path_factory.mktemp("published") / "janus")


@pytest.fixture
def transformers_folder(tmp_path):
    """The fixture with a processor next to it."""
    folder = shutil.copytree(tiny_janus.FOLDER, tmp_path / "transformers")
    tiny_janus.processor().save_pretrained(folder)
    return folder


def greedy(pipe, expected):
    prompts = {name: expected[name] for name in ("input_ids", "attention_mask")}
    return pipe(**prompts, top_k=1, output_type="latent").tokens.flatten(1)


def assert_weights(pipe, weights):
    state = pipe.model.state_dict()
    assert state.keys() == weights.keys()
    assert all(torch.equal(state[key], weights[key]) for key in state)


@pytest.mark.parametrize("shards", [0, 3])
def test_the_authors_layout_gives_the_model_of_the_transformers_layout(weights, expected, shards, tmp_path):
    pipe = convert_janus(tiny_janus.write_original(tmp_path / "janus", shards=shards))
    assert_weights(pipe, weights)
    assert torch.equal(greedy(pipe, expected), expected["generated_image_tokens"])
    assert not pipe.model.training


def test_the_authors_layout_has_the_config_that_transformers_gave_it(original):
    ours = convert_janus(original).model.config.to_dict()
    theirs = JanusForConditionalGeneration.config_class.from_pretrained(tiny_janus.FOLDER).to_dict()
    # The fixture has other heads than any published vision tower.
    assert (ours["vision_config"].pop("num_attention_heads"), theirs["vision_config"].pop("num_attention_heads")) == (
        16,
        2,
    )
    for part in ("text_config", "vision_config", "vq_config"):
        assert {k: v for k, v in ours[part].items() if "dtype" not in k and k != "architectures"} == {
            k: v for k, v in theirs[part].items() if "dtype" not in k and k != "architectures"
        }
    assert ours["image_token_id"] == theirs["image_token_id"] and not ours["tie_word_embeddings"]


def test_the_authors_tokenizer_is_taken_as_it_is_with_the_tokens_of_a_prompt(original):
    pipe = convert_janus(original)
    tokenizer, config = pipe.processor.tokenizer, pipe.model.generation_config
    assert tokenizer("a b").input_ids == [150, *tiny_janus.characters().encode("a b").ids]
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (150, 151, 152)
    assert config.generation_kwargs == {"boi_token_id": 153}
    assert (tokenizer.pad_token_id, tokenizer.boi_token_id, tokenizer.image_token_id) == (152, 153, 155)
    assert (pipe.processor.num_image_tokens, pipe.processor.image_processor.size["height"]) == (16, 64)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (None, "<|User|>: a cat\n\n<|Assistant|>:"),
        ("janus-pro", "<|User|>: a cat\n\n<|Assistant|>:"),
        ("janus", "User: a cat\n\nAssistant:"),
    ],
)
def test_prompts_of_the_authors_layout_are_written_as_their_code_writes_them(original, template, text):
    pipe = convert_janus(original, template=template)
    ids, _ = pipe.encode_prompt([" a cat\n"])
    assert pipe.processor.tokenizer.decode(ids[0]) == tiny_janus.BOS + text + tiny_janus.BOI
    assert ids[0].tolist().count(150) == 1


def test_a_conversation_is_written_as_their_code_writes_it(original):
    turns = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what is it? "}]},
        {"role": "assistant", "content": [{"type": "text", "text": "a cat"}]},
        {"role": "user", "content": [{"type": "text", "text": "why?"}]},
    ]
    text = convert_janus(original).processor.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    first = f"<|User|>: {tiny_janus.IMAGE}\nwhat is it?\n\n<|Assistant|>: a cat{tiny_janus.EOS}"
    assert text == f"{first}<|User|>: why?\n\n<|Assistant|>:"


def test_the_transformers_layout_keeps_its_processor(transformers_folder, weights, expected):
    pipe = convert_janus(transformers_folder)
    assert_weights(pipe, weights)
    assert torch.equal(greedy(pipe, expected), expected["generated_image_tokens"])
    ids, _ = pipe.encode_prompt(["cat"])
    assert pipe.processor.tokenizer.decode(ids[0]) == f"{tiny_janus.BOS}QcatA{tiny_janus.BOI}"
    ids, _ = convert_janus(transformers_folder, template="janus").encode_prompt(["cat"])
    assert pipe.processor.tokenizer.decode(ids[0]) == f"{tiny_janus.BOS}User: cat\n\nAssistant:{tiny_janus.BOI}"


def test_a_tokenizer_that_lost_its_first_token_gets_it_back(transformers_folder):
    text = (transformers_folder / "tokenizer.json").read_text()
    (transformers_folder / "tokenizer.json").write_text(json.dumps({**json.loads(text), "post_processor": None}))
    pipe = convert_janus(transformers_folder, out=transformers_folder / "pipe")
    for each in (pipe, JanusPipeline.from_pretrained(transformers_folder / "pipe")):
        assert each.processor.tokenizer("ab").input_ids == [150, *tiny_janus.characters().encode("ab").ids]


@pytest.mark.parametrize("token", [tiny_janus.PAD, tiny_janus.BOI])
def test_a_tokenizer_of_another_model_is_refused(token, tmp_path):
    folder = tiny_janus.write_original(tmp_path / "janus")
    text = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(text.replace(token, "<another>"))
    with pytest.raises(CheckpointError, match=f"tokenizer.json has no '{token}': give the tokenizer of a Janus"):
        convert_janus(folder)


def test_folders_of_something_else_are_refused(original, tmp_path):
    with pytest.raises(CheckpointError, match="config.json cannot be read"):
        convert_janus(tmp_path)
    for config in ({"model_type": "llama"}, {"model_type": "multi_modality", "gen_vision_config": {}}):
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(CheckpointError, match=f"model of type '{config['model_type']}', expected 'janus' or"):
            convert_janus(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(tiny_janus.original_config()))
    with pytest.raises(CheckpointError, match="has no tokenizer.json: give the whole folder"):
        convert_janus(tmp_path)
    for name in ("tokenizer.json", "preprocessor_config.json"):
        shutil.copy(original / name, tmp_path)
    with pytest.raises(CheckpointError, match="has neither model.safetensors nor pytorch_model.bin nor an index"):
        convert_janus(tmp_path)
    with pytest.raises(CheckpointError, match="template is 'pro': choose among janus, janus-pro"):
        convert_janus(original, template="pro")


def test_without_a_tokenizer_the_transformers_layout_generates_from_token_ids():
    pipe = convert_janus(tiny_janus.FOLDER)
    assert pipe.processor is None
    with pytest.raises(ValueError, match="has no processor: give input_ids"):
        pipe("a cat")
