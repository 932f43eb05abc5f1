"""Files of adapters: what their headers say, what other programs write, and what is refused before it changes
anything."""

import json
from dataclasses import fields

import pytest
import torch
from adapters import STYLE, adapter, merge
from families import EVERY, seeded, tokens
from safetensors.torch import load_file, save_file

from arimage.pipelines.adapters.lora_settings import OF_TRAINING, PeftSettings


pytest.importorskip("peft", reason="the extra `lora` is not installed")
from peft import LoraConfig, get_peft_model  # noqa: E402
from peft.utils.hotswap import hotswap_adapter_from_state_dict  # noqa: E402


def build(family="llamagen-text"):
    return EVERY[family]()


def snapshot(pipe):
    """All that an adapter could change in a pipeline."""
    parts = {}
    for key in pipe._lora_loadable_modules:
        component = pipe.components[key]
        parts |= {f"{key}.{name}": value.clone() for name, value in component.state_dict().items()}
        parts[key] = [(name, type(module)) for name, module in component.named_modules()]
        parts[f"{key} state"] = dict(getattr(component, "peft_config", {})), bool(component._hf_peft_config_loaded)
    parts["layers"] = [
        (
            it.active_adapters,
            {name: float(scale) for name, scale in it.scaling.items()},
            dict(it.r),
            it.disable_adapters,
        )
        for it in pipe._layers_of(None)
    ]
    return parts


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value) if isinstance(value, torch.Tensor) else found[name] == value


def settings_of(**changes):
    return LoraConfig(r=2, lora_alpha=2, target_modules=["some"]).to_dict() | {"target_modules": ["some"]} | changes


def write(path, state, settings=None, own=None):
    """A file; settings and `own` are texts or objects."""
    header = {"format": "pt"}
    if settings is not None:
        prefixed = settings if isinstance(settings, str) else {f"transformer.{k}": v for k, v in settings.items()}
        header["lora_adapter_metadata"] = prefixed if isinstance(prefixed, str) else json.dumps(prefixed)
    if own is not None:
        header["arimage"] = own if isinstance(own, str) else json.dumps(own)
    save_file({key: value.contiguous() for key, value in state.items()}, path, metadata=header)
    return path


WRONG_HEADERS = {
    "lora_adapter_metadata": ["[]", "null", "[" * 100_000, "{", "3"],
    "arimage": ["[]", "null", '{"captions": 3}', '{"captions": [3]}', '{"base": []}', '{"other": 1}', "x"],
    "r": [None, 0, -1, True, "2", 2.0, 10**9, 7, [], 10**400],
    "lora_alpha": [0, -1, True, "2", None, float("nan"), float("inf"), 10**400],
    "rank_pattern": ["x", [], {"(": 3}, {"(a+)+$": 3}, {"x": 0}, {"x": "y"}, {".*.*.*.*x": 1}],
    "alpha_pattern": ["x", {"(": 3}, {"x": float("nan")}, {"(a|aa)(a|aa)": 1}, {"x" * 400: 1}],
    "init_lora_weights": [5, None, "x", "pissa_niter_4", "PiSSA", "olora", "corda", "loftq", "lora_ga", {"a": 1}],
    "bias": ["all", "lora_only", "x", None, 3],
    "use_dora": [True, "x"],
    "lora_bias": [True, "x"],
    "use_rslora": ["x", None],
    "peft_type": ["LOHA", 3],
    "modules_to_save": [["head"], "head"],
    "use_qalora": [True],
    "alora_invocation_tokens": [[1, 2]],
    "trainable_token_indices": [[1], {"a": [1]}],
    "target_parameters": [["x"]],
    "layer_replication": [[[0, 1]]],
    "megatron_config": [{"x": 1}],
    "use_bdlora": [{"x": 1}],
    "arrow_config": [{"x": 1}],
    "velora_config": [{"x": 1}],
    "monteclora_config": [{"x": 1}],
    "kasa_config": [{"x": 1}],
    "ensure_weight_tying": [True],
    "setting_of_tomorrow": [True, 1, "x"],
}


