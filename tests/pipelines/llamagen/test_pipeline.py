"""What a call of `LlamaGenPipeline` generates, returns and refuses."""

import logging
import time

import numpy as np
import pytest
import tiny
import torch
from PIL import Image
from pipelines.llamagen import tiny as tiny_llamagen
from presets import FOR_TOKENS, quick

from arimage import (
    AutoregressiveDecoding,
    ImagePipelineOutput,
    SpeculativeJacobiDecoding,
    decoding_from_name,
)
from arimage.pipelines.llamagen import pipeline_llamagen
from arimage.pipelines.llamagen.pipeline_llamagen import LlamaGenPipeline
from arimage.pipelines.llamagen.transformer_llamagen import LlamaGenTokenModel


PROMPTS = ["a red heart", "tree", "a blue book with a grinning cat face, flat"]
GREEDY = {"top_k": 1, "guidance_scale": 3.0, "output_type": "latent"}
GRID = 4
N = GRID * GRID
SIZE = GRID * tiny.SCALE_FACTOR
# One of each way to decode; the others are slow.
FEW = ("ar", "sjd-coupled", "sjd-tree", "sjd2", "eagle", "zipar")
few_decodings = pytest.mark.parametrize(
    "decoding", [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in FOR_TOKENS]
)


def seeded(seed):
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def pipe():
    return tiny_llamagen.text_pipeline(GRID)


@pytest.fixture(scope="module")
def class_pipe():
    return tiny_llamagen.class_pipeline(GRID)


@pytest.fixture(scope="module")
def greedy(pipe):
    """The greedy codes of each of PROMPTS, each generated alone."""
    rows = torch.cat([pipe(prompt, **GREEDY, decoding="ar").tokens for prompt in PROMPTS])
    assert len({tuple(row.flatten().tolist()) for row in rows}) == len(PROMPTS)
    assert min(len(row.unique()) for row in rows) > 3
    return rows


@pytest.fixture(autouse=True)
def defaults(pipe, class_pipe):
    """A test that changes the defaults leaves none behind."""
    yield
    for one in (pipe, class_pipe):
        one.decoding = "ar"
        one.generation_config.update(guidance_scale=1.0, temperature=1.0, top_k=0, top_p=1.0)
        one.set_progress_bar_config(disable=True)


def guided_argmax(pipe, tokens, condition, scale, guided_tokens=N):
    """The codes that greedy decoding must choose after each prefix of `tokens`, by one teacher-forced pass."""
    flat = tokens.flatten(1)
    none = torch.ones(len(flat), dtype=torch.bool)
    with torch.no_grad():
        with_condition = pipe.transformer.predict(flat, **condition)
        without = pipe.transformer.predict(flat, **condition, unconditional=none)
    guided = without + scale * (with_condition - without)
    guided[:, guided_tokens:] = with_condition[:, guided_tokens:]
    return guided.argmax(-1).reshape(tokens.shape)


# Output


def test_images_of_every_output_type_show_the_decoded_codes(pipe):
    out = {kind: pipe(PROMPTS[:2], generator=seeded(1), output_type=kind) for kind in ("pil", "np", "pt", "latent")}
    tokens = out["latent"].images
    assert tokens.dtype == torch.int64 and tokens.shape == (2, GRID, GRID)
    assert tokens.min() >= 0 and tokens.max() < tiny.CODES
    for output in out.values():
        assert isinstance(output, ImagePipelineOutput)
        assert torch.equal(output.tokens, tokens)
    with torch.no_grad():
        expected = (pipe.vq.decode(tokens) / 2 + 0.5).clamp(0, 1)
    assert expected.std() > 0.1

    tensors = out["pt"].images
    assert tensors.dtype == torch.float32 and tensors.shape == (2, 3, SIZE, SIZE)
    torch.testing.assert_close(tensors, expected)
    arrays = out["np"].images
    assert arrays.dtype == np.float32 and arrays.shape == (2, SIZE, SIZE, 3)
    np.testing.assert_allclose(arrays, expected.permute(0, 2, 3, 1).numpy(), atol=1e-6)
    pil_images = out["pil"].images
    assert all(isinstance(one, Image.Image) and one.mode == "RGB" for one in pil_images)
    np.testing.assert_array_equal(np.stack([np.asarray(p) for p in pil_images]), (arrays * 255).round())


