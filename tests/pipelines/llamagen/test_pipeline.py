"""What a call of `LlamaGenPipeline` generates, returns and refuses."""

import logging
import time

import pytest
import tiny
import torch
from families import seeded
from pipelines.llamagen import tiny as tiny_llamagen

from arimage import decoding_from_name
from arimage.pipelines.llamagen.denoiser_llamagen import LlamaGenDenoiser
from arimage.pipelines.llamagen.drafter_llamagen import LlamaGenDrafter
from arimage.pipelines.llamagen.pipeline_llamagen import LlamaGenPipeline


PROMPTS = ["a red heart", "tree", "a blue book with a grinning cat face, flat"]
GREEDY = {"top_k": 1, "guidance_scale": 3.0, "output_type": "latent"}
GRID = 4
N = GRID * GRID


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


def test_a_call_overrides_the_defaults_of_the_checkpoint(pipe, greedy):
    pipe.generation_config.update(guidance_scale=3.0, top_k=1)
    assert torch.equal(pipe(PROMPTS, output_type="latent").tokens, greedy)
    assert not torch.equal(pipe(PROMPTS, output_type="latent", guidance_scale=1.0).tokens, greedy)
    assert not torch.equal(pipe(PROMPTS, output_type="latent", top_k=0, generator=seeded(0)).tokens, greedy)


@pytest.mark.parametrize("decoding", ["ar", "sjd-coupled"])
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
    with pytest.raises(ValueError, match=r"prompt_embeds are \(3, 1, 5\): .*\[B, P, 16\]"):
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


EMBEDS = torch.zeros(2, tiny.TEXT_LENGTH, tiny.TEXT_WIDTH)
MASK = torch.ones(2, tiny.TEXT_LENGTH)


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        ({}, "give either a prompt or prompt_embeds"),
        ({"prompt": "x", "prompt_embeds": EMBEDS}, "give either a prompt or prompt_embeds"),
        ({"class_labels": 1}, "generates from text: give a prompt instead of class_labels"),
        ({"prompt": []}, r"prompt is \[\]: give a string or a list of strings"),
        ({"prompt_embeds": EMBEDS[:, :3]}, r"prompt_embeds are \(2, 3, 16\): .*\[B, 12, 16\]"),
        ({"prompt_embeds": EMBEDS[0]}, r"prompt_embeds are \(12, 16\): .*\[B, 12, 16\]"),
        ({"prompt_embeds": EMBEDS}, r"prompt_attention_mask must be \[B, 12\]"),
        ({"prompt_embeds": EMBEDS, "prompt_attention_mask": MASK * 0}, "pad on the right"),
        ({"prompt": "x", "height": 16}, "height and width are 16 and None: this checkpoint generates 8x8 pixels only"),
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
        ({"class_labels": 1, "prompt_embeds": EMBEDS}, "this checkpoint generates classes"),
        ({"class_labels": []}, r"class_labels are \[\]: give one or more ids from 0 to 9"),
        ({"class_labels": [3, -1]}, r"class_labels are \[3, -1\]: give one or more ids from 0 to 9"),
    ],
)
def test_what_a_class_model_cannot_generate_is_refused(class_pipe, arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        class_pipe(**arguments)


def test_parts_that_do_not_fit_together_are_refused(pipe):
    with pytest.raises(ValueError, match="the transformer has 48, the image tokenizer 32"):
        LlamaGenPipeline(pipe.transformer, tiny.image_tokenizer(codes=32))
    wide = tiny.text_encoder(300, width=32)
    with pytest.raises(ValueError, match="the text encoder .* 32.* the transformer .*16"):
        LlamaGenPipeline(pipe.transformer, pipe.vq, pipe.tokenizer, wide)
    for name, part in (("drafter", LlamaGenDrafter()), ("denoiser", LlamaGenDenoiser())):
        with pytest.raises(ValueError, match=f"the {name} .* 768.* the transformer 32"):
            LlamaGenPipeline(pipe.transformer, pipe.vq, **{name: part})


def test_group_offloading_changes_nothing(greedy, device):
    pipe = tiny_llamagen.text_pipeline(GRID)
    pipe.compile()
    pipe.enable_group_offload(torch.device(device))
    # A captured step would keep the addresses of weights that move.
    assert pipe.has_hooks and pipe.steps_of(pipe.decoding) is None
    assert torch.equal(pipe(PROMPTS, **GREEDY).tokens.cpu(), greedy)
    assert len(pipe(PROMPTS[0]).images) == 1
    with pytest.raises(ValueError, match=r"^offload_type is 'block_level', .*: give \"leaf_level\"$"):
        pipe.enable_group_offload(torch.device(device), offload_type="block_level", num_blocks_per_group=1)
