"""Parts of finished models learn from tokens of the model: they come closer to it on held-out images, leave the rest
as it was, and go on after an interruption."""

import json
import math
import sys
from dataclasses import replace

import pytest
import torch
from pipelines.llamagen import tiny as tiny_llamagen
from pipelines.var import tiny as tiny_var

from arimage import AutoPipeline, CollaborativeDecoding, LlamaGenDDPipeline, VARDDPipeline
from arimage.cli import main as cli
from arimage.pipelines.llamagen.convert import convert_llamagen
from arimage.pipelines.var.convert import convert_var
from arimage.settings.schema import check
from arimage.training import commands
from arimage.training.checkpoints import load_checkpoint
from arimage.training.recipe import PartRecipe, load_recipe, recipes


pytest.importorskip("datasets", reason="the extra `train` is not installed")
from training.tokens.test_cache import encode, parquet  # noqa: E402

from arimage.training.acceleration import parts  # noqa: E402
from arimage.training.acceleration.denoiser import begin_denoiser  # noqa: E402
from arimage.training.acceleration.drafter import DrafterTask, begin_drafter  # noqa: E402
from arimage.training.acceleration.parts import OVERLAP, Sets, run_part  # noqa: E402
from arimage.training.acceleration.refiner import begin_refiner  # noqa: E402
from arimage.training.acceleration.student import begin_student  # noqa: E402
from arimage.training.acceleration.window_drafter import begin_window_drafter  # noqa: E402
from arimage.training.tokens.cache import TokenCache  # noqa: E402
from arimage.training.tokens.heldout import hold_out  # noqa: E402


MODELS = {
    "llamagen-text": tiny_llamagen.text_pipeline,
    "llamagen-class": tiny_llamagen.class_pipeline,
    "var-text": lambda: tiny_var.pipeline("text"),
    "var-class": lambda: tiny_var.pipeline("class"),
}
BEGIN = {"drafter": begin_drafter, "denoiser": begin_denoiser, "refiner": begin_refiner, "student": begin_student}
TRAINING = {
    "drafter": {"batch_size": 4},
    "denoiser": {"batch_size": 4, "segments": 4, "length": 6, "rank": 16},
    "refiner": {"batch_size": 4, "drafter_scales": 2},
    "student": {"batch_size": 4, "noises_per_prompt": 2, "starts": [0, 6]},
}


# A refiner that is new, as drafters and denoisers are.
SMALL = {"refiner": {"hidden_size": 16, "num_layers": 1, "num_attention_heads": 2}}


def recipe(part, steps=2, model=None, kind="tree", **training):
    optimizer = {"steps": steps, "learning_rate": 1e-2, "warmup_steps": 2, "ema_decay": 0.8}
    table = {"part": part, "kind": kind, "model": model or {}, "optimizer": optimizer}
    table["training"] = TRAINING[part] | training
    return check(PartRecipe, table, "mine.toml")


@pytest.fixture(scope="module")
def caches(tmp_path_factory):
    """The folders of tokens of twenty pictures with captions or classes, by the names of the models."""
    root = tmp_path_factory.mktemp("tokens")
    colours = [f"a {one} heart" for one in ("red", "green", "blue", "white")]
    parquet(root / "text.parquet", range(20), caption=[colours[number % 4] for number in range(20)])
    parquet(root / "class.parquet", range(20), label=[number % 10 for number in range(20)])
    for name, make in MODELS.items():
        encode(make(), root / f"{name.partition('-')[2]}.parquet", root / name, model=name)
    return root


def train(name, part, caches, out, steps=2, **more):
    pipe = MODELS[name]()
    figures = run_part(BEGIN[part], recipe(part, steps, **more), pipe, caches / name, None, out)
    return pipe, figures


def test_a_part_learns_the_classes_of_its_model(caches, tmp_path, monkeypatch):
    cache = TokenCache(caches / "llamagen-class")
    monkeypatch.setattr(parts, "open_sets", lambda *_: (cache, cache, {"": cache}))
    for count, theirs, ours in ((11, None, None), (10, "jihgfedcba", "abcdefghij"), (2, "bc", "abcdefghij")):
        pipe = tiny_llamagen.class_pipeline()
        pipe.name_classes(ours and dict(enumerate(ours)))
        cache.index = replace(cache.index, num_classes=count, classes=theirs and [*theirs])
        with pytest.raises(ValueError, match=f"--model has 10 classes.*, and the tokens have {count} classes"):
            run_part(begin_drafter, recipe("drafter"), pipe, tmp_path, None, tmp_path)
    named = dict(enumerate("abcdefghij"))
    for count, theirs in ((5, None), (10, "abcdefghij"), (10, "klmnopqrst")):
        pipe.name_classes(named)
        cache.index = replace(cache.index, num_classes=count, classes=theirs and [*theirs])
        parts.check_classes(pipe, cache, "--model has")


