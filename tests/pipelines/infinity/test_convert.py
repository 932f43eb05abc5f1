import json
import re

import pytest
import torch
from pipelines.infinity.tiny import FIXTURES

from arimage.convert import CheckpointError, convert_infinity
from arimage.convert.checkpoint import load_original
from arimage.pipelines.infinity.pipeline_infinity import InfinityPipeline


FILES = FIXTURES / "plain" / "infinity_tiny_reg.pth", FIXTURES / "plain" / "infinity_vae_d8_tiny.pth"
PATCHIFY = FIXTURES / "patchify"
PATCHIFY_FILES = PATCHIFY / "infinity_8b_tiny_weights", PATCHIFY / "infinity_vae_d16_f8_4_patchify_tiny.pth"


@pytest.fixture
def state():
    return dict(torch.load(FILES[0], weights_only=True))


def weights_of(pipe):
    return {**pipe.transformer.state_dict(), **{f"vq.{name}": value for name, value in pipe.vq.state_dict().items()}}


def assert_same(one, other):
    ours, theirs = weights_of(one), weights_of(other)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def saved(content, path):
    torch.save(content, path)
    return path


def test_settings_that_the_tensors_show():
    config = convert_infinity(*FILES).transformer.config
    shape = (config.hidden_size, config.num_layers, config.num_attention_heads, config.num_pool_heads)
    assert shape == (64, 4, 4, 2) and (config.bits, config.num_levels, config.num_text_tokens) == (8, 15, 64)
    pipe = convert_infinity(*PATCHIFY_FILES, pixels="0.25M")
    assert pipe.vq.config.patchify and pipe.vq.bits == pipe.transformer.config.bits == 16
    assert pipe.image_sizes[0] == (512, 512) and pipe.generation_config["guidance_scale"] == 3.0


def test_other_forms_of_the_file_give_the_same_pipeline(state, tmp_path):
    plain = convert_infinity(*FILES)
    # Built with one chunk, with the shapes of the authors' own attention kernel, and with buffers of older files.
    one_chunk = {
        re.sub(
            r"block_chunks\.(\d)\.module\.(\d)", lambda match: f"blocks.{2 * int(match[1]) + int(match[2])}", key
        ): value.transpose(1, 2) if "scale_mul" in key else value
        for key, value in state.items()
    }
    one_chunk |= {"lvl_1L": torch.zeros(1, 5), "attn_bias_for_masking": torch.zeros(1)}
    assert_same(plain, convert_infinity(saved(one_chunk, tmp_path / "one.pth"), FILES[1]))
    # A trainer's checkpoint, and the names of plain layers in the tokenizer.
    trainer = {"trainer": {"gpt_fsdp": state}, "args": {"a": 1}, "epoch": 3}
    vae = {
        re.sub(r"\.(conv|norm)\.(weight|bias)$", r".\2", key) if "resample" not in key else key: value
        for key, value in load_original(FILES[1], ("vae",)).items()
    }
    vae = saved({"vae": vae, "discriminator": {"weight": torch.zeros(2)}}, tmp_path / "vae.pth")
    assert_same(plain, convert_infinity(saved(trainer, tmp_path / "ar-ckpt-giter1K.pth"), vae))


@torch.no_grad()
def test_a_converted_pipeline_is_saved_and_loaded(tmp_path):
    pipe = convert_infinity(*FILES, out=tmp_path / "out", dtype=torch.bfloat16)
    assert pipe.transformer.dtype == torch.bfloat16 and pipe.vq.dtype == torch.float32
    loaded = InfinityPipeline.from_pretrained(tmp_path / "out")
    assert loaded.generation_config == {"guidance_scale": 3.0, "temperature": 1.0, "top_k": 0, "top_p": 0.97}
    assert json.loads((tmp_path / "out" / "transformer" / "config.json").read_text())["pixels"] == "1M"
    for name, value in pipe.transformer.float().state_dict().items():
        assert torch.equal(loaded.transformer.state_dict()[name], value)


def test_the_subfolder_of_a_repository_is_read():
    folder, vae = PATCHIFY_FILES
    assert_same(convert_infinity(folder, vae), convert_infinity(folder.parent, vae, subfolder=folder.name))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("block_chunks.1.module.0.ca.mat_q.weight"), r"has no 'blocks\.2\.ca\.mat_q\.weight'"),
        (lambda state: state.pop("block_chunks.0.module.1.sa.q_bias"), r"has no 'blocks\.1\.sa\.q_bias'"),
        (lambda state: state.pop("cfg_uncond"), "has no 'cfg_uncond'"),
        (lambda state: state.update(more=torch.zeros(1)), "has 'more', unknown to InfinityTransformer"),
        (lambda state: state.update({"head.bias": torch.zeros(3)}), "has 'head.bias' of shape"),
    ],
)
def test_a_file_that_is_not_whole_is_refused(state, tmp_path, change, message):
    change(state)
    with pytest.raises(CheckpointError, match=message):
        convert_infinity(saved(state, tmp_path / "changed.pth"), FILES[1])


def test_the_tokenizer_of_another_model_is_refused():
    with pytest.raises(CheckpointError, match="predicts 8 bits per cell and .* latents of .4. channels"):
        convert_infinity(FILES[0], PATCHIFY_FILES[1])
    with pytest.raises(ValueError, match="pixels is '2M'"):
        convert_infinity(*FILES, pixels="2M")
