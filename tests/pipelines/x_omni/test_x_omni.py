"""X-Omni: logits, tokens, features and velocities against the authors' code, and the pipeline around them."""

import json
import shutil

import pytest
import torch
import torch.nn.functional as F
from diffusers import FluxPipeline
from families import seeded
from pipelines.x_omni import tiny as tiny_x_omni
from pipelines.x_omni.tiny import EXPECTED, FIXTURES
from safetensors.torch import load_file, save_file

from arimage import AutoPipeline, XOmniPipeline
from arimage.convert import CheckpointError, convert_x_omni


LATENT = {"output_type": "latent"}
SIZE = {"height": 64, "width": 48}


@pytest.fixture(scope="module")
def converted():
    return convert_x_omni(FIXTURES)


@pytest.fixture(scope="module")
def pipe():
    return tiny_x_omni.pipeline()


def given(*names, rows=slice(None)):
    return {name: EXPECTED[name][rows] for name in ("input_ids", "attention_mask", *names)} | SIZE


def close(found, wanted, atol=1e-4):
    torch.testing.assert_close(found, wanted, rtol=0, atol=atol)


@torch.no_grad()
@pytest.mark.parametrize("names", [(), ("negative_input_ids",)])
def test_logits_are_those_of_the_authors(converted, names):
    """Without negative ids, the unconditional logits read the header alone, as the authors' do."""
    model = converted.prepare(**given(*names), guidance_scale=3.0).model
    cache, first = model.prefill(2)
    codes = EXPECTED["image_codes"].flatten(1)[:, :-1]
    others = model.forward(codes, torch.arange(codes.shape[1]).expand(2, -1), cache)
    logits = torch.cat([first[:, :, None], others], dim=2)
    close(logits, torch.stack([EXPECTED["cond_logits"], EXPECTED["uncond_logits"]]))


@pytest.mark.parametrize("decoding", ["ar", "sjd:window=4", "sjd-coupled:window=16", "sjd-tree"])
def test_greedy_tokens_are_those_of_the_authors(converted, decoding):
    for scale, name in ((3.0, "image_codes"), (1.0, "image_codes_unguided")):
        out = converted(**given(), guidance_scale=scale, top_k=1, decoding=decoding, **LATENT)
        assert torch.equal(out.images, EXPECTED[name]) and out.stats.exact


@torch.no_grad()
def test_features_and_velocities_are_those_of_the_authors(converted):
    features = converted.projector.features(EXPECTED["image_codes"][:1])
    close(features, EXPECTED["semantic_features"])
    sequence = features.flatten(2).transpose(1, 2)
    close(sequence, EXPECTED["siglip_tensor"])
    latents = F.pixel_shuffle(EXPECTED["flux_hidden_states"].transpose(1, 2).unflatten(2, (4, 3)), 2)
    text = EXPECTED["flux_text"], EXPECTED["flux_pooled"]
    for read, name in ((sequence, "velocity"), (torch.zeros_like(sequence), "velocity_negative")):
        velocity = converted.predict_velocity(latents, EXPECTED["flux_timestep"], read, text)
        close(F.pixel_unshuffle(velocity, 2).flatten(2).transpose(1, 2), EXPECTED[name])


def test_the_published_settings_are_the_defaults(converted):
    config = converted.generation_config
    assert (config["min_p"], config["guidance_scale"]) == (0.03, 1.0)
    assert (config["num_inference_steps"], config["decoder_guidance_scale"]) == (3, 2.0)


def test_images_of_a_flux_depend_on_tokens_and_text(pipe):
    out = pipe(["a red fox", "snow"], **SIZE, generator=[seeded(0), seeded(1)], output_type="pt")
    assert out.images.shape == (2, 3, 64, 48) and out.stats.decoder_steps == 2
    assert set(out.stats.seconds) == {"tokens", "hand_off", "decoder", "pixels"}
    alone = pipe("snow", **SIZE, generator=seeded(1), output_type="pt").images
    close(alone, out.images[1:], 1e-3)
    guided = pipe("snow", **SIZE, generator=seeded(1), output_type="pt", decoder_guidance_scale=3.0).images
    assert not torch.equal(guided, alone)


def test_tokens_are_guided_away_from_a_negative_prompt(pipe):
    options = {**SIZE, **LATENT, "guidance_scale": 2.0}
    plain, fog = (pipe("snow", negative, generator=seeded(0), **options).images for negative in (None, "fog"))
    assert not torch.equal(plain, fog)
    with pytest.raises(ValueError, match="either a negative_prompt or"):
        pipe("snow", "fog", negative_input_ids=EXPECTED["negative_input_ids"], **options)


def test_a_flux_of_ones_own_is_handed_over(converted, pipe, tmp_path):
    parts = {name: part for name, part in pipe.components.items() if name not in ("language_model", "projector")}
    del parts["text_tokenizer"]
    flux = FluxPipeline(**parts)
    own = {name: part for name, part in converted.components.items() if part is not None}
    whole = XOmniPipeline.from_pipe(flux, **own | {"text_tokenizer": pipe.text_tokenizer})
    options = {**SIZE, "output_type": "pt", "num_inference_steps": 2, "decoder_guidance_scale": 2.0}
    images = whole("snow", generator=seeded(1), min_p=0.03, top_k=50, **options).images
    assert torch.equal(images, pipe("snow", generator=seeded(1), **options).images)
    whole.save_pretrained(tmp_path)
    loaded = AutoPipeline.from_pretrained(tmp_path)
    assert torch.equal(loaded("snow", generator=seeded(1), min_p=0.03, top_k=50, **options).images, images)


def test_what_is_missing_is_said_before_any_token(converted, pipe):
    with pytest.raises(ValueError, match="no vae .*from_pipe.*latent"):
        converted(**given())
    with pytest.raises(ValueError, match="no text_tokenizer: give input_ids"):
        converted("snow", **SIZE, **LATENT)
    with pytest.raises(ValueError, match="reads prompts as text"):
        pipe(**given())
    with pytest.raises(ValueError, match="multiple of 16"):
        pipe("snow", height=50, width=48, **LATENT)
    ids = EXPECTED["input_ids"].clone()
    ids[0, 0] = 272
    with pytest.raises(ValueError, match="token id 272"):
        converted(**given() | {"input_ids": ids}, **LATENT)
    ids[0, :2] = 264
    with pytest.raises(ValueError, match="<SOM>"):
        converted(**given() | {"input_ids": ids}, **LATENT)


def copy(folder, **changes):
    shutil.copytree(FIXTURES, folder)
    state = load_file(folder / "model.safetensors") | changes
    save_file({key: value for key, value in state.items() if value is not None}, folder / "model.safetensors")
    return folder


def test_folders_that_do_not_fit_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"mm_norm\.weight"):
        convert_x_omni(copy(tmp_path / "missing", **{"model.mm_norm.weight": None}))
    with pytest.raises(CheckpointError, match=r"model\.other"):
        convert_x_omni(copy(tmp_path / "unknown", **{"model.other": torch.zeros(1)}))
    folder = copy(tmp_path / "kind")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"image_vocab_size": 63}))
    with pytest.raises(CheckpointError, match="63, the projector 64"):
        convert_x_omni(folder)
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "qwen2"}))
    with pytest.raises(CheckpointError, match="'x-omni' was expected"):
        convert_x_omni(folder)
    shutil.rmtree(folder / "diffusers")
    (folder / "config.json").write_text(json.dumps(config))
    assert convert_x_omni(folder).transformer is None
