"""The pipeline of Halton-MaskGIT: classes and texts, editing, decodings, callbacks, saving and loading."""

import pytest
import tiny
import torch
from families import seeded
from PIL import Image
from pipelines.halton_maskgit import tiny as tiny_halton

from arimage import AutoPipeline, HaltonMaskGITPipeline
from arimage.decoding import ConfidenceDecoding, HaltonDecoding, Layout
from arimage.pipelines.halton_maskgit.pipeline_halton_maskgit import CONFIDENCE
from arimage.pipelines.halton_maskgit.transformer_halton_maskgit import HaltonMaskGITModel


LATENT = {"output_type": "latent"}
DECODINGS = [
    "halton:steps=5",
    "confidence:steps=5",
    "recap:steps=5,full_steps=1",
    "recap:sampler=ConfidenceDecoding",
    "ml-cache:steps=6",
]
CONDITIONS = {"class": {"class_labels": [1, 2, 3]}, "text": {"prompt": ["a red heart", "a blue book", "green tree"]}}


@pytest.fixture(scope="module")
def pipe():
    return tiny_halton.pipeline()


@pytest.fixture(scope="module")
def pipes(pipe):
    return {"class": pipe, "text": tiny_halton.pipeline("text")}


def tokens(pipe, seed=0, **options):
    condition = {} if "prompt" in options else {"class_labels": 3}
    return pipe(**{**condition, **options}, generator=seeded(seed), **LATENT).images


def test_images_and_tokens(pipe):
    out = pipe(class_labels=[1, 2], num_images_per_prompt=2, output_type="pt")
    assert out.images.shape == (4, 3, 8, 8) and out.tokens.shape == (4, 4, 4)
    assert out.tokens.min() >= 0 and out.tokens.max() < tiny.CODES
    assert out.stats.forward_passes == 5 and out.stats.tokens_per_pass == 16 / 5 and out.stats.exact
    assert pipe.image_sizes == [(8, 8)] and pipe.num_classes == tiny.NUM_CLASSES
    assert pipe.decoding_names == ["recap", "halton", "confidence", "ml-cache"]


@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.parametrize("decoding", DECODINGS)
def test_an_image_is_that_of_its_own_run(pipes, condition, decoding):
    generators = [seeded(seed) for seed in range(3)]
    options = {**CONDITIONS[condition], "guidance_scale": 2.0, "decoding": decoding, **LATENT}
    together = pipes[condition](**options, generator=generators).images
    in_turn = pipes[condition](**options, generator=[seeded(seed) for seed in range(3)], batch_size=1).images
    assert torch.equal(in_turn, together) and not torch.equal(together[0], together[1])


def test_settings_change_the_image(pipe):
    options = {"seed": 1, "guidance_scale": 1.5, "temperature": 2.0}
    first = tokens(pipe, **options)
    assert torch.equal(tokens(pipe, **options), first)
    changes = [
        {"guidance_scale": 4.0},
        {"temperature": 0.5},
        {"top_k": 2},
        {"top_p": 0.3},
        {"min_p": 0.5},
        {"decoding": "halton:steps=4"},
        {"decoding": HaltonDecoding(5, randomize=False)},
        {"decoding": HaltonDecoding(5, sharpness=(0.2, 0.3))},
        {"decoding": "confidence:steps=5"},
    ]
    for change in changes:
        assert not torch.equal(tokens(pipe, **{**options, **change}), first), change


def test_the_decoding_has_the_published_settings(pipe):
    given = ConfidenceDecoding(5, schedule="arccos", noise=4.5, noise_schedule="linear", guidance_schedule="linear")
    found = tokens(pipe, guidance_scale=3.0, decoding="confidence:steps=5")
    assert torch.equal(tokens(pipe, guidance_scale=3.0, decoding=given), found)
    assert HaltonMaskGITPipeline(**pipe.components).decoding == HaltonDecoding()


