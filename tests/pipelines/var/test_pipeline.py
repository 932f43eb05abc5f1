"""What a call of `VARPipeline` generates, returns and refuses."""

import pytest
import tiny
import torch
from families import seeded
from pipelines.var import tiny as tiny_var

from arimage import AutoPipeline, VARPipeline


PROMPTS = ["a red heart", "tree", "a blue book with a grinning cat face, flat"]
LABELS = [3, 0, 7]
SIZE = tiny.SCALES[-1] * tiny.SCALE_FACTOR
N = sum(side * side for side in tiny.SCALES)


def same(maps, others):
    return all(torch.equal(a, b) for a, b in zip(maps, others, strict=True))


@pytest.fixture(scope="module", params=["text", "class"])
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def pipe(kind):
    return tiny_var.pipeline(kind)


@pytest.fixture
def condition(kind):
    return {"prompt": PROMPTS} if kind == "text" else {"class_labels": LABELS}


def test_greedy_codes_are_the_arg_max_of_guided_logits_that_ramp_up(pipe, condition, kind):
    out = pipe(**condition, top_k=1, guidance_scale=3.0, output_type="latent")
    if kind == "text":
        embeds, mask = pipe.encode_prompt(PROMPTS)
        given = {"prompt_embeds": embeds, "prompt_attention_mask": mask}
    else:
        given = {"class_labels": torch.tensor(LABELS)}
    with torch.no_grad():
        inputs = pipe.vq.inputs(out.images)
        with_condition = pipe.transformer.predict(inputs, **given)
        without = pipe.transformer.predict(inputs, **given, unconditional=torch.ones(3, dtype=torch.bool))
    ramp = torch.cat([torch.full((side * side,), k / 3) for k, side in enumerate(tiny.SCALES)])
    guided = with_condition + 2 * ramp[:, None] * (with_condition - without)
    assert torch.equal(guided.argmax(-1), torch.cat([each.flatten(1) for each in out.images], dim=1))


def test_the_image_grows_scale_by_scale_and_an_interrupt_keeps_what_there_is(pipe, condition):
    seen = []

    def stop_after_two(pipe, step, passes, tensors):
        seen.append((step, passes, sorted(tensors), tensors["decided"].sum(1).tolist()))
        pipe._interrupt = passes == 2

    out = pipe(
        **condition,
        generator=seeded(0),
        output_type="pt",
        callback_on_step_end=stop_after_two,
        callback_on_step_end_tensor_inputs=["tokens", "decided", "latents"],
    )
    assert seen == [
        (0, 1, ["decided", "latents", "tokens"], [1] * 3),
        (1, 2, ["decided", "latents", "tokens"], [5] * 3),
    ]
    with torch.no_grad():
        expected = pipe.vq.decode(out.tokens[:2]) / 2 + 0.5
        flat = torch.cat([each.flatten(1) for each in out.tokens], dim=1)
        known = torch.where(torch.arange(N) < 5, flat, -1)
        decoded = pipe.decode_tokens(pipe.prepare(**condition), known) / 2 + 0.5
    torch.testing.assert_close(out.images, expected.clamp(0, 1), atol=1e-5, rtol=0)
    torch.testing.assert_close(decoded, expected)


def test_a_refiner_is_given_to_a_pipeline_that_has_none(tmp_path):
    tiny_var.pipeline("class", refiner=False).save_pretrained(tmp_path / "pipe")
    refiner = tiny_var.pipeline("class").refiner
    pipe = AutoPipeline.from_pretrained(tmp_path / "pipe", refiner=refiner)
    options = {"class_labels": LABELS, "decoding": "code", "output_type": "latent"}
    expected = tiny_var.pipeline("class")(**options, generator=seeded(1)).images
    assert same(pipe(**options, generator=seeded(1)).images, expected)


def test_parts_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="trained together"):
        VARPipeline(tiny_var.transformer("class", vocab_size=50), tiny.scale_tokenizer())
    with pytest.raises(ValueError, match="the refiner has"):
        VARPipeline(
            tiny_var.transformer("class"),
            tiny.scale_tokenizer(),
            refiner=tiny_var.transformer("class", scales=(1, 2, 4)),
        )
    with pytest.raises(ValueError, match="the refiner has"):
        VARPipeline(
            tiny_var.transformer("class"), tiny.scale_tokenizer(), refiner=tiny_var.transformer("class", num_classes=3)
        )
    with pytest.raises(ValueError, match="32 and 32"):
        tiny_var.pipeline("class")(class_labels=1, height=32, width=32)


def test_a_mask_is_felt_in_every_scale_where_it_covers_most_of_a_cell(pipe, condition):
    given = torch.rand(1, 3, SIZE, SIZE, generator=seeded(3))
    left = torch.zeros(1, 1, SIZE, SIZE)
    left[..., : SIZE // 2] = 1
    forced = pipe.token_maps(pipe.encode_known_tokens(given * 2 - 1, left.bool()))
    assert forced[0].min() >= 0
    for each in forced[1:]:
        side = each.shape[-1]
        assert (each[..., : side // 2] == -1).all() and (each[..., (side + 1) // 2 :] >= 0).all()
    everything = pipe.token_maps(pipe.encode_known_tokens(given * 2 - 1, torch.ones_like(left).bool()))
    assert everything[0].min() >= 0 and all((each == -1).all() for each in everything[1:])