@pytest.mark.every(6)
@pytest.mark.parametrize("name", WRONG_HEADERS)
def test_wrong_settings_are_named_and_change_nothing(name, tmp_path):
    pipe = build()
    state, before = adapter(pipe, targets="proj"), snapshot(pipe)
    for value in WRONG_HEADERS[name]:
        own = value if name == "arimage" else None
        settings = value if name == "lora_adapter_metadata" else settings_of(**({} if own else {name: value}))
        path = write(tmp_path / "one.safetensors", state, settings, own)
        with pytest.raises(ValueError, match=name) as error:
            pipe.load_lora_weights(path, adapter_name=STYLE)
        assert "\n" not in str(error.value) and len(str(error.value)) < 1000
    assert_same(snapshot(pipe), before)


def test_every_setting_of_peft_is_decided():
    """A new one, or one that is on, is refused unless it is among those that are understood."""
    off = {field.name for field in fields(LoraConfig)} - set(PeftSettings.model_fields) - OF_TRAINING
    default = LoraConfig(r=2, lora_alpha=2, target_modules=["some"]).to_dict()
    assert not any(default.get(name) for name in off)
    assert off <= set(WRONG_HEADERS)


@pytest.mark.every(2)
@pytest.mark.parametrize(
    "text",
    [
        *("[]", "null", "[" * 100_000, b"\xff\xfe", "{", " " * 2**24 + " {}"),
        *('{"r": 2, "lora_alpha": 4}', '{"peft_type": "LORA", "lora_alpha": 4}'),
    ],
)
def test_settings_next_to_the_file_are_read_by_the_same_rules(text, tmp_path):
    pipe = build()
    state = adapter(pipe, targets="proj")
    save_file(
        {key.replace("transformer.", "base_model.model."): value for key, value in state.items()},
        tmp_path / "adapter_model.safetensors",
    )
    (tmp_path / "adapter_config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=r"adapter_config\.json"):
        pipe.load_lora_weights(tmp_path)
    assert pipe.get_list_adapters() == {}


def test_patterns_are_names_or_ends_of_names(tmp_path):
    pipe, merged = build(), build()
    state = adapter(pipe, targets="blocks.0")
    patterns = {"alpha_pattern": {"attention.qkv_proj": 4, "^blocks.*out_proj": 8}}
    pipe.load_lora_weights(write(tmp_path / "one.safetensors", state, settings_of(**patterns)), adapter_name=STYLE)
    for part, scale in {"qkv_proj": 2.0, "out_proj": 4.0, "feed_forward": 1.0}.items():
        merge(merged, {key: value for key, value in state.items() if part in key}, scale)
    assert torch.equal(tokens(pipe), tokens(merged))


def test_weights_that_are_not_whole_adapters_are_refused():
    pipe = build()
    state, before = adapter(pipe, targets="blocks.0.attention.qkv"), snapshot(pipe)
    embedding, [a, b] = adapter(pipe, targets="token_embedding"), state
    for wrong, words in [
        ({a: state[a]}, "without.*lora_B"),
        ({b: state[b]}, "without.*lora_A"),
        ({a: state[a], b: state[b][:, :1]}, "lora_B.*needs"),
        ({a: state[a][:0], b: state[b][:, :0]}, "lora_A"),
        ({a: state[a][0], b: state[b]}, "lora_A.*shape"),
        ({a: state[a] * torch.nan, b: state[b]}, "lora_A.*not finite"),
        ({a: state[a].int(), b: state[b]}, "lora_A.*int32"),
        (state | {b.replace(".weight", ".bias"): torch.ones(63)}, "lora_B.bias.*63"),
        (state | {a.replace("lora_A", "lora_C"): state[a]}, "lora_C.*not a weight of a LoRA"),
        ({a.replace("attention.qkv_proj", "attention_norm"): state[a]}, "attention_norm, a RMSNorm"),
        ({key.replace("embedding_", "", 1).replace("_A", "_A.weight"): it for key, it in embedding.items()}, "lora_"),
        (state | {a.replace(".weight", ".default.weight"): state[a]}, "qkv_proj.lora_A.weight twice"),
        ({a.replace(".weight", f".{name}.weight"): state[a] for name in ("one", "two")}, "adapters one, two"),
        (
            state
            | adapter(pipe, targets="out_proj")
            | {"transformer.blocks.0.attention.qkv_proj.lora_magnitude_vector": state[b][:, 0]},
            "without.*lora_magnitude_vector",
        ),
    ]:
        with pytest.raises(ValueError, match=words) as error:
            pipe.load_lora_weights(wrong, STYLE)
        assert "no such layer" not in str(error.value)
    assert_same(snapshot(pipe), before)


def test_dora_and_bias_work_and_unfuse():
    pipe = build()
    state, base = adapter(pipe, targets="feed_forward"), tokens(pipe)
    before = snapshot(pipe)
    for key in [key for key in state if "lora_B" in key]:
        state[key.replace("lora_B.weight", "lora_magnitude_vector")] = torch.rand(len(state[key])) + 0.5
    pipe.load_lora_weights(state, STYLE)
    styled = tokens(pipe)
    assert not torch.equal(styled, base)
    pipe.fuse_lora()
    assert torch.equal(tokens(pipe), styled)
    pipe.unfuse_lora()
    pipe.unload_lora_weights()
    after = snapshot(pipe)
    assert all(torch.equal(after[key], it) for key, it in before.items() if isinstance(it, torch.Tensor))


def broken_after(count, function):
    """`function`, which fails when it is called once more than `count` times."""
    calls = []

    def call(*args, **kwargs):
        calls.append(None)
        if len(calls) > count:
            raise MemoryError("out of memory")
        return function(*args, **kwargs)

    return call


@pytest.mark.every(2)
@pytest.mark.parametrize("others", [False, True])
def test_a_load_that_fails_half_way_leaves_no_trace(others, monkeypatch):
    from peft import set_peft_model_state_dict

    pipe = build("mammothmoda2")
    state = adapter(pipe, targets="self_attn") | adapter(pipe, targets="attn.to_q")
    assert len({key.partition(".")[0] for key in state}) == 2
    if others:
        pipe.load_lora_weights(adapter(pipe, seed=1, targets="layers.0.self_attn.q_proj"), "aa")
    pipe.enable_lora_hotswap(target_rank=4) if not others else None
    before = snapshot(pipe)
    for count in (0, 1):
        monkeypatch.setattr("peft.set_peft_model_state_dict", broken_after(count, set_peft_model_state_dict))
        with pytest.raises(MemoryError):
            pipe.load_lora_weights(state, STYLE)
        assert_same(snapshot(pipe), before)
    monkeypatch.undo()
    pipe.load_lora_weights(state, STYLE)
    assert STYLE in pipe.get_active_adapters()


def test_swaps_that_peft_cannot_do_are_refused_and_others_have_their_scale(tmp_path):
    pipe, other = build(), build()
    one, two = adapter(pipe, targets="qkv_proj"), adapter(pipe, 1, rank=4, targets="blocks.0.attention.qkv_proj")
    more = adapter(pipe, targets="blocks.0")
    pipe.load_lora_weights(one, STYLE)
    before = snapshot(pipe)
    with pytest.raises(ValueError, match="hotswap cannot add"):
        pipe.load_lora_weights(more, STYLE, hotswap=True)
    path = write(tmp_path / "one.safetensors", two, settings_of(r=4, use_rslora=True))
    with pytest.raises(ValueError, match="use_rslora"):
        pipe.load_lora_weights(path, adapter_name=STYLE, hotswap=True)
    assert_same(snapshot(pipe), before)
    path = write(tmp_path / "one.safetensors", two, settings_of(r=4, lora_alpha=8))
    pipe.load_lora_weights(path, adapter_name=STYLE, hotswap=True)
    other.load_lora_weights(path, adapter_name=STYLE)
    for scale in (1.0, 0.5):
        for each in (pipe, other):
            each.set_adapters(STYLE, scale)
        assert torch.equal(tokens(pipe), tokens(other))


def test_what_has_room_for_swaps_is_saved_with_its_scale(tmp_path):
    from peft import get_peft_model_state_dict

    pipe, other = build(), build()
    pipe.enable_lora_hotswap(target_rank=4)
    with pytest.raises(ValueError, match="target_rank"):
        pipe.load_lora_weights(adapter(pipe, rank=5, targets="proj"), STYLE)
    path = write(tmp_path / "one.safetensors", adapter(pipe, targets="proj"), settings_of(lora_alpha=6))
    pipe.load_lora_weights(path, adapter_name=STYLE)
    parts = {
        "transformer_lora_layers": get_peft_model_state_dict(pipe.transformer, adapter_name=STYLE),
        "transformer_lora_adapter_metadata": pipe.transformer.peft_config[STYLE].to_dict(),
    }
    type(pipe).save_lora_weights(tmp_path / "saved", **parts)
    other.load_lora_weights(tmp_path / "saved")
    assert torch.equal(tokens(pipe), tokens(other))


def by_other_names(state, how):
    """The weights as another program names them, with alpha = 1 where it has one."""
    found = {}
    for key, value in state.items():
        layer, _, part = key.removeprefix("transformer.").partition(".lora_")
        which = {"A.weight": "down", "B.weight": "up"}[part]
        if how == "kohya":
            layer = "lora_unet_" + layer.replace(".", "_")
            found |= {f"{layer}.lora_{which}.weight": value, f"{layer}.alpha": torch.tensor(1.0)}
        elif how == "ai-toolkit":
            found |= {f"diffusion_model.{layer}.lora_{part}": value, f"diffusion_model.{layer}.alpha": torch.tensor(1)}
        elif how == "down and up":
            found |= {f"transformer.{layer}.lora_{which}.weight": value, f"transformer.{layer}.alpha": torch.ones(1)}
        elif how == "old diffusers":
            found[f"transformer.{layer}.lora.{which}.weight"] = value
        else:
            found[f"transformer.{layer}.lora_{part[0]}.default.weight"] = value
    return found


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("how", "names"),
    [
        ("kohya", "the authors'"),
        ("ai-toolkit", "the authors'"),
        ("down and up", "ours"),
        ("old diffusers", "ours"),
        ("default", "the authors'"),
    ],
)
def test_files_of_other_programs_load_with_their_alpha(how, names, tmp_path):
    pipe, merged = build(), build()
    state = adapter(pipe, targets="blocks.0.attention.qkv_proj")
    merge(merged, state, 0.5 if how in ("kohya", "ai-toolkit", "down and up") else 1.0)
    if names != "ours":
        state = {
            key.replace("blocks.0.attention.qkv_proj", "layers.0.attention.wqkv"): it for key, it in state.items()
        }
    save_file(by_other_names(state, how), tmp_path / "one.safetensors", metadata={"ss_network_alpha": "1.0"})
    pipe.load_lora_weights(tmp_path / "one.safetensors", adapter_name=STYLE)
    assert torch.equal(tokens(pipe), tokens(merged))
    assert set(load_file(tmp_path / "one.safetensors")) == set(pipe.lora_state_dict(tmp_path / "one.safetensors"))


