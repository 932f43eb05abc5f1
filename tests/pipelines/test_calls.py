"""What the calls of all pipelines share: signatures, threads, nested calls, compiled components, refusals."""

import functools
import inspect
import threading
import time

import numpy as np
import pytest
import tiny
import torch
from families import BUILD, EVERY, LATENT, condition_of, flat, having, one_of_each_kind, seeded
from pipelines.cosmos import tiny as tiny_cosmos
from pipelines.llamagen import tiny as tiny_llamagen
from transformers import PreTrainedTokenizerFast

import arimage
from arimage import SpeculativeJacobiDecoding
from arimage.pipelines.emu3.prompts import PROMPT_SUFFIX


RUN = [
    *("batch_size", "generator", "decoding", "output_type", "return_dict", "callback_on_step_end"),
    "callback_on_step_end_tensor_inputs",
]
IMAGES = ["height", "width", "num_images_per_prompt", *RUN]
CUTS = ["temperature", "top_k", "top_p", "min_p"]
# By the kind of model, what all calls end with.
TAILS = {
    "tokens": ["guidance_scale", *CUTS, "guided_tokens", *IMAGES],
    "latents": ["guidance_scale", "guidance_schedule", "temperature", *IMAGES],
    "decoder": [*CUTS, *IMAGES],
    "videos": ["guidance_scale", *CUTS, "num_videos_per_prompt", *RUN],
}
DEFAULTS = {"num_images_per_prompt": 1, "num_videos_per_prompt": 1, "output_type": "pil", "return_dict": True}
DEFAULTS |= {
    "callback_on_step_end_tensor_inputs": ["tokens"],
    "cfg_insertion_layer": 0,
    "prompt_suffix": PROMPT_SUFFIX,
}
# InfinityStar's suffix is for videos only, and images are videos of one frame.
OWN_DEFAULTS = {"InfinityStarPipeline": {"prompt_suffix": None, "apg_norm_threshold": 0.05}}
OWN_DEFAULTS["NextStepPipeline"] = {"prompt_suffix": None}
PIPELINES = [name for name in arimage.__all__ if name.endswith("Pipeline") and name != "AutoPipeline"]


LANGUAGE_MODELS = ("janus", "emu3", "lumina", "anole")


@pytest.fixture(scope="module")
def pipes():
    return {name: build() for name, build in BUILD.items()}


@pytest.fixture(params=one_of_each_kind(BUILD))
def pipe(request, pipes):
    return pipes[request.param]


def keywords_of(function):
    """The defaults of the keyword arguments of a function, in their order, and its positional arguments."""
    parameters = inspect.signature(function).parameters.values()
    kinds = [parameter.kind for parameter in parameters]
    assert set(kinds) == {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}
    count = kinds.index(inspect.Parameter.KEYWORD_ONLY)
    return {one.name: one.default for one in list(parameters)[count:]}, list(parameters)[1:count]


@pytest.mark.parametrize("family", PIPELINES)
def test_a_call_has_its_own_arguments_then_those_of_all_in_one_order_with_one_set_of_defaults(family):
    keywords, positional = keywords_of(getattr(arimage, family).__call__)
    assert [one.name for one in positional] in (["prompt"], ["prompt", "class_labels"], ["prompt", "negative_prompt"])
    prompt, names = positional[0], list(keywords)
    others = {"class_labels", "input_ids", "prompt_embeds"} & {*names, *(one.name for one in positional)}
    assert prompt.default is (None if others else inspect.Parameter.empty)
    assert all(one.default is None for one in positional[1:])
    own = OWN_DEFAULTS.get(family, {})
    assert keywords == {name: own[name] if name in own else DEFAULTS.get(name) for name in names}
    [tail] = [tail for tail in TAILS.values() if names[-len(tail) :] == tail]
    assert not {*names[: -len(tail)]} & {*RUN}


@pytest.mark.parametrize("family", PIPELINES)
def test_to_prepare_takes_the_arguments_of_a_call_but_those_of_its_run(family):
    pipeline = getattr(arimage, family)
    (called, first), (prepared, given) = keywords_of(pipeline.__call__), keywords_of(pipeline.prepare)
    # The order "locality" is that of the groups of a decoding; not every pipeline has a diffusion decoder.
    reads = (
        {"decoding", "output_type"} if "order" in called else {"output_type"} if family == "XOmniPipeline" else set()
    )
    assert prepared == {
        name: value for name, value in called.items() if name not in RUN or name in {"generator", *reads}
    }
    assert first == given and pipeline.prepare.__name__ == "prepare"
    assert "arguments of a call" in inspect.getdoc(pipeline.prepare)


