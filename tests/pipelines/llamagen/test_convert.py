import argparse
import json
import os
import pickle
import re

import pytest
import torch
from pipelines.llamagen.published import t5_encoder
from pipelines.llamagen.tiny import FIXTURES
from safetensors.torch import save_file

from arimage.convert.checkpoint import CheckpointError, load_original
from arimage.pipelines.llamagen.convert import convert_llamagen, llamagen_transformer_from_original
from arimage.pipelines.llamagen.pipeline_llamagen import LlamaGenPipeline


CLASS = (FIXTURES / "c2i" / "c2i_tiny.pt", FIXTURES / "c2i" / "vq_ds4_c2i.pt")
TEXT = (FIXTURES / "t2i" / "t2i_tiny.pt", FIXTURES / "t2i" / "vq_ds4_t2i.pt")


@pytest.fixture
def state():
    return load_original(CLASS[0])


def test_tensors_with_attributes_are_read(state, tmp_path):
    # The published 3B was saved with some.
    for tensor in state.values():
        tensor.sharded = True
    torch.save(state, tmp_path / "c2i_3B_384.pt")
    assert b"_rebuild_from_type_v2" in (tmp_path / "c2i_3B_384.pt").read_bytes()
    read = load_original(tmp_path / "c2i_3B_384.pt")
    assert read.keys() == state.keys() and all(torch.equal(read[key], state[key]) for key in state)


def transformer_from(state, **settings):
    return llamagen_transformer_from_original(state, **{"image_size": 24, "downsample": 4, "num_heads": 4} | settings)


# What a trainer keeps next to the weights.
OTHERS = {"optimizer": {"state": {0: torch.ones(2)}}, "steps": 7, "args": argparse.Namespace(lr=1e-4, name="x")}
OTHERS |= {"discriminator": {"b": torch.ones(1)}}
WRAPPINGS = [None, "model", "module", "state_dict", "model_state_dict", "ema", "model_ema"]
PREFIXES = [
    "",
    "module.",
    "_orig_mod.",
    "module._orig_mod.",
    "_orig_mod.module.",
    "_fsdp_wrapped_module.",
    ".",
    "mixed",
]


def prefixed(state, prefix):
    """The names of a state as wrappers of the module change them."""
    if prefix == "mixed":
        # Some blocks are compiled, and the output is in a wrapper of its own.
        names = {key: re.sub(r"^layers\.1\.", "module.layers.1._orig_mod.", key) for key in state}
        names |= {"output.weight": "module.output._checkpoint_wrapped_module.weight"}
        return {names[key]: value for key, value in state.items()}
    return {prefix + key: value for key, value in state.items()}


@pytest.mark.parametrize("wrapping", WRAPPINGS)
@pytest.mark.parametrize("prefix", PREFIXES)
def test_names_lose_what_wrappers_of_modules_added(state, prefix, wrapping, tmp_path):
    changed = prefixed(state, prefix)
    if wrapping == "ema":
        changed["n_averaged"] = torch.tensor(7)
    torch.save(changed if wrapping is None else {wrapping: changed, **OTHERS}, tmp_path / "wrapped.pt")
    loaded = load_original(tmp_path / "wrapped.pt")
    assert loaded.keys() == state.keys()
    assert all(torch.equal(loaded[key], state[key]) for key in state)
    save_file(prefixed(state, prefix), tmp_path / "wrapped.safetensors")
    assert load_original(tmp_path / "wrapped.safetensors").keys() == state.keys()


def test_a_name_with_and_without_a_prefix_is_refused(state, tmp_path):
    torch.save(state | {"module.output.weight": torch.ones(2)}, tmp_path / "both.pt")
    with pytest.raises(CheckpointError, match="both.pt has 'output.weight' twice, the second time as 'module.output"):
        load_original(tmp_path / "both.pt")


