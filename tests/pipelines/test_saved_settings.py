"""What a saved folder says besides its components is checked by schemas when it is read."""

import json

import pytest
from pipelines.latent_llama import tiny as tiny_latent_llama
from pipelines.llamagen import tiny as tiny_llamagen
from pipelines.mar import tiny as tiny_mar

from arimage.auto import class_names
from arimage.families import family_of
from arimage.pipelines.saving.saved_folder import read_index
from arimage.pipelines.saving.saved_settings import load_defaults
from arimage.pipelines.text.known import KNOWN_CAPTIONS, load_known


DEEP = ["[" * 100_000, '{"a":' * 100_000]
ODD = [None, True, "x", -1, 10**30, 10**400, float("nan"), float("inf"), [], [[]], {}, {"a": 1}]
# By pipeline, the settings that it takes with one good value each.
SETTINGS = {
    "tokens": {"guidance_scale": 2, "temperature": 0.5, "top_k": 3, "top_p": 1, "min_p": 0.1, "guided_tokens": 4},
    "latents": {
        "guidance_scale": 2,
        "temperature": 0.5,
        "guidance_schedule": "constant",
        "num_diffusion_steps": [2, 3],
    },
}
OTHERS = {"tokens": ["num_inference_steps", "guidance_schedule", "order"], "latents": ["top_k", "min_p", "order"]}


@pytest.fixture(scope="module")
def pipes():
    return {"tokens": tiny_llamagen.class_pipeline(), "latents": tiny_latent_llama.pipeline()}


@pytest.fixture
def load(pipes, tmp_path):
    """Give a pipeline defaults from a file that holds them."""

    def load(kind, defaults):
        path = tmp_path / "generation_config.json"
        path.write_text(defaults if isinstance(defaults, str) else json.dumps(defaults))
        load_defaults(pipes[kind], path)
        return pipes[kind]

    return load


@pytest.mark.parametrize("kind", SETTINGS)
def test_sound_defaults_are_taken(load, kind):
    pipe = load(kind, SETTINGS[kind] | {"decoding": {"method": "AutoregressiveDecoding"}})
    assert pipe.generation_config.items() >= SETTINGS[kind].items()


@pytest.mark.every(3)
@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in SETTINGS.items() for name in names])
def test_odd_defaults_are_refused_by_name(load, kind, name):
    for value in ODD:
        if (name, value) == ("guided_tokens", None):
            continue
        with pytest.raises(ValueError, match=f"^.*generation_config.json: {name}.* (give|choose|leave)") as refusal:
            load(kind, {name: value})
        assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in OTHERS.items() for name in names])
def test_defaults_of_other_pipelines_are_refused(load, kind, name):
    value = {"guidance_schedule": "linear", "order": "raster"}.get(name, 3)
    with pytest.raises(ValueError, match=f"generation_config.json: {name} is"):
        load(kind, {name: value})


@pytest.mark.parametrize("value", [value for value in ODD if value != {}])
@pytest.mark.parametrize("name", ["method", "window", "acceptance", "refresh", "relax", "levels"])
def test_odd_decodings_are_refused(load, name, value):
    decoding = {"method": "SpeculativeJacobiDecoding"} | {name: value}
    with pytest.raises(ValueError, match="generation_config.json: "):
        load("tokens", {"decoding": decoding})


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", *DEEP])
def test_a_file_without_defaults_is_refused(load, text):
    with pytest.raises(ValueError, match="generation_config.json"):
        load("tokens", text)


NO_NUMBERS = [None, 0, -1, "x", 64.0]


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("kind", "name", "values"),
    [
        (
            "MARPipeline",
            "id2label",
            ["x", [], 5, {"0": 5}, {"0": ""}, {"1": "cat"}, {"0": "cat", "2": "dog"}, {"cat": "0"}, {"0": None}],
        ),
        ("CosmosPipeline", "fps", [None, True, 0, -1, 1.5, "x", float("nan"), 10**9]),
        ("CosmosPipeline", "begins_with_text", [None, 0, 1, "x"]),
        ("CosmosPipeline", "requires_safety_checker", [None, 0, "x"]),
        ("AnolePipeline", "image_size", [*NO_NUMBERS, 10**9]),
        ("Emu3Pipeline", "image_area", [*NO_NUMBERS, 10**12]),
        ("Emu35Pipeline", "image_area", [*NO_NUMBERS, 10**12]),
        ("Emu35Pipeline", "token_ids", [[], {"a": -1}, {"a": "x"}, {"a": None}]),
        ("Emu35Pipeline", "edit_guidance_scale", [None, -1, "x", float("inf")]),
        ("MammothModa2Pipeline", "image_size", [*NO_NUMBERS, 10**9]),
        ("MammothModa2Pipeline", "token_grid", [None, [], [32], [32, 0], [1, 2, 3], 32]),
        ("MammothModa2Pipeline", "num_codes", [0, "x", 1.5]),
        ("MammothModa2Pipeline", "reads_answer_text", [None, 0, "x"]),
        ("MammothModa2Pipeline", "reads_last_tokens", [None, 0, "x"]),
    ],
)
def test_odd_fields_of_the_index_are_refused_by_name(tmp_path, kind, name, values):
    path = tmp_path / "model_index.json"
    for value in values:
        path.write_text(json.dumps({"_class_name": kind, name: value}))
        with pytest.raises(ValueError, match=f"^.*model_index.json: {name}.*: (give|name|choose|leave)"):
            read_index(path, family_of(kind))
        with pytest.raises(ValueError, match=name):
            class_names(tmp_path)


@pytest.mark.parametrize("text", DEEP)
def test_deep_files_are_refused(tmp_path, text):
    (tmp_path / KNOWN_CAPTIONS).write_text(text)
    with pytest.raises(ValueError, match=KNOWN_CAPTIONS):
        load_known(tmp_path)
    (tmp_path / "model_index.json").write_text(text)
    with pytest.raises(ValueError, match="model_index.json"):
        class_names(tmp_path)


@pytest.mark.parametrize("build", [tiny_latent_llama.pipeline, tiny_mar.pipeline])
def test_more_denoising_steps_than_there_were_in_training_are_refused_at_once(build):
    pipe = build()
    for steps in (1001, 10**9, [600, 500]):
        with pytest.raises(ValueError, match="num_diffusion_steps is"):
            pipe(class_labels=0, num_diffusion_steps=steps)