def test_the_label_after_the_last_stands_for_no_class(pipe):
    none = tokens(pipe, class_labels=tiny.NUM_CLASSES)
    # Where both conditions are the same guidance changes nothing.
    assert torch.equal(tokens(pipe, class_labels=tiny.NUM_CLASSES, guidance_scale=4.0), none)
    assert not torch.equal(tokens(pipe), none)
    with pytest.raises(ValueError, match="ids from 0 to 10"):
        pipe(class_labels=tiny.NUM_CLASSES + 1)


@torch.no_grad()
def test_padding_of_a_text_and_texts_that_are_dropped_have_no_effect(pipes):
    transformer = pipes["text"].transformer
    embeds = torch.randn(2, tiny.TEXT_LENGTH, tiny.TEXT_WIDTH, generator=seeded(0))
    mask, codes = torch.ones(2, tiny.TEXT_LENGTH, dtype=torch.long), torch.full((2, 16), tiny.CODES)
    mask[0, 3:] = 0
    dropped = torch.tensor([False, True])
    other = embeds.clone()
    other[0, 3:], other[1] = 7, 5
    found, wanted = (
        transformer(codes, prompt_embeds=each, prompt_attention_mask=mask, unconditional=dropped)
        for each in (embeds, other)
    )
    assert torch.equal(found, wanted)
    other[0, 2] += 1
    assert not torch.allclose(
        transformer(codes, prompt_embeds=other, prompt_attention_mask=mask, unconditional=dropped)[0], found[0]
    )


def test_the_words_of_a_text_are_told_apart_by_their_order(pipes):
    first, second = (tokens(pipes["text"], prompt=text) for text in ("a red book", "a book red"))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.parametrize("logits", [False, True])
@torch.no_grad()
def test_passes_over_few_rows(pipes, condition, logits):
    """Those over all rows in any order are passes over the picture; those over some change nothing else."""
    pipe = pipes[condition]
    model = pipe.prepare(**CONDITIONS[condition], guidance_scale=2.0).model
    given = torch.randint(-1, tiny.CODES, (3, 16), generator=seeded(0))
    changed, places = given.clone(), torch.arange(16).expand(3, -1)
    changed[:, 5] = (given[:, 5] + 2) % tiny.CODES
    context, size = model.open_context(3, logits=logits), model.num_rows
    before = model.forward(given, places, context=context)
    keys = context.stacks[0].clone()
    # Padding writes nowhere.
    rows = torch.tensor([5, 9, size, size]).expand(2, 3, -1)
    asked = torch.tensor([[9, 5, 16]]).expand(3, -1)
    part = model.forward(changed, asked, rows=rows, context=context)
    wanted = model.forward(changed, places)
    assert part.shape == (2, 3, 3, tiny.CODES) and not torch.allclose(part[:, :, 0], before[:, :, 9], atol=1e-2)
    kept = torch.ones(size, dtype=torch.bool).index_fill(0, torch.tensor([5, 9]), False)
    assert torch.equal(context.stacks[0][..., :size, :][..., kept, :], keys[..., :size, :][..., kept, :])
    if logits:
        # The logits of all other places are still there.
        assert torch.equal(
            model.forward(changed, asked.clone().fill_(2), rows=rows, context=context)[:, :, 0], before[:, :, 2]
        )
        assert context.logits.shape == (2, 3, 16, tiny.CODES)
    everything = torch.arange(size).flip(0).expand(3, -1)
    torch.testing.assert_close(model.forward(changed, places, rows=everything, context=context), wanted)


def test_an_order_is_refused(pipe):
    layout = Layout((4, 4), torch.arange(16).flip(0)[None])
    with pytest.raises(ValueError, match="layout has an order"):
        HaltonMaskGITModel(pipe.transformer, {"class_labels": torch.zeros(1).long()}, layout, CONFIDENCE)