@pytest.mark.parametrize("family", PIPELINES)
def test_the_docstring_of_a_call_names_every_argument_and_has_an_example(family):
    call = getattr(arimage, family).__call__
    # From Python 3.13 on, `__doc__` itself has no indentation of the code.
    text = inspect.getdoc(call)
    assert "{" not in text and "\nExamples:\n    ```py\n    >>> " in text
    for name in inspect.signature(call).parameters:
        assert name == "self" or f" {name} (" in text, name


def test_an_unknown_argument_is_refused_by_its_name(pipe):
    name, condition = type(pipe).__name__, condition_of(pipe)
    for method in ("__call__", "prepare"):
        with pytest.raises(TypeError, match=rf"{name}.{method}\(\) got an unexpected keyword argument 'nonsense'"):
            getattr(pipe, method)(**condition, nonsense=3)
    with pytest.raises(TypeError, match=f"{name}.__call__.*multiple values for argument 'prompt'"):
        pipe("a", prompt="b")
    with pytest.raises(TypeError, match=f"{name}.__call__.*too many positional arguments"):
        pipe("a", None, None)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [("seed", "generator="), ("strength", "mask_image"), ("num_inference_steps", "no scheduler.*decoding")],
)
def test_arguments_of_diffusion_pipelines_are_refused_with_what_to_do_instead(pipes, name, remedy):
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}': .*{remedy}"):
        pipes["llamagen-text"]("a red heart", **{name: 1})


def test_statistics_print_as_one_line(pipe):
    shown = repr(pipe(**condition_of(pipe), **LATENT).stats)
    assert shown.startswith("DecodingStats(") and "forward pass" in shown and "\n" not in shown and len(shown) < 200


def test_an_unknown_decoding_is_refused_with_those_of_the_model(pipe):
    with pytest.raises(ValueError, match="'sdj'") as error:
        pipe.decoding = "sdj:window=8"
    listed = str(error.value).partition("runs ")[2].split(", ")
    assert listed == pipe.decoding_names


def test_what_a_pipeline_says_of_itself_holds(pipe):
    sizes = pipe.image_sizes
    images = pipe(**condition_of(pipe), output_type="pt").images
    assert tuple(images.shape[-2:]) == sizes[0] and len(set(sizes)) == len(sizes)


def test_only_the_first_guided_tokens_are_guided(pipe):
    options = {**condition_of(pipe), "guidance_scale": 6.0, "top_k": 1, **LATENT}
    none, some, every = (flat(pipe(**options, guided_tokens=count).tokens) for count in (0, 2, None))
    off = flat(pipe(**options | {"guidance_scale": 1.0}).tokens)
    assert torch.equal(none, off)
    assert not torch.equal(every, off) and torch.equal(some[:, :2], every[:, :2])


def sizes_of(pipe):
    """Two sizes, the same one twice where there is only one."""
    if type(pipe).__name__ == "Emu3Pipeline":
        return [{"height": 32, "width": 32}, {"height": 16, "width": 64}]
    if type(pipe).__name__ == "LuminaMGPTPipeline":
        return [{"height": 32, "width": 32}, {"height": 32, "width": 64}]
    return [{}, {}]


def test_a_call_may_run_inside_of_a_callback(pipe):
    outer, inner = sizes_of(pipe)
    options = {**condition_of(pipe), "output_type": "pt"}
    expected = [pipe(**options, **size, generator=seeded(i)).images for i, size in enumerate((outer, inner))]
    nested = []

    def callback(pipe, step, passes, tensors):
        if step == 1:
            call = pipe.current_call
            nested.append(pipe(**options, **inner, generator=seeded(1)).images)
            assert pipe.current_call is call
            pixels = pipe.decode_tokens(call, tensors["tokens"])
            assert pixels.shape == expected[0].shape

    images = pipe(**options, **outer, generator=seeded(0), callback_on_step_end=callback).images
    assert torch.equal(images, expected[0]) and torch.equal(nested[0], expected[1])
    assert pipe.current_call is None


