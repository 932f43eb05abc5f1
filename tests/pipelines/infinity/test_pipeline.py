"""What Infinity has beside the tests of all families: sizes, lists per scale, negative prompts, editing."""

import pytest
import tiny
import torch
from families import LATENT, flat, seeded
from PIL import Image
from pipelines.infinity import tiny as tiny_infinity

from arimage.pipelines.infinity.schedules import COUNTS, SCHEDULES


@pytest.fixture(scope="module")
def pipe():
    return tiny_infinity.pipeline()


@pytest.mark.every(4)
@pytest.mark.parametrize("size", tiny_infinity.pipeline().image_sizes)
def test_every_ratio_is_generated(pipe, size):
    out = pipe("a red heart", height=size[0], width=size[1], output_type="pt", generator=seeded(0))
    assert out.images.shape == (1, 3, *size)
    assert tuple(out.tokens[-1].shape) == (1, size[0] // 2, size[1] // 2, 4) and out.stats.forward_passes == 7


def test_other_sizes_are_refused_and_those_of_other_pixel_classes_warned_of(pipe, caplog):
    with pytest.raises(ValueError, match="height and width are 34 and 32: choose among 32x32, 40x32, 32x40"):
        pipe("a", height=34)
    pipe.prepare("a")
    assert not caplog.records
    assert pipe.prepare("a", height=64, width=64).size == (64, 64)
    assert "trained at 0.06M pixels" in caplog.text


def test_lists_per_scale_and_a_tail_without_guidance(pipe):
    ones = pipe("a", guidance_scale=[1.0] * 7, generator=seeded(1), **LATENT)
    off = pipe("a", guidance_scale=1.0, generator=seeded(1), **LATENT)
    assert torch.equal(flat(ones.tokens), flat(off.tokens))
    guided = pipe("a", guidance_scale=4.0, generator=seeded(1), **LATENT)
    until = pipe("a", guidance_scale=[4.0] * 3 + [1.0] * 4, generator=seeded(1), **LATENT)
    same = [torch.equal(one, other) for one, other in zip(guided.tokens, until.tokens, strict=True)]
    assert same[:3] == [True] * 3 and not all(same)
    for name in ("guidance_scale", "temperature"):
        with pytest.raises(ValueError, match=f"{name} holds 2 numbers: give one number, or one for each of the 7"):
            pipe("a", **{name: [1.0, 2.0]})


def test_a_negative_prompt_takes_the_place_of_no_text(pipe):
    options = {"guidance_scale": 5.0, "temperature": 2.0, **LATENT}
    without, plain, other = (
        flat(pipe("a red heart", negative_prompt=negative, generator=seeded(2), **options).tokens)
        for negative in (None, "green tree", "a")
    )
    assert not torch.equal(without, plain) and not torch.equal(plain, other)
    embeds, mask = pipe.encode_prompt("green tree")
    given = {"negative_prompt_embeds": embeds, "negative_prompt_attention_mask": mask}
    assert torch.equal(flat(pipe("a red heart", **given, generator=seeded(2), **options).tokens), plain)
    # Its own text as the negative one leaves nothing to guide.
    own = flat(pipe("a", negative_prompt="a", generator=seeded(2), **options).tokens)
    assert torch.equal(own, flat(pipe("a", generator=seeded(2), **options | {"guidance_scale": 1.0}).tokens))
    with pytest.raises(ValueError, match="negative_prompt holds 2 texts for 3 prompts"):
        pipe(["a"] * 3, negative_prompt=["b"] * 2)


def test_a_prompt_keeps_its_case_and_ends_at_two_dashes(pipe):
    for text, read in (("A Red -- heart", "A Red "), ("-- heart", "-- heart"), ("one-way", "one-way")):
        assert torch.equal(pipe.encode_prompt(text)[0], pipe.encode_prompt(read)[0])


def test_guidance_of_hidden_states(pipe):
    options = {"guidance_scale": 3.0, "generator": seeded(3), **LATENT}
    logits, hidden = (flat(pipe("a", cfg_insertion_layer=n, **options).tokens) for n in (0, -1))
    assert not torch.equal(logits, hidden)
    off = [flat(pipe("a", cfg_insertion_layer=n, guidance_scale=1.0, top_k=1, **LATENT).tokens) for n in (0, -2)]
    assert torch.equal(*off)
    for wrong in (1, -3, 0.5, True):
        with pytest.raises(ValueError, match="cfg_insertion_layer"):
            pipe("a", cfg_insertion_layer=wrong)
    with pytest.raises(ValueError, match="guided_tokens"):
        pipe("a", cfg_insertion_layer=-1, guided_tokens=5)
    # Also where it is a saved default.
    saved = type(pipe).from_pipe(pipe)
    saved.generation_config["guided_tokens"] = 5
    with pytest.raises(ValueError, match="guided_tokens is 5"):
        saved("a", cfg_insertion_layer=-1)


def test_cells_outside_of_the_mask_keep_the_bits_of_the_image(pipe):
    image = Image.linear_gradient("L").convert("RGB").resize((40, 32))
    mask = Image.new("L", (40, 32))
    mask.paste(255, (20, 0, 40, 32))
    out = pipe("a", image=image, mask_image=mask, height=32, width=40, output_type="pt", generator=seeded(0))
    pixels = torch.tensor(list(image.getdata()), dtype=torch.float32).view(32, 40, 3).permute(2, 0, 1)[None]
    given = pipe.encode_image(pixels / 127.5 - 1)
    assert torch.equal(out.tokens[-1][:, :, :10], given[-1][:, :, :10])
    assert not torch.equal(out.tokens[-1], given[-1]) and torch.equal(out.tokens[0], given[0])
    assert (out.images[..., :20] - pixels[..., :20] / 255).abs().max() < 1e-6
    shown = pipe.decode_tokens(pipe.prepare("a", height=32, width=40), flat(out.tokens)) / 2 + 0.5
    torch.testing.assert_close(shown.clamp(0, 1)[..., 20:], out.images[..., 20:], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "either a prompt or prompt_embeds"),
        ({"prompt": "a", "prompt_embeds": torch.zeros(1, 3, tiny.TEXT_WIDTH)}, "either a prompt or prompt_embeds"),
        ({"prompt_embeds": torch.zeros(1, 3, 5)}, r"prompt_embeds are \(1, 3, 5\)"),
        ({"prompt_embeds": torch.zeros(1, 99, tiny.TEXT_WIDTH)}, "at most 12 tokens"),
        (
            {"prompt_embeds": torch.zeros(1, 3, tiny.TEXT_WIDTH), "prompt_attention_mask": torch.tensor([[0, 1, 1]])},
            "pad on the right",
        ),
    ],
)
def test_texts_that_cannot_be_read_are_refused(pipe, arguments, message):
    with pytest.raises(ValueError, match=message):
        pipe(**arguments)


def test_every_size_has_maps_that_grow_to_it():
    assert len(SCHEDULES) == 60
    for finest, schedule in SCHEDULES.items():
        assert len(schedule.scales) == COUNTS[schedule.pixels] and schedule.scales[-1] == finest
        assert schedule.scales[0] == (1, 1) and list(schedule.scales) == sorted(schedule.scales)
    # As published: 1:1 at 1M has 10,521 cells, and the longest image 11,269.
    cells = {finest: sum(h * w for h, w in schedule.scales) for finest, schedule in SCHEDULES.items()}
    assert cells[64, 64] == 10_521 and max(cells.values()) == cells[90, 45] == cells[45, 90] == 11_269
