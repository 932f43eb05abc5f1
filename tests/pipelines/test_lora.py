"""Adapters on every family: what they change, and how they are loaded, scaled, fused and saved."""

import contextlib
import json
from importlib import import_module

import pytest
import torch
from adapters import STYLE, adapter, layers_of, merge
from families import EVERY, condition_of, flat, seeded, tokens
from pipelines.distilled_decoding import tiny as tiny_distilled
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel

from arimage import AutoPipeline
from arimage.families import PIPELINES


pytest.importorskip("peft", reason="the extra `lora` is not installed")
from diffusers.loaders.peft import PeftAdapterMixin  # noqa: E402
from peft import LoraConfig, get_peft_model_state_dict  # noqa: E402


# One of our models and one of transformers; those of other kinds are slow.
FEW = ["llamagen-text", "janus"]
MORE = [pytest.param(name, marks=pytest.mark.slow) for name in ("var-class", "arpg", "emu3", "lumina")]
few = pytest.mark.parametrize("family", FEW + MORE)


def build(family):
    return EVERY[family]()


def run(pipe, **settings):
    return pipe(**condition_of(pipe), output_type="latent", generator=seeded(0), **settings)


def greedy(pipe, **settings):
    return tokens(pipe, top_k=1, **settings)


def first_logits(pipe):
    with torch.no_grad():
        return pipe.prepare(**condition_of(pipe), generator=seeded(0)).model.prefill(1)[1]


def write(path, state, config=None, **about):
    """A file as `save_lora_weights` writes it."""
    header = {} if config is None else {"lora_adapter_metadata": json.dumps(config)}
    save_file(state, path, metadata={"format": "pt", **header, **{name: json.dumps(it) for name, it in about.items()}})
    return path


@pytest.mark.parametrize("name", PIPELINES)
def test_every_pipeline_names_components_that_take_adapters(name):
    kind = getattr(import_module(f"arimage.{PIPELINES[name]}"), name)
    types = kind._get_signature_types()
    for key in kind._lora_loadable_modules:
        assert all(issubclass(one, PreTrainedModel | PeftAdapterMixin) for one in types[key] if one is not type(None))


def test_two_halves_of_an_adapter_are_the_whole():
    pipe = build("llamagen-text")
    state = adapter(pipe)
    pipe.load_lora_weights(state, STYLE)
    whole = tokens(pipe)
    pipe.load_lora_weights(state, "yy")
    pipe.set_adapters([STYLE, "yy"], [0.5, 0.5])
    assert torch.equal(tokens(pipe), whole)
    with pytest.raises(ValueError, match="'none' is not loaded"):
        pipe.delete_adapters(["yy", "none"])
    pipe.delete_adapters("yy")
    assert pipe.get_list_adapters() == {pipe._lora_loadable_modules[0]: [STYLE]}
    pipe.set_adapters(STYLE)
    assert torch.equal(tokens(pipe), whole)
    pipe.delete_adapters(STYLE)
    pipe.unload_lora_weights()
    pipe.check_without_adapters()


@pytest.mark.every(2)
@few
def test_exact_decodings_stay_exact(family):
    pipe = build(family)
    pipe.load_lora_weights(adapter(pipe), STYLE)
    for name in {"sjd-coupled", "eagle"} & set(pipe.decoding_names):
        out = run(pipe, top_k=1, decoding=name)
        assert torch.equal(flat(out.tokens), greedy(pipe, decoding="ar")) and out.stats.exact


