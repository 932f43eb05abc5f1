"""Lumina-DiMOO agrees with the authors' code: sequences, logits, image tokenizer, and every step of whole runs."""

import pytest
import torch
from families import close
from PIL import Image
from pipelines.lumina_dimoo import tiny
from pipelines.lumina_dimoo.tiny import EXPECTED, REFERENCE, RUNS

from arimage.decoding.masked import confidence
from arimage.decoding.masked.ml_cache import MLCache
from arimage.pipelines.lumina_dimoo import pipeline_lumina_dimoo
from arimage.pipelines.lumina_dimoo.prompts import GENERATE, LuminaDiMOOPrompts, crop_picture, edited_sizes, task_texts
from arimage.pipelines.lumina_dimoo.vocabulary import FIRST_CODE


pytestmark = pytest.mark.usefixtures("no_grad")


CACHED = [name for name in RUNS if REFERENCE[name].get("cache")]


@pytest.fixture(scope="module")
def pipe():
    return tiny.converted()


@pytest.mark.parametrize("name", RUNS)
def test_sequences(name, pipe):
    run, prompts = REFERENCE[name], LuminaDiMOOPrompts(pipe.tokenizer)
    task = run.get("edit_type")
    system, prompt = (GENERATE, run["prompt"]) if task is None else task_texts(task, run["prompt"])
    pictures = [EXPECTED[key].tolist() for i in range(2) if (key := f"{name}.picture_{i}") in EXPECTED]
    ids = prompts.prefix(system, prompt, pictures).tolist()
    assert ids == run["sequence"][: run["code_start"]]
    without = prompts.prefix(system, None, pictures).tolist()
    if task is None:
        assert without[:-2] == run["unconditional"]
    else:
        assert without == run["without_text"][: len(without)]
        alone = prompts.prefix(system, prompt).tolist()
        assert alone == run["without_image"][: len(alone)]


def test_prompts_of_tasks():
    for task, texts in REFERENCE["edit_prompts"].items():
        system, prompt = task_texts(task, "PROMPT")
        assert f"<system>{system}</system><user>{prompt}</user>" == texts[0]
    assert task_texts("canny_dense", "")[1] == "Generate a canny map according to the image."


def test_sizes_of_pictures():
    sizes, known = edited_sizes(), REFERENCE["crop_sizes"]
    assert len(sizes) == known["number"]
    assert [list(size) for size in (*sizes[:3], *sizes[-3:])] == known["first"] + known["last"]
    for given, cropped in REFERENCE["crops"]:
        assert list(crop_picture(Image.new("RGB", given)).size) == cropped


@pytest.mark.parametrize("name", ["masked", "half", "unconditional"])
def test_one_pass(name, pipe):
    ids, codes = EXPECTED[f"forward_{name}.ids"].long()[None], EXPECTED["logit_columns"] >= FIRST_CODE
    [logits] = pipe.transformer(ids, torch.arange(ids.shape[1])[None])
    columns = EXPECTED["logit_columns"][codes] - FIRST_CODE
    close(logits[:, columns], EXPECTED[f"forward_{name}.logits"][:, codes], 1e-4)
    close(logits.amax(1), EXPECTED[f"forward_{name}.max"], 1e-4)
    close(logits.logsumexp(1), EXPECTED[f"forward_{name}.logsumexp"], 1e-4)
    assert logits.argmax(1).tolist() == EXPECTED[f"forward_{name}.argmax"].tolist()


def test_the_image_tokenizer(pipe):
    pixels = EXPECTED["vq.image"].permute(2, 0, 1)[None] / 127.5 - 1
    assert torch.equal(pipe.encode_image(pixels)[0], EXPECTED["vq.image_codes"].long())
    decoded = pipe.decode_image(EXPECTED["vq.codes"].long()[None])[0]
    close(decoded / 2 + 0.5, EXPECTED["vq.pixels"], 1e-4)


@pytest.fixture
def run_of(pipe, monkeypatch):
    """Runs a call with the authors' noise, and returns its output and the state after each step."""
    # The authors' pictures keep their size there.
    monkeypatch.setattr(pipeline_lumina_dimoo, "crop_picture", lambda image: image)

    def run(name, **changes):
        if REFERENCE[name]["noise_seed"] is not None:
            monkeypatch.setattr(confidence, "exponentials", tiny.authors_noise(name))
        arguments = {"decoding": tiny.decoding_of(name), "output_type": "pt"} | tiny.arguments_of(name) | changes
        after = []
        out = pipe(**arguments, callback_on_step_end=lambda pipe, step, passes, now: after.append(now["tokens"][0]))
        return out, torch.stack(after)

    return run


@pytest.mark.parametrize("name", [name for name in RUNS if name not in CACHED])
def test_whole_runs(name, run_of):
    out, after = run_of(name)
    assert torch.equal(out.tokens[0], EXPECTED[f"{name}.codes"].long())
    assert torch.equal(after, EXPECTED[f"{name}.after"].long())
    assert (after < 0).sum(1).tolist() == REFERENCE[name]["masked_after"]
    assert out.stats.forward_passes == REFERENCE[name]["steps_run"]
    if REFERENCE[name].get("kind") != "paint":
        # Of painted images we keep the given pixels.
        close(out.images[0], EXPECTED[f"{name}.pixels"], 1e-4)


@pytest.mark.parametrize("name", CACHED)
def test_what_each_step_evaluates_and_keeps(name, pipe, run_of, monkeypatch):
    evaluated, kept = [], []

    def record(model, tokens, places, *, rows=None, context=None):
        logits = forward(model, tokens, places, rows=rows, context=context)
        if rows is None:
            rows = torch.arange(model.num_rows).expand(2, 1, -1)
        evaluated.append(torch.zeros(2, model.num_rows + 1).scatter(1, rows[:, 0], 1)[:, :-1].bool())
        kept.append(None if context is None else context.logits[:, 0].clone())
        return logits

    kind = type(pipe.prepare(**tiny.arguments_of(name)).model)
    forward = kind.forward
    monkeypatch.setattr(kind, "forward", record)
    _, after = run_of(name)
    assert torch.equal(after, EXPECTED[f"{name}.after"].long())
    model = pipe.prepare(**tiny.arguments_of(name)).model
    _, positions, there = model._rows_of(torch.full((1, model.num_tokens), -1))
    for branch, label in enumerate(("cond", "uncond")):
        # From our rows to the places of the authors' sequence.
        order = positions[branch][there[branch]]
        for step, wanted in enumerate(EXPECTED[f"{name}.recomputed_{label}"]):
            found = torch.zeros(len(order), dtype=torch.bool)
            found[order] = evaluated[step][branch][there[branch]]
            assert torch.equal(found, wanted[: len(order)].bool()), (label, step)
            if kept[step] is None:
                continue
            logits = torch.empty(len(order), model.vocab_size)
            logits[order] = kept[step][branch][there[branch]]
            close(logits.amax(1), EXPECTED[f"{name}.score_{label}"][step, : len(order)], 1e-4)
            columns = EXPECTED["logit_columns"][5:13] - FIRST_CODE
            close(logits[:, columns], EXPECTED[f"{name}.kept_logits_{label}"][step, : len(order)], 1e-4)


def test_which_steps_are_full():
    for case in REFERENCE["refresh"]:
        decoding = MLCache(warmup=case["warmup"], interval=case["interval"])
        steps = range(case["steps"])
        assert [step for step in steps if decoding.is_full(step, case["steps"])] == case["full"]