@pytest.mark.parametrize(
    ("part", "name", "decoding"),
    [
        ("drafter", "llamagen-text", "eagle"),
        ("drafter", "llamagen-class", "eagle"),
        ("denoiser", "llamagen-text", "sjd2"),
        ("denoiser", "llamagen-class", "sjd2"),
        ("refiner", "var-text", "code"),
        ("refiner", "var-class", "code"),
        ("student", "llamagen-text", "flow"),
        ("student", "llamagen-class", "flow"),
        ("student", "var-class", "few-step"),
    ],
)
def test_the_command_saves_the_model_with_its_part(part, name, decoding, caches, tmp_path, monkeypatch, capsys):
    in_maps = {"starts": [0, 1]} if (part, name) == ("student", "var-class") else {}
    settings = "\n".join(f"{key} = {value}" for key, value in (TRAINING[part] | in_maps).items())
    (tmp_path / "mine.toml").write_text(
        f'part = "{part}"\n[optimizer]\nsteps = 2\nlearning_rate = 1e-3\n[training]\n{settings}\n'
    )
    monkeypatch.setattr(commands, "load_pipeline", lambda *_: MODELS[name]())
    words = ["--tokens", caches / name, "--model", "emoji-llamagen", "--recipe", tmp_path / "mine.toml"]
    words += ["--out", tmp_path / "run"]
    monkeypatch.setattr(sys, "argv", ["arimage", "train", part, *map(str, words)])
    with pytest.raises(SystemExit, match="0"):
        cli.main()
    figures = json.loads((tmp_path / "run" / "acceptance.json").read_text())
    kind = "foreseen" if part == "student" else OVERLAP
    assert all(0 <= figures[f"held-out {kind} {when}"] <= 1 for when in ("before", "after"))
    assert f"held-out {kind} after: {figures[f'held-out {kind} after']:.3f}" in capsys.readouterr().out
    if not name.startswith("var"):
        assert figures[f"tokens per forward pass after, {decoding}"] >= 1
    pipe = AutoPipeline.from_pretrained(tmp_path / "run" / "model")
    pipe.set_progress_bar_config(disable=True)
    given = {"prompt": "a red heart"} if name.endswith("text") else {"class_labels": 3}
    stats = pipe(**given, decoding=decoding, output_type="latent").stats
    assert stats.exact == (not name.startswith("var")) and stats.forward_passes <= 16
    assert isinstance(pipe, LlamaGenDDPipeline | VARDDPipeline) == (part == "student")
    if part == "refiner":
        assert pipe.decoding == CollaborativeDecoding(2)


@pytest.mark.parametrize(
    ("part", "name", "component"),
    [
        ("drafter", "llamagen-text", "drafter"),
        ("denoiser", "llamagen-text", "denoiser"),
        ("refiner", "var-text", "refiner"),
    ],
)
def test_it_comes_closer_on_held_out_images_and_changes_nothing_else(part, name, component, caches, tmp_path):
    pipe, figures = train(name, part, caches, tmp_path, steps=24, model=SMALL.get(part))
    assert figures[f"held-out {OVERLAP} after"] > figures[f"held-out {OVERLAP} before"]
    before = MODELS[name]()
    for key, module in before.components.items():
        if isinstance(module, torch.nn.Module) and key != component:
            for weight, value in module.state_dict().items():
                assert torch.equal(getattr(pipe, key).state_dict()[weight], value), f"{key} {weight}"


def converted_llamagen():
    folder = tiny_llamagen.FIXTURES / "c2i"
    return convert_llamagen(folder / "c2i_tiny.pt", folder / "vq_ds4_c2i.pt", 24, num_heads=4)


def converted_var():
    return convert_var(tiny_var.FOLDER / "var_d2.pth", tiny_var.FOLDER / "vae_ch32v64z8.pth")