def test_alpha_of_split_projections():
    pipe, merged = build(), build()
    name, widths, generator = "transformer.blocks.0.attention", {"q": 32, "k": 16, "v": 16}, seeded(1)
    state, whole = {}, []
    for part, width in widths.items():
        a, b = torch.randn(2, 32, generator=generator), torch.randn(width, 2, generator=generator)
        state |= {f"{name}.{part}_proj.lora_A.weight": a, f"{name}.{part}_proj.lora_B.weight": b}
        state[f"{name}.{part}_proj.alpha"] = torch.tensor(4.0)
        whole.append(b @ a)
    pipe.load_lora_weights(state, STYLE)
    with torch.no_grad():
        merged.transformer.blocks[0].attention.qkv_proj.weight += 2 * torch.cat(whole)
    assert torch.equal(tokens(pipe), tokens(merged))
    with pytest.raises(ValueError, match="all three"):
        build().load_lora_weights({key: it for key, it in state.items() if "v_proj.lora_A" not in key})
    with pytest.raises(ValueError, match="another alpha"):
        build().load_lora_weights(state | {f"{name}.v_proj.alpha": torch.tensor(1.0)})


def test_what_cannot_be_told_is_refused(tmp_path):
    pipe = build()
    state = adapter(pipe, targets="blocks.0.attention")
    kohya = by_other_names(state, "kohya")
    first = next(key for key in kohya if key.endswith(".alpha"))
    for wrong, words in [
        ({key: it for key, it in kohya.items() if key != first}, "alpha for some layers"),
        (kohya | {first: torch.tensor(0.0)}, ".alpha of the shape"),
        (kohya | {first: torch.tensor(torch.nan)}, ".alpha of the shape"),
        (kohya | {first: torch.ones(2)}, "alpha"),
        ({key.replace("_0_", "_7_"): it for key, it in kohya.items()}, "0 layers of that name"),
        (kohya | {first.replace("alpha", "dora_scale"): torch.ones(64)}, "dora_scale"),
        ({"lora_te_text_model.lora_down.weight": torch.ones(2, 2)}, "lora_te_text_model"),
    ]:
        with pytest.raises(ValueError, match=words):
            pipe.load_lora_weights(wrong)
    path = write(tmp_path / "one.safetensors", by_other_names(state, "down and up"), settings_of(lora_alpha=4))
    with pytest.raises(ValueError, match="lora_alpha is 4.*alpha is 1"):
        pipe.load_lora_weights(path)
    several = build("mammothmoda2")
    with pytest.raises(ValueError, match="any of language_model, transformer|any of transformer, language_model"):
        several.load_lora_weights({"diffusion_model.x.lora_A.weight": torch.ones(2, 2)})