def test_a_tuple_holds_the_images_only(pipe):
    output = pipe(PROMPTS[0], generator=seeded(1), output_type="pt", return_dict=False)
    assert isinstance(output, tuple) and len(output) == 1
    torch.testing.assert_close(output[0], pipe(PROMPTS[0], generator=seeded(1), output_type="pt").images)


def test_one_string_is_a_batch_of_one(pipe, greedy):
    assert torch.equal(pipe(PROMPTS[0], **GREEDY).tokens, pipe([PROMPTS[0]], **GREEDY).tokens)
    assert len(pipe(PROMPTS[0]).images) == 1


# Randomness


@pytest.mark.every(3)
@few_decodings
def test_the_same_generator_gives_the_same_images_and_another_gives_others(pipe, decoding):
    first, again, other = (
        pipe(PROMPTS[:2], generator=seeded(seed), decoding=decoding, output_type="pt") for seed in (5, 5, 6)
    )
    assert torch.equal(first.tokens, again.tokens)
    assert torch.equal(first.images, again.images)
    assert not torch.equal(first.tokens, other.tokens)


def test_without_a_generator_every_call_generates_other_images(pipe):
    assert not torch.equal(pipe("tree", output_type="latent").tokens, pipe("tree", output_type="latent").tokens)


def test_the_global_random_state_decides_only_when_no_generator_is_given(pipe):
    state = torch.get_rng_state()
    pipe("tree", generator=seeded(1), output_type="latent")
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.every(3)
@few_decodings
def test_each_generator_of_a_list_generates_its_own_image(pipe, decoding):
    seeds = [7, 8, 7]
    batch = pipe(PROMPTS, generator=[seeded(seed) for seed in seeds], decoding=decoding, output_type="latent").tokens
    for prompt, seed, row in zip(PROMPTS, seeds, batch, strict=True):
        alone = pipe(prompt, generator=seeded(seed), decoding=decoding, output_type="latent").tokens
        assert torch.equal(alone[0], row)


def test_one_generator_serves_the_images_in_turn(pipe):
    generator = seeded(9)
    single = torch.cat([pipe("tree", generator=generator, output_type="latent").tokens for _ in range(3)])
    batch = pipe(["tree"] * 3, generator=seeded(9), output_type="latent").tokens
    assert torch.equal(batch, single)
    assert len({tuple(row.flatten().tolist()) for row in batch}) == 3


# Batches


def test_prompts_of_different_length_give_what_each_gives_alone(pipe, greedy):
    lengths = pipe.tokenizer(PROMPTS, truncation=True, max_length=tiny.TEXT_LENGTH).input_ids
    assert len({len(ids) for ids in lengths}) == len(PROMPTS)
    assert torch.equal(pipe(PROMPTS, **GREEDY).tokens, greedy)


def test_the_images_of_a_prompt_stand_together(pipe, greedy):
    tokens = pipe(PROMPTS, **GREEDY, num_images_per_prompt=2).tokens
    assert torch.equal(tokens, greedy.repeat_interleave(2, dim=0))
    sampled = pipe(PROMPTS[:2], num_images_per_prompt=2, generator=seeded(3), output_type="latent").tokens
    rows = pipe([PROMPTS[0]] * 2 + [PROMPTS[1]] * 2, generator=seeded(3), output_type="latent").tokens
    assert torch.equal(sampled, rows)
    assert not torch.equal(sampled[0], sampled[1])


# Sampling settings