@pytest.mark.every(2)
def test_calls_of_other_sizes_run_in_other_threads(pipe):
    sizes = sizes_of(pipe) * 2
    options = {**condition_of(pipe), "output_type": "pt", "decoding": pipe.decoding_names[0]}
    expected = [pipe(**options, **size, generator=seeded(i)).images for i, size in enumerate(sizes)]
    found, start = [None] * len(sizes), threading.Barrier(len(sizes))

    def run(i):
        start.wait()
        found[i] = pipe(**options, **sizes[i], generator=seeded(i)).images

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(sizes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for images, one in zip(found, expected, strict=True):
        torch.testing.assert_close(images, one, atol=1e-5, rtol=0)


@pytest.mark.every(2)
@pytest.mark.parametrize("family", one_of_each_kind(having("text")))
def test_threads_tokenize_their_prompts_one_at_a_time(family, monkeypatch):
    # A call sets the padding of the tokenizer of all: next to a call without padding, this one's rows would differ.
    pipe, calls = EVERY[family](), []
    encode, running = PreTrainedTokenizerFast._encode_plus, []

    def encode_slowly(self, *args, **options):
        running.append(options)
        calls.append(len(running))
        time.sleep(0.02)
        encoded = encode(self, *args, **options)
        running.pop()
        return encoded

    monkeypatch.setattr(PreTrainedTokenizerFast, "_encode_plus", encode_slowly)
    prompts = ("a red heart", "a green book")
    threads = [
        threading.Thread(target=pipe, kwargs=condition_of(pipe) | LATENT | {"prompt": prompt}) for prompt in prompts
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) > 1 and max(calls) == 1


def test_an_interrupt_outside_of_a_call_is_an_error(pipe):
    pipe._interrupt = False
    with pytest.raises(RuntimeError, match="_interrupt"):
        pipe._interrupt = True
    assert not pipe.interrupt


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["llamagen-text", "var-class", "janus", "anole", "emu3", "lumina", "mar", "glm-image", "mammothmoda2"]
)
def test_a_compiled_component_is_the_one_that_runs(name):
    pipe, compiled = EVERY[name](), []
    if name == "llamagen-text":
        pipe = tiny_llamagen.text_pipeline(num_layers=1)
    part = pipe._lora_loadable_modules[0]
    size = sizes_of(pipe)[0]
    options = {**condition_of(pipe), **size, "guidance_scale": 2.0, **LATENT}
    expected = flat(pipe(**options, generator=seeded(0)).tokens)

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    torch._dynamo.reset()
    setattr(pipe, part, torch.compile(getattr(pipe, part), backend=backend))
    torch.testing.assert_close(flat(pipe(**options, generator=seeded(0)).tokens), expected, atol=1e-2, rtol=1e-3)
    assert compiled


EMBEDS, MASK = torch.zeros(1, tiny.TEXT_LENGTH, tiny.TEXT_WIDTH), torch.ones(1, tiny.TEXT_LENGTH)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        *(("generator", value) for value in (5, [5], [None], (None,), [], "x")),
        *(("num_images_per_prompt", value) for value in (None, 0, -1, 1.5, True, "2", 10**9, 10**23)),
        *(("batch_size", value) for value in (0, -1, 1.5, True, "2")),
        *(("callback_on_step_end_tensor_inputs", value) for value in (None, "tokens", ["noise"], [[]], 5)),
        *(("top_k", value) for value in (5.0, float("nan"), "5", [1], True)),
        *(("guided_tokens", value) for value in (1.5, "1", True)),
        *((name, torch.tensor([1.0, 2.0])) for name in ("guidance_scale", "temperature", "top_p", "min_p")),
        *((name, "1") for name in ("guidance_scale", "temperature", "top_p", "min_p")),
        *(("decoding", value) for value in (5, [], object(), SpeculativeJacobiDecoding, "sdj")),
        *(("height", value) for value in ([], "64", 3, 0, 2.5, torch.ones(2))),
        *(("output_type", value) for value in (None, "jpg", 5, np.zeros(2))),
        ("callback_on_step_end", 5),
    ],
)
@pytest.mark.parametrize("name", ["llamagen-class", "var-text", "emu3", "lumina"])
def test_an_argument_that_makes_no_sense_is_refused_by_its_name(pipes, name, argument, value):
    pipe = pipes[name]
    with pytest.raises(ValueError, match=argument):
        pipe(**condition_of(pipe), **{argument: value})


@pytest.mark.every(2)
@pytest.mark.parametrize("value", [[None], {}, True, [True], "x", 1.5, torch.tensor([1j]), torch.zeros(0), 3.0])
@pytest.mark.parametrize("name", ["llamagen-class", "var-class"])
def test_class_labels_that_are_no_ids_are_refused(pipes, name, value):
    with pytest.raises(ValueError, match="class_labels"):
        pipes[name](class_labels=value)