def test_captions_belong_to_the_adapter_of_the_shared_component(tmp_path):
    from arimage_emoji.known import KnownCaptions

    pipe = build()
    pipe.known_captions = KnownCaptions({"red heart": []})
    path = write(tmp_path / "one.safetensors", adapter(pipe, targets="qkv"), own={"captions": ["blue house"]})
    pipe.load_lora_weights(path, adapter_name=STYLE)
    other = type(pipe).from_pipe(pipe)
    assert other.known_captions.knows("a blue house")
    other.delete_adapters(STYLE)
    assert not pipe.known_captions.knows("a blue house") and not other.known_captions.knows("a blue house")
    other.load_lora_weights(path, adapter_name=STYLE)
    assert pipe.known_captions.knows("a blue house")
    pipe.transformer.delete_adapters(STYLE)
    assert pipe.known_captions == other.known_captions == KnownCaptions({"red heart": []})


def test_settings_of_no_component_are_refused(tmp_path):
    pipe = build()
    path = write(tmp_path / "one.safetensors", adapter(pipe, targets="proj"), json.dumps({"r": 2, "lora_alpha": 4}))
    with pytest.raises(ValueError, match="setting r in lora_adapter_metadata"):
        pipe.load_lora_weights(path)


def test_keys_inside_of_a_loaded_adapter_are_no_layers():
    pipe = build()
    state = adapter(pipe, targets="qkv_proj")
    pipe.load_lora_weights(state, STYLE)
    for inside in ("base_layer", f"lora_A.{STYLE}"):
        with pytest.raises(ValueError, match="qkv_proj.*lora_A"):
            pipe.load_lora_weights({key.replace("qkv_proj", f"qkv_proj.{inside}"): it for key, it in state.items()})


