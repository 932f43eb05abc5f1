"""The engine: batches that nobody can tell from single images, limits, and work that ends when nobody waits for it."""

import io
import sys
import threading
import time
from functools import partial

import numpy as np
import pytest
import torch
from app.server.server_kit import same as same_image
from app.server.server_kit import wait_for
from PIL import Image
from pipelines.chameleon import tiny as tiny_chameleon
from pipelines.cosmos import tiny as tiny_cosmos
from pipelines.llamagen import tiny as tiny_llamagen
from pipelines.var import tiny as tiny_var

from arimage.app.commands import open_app
from arimage.app.engine import batch as engine_batch
from arimage.app.engine.batch import preview
from arimage.app.engine.engine import FAILURES, Engine
from arimage.app.engine.models import load_models
from arimage.app.engine.types import Cancelled, Limits, Progress, Refused, Request, Result, seeds_of
from arimage.app.engine.videos import VideoRequest
from arimage.decoding import Layout, decoding_from_name, decoding_from_text
from arimage.decoding.run.batch import Batch
from arimage.media.trace import Trace, draw_steps


PROMPTS = ["a red heart", "a blue book", "green tree", "a cat", "grinning cat face", "a", "flat style", "red red"]


@pytest.fixture(scope="module")
def engine():
    pipelines = {
        "text": tiny_llamagen.text_pipeline(),
        "class": tiny_llamagen.class_pipeline(),
        "scales": tiny_var.pipeline("text"),
    }
    engine = Engine(pipelines)
    yield engine
    engine.close()


@pytest.fixture
def held_engine(held):
    engine = Engine({"text": held}, Limits(queue=8))
    yield engine
    held.go.set()
    engine.close()


def same(images: list[Image.Image], others: list[Image.Image]) -> bool:
    return all(same_image(one, other) for one, other in zip(images, others, strict=True))


def occupy(engine: Engine, held) -> None:
    """Keep the worker busy until `held.go` is set, so that what comes now waits."""
    engine.submit(Request("text", prompt="first"))
    assert held.entered.wait(60)


def test_a_folder_goes_by_its_name(tmp_path):
    tiny_llamagen.class_pipeline().save_pretrained(tmp_path / "classes")
    assert list(load_models([str(tmp_path / "classes")], "cpu")) == ["classes"]
    with pytest.raises(ValueError, match="classes"):
        load_models([str(tmp_path / "classes"), f"{tmp_path}/classes/"], "cpu")


@pytest.mark.every(2)
@pytest.mark.parametrize("decoding", [None, "sjd-lazy:window=16,tokens=16"])
def test_an_image_does_not_depend_on_its_batch(held_engine, held, decoding):
    sizes = []
    requests = [Request("text", prompt=prompt, seed=i, decoding=decoding) for i, prompt in enumerate(PROMPTS)]
    occupy(held_engine, held)
    tickets = [held_engine.submit(request) for request in requests]
    held_engine.on_pass = lambda model, images: sizes.append(images)
    held.go.set()
    together = [ticket.result(120) for ticket in tickets]
    assert sizes[0] == 1 and max(sizes) == 8
    sizes.clear()
    alone = [held_engine.submit(request).result(60) for request in requests]
    assert set(sizes) == {1}
    for one, other in zip(together, alone, strict=True):
        assert same(one.images, other.images)
        assert (one.passes, one.tokens_per_pass, one.seeds) == (other.passes, other.tokens_per_pass, other.seeds)
        assert np.array_equal(one.deciding_pass, other.deciding_pass)
    assert not any(same(one.images, other.images) for one in together[1:] for other in together[:1])


def test_every_image_of_a_request_can_be_generated_again_alone(engine):
    for model in ("text", "scales"):
        result = engine.submit(Request(model, prompt="a red heart", seed=7, count=3)).result(60)
        assert result.seeds == seeds_of(7, 3) and result.seeds[0] == 7 and len(set(result.seeds)) == 3
        for image, seed in zip(result.images, result.seeds, strict=True):
            again = engine.submit(Request(model, prompt="a red heart", seed=seed)).result(60)
            assert same(again.images, [image])