@pytest.mark.parametrize("name", ["ema", "model_ema"])
def test_averaged_weights_are_offered_and_taken(state, name, tmp_path, caplog):
    averaged = {f"module.{key}": value + 1 for key, value in state.items()}
    torch.save({"trainer": {"model": state, name: averaged}, "step": 3}, tmp_path / "both.pt")
    options = {"wrappings": ("trainer", "model")}
    last = load_original(tmp_path / "both.pt", **options, ema=False)
    assert torch.equal(last["output.weight"], state["output.weight"])
    assert f"both.pt has averaged weights too, under '{name}'" in caplog.text and "--ema" in caplog.text
    caplog.clear()
    taken = load_original(tmp_path / "both.pt", **options, ema=True)
    assert torch.equal(taken["output.weight"], state["output.weight"] + 1) and not caplog.text
    torch.save({"model": state}, tmp_path / "one.pt")
    load_original(tmp_path / "one.pt", ema=False)
    assert not caplog.text
    with pytest.raises(CheckpointError, match="one.pt has no averaged weights"):
        load_original(tmp_path / "one.pt", ema=True)


def test_safetensors_and_the_old_torch_format_give_the_same_tensors(state, tmp_path):
    save_file(state, tmp_path / "new.safetensors")
    torch.save(state, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    for name in ("new.safetensors", "old.pt"):
        loaded = load_original(tmp_path / name)
        assert loaded.keys() == state.keys()
        assert all(torch.equal(loaded[key], state[key]) for key in state)


class Code:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("write", ["zip", "old", "pickle", "nested"])
def test_code_in_a_file_is_refused_and_not_run(state, write, tmp_path):
    file, trace = tmp_path / "evil.pt", tmp_path / "trace"
    if write == "pickle":
        file.write_bytes(pickle.dumps({"model": Code(trace)}, protocol=2))
    else:
        content = {"model": state, "steps": Code(trace)} if write == "nested" else {"a": Code(trace)}
        torch.save(content, file, _use_new_zipfile_serialization=write != "old")
    with pytest.raises(CheckpointError, match=r"evil\.pt asks to run \S*mkdir when it is read"):
        load_original(file)
    assert not trace.exists()


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


# How a file is written, and what is said of it.
UNREADABLE = {
    "cut zip": (lambda path, state: (torch.save(state, path), cut(path)), "cut short"),
    "cut old": (
        lambda path, state: (torch.save(state, path, _use_new_zipfile_serialization=False), cut(path)),
        "damaged",
    ),
    "cut.safetensors": (lambda path, state: (save_file(state, path), cut(path)), "cut short"),
    "text": (lambda path, _: path.write_text("<!doctype html><p>Not found</p>"), "not a file of torch.save"),
    "empty": (lambda path, _: path.touch(), "not a file of torch.save"),
    "pickle": (lambda path, _: path.write_bytes(pickle.dumps({"a": 1}, protocol=4)), "damaged or not a checkpoint"),
    "list": (lambda path, _: torch.save([1, 2], path), "dictionary of tensors"),
    "no tensors": (lambda path, _: torch.save({"model": {"a": 1}}, path), "a value of type int under 'a'"),
    "missing": (lambda path, _: None, "is not a file"),
}


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("name", UNREADABLE)
def test_unreadable_files_are_refused_in_one_sentence(name, state, tmp_path):
    write, said = UNREADABLE[name]
    write(tmp_path / name, state)
    with pytest.raises(CheckpointError, match=said) as refusal:
        load_original(tmp_path / name)
    assert str(tmp_path / name) in str(refusal.value) and "\n" not in str(refusal.value)


def test_grouped_query_attention_is_inferred(state, kv_heads=2):
    for i in range(3):
        state[f"layers.{i}.attention.wqkv.weight"] = torch.randn(48 + 2 * kv_heads * 12, 48)
    assert transformer_from(state).config.num_key_value_heads == kv_heads


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tok_embeddings.weight": torch.ones(3)}, r"'tok_embeddings.weight' of shape \(3,\) where 2 dimensions"),
        ({"layers.5.ffn_norm.weight": torch.ones(48)}, "has no 'layers.3"),
        ({"layers.0.attention.wqkv.weight": torch.ones(150, 48)}, "150 rows, which 4 heads.*--num-heads"),
    ],
)
def test_unfitting_tensors_are_refused_by_name(state, change, said):
    changed = {key: value for key, value in (state | change).items() if value is not None}
    with pytest.raises(CheckpointError, match=f"^some.pt has .*{said}|^some.pt {said}"):
        transformer_from(changed, source="some.pt")