@pytest.mark.parametrize(
    ("embeds", "mask", "argument"),
    [
        *((embeds, MASK, "prompt_embeds") for embeds in ("x", EMBEDS[:0], EMBEDS.long(), EMBEDS + 0j)),
        *((EMBEDS, mask, "prompt_attention_mask") for mask in ("x", 2 * MASK, 0.5 * MASK, -MASK)),
    ],
)
@pytest.mark.parametrize("name", ["llamagen-text", "var-text"])
def test_prompt_embeds_that_are_no_tensors_are_refused(pipes, name, embeds, mask, argument):
    with pytest.raises(ValueError, match=argument):
        pipes[name](prompt_embeds=embeds, prompt_attention_mask=mask)


@pytest.mark.parametrize("name", one_of_each_kind(EVERY))
def test_a_mask_without_what_it_masks_is_refused(name):
    pipe = EVERY[name]()
    masks = [name for name in inspect.signature(pipe.__call__).parameters if name.endswith("attention_mask")]
    for mask in masks:
        for call in (pipe, pipe.prepare):
            with pytest.raises(ValueError, match=f"^{mask} is given without .*: give both, or neither"):
                call(**condition_of(pipe), **{mask: torch.ones(1, 4)})


@pytest.mark.parametrize(
    "ids",
    [
        *("x", [1, 2], torch.zeros(0, 3).long(), torch.zeros(1, 3), torch.zeros(1, 3).bool()),
        *(torch.full((1, 3), number) for number in (-1, 10**6)),
    ],
)
@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_input_ids_that_are_no_token_ids_are_refused(pipes, name, ids):
    with pytest.raises(ValueError, match="input_ids"):
        pipes[name](input_ids=ids)


NAN = np.full((8, 8, 3), np.nan, dtype=np.float32)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("image", []),
        ("image", [[]]),
        ("image", NAN),
        ("image", torch.zeros(0, 3, 8, 8)),
        ("mask_image", []),
        ("mask_image", NAN[..., 0]),
    ],
)
def test_images_that_are_empty_or_not_finite_are_refused(pipe, argument, value):
    given = {"image": np.zeros((8, 8, 3), dtype=np.float32), "mask_image": np.ones((8, 8), dtype=np.float32)}
    with pytest.raises(ValueError, match=argument):
        pipe(**condition_of(pipe), **given | {argument: value})


@pytest.mark.parametrize("output_type", ["pil", "np", "pt"])
def test_pixels_that_are_not_finite_are_an_error(output_type):
    pipe = tiny_llamagen.class_pipeline()
    next(pipe.vq.decoder.parameters()).data.fill_(float("nan"))
    with pytest.raises(ValueError, match="pixels are not finite"):
        pipe(class_labels=1, output_type=output_type)


@pytest.mark.every(2)
@pytest.mark.parametrize("name", BUILD)
def test_encoded_pixels_that_are_not_finite_are_an_error(name):
    pipe = EVERY[name]()
    parts = [part for key, part in pipe.components.items() if key != "text_encoder" and hasattr(part, "named_modules")]
    encoders = [
        one for part in parts for place, one in part.named_modules() if place.rpartition(".")[2].startswith("encoder")
    ]
    for encoder in encoders:
        for weight in encoder.parameters():
            weight.data.fill_(float("nan"))
    image, mask = np.zeros((8, 8, 3), dtype=np.float32), np.ones((8, 8), dtype=np.float32)
    with pytest.raises(ValueError, match="encodes is not finite"):
        pipe(**condition_of(pipe), image=image, mask_image=mask)


@pytest.mark.parametrize("name", ["llamagen-text", "var-text"])
def test_a_word_of_a_million_letters_is_cut_before_it_is_read(pipes, name):
    pipe = pipes[name]
    embeds, mask = pipe.encode_prompt(["a" * 10**6])
    assert mask.all() and torch.equal(embeds, pipe.encode_prompt(["a" * 2000])[0])


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_a_language_model_refuses_a_prompt_that_is_too_long(pipes, name):
    with pytest.raises(ValueError, match="prompt has 1000000 characters"):
        pipes[name]("a" * 10**6)


