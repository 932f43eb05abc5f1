import json
import re
import shutil

import pytest
import torch
from pipelines.chameleon import tiny as tiny
from pipelines.chameleon.tiny import FIXTURE, MOVQGAN
from safetensors.torch import load_file, save_file

from arimage.convert import CheckpointError, convert_anole, convert_lumina_mgpt
from arimage.convert.checkpoint import load_original
from arimage.convert.vqgan import vq_model_from_original
from arimage.pipelines.chameleon.pipeline_anole import AnolePipeline
from arimage.pipelines.chameleon.pipeline_lumina_mgpt import LuminaMGPTPipeline


META = FIXTURE / "tokenizer"


@pytest.fixture(scope="module")
def expected():
    return load_file(FIXTURE / "expected.safetensors")


@pytest.fixture
def folder(tmp_path):
    """A copy of the published layout to change."""
    folder = tmp_path / "published"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(FIXTURE / name, folder)
    return folder


def change_weights(folder, change):
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors")


def change_config(folder, change):
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def first_logits(pipe, expected, group=0):
    pipe.to(dtype=torch.float32)
    return pipe.prepare(input_ids=expected["prefix_ids"][None]).model.prefill(1)[1][group, 0]


def assert_close_to_original(pipe, expected):
    for group, name in enumerate(("cond", "uncond")):
        theirs = expected[f"{name}_logits_full_last_prefix"][4:8196]
        torch.testing.assert_close(first_logits(pipe, expected, group), theirs, atol=1e-4, rtol=0)


def test_the_authors_layout_gives_a_complete_model(expected):
    pipe = convert_lumina_mgpt(FIXTURE, tokenizer=META)
    assert type(pipe) is LuminaMGPTPipeline and not pipe.transformer.training and not pipe.vq.training
    assert pipe.transformer.dtype == torch.bfloat16 and pipe.vq.dtype == torch.float32
    defaults = {"guidance_scale": 4.0, "temperature": 1.0, "top_k": 2000, "top_p": 1.0}
    assert pipe.generation_config == defaults and pipe.config.image_size == 768
    assert_close_to_original(pipe, expected)
    # Its own image encoder, which transformers uses to understand images, is the tokenizer's.
    image = expected["encode_input_uint8_hwc"].permute(2, 0, 1)[None] / 127.5 - 1
    tokens = pipe.transformer.get_image_tokens(image)
    assert torch.equal(tokens.flatten() - 4, expected["encode_codes"])


def test_norms_of_shards_become_norms_of_their_heads(folder):
    generator = torch.Generator().manual_seed(0)
    norms = {}

    def split(state):
        for key in state:
            if "_norm." in key:
                state[key] = norms[key] = torch.randn(2, 8, generator=generator).bfloat16()

    change_weights(folder, split)
    state = convert_lumina_mgpt(folder, tokenizer=META).transformer.state_dict()
    assert len(norms) == 8
    for key, tensor in norms.items():
        # Four heads, two of each shard.
        assert torch.equal(state[key], tensor[[0, 0, 1, 1]])


def test_the_vocabulary_may_be_that_of_the_text_tokenizer(folder, expected):
    change_config(folder, lambda config: config.pop("vocabulary_map"))
    pipe = convert_lumina_mgpt(folder, tokenizer=META)
    assert pipe.transformer.config.vocabulary_map["<reserved08799>"] == 8803
    assert_close_to_original(pipe, expected)