@pytest.mark.parametrize(
    ("make", "begin", "given", "decoding"),
    [
        (converted_llamagen, begin_drafter, recipe("drafter"), "eagle"),
        (
            converted_llamagen,
            begin_window_drafter,
            recipe("drafter", kind="window", images=4, at_once=2, batch_size=16),
            "sjd-coupled:corrections=4",
        ),
        (converted_var, begin_refiner, recipe("refiner", model=SMALL["refiner"]), "code"),
    ],
    ids=["llamagen-drafter", "llamagen-window-drafter", "var-refiner"],
)
def test_parts_of_converted_checkpoints(make, begin, given, decoding, tmp_path):
    pipe = make()
    pipe.set_progress_bar_config(disable=True)
    parquet(tmp_path / "a.parquet", range(20), label=[number % 10 for number in range(20)])
    encode(pipe, tmp_path / "a.parquet", tmp_path / "tokens")
    figures = run_part(begin, given, pipe, tmp_path / "tokens", None, tmp_path / "run")
    assert 0 < figures[f"held-out {OVERLAP} after"] <= 1
    trained = AutoPipeline.from_pretrained(tmp_path / "run" / "model", dtype=torch.float32)
    trained.set_progress_bar_config(disable=True)
    stats = trained(class_labels=[3, 7], decoding=decoding, output_type="latent").stats
    assert stats.exact == (decoding != "code")


@pytest.mark.parametrize(("part", "name"), [("denoiser", "llamagen-text"), ("refiner", "var-text")])
def test_the_transformer_may_be_fine_tuned_with_it(part, name, caches, tmp_path):
    pipe, _ = train(name, part, caches, tmp_path, fine_tune=True)
    before, changed = MODELS[name](), set()
    for key, module in before.components.items():
        if isinstance(module, torch.nn.Module):
            after = getattr(pipe, key).state_dict()
            changed |= {key for weight, value in module.state_dict().items() if not torch.equal(after[weight], value)}
    assert changed == {part, "transformer"}


@pytest.mark.parametrize("part", ["drafter", pytest.param("student", marks=pytest.mark.slow)])
def test_an_interrupted_run_ends_as_if_it_had_never_been(part, caches, tmp_path, monkeypatch):
    train("llamagen-text", part, caches, tmp_path / "whole", steps=6)
    fit = parts.fit

    def stopping(task, *args, **more):
        loss = task.loss

        def stops(step):
            if step == 4:
                raise KeyboardInterrupt
            return loss(step)

        task.loss = stops
        fit(task, *args, checkpoint_every_seconds=-1.0, **more)

    with monkeypatch.context() as broken:
        broken.setattr(parts, "fit", stopping)
        with pytest.raises(KeyboardInterrupt):
            train("llamagen-text", part, caches, tmp_path / "parts", steps=6)
    assert torch.load(tmp_path / "parts" / part / "checkpoint.pt", weights_only=True)["step"] == 4
    train("llamagen-text", part, caches, tmp_path / "parts", steps=6)
    ours, theirs = (AutoPipeline.from_pretrained(tmp_path / run / "model").components for run in ("whole", "parts"))
    key = "transformer" if part == "student" else part
    for name, value in ours[key].state_dict().items():
        assert torch.equal(theirs[key].state_dict()[name], value), name


def test_held_out_images_are_not_trained(caches, tmp_path, monkeypatch):
    seen, figures = {True: set(), False: set()}, DrafterTask.figures

    def recorded(self, captions, tokens, generator):
        seen[self.training] |= {tuple(row) for row in tokens.tolist()}
        return figures(self, captions, tokens, generator)

    monkeypatch.setattr(DrafterTask, "figures", recorded)
    train("llamagen-text", "drafter", caches, tmp_path, steps=8)
    assert seen[True] and seen[False] and not seen[True] & seen[False]


def begun(name, caches):
    cache = TokenCache(caches / name)
    trained, held = hold_out(cache)
    return MODELS[name](), Sets(trained, held)