@pytest.mark.parametrize(
    ("files", "image_size", "num_heads", "said"),
    [
        (CLASS, 24, None, "--num-heads"),
        (CLASS, 24, 5, "5 heads"),
        (CLASS, 24, -4, "-4 heads"),
        (CLASS, 0, 4, "image size 0"),
        (CLASS, 26, 4, "image size 26"),
        (CLASS[::-1], 24, 4, r"c2i_tiny\.pt has no 'quantize.embedding.weight', as every LlamaGen tokenizer"),
    ],
)
def test_arguments_that_do_not_fit_the_files_are_refused(files, image_size, num_heads, said):
    with pytest.raises(CheckpointError, match=said):
        convert_llamagen(*files, image_size, num_heads=num_heads)


def test_a_codebook_of_another_size_is_refused_naming_both_files(tmp_path):
    state = load_original(CLASS[1])
    state["quantize.embedding.weight"] = torch.randn(64, 8)
    torch.save(state, tmp_path / "other.pt")
    with pytest.raises(CheckpointError, match=r"c2i_tiny.pt with .*other.pt .* has 128, .* 64"):
        convert_llamagen(CLASS[0], tmp_path / "other.pt", 24, num_heads=4)


@pytest.mark.parametrize(("files", "image_size", "scale", "top_k"), [(CLASS, 24, 4.0, 2000), (TEXT, 16, 7.5, 1000)])
def test_a_converted_pipeline_samples_as_published(files, image_size, scale, top_k):
    defaults = {"guidance_scale": scale, "temperature": 1.0, "top_k": top_k, "top_p": 1.0}
    assert defaults.items() <= convert_llamagen(*files, image_size, num_heads=4).generation_config.items()


def test_a_text_encoder_is_packed_with_a_text_model(tmp_path):
    out = tmp_path / "pipe"
    pipe = convert_llamagen(*TEXT, 16, num_heads=4, text_encoder=t5_encoder(tmp_path / "t5", 32), out=out)
    assert pipe.tokenizer("heart").input_ids == [3]
    loaded = LlamaGenPipeline.from_pretrained(out)
    assert loaded.text_encoder.config.d_model == 32 and loaded.tokenizer("heart").input_ids == [3]


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("files", "image_size", "kind", "said"),
    [
        (TEXT, 16, "narrow", "embeddings of width 16 where .*t2i_tiny.pt takes 32"),
        (TEXT, 16, "not T5", "is not a T5 encoder"),
        (TEXT, 16, "no tokenizer", "has neither tokenizer.json nor spiece.model"),
        (TEXT, 16, "absent", "config.json cannot be read"),
        (CLASS, 24, "fitting", "c2i_tiny.pt is conditioned on classes"),
    ],
)
def test_unfitting_text_encoders_are_refused(files, image_size, kind, said, tmp_path):
    folder = tmp_path / "absent" if kind == "absent" else t5_encoder(tmp_path / "t5", 16 if kind == "narrow" else 32)
    if kind == "not T5":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"model_type": "clip"}))
    if kind == "no tokenizer":
        for path in folder.glob("tokenizer*"):
            path.unlink()
    with pytest.raises(CheckpointError, match=said) as refusal:
        convert_llamagen(*files, image_size, num_heads=4, text_encoder=folder)
    assert "\n" not in str(refusal.value)


def test_an_empty_output_folder_is_filled(tmp_path):
    (tmp_path / "pipe").mkdir()
    convert_llamagen(*CLASS, 24, num_heads=4, out=tmp_path / "pipe")
    assert (tmp_path / "pipe" / "model_index.json").is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]