@pytest.mark.parametrize("scale", [1.0, 3.0, 7.5])
def test_greedy_codes_are_the_greatest_guided_logits(pipe, scale):
    tokens = pipe(PROMPTS, top_k=1, guidance_scale=scale, output_type="latent").tokens
    embeds, mask = pipe.encode_prompt(PROMPTS)
    condition = {"prompt_embeds": torch.zeros_like(embeds), "prompt_attention_mask": mask.flip(1)}
    for row, length in enumerate(mask.sum(1).tolist()):
        condition["prompt_embeds"][row, -length:] = embeds[row, :length]
    assert torch.equal(guided_argmax(pipe, tokens, condition, scale), tokens)


def test_guidance_changes_the_images_and_one_is_off(pipe, monkeypatch):
    groups = []

    def spy(*args, **kwargs):
        groups.append(kwargs["guided"])
        return LlamaGenTokenModel(*args, **kwargs)

    monkeypatch.setattr(pipeline_llamagen, "LlamaGenTokenModel", spy)
    plain, one, three = (
        pipe("tree", generator=seeded(2), guidance_scale=scale, output_type="latent").tokens for scale in (None, 1, 3)
    )
    assert torch.equal(plain, one) and not torch.equal(one, three)
    assert groups == [False, False, True]


@pytest.mark.parametrize("guided_tokens", [0, 1, 5, N])
def test_only_the_first_guided_tokens_are_guided(class_pipe, guided_tokens):
    tokens = class_pipe(class_labels=[1, 4], **GREEDY, guided_tokens=guided_tokens).tokens
    condition = {"class_labels": torch.tensor([1, 4])}
    assert torch.equal(guided_argmax(class_pipe, tokens, condition, 3.0, guided_tokens), tokens)


def test_a_call_overrides_the_defaults_of_the_checkpoint(pipe, greedy):
    pipe.generation_config.update(guidance_scale=3.0, top_k=1)
    assert torch.equal(pipe(PROMPTS, output_type="latent").tokens, greedy)
    assert not torch.equal(pipe(PROMPTS, output_type="latent", guidance_scale=1.0).tokens, greedy)
    assert not torch.equal(pipe(PROMPTS, output_type="latent", top_k=0, generator=seeded(0)).tokens, greedy)


def test_low_temperature_small_top_p_and_large_min_p_come_down_to_greedy(pipe, greedy):
    settings = {"guidance_scale": 3.0, "output_type": "latent", "generator": seeded(0)}
    assert torch.equal(pipe(PROMPTS, temperature=1e-5, **settings).tokens, greedy)
    assert torch.equal(pipe(PROMPTS, top_p=1e-6, **settings).tokens, greedy)
    assert torch.equal(pipe(PROMPTS, min_p=1.0, **settings).tokens, greedy)


# Decodings


@pytest.mark.every(6)
@pytest.mark.parametrize("decoding", quick(FOR_TOKENS))
def test_every_decoding_gives_the_greedy_codes(decoding, device):
    pipe = tiny_llamagen.text_pipeline(GRID).to(device)
    reference = pipe(PROMPTS, **GREEDY, decoding="ar").tokens
    assert torch.equal(pipe(PROMPTS, **GREEDY, decoding=decoding).tokens, reference)


@pytest.mark.parametrize(
    ("init", "window"), [("uniform", 1), ("left", 2), ("above", 5), ("uniform", N), ("left", 3 * N), ("above", 2)]
)
def test_greedy_codes_depend_on_no_setting_of_the_decoding(pipe, greedy, window, init):
    decoding = SpeculativeJacobiDecoding(window=window, init=init)
    assert torch.equal(pipe(PROMPTS, **GREEDY, decoding=decoding).tokens, greedy)


def test_a_decoding_is_swapped_by_object_by_name_and_for_one_call(pipe):
    assert pipe.decoding == AutoregressiveDecoding()
    pipe.decoding = SpeculativeJacobiDecoding(window=3, refresh="independent")
    by_object = pipe("tree", generator=seeded(4), output_type="latent")
    pipe.decoding = "sjd"
    assert pipe.decoding == SpeculativeJacobiDecoding(window=32, refresh="independent")
    by_name = pipe("tree", generator=seeded(4), output_type="latent")
    for_one_call = pipe("tree", generator=seeded(4), output_type="latent", decoding="ar")
    assert pipe.decoding == SpeculativeJacobiDecoding(window=32, refresh="independent")
    assert for_one_call.stats.forward_passes == N
    assert by_object.stats.accepted.max() <= 3
    assert not torch.equal(by_object.tokens, by_name.tokens)
    with_settings = pipe("tree", generator=seeded(4), output_type="latent", decoding="sjd:window=3")
    assert torch.equal(with_settings.tokens, by_object.tokens)