@pytest.mark.every(2)
@pytest.mark.parametrize("family", ["llamagen-text", "janus"])
def test_saved_adapters_load_with_their_alpha(family, tmp_path):
    pipe = build(family)
    (key,) = pipe._lora_loadable_modules
    state = adapter(pipe, targets="q_proj" if key == "model" else "qkv")
    rank = 2
    config = {f"{key}.{name}": value for name, value in LoraConfig(r=rank, lora_alpha=2 * rank).to_dict().items()}
    path = write(tmp_path / "one.safetensors", state, {n: v for n, v in config.items() if not isinstance(v, set)})
    pipe.load_lora_weights(path, adapter_name=STYLE)
    strong = tokens(pipe)
    component = pipe.components[key]
    layers = get_peft_model_state_dict(component, adapter_name=STYLE)
    parts = {f"{key}_lora_layers": layers, f"{key}_lora_adapter_metadata": component.peft_config[STYLE].to_dict()}
    type(pipe).save_lora_weights(tmp_path / "saved", **parts, base="tiny", captions=["a blue house"])
    with safe_open(tmp_path / "saved" / "pytorch_lora_weights.safetensors", framework="pt") as file:
        header = file.metadata()
        assert set(file.keys()) == set(state)
    assert header["format"] == "pt"
    assert json.loads(header["lora_adapter_metadata"])[f"{key}.lora_alpha"] == 2 * rank
    assert json.loads(header["arimage"]) == {"base": "tiny", "captions": ["a blue house"]}

    other, merged = build(family), build(family)
    other.load_lora_weights(tmp_path / "saved")
    assert other.get_list_adapters() == {key: ["default_0"]}
    merge(merged, state, scale=2.0)
    assert torch.equal(tokens(other), strong) and torch.equal(tokens(merged), strong)


def test_saving_refuses_what_is_no_component(tmp_path):
    pipe = build("llamagen-text")
    with pytest.raises(ValueError, match="transformer_lora_layers"):
        pipe.save_lora_weights(tmp_path)
    with pytest.raises(ValueError, match="text_encoder_lora_layers"):
        pipe.save_lora_weights(tmp_path, transformer_lora_layers=adapter(pipe), text_encoder_lora_layers={})


def test_a_wrong_prefix_is_refused():
    pipe = build("llamagen-text")
    state = {name.removeprefix("transformer."): value for name, value in adapter(pipe, targets="qkv").items()}
    with pytest.raises(ValueError, match=r"blocks\.0\.attention\.qkv_proj\.lora_A\.weight.*prefix=None"):
        pipe.load_lora_weights(state)
    with pytest.raises(ValueError, match="none at all"):
        pipe.load_lora_weights({})
    pipe.transformer.load_lora_adapter(state, prefix=None, adapter_name=STYLE)
    assert pipe.get_list_adapters() == {"transformer": [STYLE]}


def test_damaged_and_missing_files_are_named(tmp_path):
    pipe = build("llamagen-text")
    (tmp_path / "cut.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}")
    for path, words in [
        (tmp_path / "cut.safetensors", "damaged"),
        (tmp_path / "none.safetensors", "is not a file"),
        (tmp_path / "none", "is not a folder"),
    ]:
        with pytest.raises(ValueError, match=words):
            pipe.load_lora_weights(path)
    for name in ("a", "b"):
        write(tmp_path / f"{name}.safetensors", adapter(pipe, targets="qkv"))
    with pytest.raises(ValueError, match="3 .safetensors files"):
        pipe.load_lora_weights(tmp_path)
    pipe.load_lora_weights(tmp_path, weight_name="b.safetensors")


def test_names_that_peft_would_mistake_are_refused():
    pipe = build("llamagen-text")
    state = adapter(pipe, targets="qkv")
    for name in ("b", "blocks", "weight", "lora", "my.style", ""):
        with pytest.raises(ValueError, match="adapter_name is"):
            pipe.load_lora_weights(state, name)
    pipe.load_lora_weights(state, "style")
    for name in ("style2", "sty"):
        with pytest.raises(ValueError, match="part of the name 'style'|part of the name"):
            pipe.load_lora_weights(state, name)
    with pytest.raises(ValueError, match="already"):
        pipe.load_lora_weights(state, "style")
    with pytest.raises(ValueError, match="adapter 'zz' is not loaded and cannot be swapped"):
        pipe.load_lora_weights(state, STYLE, hotswap=True)


