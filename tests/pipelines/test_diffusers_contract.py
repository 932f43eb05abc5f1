"""What users of diffusers expect of every pipeline. The other files of this folder answer it for calls, weights and
images."""

import json
import shutil

import accelerate
import numpy as np
import pytest
import torch
from diffusers import AutoPipelineForText2Image, DiffusionPipeline
from diffusers.callbacks import PipelineCallback
from diffusers.pipelines import pipeline_utils
from diffusers.utils import dynamic_modules_utils
from families import BUILD, EVERY, KINDS, LATENT, OTHERS, condition_of, flat, one_of_each_kind, pictures_of, seeded
from huggingface_hub import ModelCard
from huggingface_hub.utils import filter_repo_objects

from arimage import AutoPipeline, FewStepDecoding, SpeculativeJacobiDecoding, decoding_from_name
from arimage.pipelines.saving import mixin


DEFAULTS = {"guidance_scale": 2.5, "temperature": 0.9, "top_k": 7, "top_p": 0.95}
WITH_TEXT_ENCODER = ("llamagen-text", "var-text")
# diffusers has a pipeline of the same name, whose folders ours are.
ALL = BUILD | {name: build for name, build in OTHERS.items() if name != "glm-image"}


def built(name):
    """A pipeline whose settings are not the defaults of its class."""
    pipe = ALL[name]()
    pipe.generation_config.update({key: value for key, value in DEFAULTS.items() if key in pipe.generation_config})
    if pipe.abilities.generates_video:
        pipe.generation_config["guidance_scale"] = 1.0
    if name.endswith("-dd"):
        pipe.decoding = FewStepDecoding(starts=(0, 2), teacher_start=0)
    elif pipe.abilities.kind == "tokens":
        pipe.decoding = SpeculativeJacobiDecoding(window=5)
    return pipe


class Made(dict):
    """What is made for a name when it is first asked for."""

    def __init__(self, make):
        super().__init__()
        self.make = make

    def __missing__(self, name):
        self[name] = self.make(name)
        return self[name]


@pytest.fixture(scope="module")
def pipes():
    return Made(built)


@pytest.fixture(scope="module")
def folders(pipes, tmp_path_factory):
    root = tmp_path_factory.mktemp("saved")

    def save(name):
        pipes[name].save_pretrained(root / name)
        return root / name

    return Made(save)


@pytest.fixture(params=one_of_each_kind(ALL))
def name(request):
    return request.param


@pytest.fixture
def pipe(name, pipes):
    return pipes[name]


@pytest.fixture
def folder(name, folders):
    return folders[name]


@pytest.fixture
def trusting(monkeypatch, tmp_path):
    """Where diffusers copies the files that it runs."""
    monkeypatch.setattr(dynamic_modules_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))


def tokens_of(pipe, seed=0, **arguments):
    pipe.set_progress_bar_config(disable=True)
    return flat(pipe(**condition_of(pipe) | arguments, generator=seeded(seed), **LATENT).tokens)


def same(found, wanted):
    """Equal, but for the rounding of continuous tokens, which changes with the place of weights in memory and which an
    untrained head multiplies."""
    if found.is_floating_point():
        return torch.allclose(found, wanted, atol=1e-2, rtol=1e-3)
    return torch.equal(found, wanted)


def decoding_of(pipe):
    return "next-scale" if pipe.abilities.kind == "scales" else "ar"


@pytest.mark.every(2)
@pytest.mark.usefixtures("trusting")
def test_diffusers_loads_a_saved_folder(pipe, folder):
    loaded = DiffusionPipeline.from_pretrained(folder, trust_remote_code=True)
    assert type(loaded) is type(pipe)
    assert loaded.generation_config == pipe.generation_config and loaded.decoding == pipe.decoding
    assert same(tokens_of(loaded), tokens_of(pipe))


@pytest.mark.usefixtures("trusting")
def test_diffusers_runs_no_file_that_is_not_trusted(folder):
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        DiffusionPipeline.from_pretrained(folder)


def test_the_pages_about_the_auto_pipelines_of_diffusers_are_true(folder, pipe):
    for load in (
        lambda: AutoPipelineForText2Image.from_pretrained(folder),
        lambda: AutoPipelineForText2Image.from_pipe(pipe),
    ):
        with pytest.raises(ValueError, match=type(pipe).__name__):
            load()


