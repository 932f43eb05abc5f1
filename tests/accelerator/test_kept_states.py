"""What is kept between calls follows whatever changes between them: masks, modes, weights, adapters, memory."""

import contextlib
import gc
import threading
import time

import card
import numpy as np
import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from accelerator.runs import call, compare, conditions, differences, equal, families, fresh, methods, pipeline, small
from adapters import STYLE, adapter
from families import flat, seeded
from PIL import Image
from pipelines.arpg import tiny as tiny_arpg
from pipelines.cosmos import tiny as tiny_cosmos
from pipelines.distilled_decoding import tiny as tiny_distilled
from pipelines.emu3 import tiny as tiny_emu3
from pipelines.latent_llama import tiny as tiny_latent_llama
from pipelines.llamagen import tiny as tiny_llamagen
from pipelines.mar import tiny as tiny_mar
from pipelines.nextstep import tiny as tiny_nextstep
from pipelines.var import tiny as tiny_var

from arimage.decoding import AutoregressiveDecoding, DraftTreeDecoding
from arimage.decoding.contract.state import DecodingState
from arimage.decoding.jacobi import step_seconds
from arimage.decoding.run.batch import Batch
from arimage.decoding.run.captured_steps import CapturedState
from arimage.decoding.run.step_key import Program, tensors_of


@contextlib.contextmanager
def compiled(pipe):
    """The pipeline with compiled steps that compile nothing."""
    pipe.compile(backend="eager")
    try:
        yield pipe._compiled
    finally:
        pipe.capture()


# What a state holds


@pytest.mark.every(3)
@families(["llamagen-text", "arpg", "var-text", "mar", "halton-maskgit-class", "latent-llama", "llamagen-dd"])
def test_a_state_declares_what_belongs_to_a_call(family, monkeypatch):
    states, admit = [], Batch._admit
    monkeypatch.setattr(Batch, "_admit", lambda self, state, count: states.append(state) or admit(self, state, count))
    pipe = pipeline(family, "cpu")
    for name in methods(pipe.decoding_names):
        call(pipe, small(name), 1)
    assert states
    for state in states:
        named = {*state.caches, *state.structure, *state.renewed, *state.settled, "model", "sampling", "head_calls"}
        values = {name: value for name, value in vars(state).items() if value is not None}
        left = [name for name, value in values.items() if not isinstance(value, torch.Tensor) and name not in named]
        assert left == [], type(state)
        hash(tuple(getattr(state, name) for name in sorted(state.structure)))


