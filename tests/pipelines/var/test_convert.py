import json
import re
from collections import OrderedDict

import pytest
import torch
from pipelines.var.tiny import FOLDER
from safetensors.torch import load_file

from arimage.convert.checkpoint import CheckpointError, load_original
from arimage.pipelines.var.convert import convert_var, var_tokenizer_from_original, var_transformer_from_original
from arimage.pipelines.var.pipeline_var import VARPipeline


FILES = (FOLDER / "var_d2.pth", FOLDER / "vae_ch32v64z8.pth")
SCALES = (1, 2, 3, 4)
DEFAULTS = {"guidance_scale": 2.5, "temperature": 1.0, "top_k": 900, "top_p": 0.96}
COUNT = sum(side**2 for side in SCALES)


@pytest.fixture
def state():
    return load_original(FILES[0])


@pytest.fixture
def vae_state():
    return load_original(FILES[1])


@pytest.fixture(scope="module")
def golden():
    expected = load_file(FOLDER / "expected.safetensors")
    return convert_var(*FILES), expected, json.loads((FOLDER / "config.json").read_text())


def share_modulation(state):
    """The same shapes with one modulation for all blocks, as in the published d36."""
    generator = torch.Generator().manual_seed(1)
    changed = {key: value for key, value in state.items() if ".ada_lin." not in key or key.startswith("head")}
    changed["shared_ada_lin.1.weight"] = torch.randn(6 * 48, 48, generator=generator)
    changed["shared_ada_lin.1.bias"] = torch.randn(6 * 48, generator=generator)
    return changed | {f"blocks.{i}.ada_gss": torch.randn(1, 1, 6, 48, generator=generator) for i in range(2)}


def name_phi(vae_state, num_phi):
    """The convolutions between the scales named as the original names one for all (1), several (4), or one a scale
    (0)."""
    old = "quantize.quant_resi.qresi_ls."
    changed = {key: value for key, value in vae_state.items() if not key.startswith(old)}
    for part in ("weight", "bias"):
        for i in range(1 if num_phi == 1 else 4):
            name = {0: f"{i}.", 1: "qresi.", 4: f"qresi_ls.{i}."}[num_phi]
            changed[f"quantize.quant_resi.{name}{part}"] = vae_state[f"{old}{i}.{part}"]
    return changed


def test_a_thousand_classes_are_those_of_imagenet(state, tmp_path):
    state["class_emb.weight"] = torch.randn(1001, state["class_emb.weight"].shape[1])
    torch.save(state, tmp_path / "var.pth")
    convert_var(tmp_path / "var.pth", FILES[1], out=tmp_path / "out")
    pipe = VARPipeline.from_pretrained(tmp_path / "out")
    assert pipe.get_label_ids(["golden retriever", "tench", "toilet tissue"]) == [207, 0, 999]
    assert len(pipe.class_names) == 1000 and convert_var(*FILES).class_names is None


@pytest.mark.parametrize("cfg", [1.5, 4])
def test_a_converted_pipeline_generates_the_greedy_images_of_the_original(golden, cfg):
    pipe, expected, config = golden
    output = pipe(class_labels=config["class_labels"], guidance_scale=1 + cfg, top_k=1, output_type="pt")
    tokens = torch.cat([part.flatten(1) for part in output.tokens], dim=1)
    assert torch.equal(tokens, expected[f"greedy_cfg{cfg}_tokens"])
    torch.testing.assert_close(output.images, expected[f"greedy_cfg{cfg}_image"], atol=1e-4, rtol=0)


@torch.no_grad()
def test_a_converted_pipeline_edits_as_the_original(golden):
    pipe, expected, config = golden
    keep = expected["edit_mask"][None, None]
    pixels = expected["vae_image"] / 2 + 0.5
    repaint = 1 - keep.repeat_interleave(4, dim=-2).repeat_interleave(4, dim=-1)
    labels, scale = expected["edit_labels"], 1 + config["edit"]["cfg"]
    output = pipe(
        class_labels=labels, image=pixels, mask_image=repaint, guidance_scale=scale, top_k=1, output_type="pt"
    )
    forced = pipe.encode_known_tokens(expected["vae_image"], repaint.bool())
    tokens = torch.cat([part.flatten(1) for part in output.tokens], dim=1)
    assert torch.equal(tokens, torch.where(forced < 0, expected["edit_greedy_tokens"], expected["vae_tokens"]))
    decoded = (pipe.vq.decode(output.tokens) / 2 + 0.5).clamp(0, 1)
    torch.testing.assert_close(decoded, expected["edit_greedy_image"], atol=1e-4, rtol=0)
    torch.testing.assert_close(output.images, torch.where(repaint.bool(), decoded, pixels), atol=1e-6, rtol=0)


@pytest.mark.parametrize("sides", [(1, 2, 3, 4, 5, 6, 8, 10, 13, 16), (1, 2, 3, 4, 6, 9, 13, 18, 24, 32), (2, 5)])
def test_any_scales_are_inferred_from_the_levels(state, sides):
    counts = [side**2 for side in sides]
    state["lvl_1L"] = torch.arange(len(sides)).repeat_interleave(torch.tensor(counts))[None]
    state["pos_start"] = torch.randn(1, counts[0], 48)
    state["pos_1LC"] = torch.randn(1, sum(counts), 48)
    state["lvl_embed.weight"] = torch.randn(len(sides), 48)
    assert tuple(var_transformer_from_original(state).config.scales) == sides