@pytest.mark.parametrize("decoding", [*DECODINGS, "confidence:steps=5,redraw_known=true"])
def test_an_edit_keeps_the_pixels_outside_of_the_mask(pipe, decoding):
    image, mask = torch.rand(1, 3, 8, 8, generator=seeded(1)), torch.zeros(1, 1, 8, 8)
    mask[..., 4:, :] = 1
    options = {"image": image, "mask_image": mask, "decoding": decoding, "guidance_scale": 2.0}
    out = pipe(class_labels=[1, 2], **options, output_type="pt", generator=seeded(0))
    assert torch.allclose(out.images[:, :, :4], image[:, :, :4].expand(2, -1, -1, -1), atol=1e-5)
    with torch.no_grad():
        known = pipe.encode_image(image * 2 - 1)
    assert torch.equal(out.tokens[:, :2], known[:, :2].expand(2, -1, -1))
    assert not torch.equal(out.tokens[:, 2:], known[:, 2:].expand(2, -1, -1))


@pytest.mark.parametrize("decoding", DECODINGS)
def test_masks_of_one_call_may_have_other_sizes(pipe, decoding):
    images = [Image.new("RGB", (8, 8), color) for color in ("red", "blue")]
    masks = [Image.new("L", (8, 8)), Image.new("L", (8, 8), 255)]
    masks[0].paste(255, (0, 0, 2, 2))
    options = {"decoding": decoding, **LATENT}
    generators = [seeded(0), seeded(1)]
    together = pipe(class_labels=[1, 2], image=images, mask_image=masks, generator=generators, **options).images
    alone = pipe(class_labels=2, image=images[1], mask_image=masks[1], generator=seeded(1), **options).images
    assert torch.equal(alone[0], together[1])


def test_a_callback_sees_the_steps_and_may_stop_the_call(pipe):
    seen = []

    def callback(pipe, step, passes, tensors):
        seen.append((pipe.guidance_scale, pipe.num_timesteps, int(tensors["decided"].sum())))
        pipe._interrupt = step == 1

    names = ["tokens", "decided"]
    out = pipe(
        class_labels=1,
        guidance_scale=2.0,
        callback_on_step_end=callback,
        callback_on_step_end_tensor_inputs=names,
        output_type="pt",
    )
    assert seen == [(2.0, 5, 2), (2.0, 5, 4)] and out.images.isfinite().all()


def test_a_preview_shows_what_is_known(pipe):
    call = pipe.prepare(class_labels=[1])
    known = torch.full((1, 16), -1)
    known[0, 5] = 7
    with torch.no_grad():
        assert torch.equal(pipe.preview(call, known), pipe.decode_tokens(call, torch.full((1, 16), 7)))


def test_a_saved_pipeline_loads_with_its_settings(pipes, tmp_path):
    for name, pipe in pipes.items():
        pipe.save_pretrained(tmp_path / name)
        loaded = AutoPipeline.from_pretrained(tmp_path / name)
        loaded.set_progress_bar_config(disable=True)
        assert type(loaded) is HaltonMaskGITPipeline and loaded.decoding == HaltonDecoding(5)
        assert loaded.generation_config == pipe.generation_config
        options = {} if name == "class" else {"prompt": "a red heart"}
        assert torch.equal(tokens(loaded, **options), tokens(pipe, **options))


def test_the_weights_of_the_logits_are_those_of_the_embeddings(pipe, tmp_path):
    names = dict(pipe.transformer.named_parameters())
    assert len([name for name, weight in names.items() if tiny.CODES + 1 in weight.shape]) == 1


def test_components_that_do_not_fit_are_refused(pipe):
    with pytest.raises(ValueError, match="tokens: the transformer has 40"):
        HaltonMaskGITPipeline(tiny_halton.transformer(vocab_size=40), pipe.vq)
    with pytest.raises(ValueError, match="num_attention_heads is 33"):
        tiny_halton.transformer(num_attention_heads=33)
    with pytest.raises(ValueError, match="steps is 17"):
        pipe(class_labels=1, decoding="halton:steps=17")
    with pytest.raises(ValueError, match="in any order"):
        pipe(class_labels=1, decoding="ar")