def test_the_engine_generates_what_the_pipeline_generates(engine):
    result = engine.submit(Request("class", class_label=3, seed=5, decoding="sjd:window=4", top_k=6)).result(60)
    pipe = tiny_llamagen.class_pipeline()
    generator = torch.Generator().manual_seed(5)
    decoding = decoding_from_name("sjd", window=4)
    expected = pipe(class_labels=3, generator=generator, decoding=decoding, top_k=6)
    assert same(result.images, expected.images)
    assert (result.passes, result.exact) == (expected.stats.forward_passes, True)
    assert result.tokens_per_pass == pytest.approx(expected.stats.tokens_per_pass)
    assert result.deciding_pass.shape == (1, 4, 4) and result.deciding_pass.max() == result.passes
    assert result.settings["decoding"] == "sjd:window=4" and result.settings["top_k"] == 6


def test_a_request_larger_than_a_batch_is_split():
    engine = Engine({"text": tiny_llamagen.text_pipeline()}, Limits(batch=2))
    sizes = []
    engine.on_pass = lambda model, images: sizes.append(images)
    request = Request("text", prompt="a red heart", count=5, previews=3)
    events = list(engine.submit(request).events())
    result = events[-1]
    small = [engine.submit(Request("text", prompt="a red heart", seed=seed)).result(60) for seed in result.seeds]
    engine.close()
    assert sizes[:48] == [2] * 32 + [1] * 16
    assert same(result.images, [image for one in small for image in one.images])
    assert (result.passes, result.tokens_per_pass, result.deciding_pass.shape) == (3 * 16, 1.0, (5, 4, 4))
    progress = [(event.passes, event.decided) for event in events[:-1]]
    assert progress == sorted(progress) and all(event.tokens == 5 * 16 for event in events[:-1])


def test_requests_of_another_kind_are_not_mixed(held_engine, held):
    sizes = []
    occupy(held_engine, held)
    settings = [{"decoding": "sjd"}, {"top_k": 4}, {"count": 2}, {"decoding": "sjd"}, {"top_k": 4, "count": 4}, {}]
    tickets = [held_engine.submit(Request("text", prompt="a", **setting)) for setting in settings]
    started = []
    for number, ticket in enumerate(tickets):
        start = ticket.start
        ticket.start = lambda number=number, start=start: (started.append(number), start())
    held_engine.on_pass = lambda model, images: sizes.append(images)
    held.go.set()
    for ticket in tickets:
        ticket.result(60)
    # First come, first served; what is of the same kind as the first begins with it, also with other settings.
    assert started == [0, 3, 1, 4, 2, 5] and max(sizes) == 8


def test_settings_of_a_request_do_not_change_the_others(held_engine, held):
    occupy(held_engine, held)
    settings = [{"top_k": 4}, {"temperature": 0.2}, {"top_p": 0.5}, {"min_p": 0.3}]
    settings += [{"guidance_scale": 3.0}, {"guidance_scale": 5.0}, {}]
    requests = [Request("text", prompt="a", seed=i, decoding="sjd-coupled", **one) for i, one in enumerate(settings)]
    tickets = [held_engine.submit(request) for request in requests]
    held.go.set()
    together = [ticket.result(60) for ticket in tickets]
    for request, one in zip(requests, together, strict=True):
        alone = held_engine.submit(request).result(60)
        assert same(one.images, alone.images) and one.passes == alone.passes