def edits(pipe, sizes, batch_size=None):
    """Edits with several masks, of which each leaves another number of tokens."""
    height, width = pipe.image_sizes[0]
    picture = Image.new("RGB", (width, height), (200, 30, 60))
    masks = np.zeros((len(sizes), height, width), np.float32)
    for mask, rows in zip(masks, sizes, strict=True):
        mask[: height * rows // 4] = 1
    settings = {"decoding": "groups:groups=4", "output_type": "latent", "image": picture}
    if batch_size is not None:
        out = pipe(class_labels=[0] * len(sizes), mask_image=masks, batch_size=1, generator=seeded(0), **settings)
        return [flat(out.tokens)]
    return [
        flat(pipe(class_labels=0, mask_image=mask[None], generator=seeded(0), **settings).tokens) for mask in masks
    ]


@pytest.mark.every(2)
@pytest.mark.parametrize("batch_size", [None, 1])
def test_edits_that_keep_other_numbers_of_tokens(batch_size):
    expected, pipe = edits(pipeline("arpg", "cpu"), (1, 3, 1), batch_size), pipeline("arpg", "replayed")
    with card.card():
        pipe._compiled.clear()
        found = edits(pipe, (1, 3, 1), batch_size)
    assert all(map(equal, expected, found)) and all((tokens >= 0).all() for tokens in expected)


def test_what_a_call_still_needs_is_not_overwritten():
    """Another call may begin while the pixels of the first one are decoded."""
    pipe = tiny_arpg.pipeline()
    pipe.set_progress_bar_config(disable=True)
    settings = {"class_labels": 1, "order": "random", "output_type": "pt"}
    expected, decode = pipe(generator=seeded(0), **settings), pipe.decode_tokens

    def nested(call, tokens):
        pipe.decode_tokens = decode
        pipe(generator=seeded(5), **settings)
        return decode(call, tokens)

    with compiled(pipe):
        pipe(generator=seeded(3), **settings)
        pipe.decode_tokens = nested
        found = pipe(generator=seeded(0), **settings)
    assert torch.equal(expected.tokens, found.tokens) and torch.equal(expected.images, found.images)


def test_the_noise_of_a_call_stays_the_callers():
    pipe = tiny_distilled.pipeline("llamagen", teacher=False)
    pipe.set_progress_bar_config(disable=True)
    noise = torch.randn(2, 1, 16, pipe.transformer.config.codebook_dim, generator=seeded(0))
    given = noise.clone()
    with compiled(pipe):
        for each in given:
            pipe(class_labels=1, noise=each, decoding="few-step", output_type="latent")
    assert torch.equal(given, noise)


# Modes


def autocast():
    return torch.autocast("cuda", torch.bfloat16)


MODES = {
    "deterministic": lambda: torch.backends.cudnn.flags(deterministic=True),
    "attention": lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    "autocast": autocast,
}


@pytest.fixture
def bfloat16(monkeypatch):
    """Without a GPU, `torch.autocast` disables itself."""
    for name in ("is_available", "is_bf16_supported"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, **__: True)


@pytest.mark.every(2)
@pytest.mark.parametrize("mode", ["attention", "autocast", pytest.param("deterministic", marks=pytest.mark.slow)])
def test_modes_have_graphs_of_their_own(mode, bfloat16):
    pipe, captures = fresh(), []
    with card.card() as device:
        for _ in range(2):
            for context in (MODES[mode], contextlib.nullcontext):
                with context():
                    call(pipe, "ar")
                captures.append(device.captures)
    assert captures == [1, 2, 2, 2]


@pytest.mark.slow
def test_a_call_under_inference_mode_leaves_nothing_that_another_cannot_write():
    pipe = pipeline("llamagen-text", "cpu")
    with compiled(pipe):
        with torch.inference_mode():
            first = call(pipe, "sjd-coupled:window=4")
        assert differences(first, call(pipe, "sjd-coupled:window=4")) == []


def test_graphs_do_not_read_the_casts_of_autocast(bfloat16):
    """Which are kept for weights with gradients, and freed when its block ends."""
    pipe = fresh()
    for weight in pipe.transformer.parameters():
        weight.requires_grad_(True)
    with card.card():
        found = []
        for _ in range(2):
            with autocast():
                found.append(call(pipe, "ar")["tokens"].elem)
            gc.collect()
    assert torch.equal(*found)


def test_other_streams_have_graphs_of_their_own(monkeypatch):
    """They may run at the same time, and graphs share memory."""
    pipe = fresh()
    with card.card() as device:
        call(pipe, "ar")
        monkeypatch.setattr(card.Stream, "cuda_stream", 1)
        call(pipe, "ar")
        assert device.captures == 2 and len(pipe._compiled._streams) == 2


# Threads


def test_one_thread_at_a_time_launches_on_the_stream_of_captures(monkeypatch):
    pipe, busy, overlaps, errors = fresh(), threading.Lock(), [], []

    @contextlib.contextmanager
    def alone():
        free = busy.acquire(blocking=False)
        overlaps.extend([] if free else ["overlap"])
        time.sleep(0.02)
        yield
        if free:
            busy.release()

    def warm_up(captured, step, place, plain=CapturedState._warm_up):
        with alone():
            plain(captured, step, place)

    @contextlib.contextmanager
    def graph(*args, **options):
        with alone(), card.DEVICE.capture(*args, **options):
            yield

    def run(count):
        try:
            call(pipe, "sjd-coupled:window=4", count)
        except BaseException as error:
            errors.append(error)

    monkeypatch.setattr(CapturedState, "_warm_up", warm_up)
    with card.card():
        monkeypatch.setattr(torch.cuda, "graph", graph)
        threads = [threading.Thread(target=run, args=(count,)) for count in (2, 3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert errors == [] and overlaps == []


# Weights and adapters


@pytest.mark.every(3)
@families(["llamagen-text", "var-text", "llamagen-dd"])
def test_weights_that_change_in_place(family):
    """As `load_state_dict` and an optimizer do. Nothing that a step reads may be a copy of them."""

    def change(pipe):
        with torch.no_grad():
            for part in pipe.components.values():
                for weight in part.parameters() if isinstance(part, torch.nn.Module) else ():
                    weight.mul_(torch.linspace(0.9, 1.1, weight.numel(), device=weight.device).view(weight.shape))

    cpu, pipe = fresh(family, "cpu"), fresh(family)
    names = [small(name) for name in ("ar", "sjd2", "lantern", "gsd", "next-scale", "few-step", "flow")]
    names = [name for name in names if name.partition(":")[0] in cpu.decoding_names]
    for name in names:
        call(cpu, name)
    change(cpu)
    expected = {name: call(cpu, name) for name in names}
    with card.card():
        for name in names:
            call(pipe, name)
        # They share memory with those on the CPU.
        change(pipe)
        found = {name: differences(expected[name], call(pipe, name)) for name in names}
    assert {name: each for name, each in found.items() if each} == {}


def replace_weights(module):
    """As `module.to(...)` does."""
    for part in module.modules():
        for name, weight in part._parameters.items():
            if weight is not None:
                part._parameters[name] = torch.nn.Parameter(weight.detach().clone(), requires_grad=False)
    gc.collect()


def test_weights_that_are_replaced_while_a_call_runs():
    expected, pipe = call(pipeline("llamagen-text", "cpu"), "ar"), fresh()

    def replace(pipe, step, passes, tensors):
        if step == 8:
            replace_weights(pipe.transformer)

    with card.card():
        assert differences(expected, call(pipe, "ar", callback_on_step_end=replace)) == []


@pytest.mark.slow
def test_weights_of_a_drafter_of_its_own():
    with torch.no_grad():
        pipe = tiny_llamagen.text_pipeline()
        drafter = tiny_llamagen.drafter(pipe.transformer, 7)
    pipe.set_progress_bar_config(disable=True)
    decoding = DraftTreeDecoding(drafter=drafter)
    expected = call(pipe, decoding)
    card.move(pipe), card.move_module(drafter)
    with card.card(), torch.no_grad():
        call(pipe, decoding)
        replace_weights(drafter)
        assert differences(expected, call(pipe, decoding)) == []


class Packed(torch.Tensor):
    """A tensor that consists of others, as quantised ones do, and has no address."""

    @staticmethod
    def __new__(cls, inner):
        packed = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        packed.inner = inner
        return packed

    def __tensor_flatten__(self):
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, operator, types, args=(), kwargs=None):
        return cls(args[0].inner) if operator is torch.ops.aten.detach.default else NotImplemented


def test_quantised_weights_are_known_by_what_they_consist_of():
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(Packed(torch.zeros(3)), requires_grad=False)
    assert module.weight.data_ptr() == 0 and any(each is module.weight.inner for each in tensors_of([module]))
    program = Program([module])
    assert program.renewed([module]) is program
    module.weight.inner = torch.zeros(3)
    assert program.renewed([module]) is not program


@pytest.mark.parametrize("nested", [pytest.param(False, marks=pytest.mark.slow), True])
def test_adapters_that_change_while_a_call_runs(nested):
    pytest.importorskip("peft", reason="the extra `lora` is not installed")

    def change(pipe, step, passes, tensors):
        if step == 4:
            pipe.set_adapters(STYLE, 0.2)
            if nested:
                call(pipe, "sjd-coupled:window=4")

    def run(pipe):
        pipe.set_adapters(STYLE, 1.0)
        first = call(pipe, "ar", callback_on_step_end=change)
        second = call(pipe, "ar")
        pipe.set_adapters(STYLE, 1.0)
        return {"first": first["tokens"], "second": second["tokens"], "third": call(pipe, "ar")["tokens"]}

    cpu, pipe = fresh(place="cpu"), fresh(place="cpu")
    for each in (cpu, pipe):
        each.load_lora_weights(adapter(each, targets="proj"), STYLE)
    card.move(pipe)
    expected = run(cpu)
    with card.card():
        assert differences(expected, run(pipe)) == []
    assert not torch.equal(expected["second"], expected["third"])


def test_steps_with_hooks_run_eagerly_and_free_what_is_kept():
    pipe, seen = fresh(), []
    with card.card() as device:
        call(pipe, "ar")
        handle = pipe.transformer.blocks[0].register_forward_hook(lambda *_: seen.append(1))
        passes = call(pipe, "ar")["forward_passes"]
        assert len(seen) >= passes and len(pipe._compiled.kept) == 0
        handle.remove()
        call(pipe, "ar")
        assert device.captures == 2 and len(pipe._compiled.kept) == 1
        add_hook_to_module(pipe.transformer, ModelHook())
        call(pipe, "ar")
        assert len(pipe._compiled.kept) == 0


# Memory


@pytest.mark.slow
def test_memory_that_runs_out_is_taken_from_what_is_kept(monkeypatch):
    pipe = fresh(place="cpu")
    with compiled(pipe) as states:

        def unless_full(function):
            def run(*args, **options):
                if states.kept:
                    raise torch.OutOfMemoryError("out of memory")
                return function(*args, **options)

            return run

        call(pipe, "ar", 1)
        for owner, name in ((AutoregressiveDecoding, "start"), (DecodingState, "allocate"), (pipe, "decode_result")):
            assert states.kept
            with monkeypatch.context() as patch:
                patch.setattr(owner, name, unless_full(getattr(owner, name)))
                pipe("a red heart", decoding="ar", generator=seeded(0))
            call(pipe, "ar", 1)


def test_a_capture_without_memory_is_tried_again(monkeypatch):
    pipe, fails = fresh(), [True]

    @contextlib.contextmanager
    def graph(*args, **options):
        if fails and fails.pop():
            raise torch.OutOfMemoryError("out of memory")
        with card.DEVICE.capture(*args, **options):
            yield

    with card.card() as device:
        monkeypatch.setattr(torch.cuda, "graph", graph)
        captures = [device.captures for _ in range(3) if call(pipe, "ar")]
    assert captures == [0, 1, 1]


def test_what_is_kept_leaves_half_of_the_memory(monkeypatch):
    pipe = fresh()
    with card.card():
        call(pipe, "ar", 1)
        [state] = pipe._compiled.kept
        for free, count in ((3 * state.nbytes, 2), (state.nbytes, 1)):
            monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, free))
            pipe._compiled.clear()
            call(pipe, "ar", 1)
            call(pipe, "sjd-coupled:window=4", 1)
            assert len(pipe._compiled.kept) == count


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("family", "decoding"),
    [
        ("llamagen-text", "ar"),
        ("llamagen-text", "sjd-coupled:window=4"),
        ("arpg", "groups:groups=4"),
        ("var-text", "next-scale"),
    ]
    + [
        pytest.param(family, text, marks=pytest.mark.slow)
        for family, texts in {
            "llamagen-text": [small(name) for name in ("eagle", "sjd-tree", "sjd-lazy", "zipar", "pjd")],
            "mar": ["mar"],
            "halton-maskgit-class": ["halton:steps=6"],
            "latent-llama": ["ar"],
            "llamagen-dd": ["flow:window=4"],
        }.items()
        for text in texts
    ],
)
def test_an_interrupted_call_leaves_its_graphs_to_others(family, decoding):
    def stop(pipe, step, passes, tensors):
        pipe._interrupt = step == 2

    expected, pipe = [call(pipeline(family, "cpu"), decoding, count) for count in (3, 1)], pipeline(family, "replayed")
    with card.card() as device:
        pipe._compiled.clear()
        for _ in pipe.until_captured():
            call(pipe, decoding)
        captures = device.captures
        call(pipe, decoding, callback_on_step_end=stop)
        assert differences(expected[0], call(pipe, decoding)) == [] and device.captures == captures
        # Fewer images than rows.
        call(pipe, decoding, callback_on_step_end=stop, batch_size=3)
        assert differences(expected[1], call(pipe, decoding, 1, batch_size=3)) == []