@pytest.mark.parametrize("kind", ["pissa", "pissa_niter_4", "olora"])
def test_adapters_of_a_changed_base_are_converted_first(kind, tmp_path):
    def model():
        component = build().transformer
        return component, get_peft_model(
            component, LoraConfig(r=2, lora_alpha=2, target_modules=["qkv_proj"], init_lora_weights=kind)
        )

    torch.manual_seed(0)
    component, trained = model()
    trained.save_pretrained(tmp_path / "begun")
    trained.peft_config["default"].init_lora_weights = kind
    with torch.no_grad():
        for name, value in component.named_parameters():
            if "lora_B" in name:
                value += 0.3
    pipe = build()
    pipe.set_progress_bar_config(disable=True)
    trained.save_pretrained(tmp_path / "unconverted")
    with pytest.raises(ValueError, match="path_initial_model_for_weight_conversion"):
        pipe.load_lora_weights(tmp_path / "unconverted", weight_name="adapter_model.safetensors")
    trained.save_pretrained(tmp_path / "converted", path_initial_model_for_weight_conversion=str(tmp_path / "begun"))
    pipe.load_lora_weights(tmp_path / "converted", weight_name="adapter_model.safetensors")
    pipe.fuse_lora()
    wanted = trained.merge_and_unload().state_dict()
    for name, value in pipe.transformer.state_dict().items():
        if ".lora_" not in name:
            torch.testing.assert_close(value, wanted[name.replace(".base_layer", "")], rtol=1e-3, atol=1e-3)