def test_progress_and_partial_images_are_reported(held_engine, held):
    occupy(held_engine, held)
    tickets = [
        held_engine.submit(Request("text", prompt="a", count=2, **how))
        for how in ({"preview_every": 4}, {"previews": 3})
    ]
    assert next(tickets[1].events()).queue_position == 2
    gathered = [[], []]
    readers = [
        threading.Thread(target=lambda t=ticket, to=to: to.extend(t.events()))
        for ticket, to in zip(tickets, gathered, strict=True)
    ]
    held.pace = 0.02
    for reader in readers:
        reader.start()
    held.go.set()
    for reader in readers:
        reader.join(60)
    for events in gathered:
        *progress, result = events
        assert isinstance(result, Result) and all(isinstance(event, Progress) for event in progress)
        assert [event.decided for event in progress] == sorted(event.decided for event in progress)
        assert progress[-1].decided == progress[-1].tokens == 32 and progress[-1].queue_position == 0
    assert sum(bool(event.previews) for event in gathered[0][:-1]) == 4
    shown = [event for event in gathered[1][:-1] if event.previews]
    assert [event.decided // 8 for event in shown] == [1, 2, 3]
    # What is not decided yet is greyed.
    first, last = (np.asarray(shown[i].previews[0], dtype=float) for i in (0, 2))
    assert np.ptp(first[-4:]) < 0.5 * np.ptp(last[:4])


def test_progress_and_previews_are_those_of_the_size_asked_for():
    engine, progress = Engine({"any size": tiny_chameleon.pipeline(tiny_chameleon.VERSION_2)}), []
    request = Request("any size", prompt="a", height=32, width=64, decoding="ar", previews=3)
    result = engine.submit(request, progress.append).result(60)
    engine.close()
    total = progress[-1].tokens
    assert progress[-1].decided == total == result.deciding_pass.size == result.passes
    assert [event.decided for event in progress if event.previews] == [total // 4, total // 2, 3 * total // 4]


@torch.no_grad()
def test_a_preview_distinguishes_drafts_from_unknown_tokens(engine):
    pipe = engine._pipelines["text"]
    tokens = torch.full((3, 16), 5)
    # A draft of token 0 is a draft, too.
    tokens[:, -1] = torch.tensor([-1, 0, 5])
    decided = torch.ones_like(tokens, dtype=torch.bool)
    decided[:, -1] = False
    images = preview(pipe, pipe.prepare(["a", "b", "c"]), tokens, decided)
    unknown, first, other = (np.asarray(image)[-2:, -2:] for image in images)
    assert np.ptp(unknown) == 0 and np.ptp(first) > 0 and np.ptp(other) > 0


@pytest.mark.every(2)
@pytest.mark.parametrize(("model", "decoding"), [("text", "sjd:window=4"), ("text", "ar"), ("scales", "next-scale")])
def test_a_film_shows_the_steps_that_a_trace_shows(engine, model, decoding, monkeypatch):
    recorder = Trace()
    pipe = {"text": tiny_llamagen.text_pipeline, "scales": lambda: tiny_var.pipeline("text")}[model]()
    output = pipe(
        "a red heart",
        decoding=decoding_from_text(decoding),
        generator=torch.Generator().manual_seed(5),
        callback_on_step_end=recorder,
        callback_on_step_end_tensor_inputs=Trace.inputs,
    )
    tokens, decided = recorder.of_image()
    layout = None if model == "scales" else Layout(output.tokens.shape[1:])
    decode_tokens = partial(pipe.preview, recorder.call)
    for most in (64, 3):
        monkeypatch.setattr(engine_batch, "FILM_STEPS", most)
        steps = range(len(tokens)) if most == 64 else [0, len(tokens) // 3, 2 * len(tokens) // 3]
        with torch.no_grad():
            expected = draw_steps(tokens, decided, layout, decode_tokens, f"{model}, {decoding}: a red heart", steps)
        request = Request(model, prompt="a red heart", seed=5, count=2, decoding=decoding, film=True)
        # Another request in the same batch.
        other = engine.submit(Request(model, prompt="tree", seed=1, decoding=decoding))
        result = engine.submit(request).result(60)
        film = result.film
        assert other.result(60).film is None
        assert len(film.frames) == len(film.seconds) == len(expected)
        assert same(film.frames, expected)
        assert film.seconds == sorted(film.seconds) and 0 < film.seconds[0] < film.seconds[-1] <= result.seconds


@pytest.mark.parametrize("where", ["prepare", "decode_result", "step", "thread"])
def test_an_error_of_the_device_or_of_its_thread_ends_the_engine(held, where, monkeypatch):
    def broken(*_, **__):
        if where == "thread":
            sys.exit("out of here")
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    engine, failures = Engine({"text": held}), []
    engine.on_failure = lambda: failures.append(engine.failure)
    occupy(engine, held)
    tickets = [engine.submit(Request("text", prompt="a", top_k=top_k)) for top_k in (0, 1)]
    if where in ("step", "thread"):
        engine.on_pass = broken
    else:
        monkeypatch.setattr(held._pipe, where, broken)
    held.go.set()
    for ticket in tickets:
        with pytest.raises(Cancelled):
            ticket.result(60)
    engine._worker.join(60)
    assert not engine.alive and engine.waiting == 0
    assert len(failures) == 1
    assert isinstance(failures[0], SystemExit if where == "thread" else torch.AcceleratorError)
    with pytest.raises(Cancelled, match="closed"):
        engine.submit(Request("text", prompt="a"))
    engine.close()


@pytest.mark.parametrize("error", [RuntimeError("CUDA error: unspecified"), ValueError("logits are not finite")])
def test_requests_that_fail_in_a_row_end_the_engine_if_its_models_fail_too(error, monkeypatch):
    def broken(*_, **__):
        raise error

    engine = Engine({"text": tiny_llamagen.text_pipeline(), "class": tiny_llamagen.class_pipeline()})
    for pipe in engine._pipelines.values():
        monkeypatch.setattr(pipe, "decode_result", broken)
    for _ in range(FAILURES):
        with pytest.raises((RuntimeError, Refused)):
            engine.submit(Request("text", prompt="a")).result(60)
    with pytest.raises(Cancelled):
        engine.submit(Request("text", prompt="a")).result(60)
    engine._worker.join(60)
    assert not engine.alive and engine.failure is not None
    engine.close()


def test_an_error_of_the_device_in_a_video_ends_the_engine_of_the_demo(monkeypatch):
    def broken(*_, **__):
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    made = []
    pipelines = {"text": tiny_llamagen.text_pipeline(), "video": tiny_cosmos.pipeline("text", begins_with_text=True)}
    monkeypatch.setattr("arimage.app.demo.demo.load_models", lambda *_, **__: pipelines)
    monkeypatch.setattr("arimage.app.demo.demo.serve_demo", lambda *arguments: made.extend(arguments))
    open_app(batch_size=2, queue=3, max_pixels=2**16, no_metadata=True)
    engine, *_, videos, _ = made
    assert engine.limits == videos.limits == Limits(batch=2, queue=3, output_pixels=2**16, metadata=False)
    monkeypatch.setattr(type(videos._pipelines["video"]), "__call__", broken)
    with pytest.raises(torch.AcceleratorError):
        list(videos.run(VideoRequest("video", "a cat")))
    assert not engine.alive and isinstance(engine.failure, torch.AcceleratorError)
    engine.close()


WHITE = Image.new("L", (8, 8), 255)


def cut_png():
    """An opened file whose end is missing, which shows when its pixels are read."""
    data = io.BytesIO()
    Image.effect_noise((8, 8), 50).save(data, "PNG")
    return Image.open(io.BytesIO(data.getvalue()[:-30]))


@pytest.mark.parametrize(
    ("changes", "parameter", "message"),
    [
        ({"model": "../../etc"}, "model", "unknown model '../../etc': choose among text, class, scales"),
        ({"prompt": " "}, "prompt", "the prompt is empty"),
        ({"prompt": "a" * 4001}, "prompt", "4001 characters: shorten it to at most 4000"),
        ({"prompt": "\ud83d"}, "prompt", "surrogate"),
        ({"class_label": 1}, "class_label", "generates from text"),
        ({"model": "class"}, "prompt", "generates classes, not text"),
        ({"model": "class", "prompt": None}, "class_label", "give class_label, 0 to 9"),
        ({"model": "class", "prompt": None, "class_label": 10}, "class_label", "from 0 to 9"),
        ({"negative_prompt": "blue"}, "negative_prompt", "negative_prompt"),
        ({"count": 9}, "count", "ask for 1 to 8"),
        ({"count": 10**23}, "count", "ask for 1 to 8"),
        ({"seed": -1}, "seed", "at least 0"),
        ({"seed": 2**53}, "seed", "at most 9007199254740991"),
        ({"height": 4096, "width": 4096}, "size", "4096x4096 pixels"),
        ({"decoding": "nonsense"}, "decoding", "cannot run the decoding 'nonsense'"),
        ({"decoding": "next-scale"}, "decoding", "cannot run"),
        ({"decoding": "sjd:window=8+100000"}, "decoding", "give at most 128"),
        ({"decoding": "sjd:window=auto"}, "decoding", "cannot be chosen here"),
        ({"decoding": "sjd:window=0"}, "decoding", "window"),
        ({"decoding": "sjd:window=64,window=3"}, "decoding", "'window' twice"),
        ({"decoding": "sjd:relax=nan"}, "decoding", "give at most 128"),
        ({"decoding": "eagle:drafter=/etc/passwd"}, "decoding", "cannot be chosen here"),
        ({"guidance_scale": float("nan")}, "guidance_scale", "a finite number"),
        ({"guidance_scale": 1e9}, "guidance_scale", "at most 100"),
        ({"temperature": 0.0}, "temperature", "at least 0.01"),
        ({"top_k": -1}, "top_k", "at least 0"),
        ({"top_k": 2**20}, None, "top_k is 1048576: give a whole number from 1 to 1000000"),
        ({"top_p": 0.0}, None, "give a probability above 0"),
        ({"min_p": 1.5}, "min_p", "at most 1"),
        ({"height": 0}, "size", "does not generate"),
        ({"width": 0}, "size", "does not generate"),
        ({"height": 8, "width": 16}, "size", "does not generate 16x8 pixels (width x height)"),
        ({"image": Image.new("RGB", (8, 8))}, "image", "belong together"),
        ({"image": Image.new("F", (8, 8), 9), "mask_image": WHITE}, "image", "image has levels from 9 to 9"),
        ({"image": WHITE, "mask_image": Image.new("L", (8, 8))}, "mask_image", "mask_image selects nothing"),
        ({"image": Image.new("L", (128, 128)), "mask_image": WHITE}, "mask_image", "mask_image has 8x8 pixels"),
        ({"image": cut_png(), "mask_image": WHITE}, "image", "image cannot be read"),
        ({"image": WHITE, "mask_image": cut_png()}, "mask_image", "mask_image cannot be read"),
        ({"image": Image.new("1", (8000, 8000)), "mask_image": Image.new("L", (8, 8))}, "image", "8000x8000 pixels"),
    ],
)
def test_what_cannot_be_generated_is_refused_at_once(engine, changes, parameter, message):
    with pytest.raises(Refused) as refused:
        engine.submit(Request(**{"model": "text", "prompt": "a red heart", **changes}))
    assert message in str(refused.value)
    assert (refused.value.parameter, refused.value.busy) == (parameter, False)
    assert engine.waiting == 0


def test_the_work_of_a_request_is_bounded():
    with pytest.raises(ValueError, match="batch is 0"):
        Limits(batch=0)
    engine = Engine({"text": tiny_llamagen.text_pipeline()}, Limits(work=50))
    with pytest.raises(Refused, match="more than the 50 tokens"):
        engine.submit(Request("text", prompt="a", count=4))
    assert len(engine.submit(Request("text", prompt="a", count=3)).result(60).images) == 3
    engine.close()


@pytest.mark.parametrize(
    "decoding",
    [
        "sjd-tree:window=128,width=128,depth=8",
        "sjd-tree:width=128",
        "eagle:nodes=128,width=128,depth=4",
        "eagle:width=64,depth=64",
        "sjd:window=129",
    ],
)
def test_the_settings_of_a_decoding_are_bounded_by_their_work(engine, decoding):
    with pytest.raises(Refused, match="position|too large") as refused:
        engine.check(Request("text", prompt="a", decoding=decoding))
    assert refused.value.parameter == "decoding"
    for within in ("sjd-tree:window=64", "eagle:nodes=64,width=8", "sjd-lazy:window=128,tokens=64"):
        engine.check(Request("text", prompt="a", decoding=within))


def test_a_batch_stops_when_nobody_waits_for_it(held_engine, held):
    passes, progress = [], []
    held_engine.on_pass = lambda model, images: passes.append(images)
    held.pace = 0.1
    held.go.set()
    tickets = [held_engine.submit(Request("text", prompt="a", seed=i), progress.append) for i in range(2)]
    wait_for(lambda: progress[-1].passes)
    for ticket in tickets:
        ticket.cancel()
    held.pace = 0.0
    assert held_engine.submit(Request("text", prompt="b")).result(60).passes == 16
    assert len(passes) < 16 + 15


def test_a_request_that_is_cancelled_while_it_begins_harms_no_other(held_engine, held, monkeypatch, caplog):
    prepare, progress, tickets = held._pipe.prepare, [], []

    def prepare_and_cancel(**arguments):
        call = prepare(**arguments)
        if arguments["prompt"] == ["b"]:
            tickets[0].cancel()
        return call

    monkeypatch.setattr(held._pipe, "prepare", prepare_and_cancel)
    held.pace = 0.02
    held.go.set()
    running = held_engine.submit(Request("text", prompt="a"), progress.append)
    wait_for(lambda: progress[-1].passes)
    with held_engine._arrived:
        tickets.append(held_engine.submit(Request("text", prompt="b")))
    assert running.result(60).passes == 16
    with pytest.raises(Cancelled):
        tickets[0].result(60)
    assert not caplog.records


def test_a_cancelled_request_gives_its_row_to_another(held_engine, held):
    sizes, progress = [], []
    held_engine.on_pass = lambda model, images: sizes.append(images)
    held.pace = 0.02
    held.go.set()
    first = [held_engine.submit(Request("text", prompt="a", count=4, seed=i), progress.append) for i in range(2)]
    wait_for(lambda: progress[-1].passes)
    waiting = held_engine.submit(Request("text", prompt="b", seed=9))
    assert not waiting.begun
    first[0].cancel()
    result = waiting.result(60)
    held.pace = 0.0
    assert first[1].result(60).passes == 16 and max(sizes) == 8
    assert same(result.images, held_engine.submit(Request("text", prompt="b", seed=9)).result(60).images)


def test_a_request_that_fails_fails_alone(held_engine, held, monkeypatch):
    def encode_prompt(prompts):
        if "boom" in prompts:
            raise RuntimeError("boom")
        if "bad" in prompts:
            raise ValueError("bad words: use others")
        return tiny_encode(prompts)

    tiny_encode = held._pipe.encode_prompt
    monkeypatch.setattr(held._pipe, "encode_prompt", encode_prompt)
    occupy(held_engine, held)
    tickets = [held_engine.submit(Request("text", prompt=prompt)) for prompt in ("a", "boom", "bad", "b")]
    held.go.set()
    assert tickets[0].result(60).images and tickets[3].result(60).images
    with pytest.raises(RuntimeError, match="boom"):
        tickets[1].result(60)
    with pytest.raises(Refused, match="bad words: use others"):
        list(tickets[2].events())
    # However often, while its models generate what is not at fault.
    monkeypatch.setattr(held_engine, "limits", Limits(prompt_characters=4))
    for _ in range(3 * FAILURES):
        with pytest.raises(RuntimeError, match="boom"):
            held_engine.submit(Request("text", prompt="boom")).result(60)
    assert held_engine.alive and held_engine.submit(Request("text", prompt="a")).result(60).images


def test_many_threads_get_the_right_images(engine):
    alone = {seed: engine.submit(Request("scales", prompt="a", seed=seed)).result(60).images for seed in range(6)}
    results = {}

    def ask(number):
        while number not in results:
            try:
                results[number] = engine.submit(Request("scales", prompt="a", seed=number % 6)).result(60)
            except Refused as error:
                assert error.busy
                time.sleep(0.01)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert all(same(results[number].images, alone[number % 6]) for number in range(40))


def test_no_request_of_a_group_that_failed_is_lost(monkeypatch):
    """Requests that are prepared one by one, since together they failed, come back into the queue after another
    failure."""
    pipe, begin = tiny_llamagen.text_pipeline(), Batch.begin
    prepare, begun = pipe.prepare, []

    def prepare_one(**arguments):
        if isinstance(arguments["prompt"], list) and len(arguments["prompt"]) > 1:
            raise ValueError("one of them is bad")
        return prepare(**arguments)

    def begin_first(batch, images):
        begun.append(images)
        if len(begun) == 2:
            raise RuntimeError("out of memory")
        begin(batch, images)

    pipe.prepare = prepare_one
    monkeypatch.setattr(Batch, "begin", begin_first)
    engine = Engine({"text": pipe}, Limits(batch=4, gathering=0.3))
    try:
        tickets = [engine.submit(Request("text", prompt="a red heart", seed=seed)) for seed in range(3)]
        assert [len(ticket.result(60).images) for ticket in tickets] == [1, 1, 1]
    finally:
        engine.close()