@pytest.mark.every(2)
@pytest.mark.parametrize(("family", "rank"), [("llamagen-text", 2), ("janus", 3)])
def test_a_hot_swap_changes_one_adapter_alone(family, rank):
    pipe, other = build(family), build(family)
    first, second, third = (adapter(pipe, seed=i, rank=n, targets="proj") for i, n in enumerate((2, 2, rank)))
    pipe.enable_lora_hotswap(target_rank=4)
    pipe.load_lora_weights(first, "style")
    with pytest.raises(ValueError, match="before the first one"):
        pipe.enable_lora_hotswap(target_rank=8)
    pipe.load_lora_weights(second, STYLE)
    pipe.set_adapters(["style", STYLE])
    pipe.load_lora_weights(third, STYLE, hotswap=True)
    other.load_lora_weights(first, "style")
    other.load_lora_weights(third, STYLE)
    other.set_adapters(["style", STYLE])
    assert torch.equal(tokens(pipe), tokens(other))


def test_folders_with_adapters_are_not_saved(tmp_path):
    pipe = build("llamagen-text")
    pipe.load_lora_weights(adapter(pipe), STYLE)
    styled = tokens(pipe)
    for prepare in (lambda: None, pipe.fuse_lora):
        prepare()
        with pytest.raises(ValueError, match="unload_lora_weights"):
            pipe.save_pretrained(tmp_path / "model")
        assert not (tmp_path / "model").exists()
    pipe.unload_lora_weights()
    pipe.save_pretrained(tmp_path / "model")
    merged = AutoPipeline.from_pretrained(tmp_path / "model")
    merged.set_progress_bar_config(disable=True)
    assert torch.equal(tokens(merged), styled)


@pytest.mark.every(2)
@pytest.mark.parametrize(("family", "how"), [("llamagen-text", "sequential"), ("janus", "model")])
def test_offloaded_pipelines_take_adapters(family, how):
    pipe, offloaded = build(family), build(family)
    (key,) = pipe._lora_loadable_modules
    getattr(offloaded, f"enable_{how}_cpu_offload")(device="cpu")
    with contextlib.suppress(ValueError) if how == "model" else pytest.raises(ValueError, match="of embeddings"):
        offloaded.load_lora_weights(adapter(pipe), "whole")
    assert hasattr(offloaded.components[key], "_hf_hook")
    state = adapter(pipe, targets="proj")
    pipe.load_lora_weights(state, STYLE)
    offloaded.load_lora_weights(state, STYLE)
    assert hasattr(offloaded.components[key], "_hf_hook")
    # accelerate itself cannot offload layers a second time where the device is the CPU.
    if how == "model":
        assert torch.equal(tokens(offloaded), tokens(pipe))


# LlamaGen's own names, in part.
ORIGINAL = {
    "token_embedding": "tok_embeddings",
    "head": "output",
    "blocks.1.attention.qkv_proj": "layers.1.attention.wqkv",
    "blocks.1.attention.out_proj": "layers.1.attention.wo",
    "blocks.0.feed_forward.gate_proj": "layers.0.feed_forward.w1",
    "blocks.0.feed_forward.up_proj": "layers.0.feed_forward.w3",
    "blocks.0.feed_forward.down_proj": "layers.0.feed_forward.w2",
}


def by_original_names(state):
    """Those of an adapter's weights that `ORIGINAL` has, and the same by these names."""
    ours, theirs = {}, {}
    for key, value in state.items():
        layer, part, rest = key.removeprefix("transformer.").partition(".lora_")
        if layer in ORIGINAL:
            ours[key], theirs[f"transformer.{ORIGINAL[layer]}{part}{rest}"] = value, value
    return ours, theirs


def write_peft(folder, state, component, **config):
    """A folder as `save_pretrained` of peft writes it."""
    folder.mkdir()
    save_file(
        {f"base_model.model.{key.removeprefix(f'{component}.')}": value for key, value in state.items()},
        folder / "adapter_model.safetensors",
    )
    LoraConfig(target_modules=["some"], **config).save_pretrained(folder)
    return folder