@pytest.mark.slow
def test_short_prompts_do_not_attend_to_the_width_of_a_long_one():
    pipe = tiny_emu3.pipeline()

    def widths(prompt):
        pipe(prompt, decoding="ar", output_type="latent", generator=seeded(0))
        *_, latest = pipe._compiled.kept
        return latest.state.cache.keys[0].shape[2]

    with compiled(pipe):
        short, long, again = map(widths, ("a red heart", "a red heart " * 60, "a red heart"))
    assert again == short < long


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: tiny_distilled.pipeline("llamagen"), "teacher"),
        (tiny_latent_llama.pipeline, "drafter"),
        (tiny_mar.pipeline_with_drafter, "drafter"),
        (lambda: tiny_nextstep.pipeline(**tiny_nextstep.drafting()), "drafter"),
        (lambda: tiny_var.pipeline("text"), "refiner"),
    ],
)
def test_models_with_other_companions_share_no_state(make, name):
    pipe = make()
    first, second = (pipe.prepare(**conditions(pipe, 1)).model for _ in range(2))
    assert first.put_key == second.put_key
    getattr(second, name).network = torch.nn.Linear(1, 1)
    assert first.put_key != second.put_key


@families(["llamagen-dd"])
def test_calls_with_and_without_guidance_follow_each_other(family):
    decoding = small(pipeline(family, "cpu").decoding_names[0])
    for guidance in (1.0, 3.0, 1.0):
        assert compare(family, "replayed", call, decoding, 1, guidance) == []


# Other parts of a pipeline


@pytest.mark.parametrize(("kind", "given"), [("video", {}), ("text", {}), ("video", {"image": True})])
def test_a_video_model_warms_up_by_what_it_reads(kind, given):
    with torch.no_grad():
        pipe = tiny_cosmos.pipeline(kind)
    if given:
        given = {"image": Image.new("RGB", pipe.image_sizes[0][::-1])}
    pipe.warm_up(**given, output_type="latent", generator=seeded(1))


def test_the_window_is_chosen_by_the_times_of_the_present_dtype(monkeypatch):
    measured = []

    def measure(model, step):
        measured.append(next(model.network.parameters()).dtype)
        return {1: 1.0, 4: 1.1}

    monkeypatch.setattr(step_seconds, "_measure", measure)
    monkeypatch.setattr(step_seconds, "read_table", lambda name: {})
    monkeypatch.setattr(step_seconds, "write_table", lambda name, table: None)
    pipe = fresh(place="cpu")
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        pipe.to(dtype=dtype)
        pipe("a red heart", decoding="sjd-coupled:window=auto", output_type="latent", generator=seeded(0))
    assert measured == [torch.float32, torch.bfloat16]