@torch.no_grad()
def test_shared_modulation_is_inferred_and_computed(state):
    shared = share_modulation(state)
    transformer = var_transformer_from_original(shared)
    assert transformer.config.shared_adaln
    # The same weights written out for each block.
    for i in range(2):
        state[f"blocks.{i}.ada_lin.1.weight"] = shared["shared_ada_lin.1.weight"]
        state[f"blocks.{i}.ada_lin.1.bias"] = shared["shared_ada_lin.1.bias"] + shared[f"blocks.{i}.ada_gss"].flatten()
    arguments = {"inputs": torch.randn(2, COUNT - 1, 8), "class_labels": torch.tensor([0, 7])}
    separate = var_transformer_from_original(state)
    torch.testing.assert_close(transformer.predict(**arguments), separate.predict(**arguments), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("num_phi", [0, 1, 4])
@torch.no_grad()
def test_every_number_of_convolutions_between_the_scales_is_inferred(vae_state, num_phi):
    vq = var_tokenizer_from_original(name_phi(vae_state, num_phi), scales=SCALES)
    assert vq.config.num_phi == num_phi and len(vq.phi) == (num_phi or 4)
    for i, phi in enumerate(vq.phi):
        assert torch.equal(phi.weight, vae_state[f"quantize.quant_resi.qresi_ls.{i}.weight"])


def test_one_tokenizer_file_serves_other_scales(vae_state):
    assert var_tokenizer_from_original(vae_state, scales=(1, 3, 6, 7, 9)).config.scales == (1, 3, 6, 7, 9)
    four = name_phi(vae_state, 0)
    with pytest.raises(CheckpointError, match=r"has no 'quantize.quant_resi.4.weight'"):
        var_tokenizer_from_original(four, scales=(1, 3, 6, 7, 9))


def wrap(files, path):
    """Both files as the original's trainer leaves them."""
    trainer = OrderedDict(config={"depth": 2, "prog_it": 0}, var_opt={"optimizer": {"state": {0: torch.ones(2)}}})
    trainer["var_wo_ddp"], trainer["vae_local"] = (OrderedDict(load_original(file)) for file in files)
    args = OrderedDict(patch_nums=SCALES, cmd="--depth 2", tlr=1e-4, fuse=True)
    torch.save({"epoch": 3, "iter": 0, "trainer": trainer, "args": args}, path)
    return path


def assert_same(first, second):
    for name in ("transformer", "vq"):
        ours, theirs = getattr(first, name).state_dict(), getattr(second, name).state_dict()
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_a_trainers_file_serves_for_both(golden, tmp_path):
    path = wrap(FILES, tmp_path / "ar-ckpt-best.pth")
    assert_same(convert_var(path, path), golden[0])
    assert_same(convert_var(path, FILES[1]), golden[0])


def test_averaged_weights_are_taken_where_they_are_asked_for(state, tmp_path):
    averaged = {f"_orig_mod.{key}": value * 2 if "head.weight" in key else value for key, value in state.items()}
    torch.save({"trainer": {"var_wo_ddp": state, "ema": averaged}}, tmp_path / "trainer.pth")
    for ema, factor in ((False, 1), (True, 2)):
        pipe = convert_var(tmp_path / "trainer.pth", FILES[1], ema=ema)
        assert torch.equal(pipe.transformer.head.weight, state["head.weight"] * factor)


def test_a_converted_pipeline_samples_as_published(golden):
    assert golden[0].generation_config.items() >= DEFAULTS.items() and golden[0].decoding.exact


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"lvl_1L": torch.zeros(1, 30).long()}, r"'lvl_1L' with levels \[0\] of \[30\] codes, expected two"),
        ({"lvl_1L": torch.arange(30)[None].flip(1)}, "'lvl_1L' with levels .29, 28"),
        ({"blocks.0.attn.scale_mul_1H11": torch.ones(1, 5, 1, 1)}, "width 48, which 5 heads cannot share"),
        ({"encoder.conv_in.weight": torch.ones(40, 3, 3, 3)}, r"widths \[40, 64, 32, 32\], expected multiples"),
    ],
)
def test_unfitting_tensors_are_refused_by_name(state, vae_state, change, said):
    with pytest.raises(CheckpointError, match=f"^some.pth .*{said}"):
        if "encoder.conv_in.weight" in change:
            var_tokenizer_from_original(vae_state | change, scales=SCALES, source="some.pth")
        else:
            var_transformer_from_original(state | change, source="some.pth")


@pytest.mark.parametrize(("rows", "width", "said"), [(32, 8, "32, 8, "), (64, 4, "64, 4, ")])
def test_a_tokenizer_of_other_codes_is_refused_naming_both_files(vae_state, rows, width, said, tmp_path):
    changed = {}
    for key, value in vae_state.items():
        shape = [rows if size == 64 and key == "quantize.embedding.weight" else size for size in value.shape]
        if re.match(r"quant|post_quant|encoder.conv_out|decoder.conv_in", key):
            shape = [width if size == 8 else size for size in shape]
        changed[key] = torch.zeros(shape)
    torch.save(changed, tmp_path / "other.pth")
    with pytest.raises(CheckpointError, match=rf"var_d2.pth with .*other.pth does not fit: .*64, 8, .*{said}"):
        convert_var(FILES[0], tmp_path / "other.pth")