@pytest.mark.every(2)
@pytest.mark.parametrize("family", having("captions"))
def test_an_odd_number_of_text_tokens_is_refused(family):
    pipe = EVERY[family]()
    call = (
        pipe.encode_prompt if hasattr(pipe, "encode_prompt") else functools.partial(pipe, tokens=tiny_cosmos.given())
    )
    for length in (0, -1, 10**12, 2.0, "5", True):
        with pytest.raises(ValueError, match=f"max_sequence_length is {length!r}: give a whole number from 1 to 4096"):
            call("a red heart", max_sequence_length=length)


@pytest.mark.every(2)
@pytest.mark.parametrize("family", ["llamagen-text", "janus", "emu3", "lumina", "lumina-2", "anole", "cosmos-text"])
def test_prompts_that_are_not_utf8_are_refused(family):
    pipe = EVERY[family]()
    given = {"tokens": tiny_cosmos.given()} if family in having("videos") else {}
    for prompt in ("\ud83d", ["a red heart", "heart \udcff"]):
        with pytest.raises(
            ValueError, match="the prompt '.*' holds half a surrogate pair, or a byte that is not UTF-8"
        ):
            pipe(prompt, **given)
        if hasattr(pipe, "encode_prompt"):
            arguments = ((32, 32),) if family in ("emu3", "lumina", "lumina-2") else ()
            with pytest.raises(ValueError, match="half a surrogate pair"):
                pipe.encode_prompt(prompt, *arguments)


@pytest.mark.every(2)
@pytest.mark.parametrize("family", ["emu3", "lumina", "lumina-2", "anole"])
def test_prompts_need_a_tokenizer(family):
    pipe = EVERY[family]()
    pipe.register_modules(tokenizer=None)
    arguments = () if family == "anole" else ((32, 32),)
    for call in (pipe, lambda text: pipe.encode_prompt(text, *arguments)):
        with pytest.raises(ValueError, match="no tokenizer: give"):
            call("a red heart")


@pytest.mark.parametrize("family", ["emu3", "emu3.5", "infinity", "infinitystar", "mammothmoda2", "nextstep"])
def test_other_texts_of_a_call_are_texts(family):
    pipe = EVERY[family]()
    for name, values in (("negative_prompt", ([], {}, 0, [None])), ("prompt_suffix", ({}, [], ["a"], 0))):
        for value in values if pipe.abilities.accepts(name) else ():
            with pytest.raises(ValueError, match=name):
                pipe(**condition_of(pipe), **{name: value})


@pytest.mark.parametrize("family", ["llamagen-text", "cosmos-text"])
def test_an_error_describes_embeddings_and_does_not_print_them(family):
    for embeds in (torch.ones(3, 300, 300), np.ones((300, 300))):
        with pytest.raises(ValueError, match="prompt_embeds") as refusal:
            EVERY[family]().prepare(prompt_embeds=embeds)
        assert len(str(refusal.value)) < 200


def test_guidance_of_a_decoder_is_told_by_one_scale():
    pipe, seen = EVERY["glm-image"](), []

    def look(pipe, step, passes, tensors):
        seen.append((pipe.guidance_scale, pipe.do_classifier_free_guidance))

    for scale in (2.0, 1.0):
        seen.clear()
        pipe("a", guidance_scale=scale, num_inference_steps=1, callback_on_step_end=look, output_type="latent")
        assert set(seen) == {(scale, scale > 1)}


def test_one_number_or_decoding_is_warmed_up_without_a_list(pipe, monkeypatch):
    asked = []
    monkeypatch.setattr(type(pipe), "__call__", lambda self, **given: asked.append(given))
    pipe.warm_up(batch_sizes=8, decodings="ar")
    pipe.warm_up(batch_sizes=[2, 3])
    assert [(given[pipe.per_prompt], given["decoding"]) for given in asked] == [(8, "ar"), (2, None), (3, None)]


@pytest.mark.parametrize("family", [name for name in having("captions") if name not in having("videos")])
def test_a_tokenizer_without_a_limit_reads_512_tokens(monkeypatch, family):
    whole = EVERY[family]()
    encoder = type(whole)(None, None, tokenizer=whole.tokenizer, text_encoder=whole.text_encoder)
    # What transformers takes where a tokenizer does not say.
    monkeypatch.setattr(encoder.tokenizer, "model_max_length", int(1e30))
    prompt = "a red heart " * 200
    assert len(encoder.tokenizer(prompt).input_ids) > 512
    assert encoder.encode_prompt(prompt)[0].shape[:2] == (1, 512)