def test_a_denoiser_reads_what_decoding_reads(caches, tmp_path, monkeypatch):
    """Every segment of a batch has the logits of a forward pass over the clean tokens before it and its own noise."""
    pipe, sets = begun("llamagen-text", caches)
    task, calls = begin_denoiser(recipe("denoiser"), pipe, sets, tmp_path), []
    settings, forward = task.settings, pipe.transformer.forward

    def recorded(*args, **options):
        calls.append((options, forward(*args, **options)))
        return calls[-1][1]

    monkeypatch.setattr(pipe.transformer, "forward", recorded)
    captions = ["a red heart", "a green tree"]
    codes, _ = sets.trained.read([0, 1], [0, 0])
    with torch.no_grad():
        task.figures(captions, codes, torch.Generator().manual_seed(0))
    (_, (options, logits)), size = calls, (2, 2, settings.segments, settings.length)
    monkeypatch.setattr(pipe.transformer, "forward", forward)
    vectors, noise = options["vectors"].unflatten(1, size[2:])[:2], options["noise"].unflatten(1, size[2:])[:2]
    assert (noise[..., 1:] >= noise[..., :-1]).all() and 0 < (noise == 1).all(-1).float().mean() < 1
    seen = options["mask"][:2, :, -(15 + settings.segments * settings.length) :][..., :15].sum(-1)
    first = seen.unflatten(1, size[2:])[..., 0]
    model = pipe.prepare(captions, guidance_scale=2.0).model
    for segment in range(settings.segments):
        cache, _ = model.prefill(2)
        everywhere = torch.arange(15).expand(2, -1)
        fed = torch.where(everywhere < first[:, segment, None], everywhere, -1)
        positions = first[:, segment, None] + torch.arange(settings.length)
        with torch.no_grad():
            model.forward(codes[:, :15], fed, cache)
            noisy = {"vectors": vectors[:, segment], "noise": noise[:, segment]}
            expected = model.forward(codes.gather(1, positions), positions, cache, **noisy)
        torch.testing.assert_close(logits.view(*size, -1)[:, :, segment], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("part", "name", "tokens", "message"),
    [
        ("drafter", "var-text", "var-text", "--model is one in a VARPipeline: give a LlamaGenPipeline"),
        ("refiner", "llamagen-text", "llamagen-text", "--model is one in a LlamaGenPipeline: give a VARPipeline"),
        ("drafter", "llamagen-text", "llamagen-class", "the tokens have classes, and the model needs captions"),
        ("refiner", "var-text", "llamagen-text", "--model has another one: make them with it"),
    ],
)
def test_what_does_not_fit_is_refused(part, name, tokens, message, caches, tmp_path):
    with pytest.raises(ValueError, match=message):
        run_part(BEGIN[part], recipe(part), MODELS[name](), caches / tokens, None, tmp_path)


@pytest.mark.parametrize(
    ("part", "more", "name"),
    [
        ("drafter", {"model": {"num_layers": 2}}, "model is given"),
        ("student", {"model": {"num_layers": 2}}, "model is given"),
        ("denoiser", {"kind": "window"}, "kind is 'window'"),
    ],
)
def test_settings_that_a_part_has_not_are_refused(part, more, name):
    with pytest.raises(ValueError, match=f"{name}.* {part}"):
        recipe(part, **more)


def test_a_refiner_needs_scales_and_its_transformer_too(caches, tmp_path):
    with pytest.raises(ValueError, match="drafter_scales is 4: give a number from 1 to 3"):
        train("var-text", "refiner", caches, tmp_path, drafter_scales=4)


@pytest.mark.parametrize("name", recipes("part"))
def test_the_recipes_are_found_and_their_settings_are_right(name, caches, tmp_path):
    table = load_recipe(name, PartRecipe)
    if table.part == "upscaler":
        return
    pipe, sets = begun("var-text" if table.part == "refiner" else "llamagen-text", caches)
    begin = begin_window_drafter if table.kind == "window" else BEGIN[table.part]
    if table.kind == "window":
        table.training |= {"images": 1, "at_once": 1}
    if table.part == "student":
        table.training["noises_per_prompt"], table.training["starts"] = 1, [0, 6]
    if table.part == "refiner":
        table.training["drafter_scales"] = 2
    assert begin(table, pipe, sets, tmp_path).settings.optimizer == table.optimizer
    with pytest.raises(ValueError, match="is a recipe for a"):
        load_recipe(name, PartRecipe, "drafter" if table.part != "drafter" else "student")


@pytest.mark.slow
@pytest.mark.parametrize("part", sorted(BEGIN))
def test_the_packaged_recipes_run(part, caches, tmp_path):
    name, table = "var-text" if part == "refiner" else "llamagen-text", load_recipe(part, PartRecipe, steps=20)
    # Of the size of the tiny models.
    table.training |= {key: value for key, value in TRAINING[part].items() if key != "batch_size"}
    figures = run_part(BEGIN[part], table, MODELS[name](), caches / name, None, tmp_path)
    assert all(math.isfinite(value) for value in figures.values())
    assert load_checkpoint(tmp_path / part / "checkpoint.pt")["step"] == 20