def test_each_file_for_diffusers_is_one_import(folder):
    index = json.loads((folder / "model_index.json").read_text())
    named = {f"{index['_class_name'][0]}.py"}
    for name, entry in index.items():
        if isinstance(entry, list) and (folder / name / f"{entry[0]}.py").is_file():
            named.add(f"{name}/{entry[0]}.py")
    files = {str(path.relative_to(folder)) for path in folder.rglob("*.py")}
    assert files == named
    for file in files:
        (line,) = (folder / file).read_text().splitlines()
        assert line.startswith("from arimage import ")


@pytest.mark.parametrize("loader", ["class", "auto"])
def test_our_loaders_run_no_file_of_a_folder(pipe, folder, loader, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    for path in copy.rglob("*.py"):
        path.write_text("raise SystemExit")
    loaded = (AutoPipeline if loader == "auto" else type(pipe)).from_pretrained(copy)
    assert type(loaded) is type(pipe) and loaded.generation_config == pipe.generation_config


@pytest.mark.every(2)
def test_a_folder_of_an_earlier_version_loads(pipe, folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy", ignore=shutil.ignore_patterns("*.py", "README.md"))
    index = json.loads((copy / "model_index.json").read_text())
    index["_class_name"] = type(pipe).__name__
    for name, entry in index.items():
        if type(pipe.components.get(name)).__module__.startswith("arimage."):
            index[name] = [type(pipe.components[name]).__module__, entry[1]]
    (copy / "model_index.json").write_text(json.dumps(index))
    assert same(tokens_of(AutoPipeline.from_pretrained(copy)), tokens_of(pipe))


@pytest.fixture
def hub(monkeypatch, folders, tmp_path):
    """A stand-in for the Hub with the repository someone/NAME for every family."""

    class Info:
        def __init__(self, folder):
            self.sha = "a" * 40
            self.siblings = [
                type("File", (), {"rfilename": str(path.relative_to(folder))})
                for path in folder.rglob("*")
                if path.is_file()
            ]

    def folder_of(repository):
        return folders[repository.removeprefix("someone/")]

    def cached(repository, files):
        out = tmp_path / f"models--{repository.replace('/', '--')}" / "snapshot"
        for file in files:
            (out / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(folder_of(repository) / file, out / file)
        return out

    def download(repository, filename, **options):
        return str(cached(repository, [filename]) / filename)

    def snapshot(repository, allow_patterns, ignore_patterns, **options):
        files = [one.rfilename for one in Info(folder_of(repository)).siblings]
        chosen = filter_repo_objects(files, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns)
        return str(cached(repository, chosen))

    for module in (pipeline_utils, dynamic_modules_utils):
        monkeypatch.setattr(module, "model_info", lambda repository, **options: Info(folder_of(repository)))
        monkeypatch.setattr(module, "hf_hub_download", download)
    monkeypatch.setattr(pipeline_utils, "snapshot_download", snapshot)
    monkeypatch.setattr(mixin, "snapshot_download", snapshot)
    for module in ("huggingface_hub", "diffusers.configuration_utils"):
        monkeypatch.setattr(f"{module}.hf_hub_download", download)
    return tmp_path


@pytest.mark.every(2)
@pytest.mark.usefixtures("trusting", "hub")
@pytest.mark.parametrize("name", one_of_each_kind(name for name in ALL if name != "janus"))
def test_diffusers_loads_a_repository(name, pipe):
    loaded = DiffusionPipeline.from_pretrained(f"someone/{name}", trust_remote_code=True)
    assert type(loaded) is type(pipe)
    assert loaded.generation_config == pipe.generation_config and loaded.decoding == pipe.decoding


@pytest.mark.usefixtures("trusting", "hub")
def test_a_repository_of_which_diffusers_downloads_too_little_is_refused():
    with pytest.raises(ValueError, match="DiffusionPipeline does not download model/generation_config.json"):
        DiffusionPipeline.from_pretrained("someone/janus", trust_remote_code=True)
    assert AutoPipeline.from_pretrained("someone/janus").generation_config == DEFAULTS


def test_parts_that_are_given_are_not_downloaded(pipes, hub):
    kind = type(pipes["llamagen-text"])
    without = dict.fromkeys(("transformer", "vq", "drafter", "denoiser", "neighbours"))
    loaded = kind.from_pretrained("someone/llamagen-text", **without)
    assert loaded.text_encoder is not None and loaded.transformer is None
    snapshot = hub / "models--someone--llamagen-text" / "snapshot"
    assert {path.name for path in snapshot.iterdir() if path.is_dir()} == {"text_encoder", "tokenizer"}


@pytest.mark.every(3)
@pytest.mark.parametrize("way", ["pipeline", "folder"])
def test_an_upload_has_a_card_that_names_the_repository(pipe, monkeypatch, tmp_path, way):
    cards = []

    def create(repository, **options):
        return type("Repository", (), {"repo_id": repository})

    def missing(*arguments, **options):
        return ModelCard("no card")

    for module in ("diffusers.utils.hub_utils", "diffusers.pipelines.pipeline_utils"):
        monkeypatch.setattr(f"{module}.create_repo", create)
        monkeypatch.setattr(f"{module}.load_or_create_model_card", missing)
    monkeypatch.setattr(mixin, "file_exists", lambda *arguments, **options: False)
    monkeypatch.setattr(
        "diffusers.utils.hub_utils.upload_folder",
        lambda folder_path, **options: cards.append(ModelCard.load(f"{folder_path}/README.md")),
    )
    if way == "pipeline":
        pipe.push_to_hub("someone/hearts")
    else:
        pipe.save_pretrained(str(tmp_path), push_to_hub=True, repo_id="someone/hearts")
    (card,) = cards
    assert card.data.to_dict()["library_name"] == "arimage" and "diffusers" in card.data.tags
    assert 'AutoPipeline.from_pretrained("someone/hearts")' in card.text
    assert ("class_labels" in card.text) == (pipe.num_classes is not None)


@pytest.mark.every(2)
def test_a_variant_and_shards_are_written_and_read(name, pipe, tmp_path):
    pipe.save_pretrained(tmp_path, variant="fp16", max_shard_size="40KB")
    loaded = AutoPipeline.from_pretrained(tmp_path, variant="fp16")
    assert same(tokens_of(loaded), tokens_of(pipe))


@pytest.mark.every(2)
def test_a_pipeline_made_from_another_keeps_its_settings(pipe):
    made = type(pipe).from_pipe(pipe)
    assert made.generation_config == pipe.generation_config and made.decoding == pipe.decoding
    assert made.components == pipe.components
    assert same(tokens_of(made), tokens_of(pipe))


@pytest.mark.parametrize("name", WITH_TEXT_ENCODER)
def test_a_text_encoder_is_used_without_the_rest(pipe, folder):
    encoder = type(pipe).from_pretrained(folder, transformer=None, vq=None)
    assert encoder.num_classes is None
    embeds, mask = encoder.encode_prompt("a red heart")
    assert not embeds.requires_grad
    rest = type(pipe).from_pretrained(folder, text_encoder=None, tokenizer=None)
    found = tokens_of(rest, prompt=None, prompt_embeds=embeds, prompt_attention_mask=mask)
    assert torch.equal(found, tokens_of(pipe))
    with pytest.raises(ValueError, match="no transformer"):
        encoder("a red heart")
    with pytest.raises(ValueError, match="no text encoder"):
        rest.encode_prompt("a red heart")
    assert encoder.encode_prompt(["a", "b"], max_sequence_length=5)[0].shape[:2] == (2, 5)


@pytest.mark.every(2)
def test_a_call_leaves_weights_and_the_global_generator_as_they_were(pipe):
    parts = {name: one for name, one in pipe.components.items() if isinstance(one, torch.nn.Module)}
    before = {(name, key): value.clone() for name, part in parts.items() for key, value in part.state_dict().items()}
    state = torch.get_rng_state()
    tokens_of(pipe)
    assert torch.equal(torch.get_rng_state(), state)
    for name, part in parts.items():
        for key, value in part.state_dict().items():
            assert torch.equal(value, before[name, key]), (name, key)


@pytest.mark.every(2)
def test_generators(pipe):
    options = condition_of(pipe) | {pipe.per_prompt: 2} | LATENT
    one = seeded(0)
    first, second = (flat(pipe(**options, generator=one).tokens) for _ in range(2))
    assert not torch.equal(first, second)
    listed = [flat(pipe(**options, generator=[seeded(a), seeded(b)]).tokens) for a, b in ((1, 2), (2, 1))]
    assert same(listed[0], listed[1].flip(0))
    torch.manual_seed(3)
    unnamed, other = (flat(pipe(**options).tokens) for _ in range(2))
    assert not torch.equal(unnamed, other)
    torch.manual_seed(3)
    assert torch.equal(flat(pipe(**options).tokens), unnamed)
    with pytest.raises(ValueError, match="generator holds 1 for 2 images"):
        pipe(**options, generator=[seeded(0)])


@pytest.mark.every(2)
def test_output_is_an_object_or_a_tuple(pipe):
    options = condition_of(pipe) | {"output_type": "pt"}
    named = pipe(**options, generator=seeded(0))
    (images,) = pipe(**options, generator=seeded(0), return_dict=False)
    name = "frames" if pipe.abilities.generates_video else "images"
    assert torch.equal(images, named[0]) and torch.equal(named[name], images)


@pytest.mark.every(2)
def test_output_types_hold_the_same_images(pipe):
    pil, array, tensor = (
        pictures_of(pipe(**condition_of(pipe), generator=seeded(0), output_type=kind)) for kind in ("pil", "np", "pt")
    )
    np.testing.assert_array_equal(array, tensor.movedim(-3, -1).numpy())
    levels = np.asarray(
        [[np.asarray(frame) for frame in video] for video in pil] if pipe.abilities.generates_video else pil
    )
    # Some families round down.
    assert np.abs(levels / 255 - array).max() < 1.001 / 255


@pytest.mark.every(2)
def test_the_progress_bar_may_be_configured(pipe, capfd):
    pipe.set_progress_bar_config(disable=False, desc="hearts")
    pipe(**condition_of(pipe), **LATENT)
    assert "hearts" in capfd.readouterr().err
    tokens_of(pipe)
    assert "hearts" not in capfd.readouterr().err


@pytest.mark.every(5)
@pytest.mark.parametrize(
    ("name", "guidance_scale"),
    [
        *(pytest.param(name, 2.5, marks=[pytest.mark.slow] * (name not in KINDS)) for name in EVERY),
        *((name, 1.0) for name in ("llamagen-text", "mar", "lpd")),
    ],
)
def test_components_may_be_offloaded_layer_by_layer(name, guidance_scale):
    pipe = EVERY[name]()
    options = {**condition_of(pipe), "output_type": "pt"}
    if not pipe.abilities.generates_video or pipe.begins_with_text:
        options["guidance_scale"] = guidance_scale
    expected = pictures_of(pipe(**options, generator=seeded(0)))
    picture = {"image": expected, "mask_image": torch.ones(expected.shape[-2:]).tril()[None]}
    edited = (
        pictures_of(pipe(**options, **picture, generator=seeded(1))) if pipe.abilities.accepts("mask_image") else None
    )
    for part in pipe.components.values():
        if isinstance(part, torch.nn.Module):
            # As `enable_sequential_cpu_offload`, which refuses a CPU.
            accelerate.cpu_offload(part, "cpu", offload_buffers=len(part._parameters) > 0)
    images = pictures_of(pipe(**options, generator=seeded(0)))
    torch.testing.assert_close(images, expected, atol=1e-5, rtol=0)
    if edited is not None:
        images = pictures_of(pipe(**options, **picture, generator=seeded(1)))
        torch.testing.assert_close(images, edited, atol=1e-5, rtol=0)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("enable_model_cpu_offload", {}),
        ("enable_sequential_cpu_offload", {}),
        ("enable_group_offload", {"onload_device": torch.device("cuda")}),
        ("enable_group_offload", {"onload_device": torch.device("cuda"), "use_stream": True}),
    ],
    ids=["model", "sequential", "group", "group with a stream"],
)
@pytest.mark.parametrize("name", EVERY)
def test_offloading_on_a_gpu_changes_nothing(name, method, options):
    plain, pipe = EVERY[name]().to("cuda"), EVERY[name]()
    given = {**condition_of(pipe), "output_type": "pt"}
    getattr(pipe, method)(**options)
    expected, images = (pictures_of(each(**given, generator=seeded(0))) for each in (plain, pipe))
    torch.testing.assert_close(images.cpu(), expected.cpu(), atol=2e-2, rtol=0)
    if pipe.abilities.accepts("mask_image"):
        given |= {"image": expected.cpu(), "mask_image": torch.ones(expected.shape[-2:]).tril()[None]}
        expected, images = (pictures_of(each(**given, generator=seeded(0))) for each in (plain, pipe))
        torch.testing.assert_close(images.cpu(), expected.cpu(), atol=2e-2, rtol=0)


class Watch(PipelineCallback):
    tensor_inputs = ["tokens"]

    def __init__(self):
        super().__init__()
        self.seen = []

    def callback_fn(self, pipeline, step_index, timestep, callback_kwargs):
        self.seen.append((pipeline.guidance_scale, pipeline.do_classifier_free_guidance, pipeline.num_timesteps))
        pipeline._interrupt = step_index == 2
        return callback_kwargs


def test_a_callback_of_diffusers_sees_the_state_of_its_call(pipe):
    watch = Watch()
    pipe(**condition_of(pipe), callback_on_step_end=watch, callback_on_step_end_tensor_inputs=["tokens"], **LATENT)
    call = pipe.prepare(**condition_of(pipe))
    call.decoding = pipe.decoding
    assert watch.seen == [(pipe.generation_config["guidance_scale"], call.guided, call.num_timesteps)] * 3
    assert pipe.num_timesteps is None and pipe.guidance_scale is None and not pipe.interrupt


@pytest.mark.parametrize("name", one_of_each_kind(BUILD))
def test_what_follows_a_replaced_token_is_generated_from_it(pipe):
    """The greedy tokens after a replaced first one are those of a model that is fed with it."""
    options = {**condition_of(pipe), "decoding": decoding_of(pipe), "top_k": 1, "guidance_scale": 1.0}
    free = tokens_of(pipe, **options)
    model = pipe.prepare(**condition_of(pipe)).model
    # A map of bits has several at its only place.
    first, *later = model.scale_sizes if pipe.abilities.kind == "scales" else (1,)
    other = (free[:, :first] + 1) % model.vocab_size

    def steer(pipe, step, passes, tensors):
        if step == 0:
            return {"tokens": torch.cat([other, tensors["tokens"][:, first:]], dim=1)}

    steered = tokens_of(pipe, **options, callback_on_step_end=steer)
    assert torch.equal(steered[:, :first], other)
    call = pipe.prepare(**condition_of(pipe), top_k=1, guidance_scale=1.0)
    cache, _ = call.model.prefill(1)
    if pipe.abilities.kind == "scales":
        latents = call.model.accumulate(0, None, call.model.vectors(0, other))
        logits = call.model.forward(1, latents, cache)
        assert torch.equal(steered[:, first : first + later[0]], logits[0].argmax(-1))
    else:
        logits = call.model.forward(other, torch.zeros(1, 1, dtype=torch.long), cache)
        assert torch.equal(steered[:, 1], logits[0, :, 0].argmax(-1))


@pytest.mark.every(2)
def test_tensors_of_a_callback_are_copies(pipe):
    def spoil(pipe, step, passes, tensors):
        tensors["tokens"].zero_()

    assert same(tokens_of(pipe, callback_on_step_end=spoil), tokens_of(pipe))


@pytest.mark.parametrize(
    ("returned", "sentence"),
    [
        (lambda tokens: tokens, "return None, or"),
        (lambda tokens: {"noise": tokens}, "'noise'"),
        (lambda tokens: {"tokens": tokens[:, 1:]}, "not int64"),
        (lambda tokens: {"tokens": tokens.float()}, "not int64"),
        (lambda tokens: {"tokens": tokens + 10**6}, "may not change"),
        (lambda tokens: {"tokens": torch.where(tokens < 0, 0, tokens)}, "may not change"),
        (lambda tokens: {"tokens": torch.where(tokens < 0, tokens, -1)}, "may not change"),
        (lambda tokens: {"tokens": tokens.to("meta")}, "'tokens', not as a tensor"),
    ],
)
@pytest.mark.parametrize("name", ["llamagen-class", "var-class"])
def test_what_a_callback_may_not_return_is_refused(pipe, returned, sentence):
    with pytest.raises(ValueError, match=sentence):
        tokens_of(
            pipe,
            decoding=decoding_of(pipe),
            callback_on_step_end=lambda pipe, step, passes, tensors: returned(tensors["tokens"]),
        )


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("name", "decoding"),
    [
        ("llamagen-text", "sjd-coupled"),
        ("llamagen-text", "eagle"),
        ("lumina", "zipar"),
        ("var-text", "code"),
        ("mar", "mar"),
        ("llamagen-dd", "few-step"),
        ("cosmos", "sjd"),
    ],
)
def test_a_decoding_that_has_used_its_tokens_refuses_others(pipe, decoding):
    def steer(pipe, step, passes, tensors):
        return {"tokens": (tensors["tokens"] + 1) % 2}

    with pytest.raises(ValueError, match=f"{type(decoding_from_name(decoding)).__name__} has computed"):
        tokens_of(pipe, decoding=decoding, callback_on_step_end=steer)