def test_a_second_component_that_does_not_fit_leaves_the_first_as_it_was():
    pipe = build("mammothmoda2")
    state = adapter(pipe, targets="self_attn") | adapter(pipe, targets="attn.to_q")
    wrong = {key: value[:, :-1] if key.startswith("transformer.") else value for key, value in state.items()}
    before = snapshot(pipe)
    with pytest.raises(ValueError, match="needs"):
        pipe.load_lora_weights(wrong, STYLE)
    assert_same(snapshot(pipe), before)
    pipe.load_lora_weights(state, STYLE)
    before = snapshot(pipe)
    with pytest.raises(ValueError, match="needs"):
        pipe.load_lora_weights(wrong, STYLE, hotswap=True)
    assert_same(snapshot(pipe), before)


@pytest.mark.every(2)
@pytest.mark.parametrize("room", [False, True])
@pytest.mark.parametrize("rank", [2, 3])
def test_a_swap_that_fails_half_way_leaves_the_adapter_as_it_was(room, rank, monkeypatch):
    pipe = build("mammothmoda2")
    pipe.enable_lora_hotswap(target_rank=4) if room else None
    first, second = (
        adapter(pipe, seed, each, targets="self_attn") | adapter(pipe, seed, each, targets="attn.to_q")
        for seed, each in enumerate((2, rank))
    )
    pipe.load_lora_weights(first, STYLE)
    if not room:
        pipe.set_adapters(STYLE, 0.5)
    before = snapshot(pipe)
    broken = broken_after(1, hotswap_adapter_from_state_dict)
    monkeypatch.setattr("peft.utils.hotswap.hotswap_adapter_from_state_dict", broken)
    with pytest.raises(MemoryError):
        pipe.load_lora_weights(second, STYLE, hotswap=True)
    assert_same(snapshot(pipe), before)


def test_a_swap_also_swaps_the_captions(tmp_path):
    from arimage_emoji.known import KnownCaptions

    pipe = build()
    pipe.known_captions, state = KnownCaptions({"red heart": []}), adapter(pipe, targets="qkv")
    for name in ("house", "boat"):
        path = write(tmp_path / f"{name}.safetensors", state, own={"captions": [f"blue {name}"]})
        pipe.load_lora_weights(path, adapter_name=STYLE, hotswap=name == "boat")
    assert pipe.known_captions.knows("blue boat") and not pipe.known_captions.knows("blue house")