def test_the_text_tokenizer_of_the_folder_comes_first(folder):
    names = tiny.vocabulary()
    tiny.tokenizer(names).backend_tokenizer.save(str(folder / "tokenizer.json"))
    specials = {"bos_token": None, "eos_token": {"content": "</s>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(specials))
    pipe = convert_lumina_mgpt(folder, tokenizer=META)
    # A tokenizer without a token for the beginning begins with that for the end.
    assert pipe.tokenizer.bos_token is None
    ids, _ = pipe.encode_prompt("a cat", (64, 64))
    assert ids[0, 0] == names["</s>"] and ids[0, -1] == 8710
    assert pipe.tokenizer.decode(ids[0, 1:-1]).replace(" ", "").startswith("Generate")


def test_a_vocabulary_without_merges_is_no_text_tokenizer(folder, tmp_path):
    assert convert_lumina_mgpt(folder, tokenizer=META).tokenizer is None
    meta = shutil.copytree(META, tmp_path / "meta")
    contents = json.loads((meta / "text_tokenizer.json").read_text())
    contents["model"]["vocab"] |= {"Ċ": 8816, "aĊ": 8817, "a": 8818}
    contents["model"]["merges"] = [["a", "Ċ"]]
    (meta / "text_tokenizer.json").write_text(json.dumps(contents))
    tokenizer = convert_lumina_mgpt(folder, tokenizer=meta).tokenizer
    assert tokenizer.bos_token_id == 0 and tokenizer.encode("aĊ", add_special_tokens=False) == [8817]


def test_anole_may_hold_its_image_decoder(folder, expected, tmp_path):
    tokenizer = {f"model.vqmodel.{key}": tensor for key, tensor in load_original(META / "vqgan.ckpt").items()}
    change_weights(folder, lambda state: state.update(tokenizer))
    pipe = convert_anole(folder, out=tmp_path / "out")
    assert type(pipe) is AnolePipeline and pipe.config.image_size == 512
    assert pipe.generation_config == {"guidance_scale": 3.0, "temperature": 0.7, "top_k": 0, "top_p": 0.9}
    loaded = AnolePipeline.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        pixels = loaded.decode_image(expected["image_codes"][None])[0]
    torch.testing.assert_close(pixels, expected["vq_decoded_pixels"], atol=1e-4, rtol=0)


@pytest.fixture
def meta_folder(tmp_path):
    return tiny.write_meta(tmp_path / "meta")


def test_metas_own_format_gives_the_same(meta_folder, expected):
    vocabulary = meta_folder / "tokenizer" / "text_tokenizer.json"
    vocabulary.write_text(vocabulary.read_text().replace("<image>", "<reserved08707>"))
    pipe = convert_anole(meta_folder)
    assert pipe.transformer.model.vocabulary_mapping.image_token_id == 8711
    theirs = convert_anole(FIXTURE, tokenizer=META)
    before, after = (each.transformer.state_dict() for each in (theirs, pipe))
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    as_lumina = LuminaMGPTPipeline(pipe.transformer, pipe.vq)
    as_lumina.generation_config.update(guidance_scale=4.0)
    assert_close_to_original(as_lumina, expected)


def test_an_incomplete_folder_of_meta_is_refused(meta_folder):
    settings = meta_folder / "models" / "7b" / "params.json"
    settings.write_text("{}")
    with pytest.raises(CheckpointError, match="params.json next to .* has no 'n_heads'"):
        convert_anole(meta_folder)
    settings.unlink()
    with pytest.raises(CheckpointError, match="params.json cannot be read"):
        convert_anole(meta_folder)


def test_the_movqgan_equals_the_original():
    vq, expected = vq_model_from_original(load_original(MOVQGAN)), load_file(FIXTURE / "movqgan_expected.safetensors")
    with torch.no_grad():
        vectors = vq.quantize.embedding(expected["codes"][None]).permute(0, 3, 1, 2)
        pixels = vq.decode(vectors, force_not_quantize=True).sample[0]
        latents = vq.encode(expected["image_uint8_chw"][None] / 127.5 - 1).latents
        codes = vq.quantize(latents)[2][2].view(latents.shape[2:])
    # Float32 rounding alone: in float64 the two are 6e-14 apart.
    torch.testing.assert_close(pixels, expected["decoded"], atol=3e-4, rtol=0)
    assert torch.equal(codes, expected["codes"])


@pytest.fixture
def second_version(tmp_path):
    return tiny.write_version_2(tmp_path / "second")


def test_lumina_mgpt_2_generates_from_text(second_version, tmp_path):
    convert_lumina_mgpt(second_version, tokenizer=MOVQGAN, image_size=64, out=tmp_path / "out")
    pipe = LuminaMGPTPipeline.from_pretrained(tmp_path / "out")
    pipe.set_progress_bar_config(disable=True)
    assert pipe.scale_factor == 8 and pipe.generation_config["top_k"] == 4096
    assert pipe._first_code == len(pipe.transformer.config.vocabulary_map) - 64
    output = pipe("a cat", height=32, width=64, task="depth", decoding="sjd", output_type="pt")
    assert output.images.shape == (1, 3, 32, 64) and output.tokens.shape == (1, 4, 8)


def drop(key):
    return lambda state: state.pop(key)


def put(key, *shape):
    return lambda state: state.update({key: torch.zeros(*shape)})


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop("model.embed_tokens.weight"), "has no 'model.embed_tokens.weight', as every Chameleon has"),
        (put("model.layers.0.self_attn.q_norm.bias", 3, 8), "with 3 rows, which 4 heads cannot share"),
        (put("model.layers.0.self_attn.q_norm.bias", 8), "of shape (8,) where 2 dimensions were expected"),
    ],
)
def test_weights_that_do_not_fit_are_refused(folder, change, message):
    change_weights(folder, change)
    with pytest.raises(CheckpointError, match=re.escape(message)):
        convert_lumina_mgpt(folder, tokenizer=META)


def test_missing_files_are_refused(folder, tmp_path):
    with pytest.raises(CheckpointError, match="holds no image decoder: give Meta's folder with vqgan.ckpt"):
        convert_lumina_mgpt(folder)
    with pytest.raises(CheckpointError, match="vqgan.ckpt is not a file"):
        convert_lumina_mgpt(folder, tokenizer=tmp_path)
    change_config(folder, lambda config: config.pop("vocabulary_map"))
    meta = tmp_path / "meta"
    meta.mkdir()
    shutil.copy(META / "vqgan.ckpt", meta)
    with pytest.raises(CheckpointError, match="neither a vocabulary_map in config.json nor tokenizer.json"):
        convert_lumina_mgpt(folder, tokenizer=meta)
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="has neither model"):
        convert_lumina_mgpt(folder, tokenizer=META)
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="config.json cannot be read"):
        convert_lumina_mgpt(folder, tokenizer=META)


def test_an_image_tokenizer_of_another_model_is_refused(folder):
    with pytest.raises(CheckpointError, match="vocabulary_map"):
        convert_lumina_mgpt(folder, tokenizer=MOVQGAN)
