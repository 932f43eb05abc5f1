"""Published files of InfinityStar: what they say, and what is refused."""

import shutil

import pytest
import torch
from pipelines.infinitystar import tiny
from safetensors.torch import save_file

from arimage import AutoPipeline
from arimage.convert import CheckpointError, convert_infinitystar
from arimage.convert.folder import load_original_folder
from arimage.pipelines.infinitystar.convert import infinitystar_transformer_from_original
from arimage.pipelines.infinitystar.schedules import repetitions_of


WEIGHTS, VAE = tiny.FIXTURES / "weights", tiny.FIXTURES / "infinitystar_videovae_tiny.pth"
TRAINED = {name: tiny.CONFIG[name] for name in tiny.TRAINED}
TRAINED["pixels"] = "0.06M"


def test_a_converted_pipeline_is_saved_and_loaded(tmp_path):
    pipe = tiny.golden_pipeline(out=tmp_path / "model", dtype=torch.bfloat16)
    loaded = AutoPipeline.from_pretrained(tmp_path / "model")
    assert pipe.transformer.dtype == torch.bfloat16 and pipe.vq.dtype == torch.float32
    assert "\n# model\n" in (tmp_path / "model" / "README.md").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert loaded.generation_config["temperature"] == [1.0, 0.4] and loaded.generation_config["guidance_scale"] == 34
    assert loaded.film((192, 336), 17) == pipe.film((192, 336), 17)
    for name, value in loaded.transformer.state_dict().items():
        assert torch.equal(value, pipe.transformer.state_dict()[name].float()), name


def test_a_folder_with_the_weights_inside_and_a_trainers_file(tmp_path):
    state = load_original_folder(WEIGHTS)
    expected = infinitystar_transformer_from_original(dict(state), **TRAINED).state_dict()
    state = {name.replace("semantic_head2.", "semantic_head."): value for name, value in state.items()}
    state[".cfg_uncond"], state[".sos_token"] = state.pop("cfg_uncond"), torch.zeros(1)
    state.pop("sos_token", None)
    torch.save({"trainer": {"gpt_fsdp": state}}, tmp_path / "trained.pth")
    shutil.copytree(WEIGHTS, tmp_path / "inside")
    for source in ({"transformer": tmp_path, "subfolder": "inside"}, {"transformer": tmp_path / "trained.pth"}):
        found = convert_infinitystar(**source, vae=VAE, **TRAINED).transformer.state_dict()
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_what_was_never_published_must_be_said():
    with pytest.raises(CheckpointError, match="no model of 0.06M pixels is published: give semantic_scales"):
        convert_infinitystar(WEIGHTS, VAE, pixels="0.06M")
    with pytest.raises(CheckpointError, match="video_scale_repetition holds 2 numbers: give one for each of the 11"):
        convert_infinitystar(WEIGHTS, VAE, **TRAINED | {"video_scale_repetition": (3, 1)})
    assert repetitions_of("0.40M") == (11, (3,) * 14, (3,) * 12 + (2, 1))
    assert repetitions_of("0.90M") == (12, (3,) * 15, (3,) * 12 + (2, 1, 1))


def test_parts_that_do_not_fit_are_refused(tmp_path):
    state = load_original_folder(WEIGHTS)
    state["word_embed.weight"] = state["word_embed.weight"][:, :12].contiguous()
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="latent channels: the transformer has 12, the video tokenizer 16"):
        convert_infinitystar(tmp_path, VAE, **TRAINED)