@pytest.mark.every(2)
@few_decodings
def test_statistics_add_up(pipe, decoding):
    began = time.perf_counter()
    stats = pipe(PROMPTS, generator=seeded(4), decoding=decoding).stats
    elapsed = time.perf_counter() - began
    assert stats.exact is decoding_from_name(decoding).exact
    assert stats.accepted.dtype == torch.int64 and stats.accepted.shape == (stats.forward_passes, 3)
    assert stats.accepted[0].tolist() == [1, 1, 1]
    assert stats.accepted.sum(0).tolist() == [N] * 3
    assert stats.tokens_per_pass == pytest.approx(N / stats.forward_passes)
    parts = [stats.prefill_seconds, stats.decode_seconds, stats.tokenizer_seconds]
    assert min(parts) > 0 and sum(parts) < elapsed
    if decoding == "ar":
        assert stats.forward_passes == N and stats.tokens_per_pass == 1 and stats.accepted.unique().tolist() == [1]
    else:
        assert 2 <= stats.forward_passes <= N


def test_a_window_that_is_chosen_by_measured_time_generates_greedy_images_all_the_same(pipe):
    decoding = SpeculativeJacobiDecoding(window="auto")
    chosen, expected = (pipe(PROMPTS, **GREEDY, decoding=each) for each in (decoding, "ar"))
    assert torch.equal(chosen.tokens, expected.tokens) and chosen.stats.exact
    again = pipe(PROMPTS, generator=seeded(4), decoding=decoding)
    assert torch.equal(again.tokens, pipe(PROMPTS, generator=seeded(4), decoding=decoding).tokens)


def test_greedy_speculation_needs_fewer_passes(pipe):
    assert pipe(PROMPTS[0], **GREEDY, decoding="sjd-coupled").stats.forward_passes < N


# Conditions


def test_encoded_prompts_stand_in_for_prompts(pipe, greedy):
    embeds, mask = pipe.encode_prompt(PROMPTS)
    assert embeds.shape == (3, tiny.TEXT_LENGTH, tiny.TEXT_WIDTH)
    assert (mask.diff(dim=1) <= 0).all() and (mask.sum(1) < tiny.TEXT_LENGTH).any()
    tokens = pipe(prompt_embeds=embeds, prompt_attention_mask=mask, **GREEDY).tokens
    assert torch.equal(tokens, greedy)
    junk = torch.where(mask[..., None].bool(), embeds, torch.full_like(embeds, 1e3))
    assert torch.equal(pipe(prompt_embeds=junk, prompt_attention_mask=mask.bool(), **GREEDY).tokens, greedy)


def test_a_prefix_of_one_token_is_the_state_of_the_last_token_of_the_prompt(pipe):
    short = LlamaGenPipeline(
        tiny_llamagen.transformer("text", GRID, num_condition_tokens=1), pipe.vq, pipe.tokenizer, pipe.text_encoder
    )
    short.set_progress_bar_config(disable=True)
    length = pipe.tokenizer.model_max_length
    embeds, mask = short.encode_prompt(PROMPTS)
    assert embeds.shape == (3, length, tiny.TEXT_WIDTH) and len(set(mask.sum(1).tolist())) == len(PROMPTS)
    ends = torch.stack([row[count - 1] for row, count in zip(embeds, mask.sum(1).tolist(), strict=True)])[:, None]
    tokens = short(PROMPTS, **GREEDY).tokens
    condition = {"prompt_embeds": ends, "prompt_attention_mask": torch.ones(3, 1)}
    assert torch.equal(guided_argmax(short, tokens, condition, GREEDY["guidance_scale"]), tokens)
    assert len({tuple(row.flatten().tolist()) for row in tokens}) == len(PROMPTS)
    for given in ({"prompt_embeds": embeds, "prompt_attention_mask": mask}, condition):
        assert torch.equal(short(**given, **GREEDY).tokens, tokens)
    with pytest.raises(ValueError, match=r"prompt_embeds are \(3, 1, 5\): give a tensor \[B, P, 16\]"):
        short(prompt_embeds=ends[..., :5], prompt_attention_mask=torch.ones(3, 1))