@pytest.mark.every(2)
@pytest.mark.parametrize("family", ["llamagen-text", "janus"])
def test_folders_of_peft_load_with_their_alpha(family, tmp_path):
    pipe, merged = build(family), build(family)
    (key,) = pipe._lora_loadable_modules
    ours = adapter(pipe, targets="q_proj" if key == "model" else "qkv")
    theirs = by_original_names(ours)[1] if family == "llamagen-text" else ours
    ours = by_original_names(ours)[0] if family == "llamagen-text" else ours
    folder = write_peft(tmp_path / "peft", theirs, key, r=2, lora_alpha=6)
    pipe.load_lora_weights(folder, adapter_name=STYLE)
    merge(merged, ours, scale=3.0)
    assert torch.equal(tokens(pipe), tokens(merged))
    torch.testing.assert_close(first_logits(pipe), first_logits(merged), rtol=1e-3, atol=1e-3)


def test_folders_of_peft_that_would_be_misread_are_refused(tmp_path):
    pipe = build("llamagen-text")
    _, theirs = by_original_names(adapter(pipe))
    folder = write_peft(tmp_path / "peft", theirs, "transformer", r=2, rank_pattern={"wqkv": 2})
    with pytest.raises(ValueError, match="rank_pattern"):
        pipe.load_lora_weights(folder)
    settings = folder / "adapter_config.json"
    for text, words in (
        ('{"peft_type": "LOHA"}', "type LOHA"),
        ('{"peft_type": "LORA", "r": 2, "lora_alpha": 2, "use_qalora": true}', "use_qalora"),
    ):
        settings.write_text(text)
        with pytest.raises(ValueError, match=words):
            pipe.load_lora_weights(folder)
    settings.unlink()
    with pytest.raises(ValueError, match="adapter_config.json cannot be read"):
        pipe.load_lora_weights(folder)
    assert pipe.get_list_adapters() == {}


EVERY_FAMILY = {**EVERY, "llamagen-dd-places": lambda: tiny_distilled.pipeline("llamagen", place_embeddings=True)}
FIRST = "llamagen-text"
OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in EVERY_FAMILY if name != FIRST]


def base_weights(pipe):
    """The weights of the model by their names without adapters."""
    return {
        f"{key}.{name.replace('.base_layer', '')}": value.clone()
        for key in pipe._lora_loadable_modules
        for name, value in pipe.components[key].state_dict().items()
        if ".lora_" not in name
    }


@pytest.mark.every(2)
@pytest.mark.parametrize(
    "family", [FIRST, "janus", "var-text", *(it for it in OTHERS if it.values[0] not in ("janus", "var-text"))]
)
def test_every_adapter_scales_fuses_and_unfuses(family):
    pipe, merged = EVERY_FAMILY[family](), EVERY_FAMILY[family]()
    assert layers_of(pipe)
    before, base, state = base_weights(pipe), tokens(pipe), adapter(pipe, size=0.2)
    pipe.load_lora_weights(state, STYLE)
    merge(merged, state, scale=0.5)
    pipe.set_adapters(STYLE, 0.0)
    torch.testing.assert_close(tokens(pipe), base)
    pipe.set_adapters(STYLE, 0.5)
    torch.testing.assert_close(tokens(pipe), tokens(merged), rtol=1e-2, atol=1e-2)
    pipe.set_adapters(STYLE, 1.0)
    pipe.fuse_lora(lora_scale=0.5)
    wanted = base_weights(merged)
    for name, value in base_weights(pipe).items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-4, atol=1e-4)
    assert not torch.equal(tokens(pipe), base)
    pipe.unfuse_lora()
    assert {name for name, value in base_weights(pipe).items() if not torch.equal(value, before[name])} == set()
    pipe.unload_lora_weights()
    assert torch.equal(tokens(pipe), base)
