"""The language model of GLM-Image against transformers', which the fixtures hold the outputs of."""

import copy
import threading

import pytest
import torch
from decoding.test_exactness import assert_follows
from pipelines.glm_image.tiny import (
    CASES,
    CODES,
    EXPECTED,
    FOLDER,
    INPUTS,
    bind,
    codes_of,
    encoder,
    layout_of,
    source_grids,
    sources,
)
from transformers import GlmImageProcessor

from arimage.decoding import Layout, Sampling, decode, decoding_from_name
from arimage.pipelines.glm_image.transformer_glm_image import (
    bind_prompts,
    grids_of,
    prompt_positions,
    source_codes,
    token_positions,
)


GREEDY, SEEDS = Sampling(top_k=1), torch.arange(2)


@pytest.fixture(autouse=True)
def untouched():
    """What transformers' own forward passes write to the module is never written."""
    yield
    parts = encoder().model
    assert (parts._cached_decode_position_ids, parts._prefill_len, parts.rope_deltas) == (None, None, None)


@pytest.fixture(scope="module")
def processor():
    return GlmImageProcessor.from_pretrained(FOLDER / "processor")


def processed(processor, text, pictures, size):
    content = [*({"type": "image", "image": picture} for picture in pictures), {"type": "text", "text": text}]
    return processor.apply_chat_template(
        [[{"role": "user", "content": content}]],
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        processor_kwargs={"target_h": size[0], "target_w": size[1]},
    )


# Grids that are multiples of each other, others, and extreme shapes.
SIZES = [(512, 512), (1024, 1024), (1152, 768), (1056, 1024), (1024, 1920), (2048, 512), (32, 1024), (2048, 32)]


@pytest.mark.parametrize("size", SIZES)
def test_grids_are_those_of_the_processor(processor, size):
    large, small = grids_of(size)
    assert processed(processor, "", [], size)["image_grid_thw"][:, 1:].tolist() == [list(large), list(small)]


@pytest.mark.parametrize("case", CASES)
def test_positions_are_those_of_transformers(case):
    ids, mask = EXPECTED[f"{case}_input_ids"], EXPECTED[f"{case}_attention_mask"]
    image_token = encoder().config.image_token_id
    prompts = prompt_positions(ids, mask, source_grids(case), image_token)
    assert torch.equal(prompts.transpose(0, 1), EXPECTED[f"{case}_prompt_position_ids"])
    tokens = prompts[..., -1:] + 1 + token_positions(layout_of(case).grids)
    assert torch.equal(tokens.transpose(0, 1), EXPECTED[f"{case}_token_position_ids"])


@pytest.mark.parametrize("case", ["i2i1", "i2i2"])
def test_codes_of_pictures_are_those_of_transformers(processor, case):
    pictures = [picture for prompt in range(2) for picture in sources(case, prompt)]
    patches = processor.image_processor(pictures, return_tensors="pt")
    assert patches["image_grid_thw"][:, 1:].tolist() == [list(grid) for grid in source_grids(case)]
    found = source_codes(encoder(), patches["pixel_values"], source_grids(case))
    for codes, expected in zip(found, codes_of(case), strict=True):
        assert torch.equal(codes, expected)


@pytest.mark.every(2)
@pytest.mark.parametrize("chunk", [1, 9])
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case, chunk):
    model, tokens = bind(case), EXPECTED[f"{case}_tokens"]
    cache, logits = model.prefill(2)
    found, last = [logits[0][:, None]], model.num_tokens - 1
    for start in range(0, last, chunk):
        ranks = torch.arange(start, min(start + chunk, last)).expand(2, -1)
        found.append(model.forward(tokens.gather(1, ranks), ranks, cache)[0])
    every = 4 if case == "t2i" else 1
    expected = torch.stack([EXPECTED[f"{case}_logits_{b}"][:, :CODES] for b in range(2)])
    torch.testing.assert_close(torch.cat(found, dim=1)[:, ::every], expected, atol=1e-4, rtol=0)


def test_threads_do_not_disturb_each_other():
    found, decoding = {}, decoding_from_name("sjd-coupled")

    def generate(case):
        found[case] = decode(bind(case), decoding, GREEDY, SEEDS).tokens

    threads = [threading.Thread(target=generate, args=(case,)) for case in ("i2i1", "i2i2")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(tokens, EXPECTED[f"{case}_tokens"]) for case, tokens in found.items()) and len(found) == 2


@pytest.mark.parametrize("name", ["ar", "sjd-coupled", "sjd-tree"])
def test_special_tokens_are_never_sampled(name):
    loud = copy.deepcopy(encoder())
    # Its logit is 50 times that of code 0, so that `generate` samples it in the middle of an image.
    loud.lm_head.weight[loud.config.image_end_token_id] = 50 * loud.lm_head.weight[0]
    models = bind("i2i1", loud), bind("i2i1")
    found = [decode(model, decoding_from_name(name), Sampling(), SEEDS).tokens for model in models]
    assert torch.equal(*found) and 0 <= found[0].min() and found[0].max() < CODES


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sjd-coupled", "sjd-tree"])
def test_two_tokens_follow_the_joint_distribution_of_transformers(processor, name):
    given, pictures = INPUTS["joint"], sources("i2i1", 0)
    size = given["height"], given["width"]
    inputs, grids = processed(processor, given["prompt"], pictures, size), source_grids("i2i1")[:1]
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    layout = Layout(grids_of(size)[0])
    model = bind_prompts(encoder(), ids, mask, grids, codes_of("i2i1")[:1], layout, torch.device("cpu"))
    model.merge_prompts()
    count = 4000
    sampling = Sampling(temperature=given["temperature"], top_p=given["top_p"])
    model = model.take(torch.zeros(count, dtype=torch.long))
    tokens = decode(model, decoding_from_name(name), sampling, torch.arange(count)).tokens
    assert_follows(tokens, EXPECTED["joint"].double().flatten(), CODES)