def test_prompts_are_cleaned_before_they_are_encoded(pipe, greedy):
    assert torch.equal(pipe("  A   RED https://example.com  heart ", **GREEDY).tokens, greedy[:1])


def test_a_prompt_that_is_too_long_is_cut_with_a_warning(pipe, caplog):
    root = logging.getLogger("arimage")
    root.addHandler(caplog.handler)
    try:
        _, mask = pipe.encode_prompt(["heart " * 100])
    finally:
        root.removeHandler(caplog.handler)
    assert mask.sum() == tiny.TEXT_LENGTH
    assert "longer than the 12 tokens that this model reads and was cut" in caplog.text


@pytest.mark.every(2)
@pytest.mark.parametrize("labels", [3, [3], torch.tensor(3), torch.tensor([3]), torch.tensor([[3]]), np.array([3])])
def test_a_class_is_an_int_a_list_or_a_tensor(class_pipe, labels):
    three = class_pipe(class_labels=[3], **GREEDY).tokens
    four = class_pipe(class_labels=[4], **GREEDY).tokens
    assert three.shape == (1, GRID, GRID) and not torch.equal(three, four)
    assert torch.equal(class_pipe(class_labels=labels, **GREEDY).tokens, three)


def test_classes_of_a_batch_keep_their_order(class_pipe):
    alone = torch.cat([class_pipe(class_labels=label, **GREEDY).tokens for label in (0, 9, 5)])
    batch = class_pipe(class_labels=[0, 9, 5], num_images_per_prompt=2, **GREEDY).tokens
    assert torch.equal(batch, alone.repeat_interleave(2, dim=0))


# Refusals

EMBEDS = torch.zeros(2, tiny.TEXT_LENGTH, tiny.TEXT_WIDTH)
MASK = torch.ones(2, tiny.TEXT_LENGTH)


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        ({}, "give either a prompt or prompt_embeds"),
        ({"prompt": "x", "prompt_embeds": EMBEDS}, "give either a prompt or prompt_embeds"),
        ({"class_labels": 1}, "generates from text: give a prompt instead of class_labels"),
        ({"prompt": "x", "class_labels": 1}, "generates from text: give a prompt instead of class_labels"),
        ({"prompt": []}, r"prompt is \[\]: give a string or a list of strings"),
        ({"prompt": 5}, "prompt is 5: give a string or a list of strings"),
        ({"prompt": ["x", None]}, "give a string or a list of strings"),
        ({"prompt_embeds": EMBEDS[:, :3]}, r"prompt_embeds are \(2, 3, 16\): give a tensor \[B, 12, 16\]"),
        ({"prompt_embeds": EMBEDS[0]}, r"prompt_embeds are \(12, 16\): give a tensor \[B, 12, 16\]"),
        ({"prompt_embeds": EMBEDS}, r"prompt_attention_mask must be \[B, 12\]"),
        ({"prompt_embeds": EMBEDS, "prompt_attention_mask": MASK[:1]}, r"prompt_attention_mask must be \[B, 12\]"),
        ({"prompt_embeds": EMBEDS, "prompt_attention_mask": MASK * 0}, "pad on the right"),
        ({"prompt": "x", "height": 16}, "height and width are 16 and None: this checkpoint generates 8x8 pixels only"),
        ({"prompt": "x", "width": 4}, "height and width are None and 4: this checkpoint generates 8x8 pixels only"),
        ({"prompt": "x", "output_type": "jpg"}, "output_type is 'jpg': choose among pil, np, pt, latent"),
        (
            {"prompt": "x", "callback_on_step_end_tensor_inputs": ["latents"]},
            r"callback_on_step_end_tensor_inputs is \['latents'\]",
        ),
        ({"prompt": "x", "num_images_per_prompt": 0}, "num_images_per_prompt is 0: give a whole number"),
        ({"prompt": "x", "generator": [seeded(0)] * 2}, "generator holds 2 for 1 images"),
        ({"prompt": "x", "decoding": "sdj"}, "'sdj'"),
        ({"prompt": "x", "temperature": 0.0}, "temperature"),
        ({"prompt": "x", "top_k": -1}, "top_k"),
        ({"prompt": "x", "top_p": 0.0}, "top_p is 0.0: give a probability above 0"),
        ({"prompt": "x", "top_p": 1.5}, "top_p is 1.5: give a probability above 0"),
        ({"prompt": "x", "min_p": -0.1}, "min_p is -0.1: give a number from 0 to 1"),
    ],
)
def test_what_a_text_model_cannot_generate_is_refused(pipe, arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        pipe(**arguments)


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        ({}, "this checkpoint generates classes: give class_labels, ids from 0 to 9, or their names as the prompt"),
        (
            {"prompt": "x"},
            "this checkpoint generates classes and does not name them: give class_labels, ids from 0 to 9",
        ),
        ({"class_labels": ["x", 1]}, "generates classes and does not name them: give class_labels, ids from 0 to 9"),
        ({"prompt": "x", "class_labels": 1}, "this checkpoint generates classes"),
        ({"class_labels": 1, "prompt_embeds": EMBEDS}, "this checkpoint generates classes"),
        ({"class_labels": []}, r"class_labels are \[\]: give one or more ids from 0 to 9"),
        ({"class_labels": 10}, "class_labels are 10: give one or more ids from 0 to 9"),
        ({"class_labels": [3, -1]}, r"class_labels are \[3, -1\]: give one or more ids from 0 to 9"),
        ({"class_labels": [1.5]}, r"class_labels are \[1.5\]: give one or more ids from 0 to 9"),
    ],
)
def test_what_a_class_model_cannot_generate_is_refused(class_pipe, arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        class_pipe(**arguments)


def test_the_trained_size_may_be_named(pipe, greedy):
    assert torch.equal(pipe(PROMPTS, **GREEDY, height=SIZE, width=SIZE).tokens, greedy)


def test_an_unknown_decoding_is_refused_when_it_is_assigned(pipe):
    with pytest.raises(ValueError, match="'jacobi'"):
        pipe.decoding = "jacobi"
    assert pipe.decoding == AutoregressiveDecoding()


def test_without_a_text_encoder_prompts_are_refused_and_encoded_ones_generated(pipe, greedy):
    bare = LlamaGenPipeline(pipe.transformer, pipe.vq)
    bare.set_progress_bar_config(disable=True)
    with pytest.raises(ValueError, match="has no text encoder: give prompt_embeds and prompt_attention_mask"):
        bare("tree")
    embeds, mask = pipe.encode_prompt(PROMPTS)
    assert torch.equal(bare(prompt_embeds=embeds, prompt_attention_mask=mask, **GREEDY).tokens, greedy)


def test_parts_that_do_not_fit_together_are_refused(pipe):
    with pytest.raises(ValueError, match="the transformer has 48, the image tokenizer 32"):
        LlamaGenPipeline(pipe.transformer, tiny.image_tokenizer(codes=32))
    wide = tiny.text_encoder(300, width=32)
    with pytest.raises(ValueError, match="the text encoder has 32, the transformer 16"):
        LlamaGenPipeline(pipe.transformer, pipe.vq, pipe.tokenizer, wide)


# Callbacks and progress


@pytest.mark.parametrize("decoding", ["ar", "sjd-coupled"])
def test_a_callback_sees_every_pass(pipe, decoding):
    seen = []

    def callback(pipeline, step, passes, tensors):
        assert pipeline is pipe and set(tensors) == {"tokens", "decided"}
        assert tensors["tokens"].shape == tensors["decided"].shape == (2, N)
        assert tensors["decided"].dtype == torch.bool
        seen.append((step, passes, tensors["decided"].clone(), tensors["tokens"].clone()))
        return {}

    output = pipe(
        PROMPTS[:2],
        generator=seeded(0),
        decoding=decoding,
        callback_on_step_end=callback,
        callback_on_step_end_tensor_inputs=["tokens", "decided"],
        output_type="latent",
    )
    assert [(step, passes) for step, passes, *_ in seen] == [(i, i + 1) for i in range(output.stats.forward_passes)]
    decided = torch.stack([d.sum(1) for _, _, d, _ in seen])
    assert torch.equal(decided, output.stats.accepted.cumsum(0))
    for _, _, known, tokens in seen:
        assert torch.equal(tokens[known], output.tokens.flatten(1)[known])


def test_tokens_alone_are_given_by_default(pipe):
    names = []
    pipe("tree", callback_on_step_end=lambda *args: names.append(sorted(args[3])), output_type="latent")
    assert names == [["tokens"]] * N


def test_an_interrupt_ends_the_call_after_the_pass(pipe):
    def stop(pipeline, step, passes, tensors):
        pipeline._interrupt = step == 4

    complete = pipe("tree", generator=seeded(3))
    stopped = pipe("tree", generator=seeded(3), callback_on_step_end=stop)
    assert stopped.stats.forward_passes == 5 and len(stopped.images) == 1
    assert torch.equal(stopped.tokens.flatten()[:5], complete.tokens.flatten()[:5])
    assert stopped.stats.accepted.sum() == 5
    assert stopped.stats.tokens_per_pass == 1
    assert pipe("tree", generator=seeded(3)).stats.forward_passes == N


def test_the_progress_bar_counts_codes_and_can_be_disabled(pipe, capsys):
    pipe("tree")
    assert capsys.readouterr().err == ""
    pipe.set_progress_bar_config(disable=False)
    pipe("tree", decoding="sjd-coupled")
    assert f"{N}/{N}" in capsys.readouterr().err


# Number formats and offloading


def test_in_bfloat16_the_pil_images_stay_sound(class_pipe):
    pipe = tiny_llamagen.class_pipeline(GRID).to(torch.bfloat16)
    assert {pipe.transformer.dtype, pipe.vq.dtype} == {torch.bfloat16}
    output = pipe(class_labels=[1, 2], generator=seeded(0), guidance_scale=2.0, output_type="pt")
    assert output.images.dtype == torch.float32 and output.images.isfinite().all()
    with torch.no_grad():
        expected = (class_pipe.vq.decode(output.tokens) / 2 + 0.5).clamp(0, 1)
    assert (output.images - expected).abs().mean() < 0.02


def test_group_offloading_changes_nothing(greedy, device):
    pipe = tiny_llamagen.text_pipeline(GRID)
    pipe.compile()
    pipe.enable_group_offload(torch.device(device))
    # A captured step would keep the addresses of weights that move.
    assert pipe.has_hooks and pipe._step_compiler is None
    assert torch.equal(pipe(PROMPTS, **GREEDY).tokens.cpu(), greedy)
    assert len(pipe(PROMPTS[0]).images) == 1
    with pytest.raises(ValueError, match=r"^offload_type is 'block_level', .*: give \"leaf_level\"$"):
        pipe.enable_group_offload(torch.device(device), offload_type="block_level", num_blocks_per_group=1)


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["enable_model_cpu_offload", "enable_sequential_cpu_offload"])
def test_offloading_to_the_cpu_changes_nothing(greedy, method):
    pipe = tiny_llamagen.text_pipeline(GRID)
    getattr(pipe, method)()
    for _ in range(2):
        assert torch.equal(pipe(PROMPTS, **GREEDY).tokens.cpu(), greedy)
    assert len(pipe(PROMPTS[0]).images) == 1
    assert {parameter.device.type for parameter in pipe.transformer.parameters()} <= {"cpu", "meta"}
