"""What calls of `LuminaMGPTPipeline` and `AnolePipeline` generate, and that it equals the authors' code."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from families import LATENT, seeded
from PIL import Image
from pipelines.chameleon import tiny as tiny
from pipelines.chameleon.tiny import FIXTURE
from safetensors.torch import load_file

from arimage import AnolePipeline, AutoPipeline, LuminaMGPTPipeline
from arimage.convert import convert_lumina_mgpt


PROMPTS = ["a red heart", "tree", "a blue book with a grinning cat face, flat"]
GREEDY = {"top_k": 1, **LATENT}
# What stands between codes in the fixture.
ROW_END, END = 8803, 8196


@pytest.fixture(scope="module")
def pipe():
    return tiny.pipeline()


@pytest.fixture(scope="module")
def pipe2():
    return tiny.pipeline(tiny.VERSION_2)


@pytest.fixture(scope="module")
def anole():
    return tiny.anole_pipeline()


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    """The converted pipeline in float32, and what the authors' code makes of the same files."""
    folder = tmp_path_factory.mktemp("golden") / "pipe"
    convert_lumina_mgpt(FIXTURE, tokenizer=FIXTURE / "tokenizer", out=folder)
    pipe = AutoPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    return pipe, load_file(FIXTURE / "expected.safetensors")


def codes_in(sequence, prefix):
    tokens = [token - 4 for token in sequence.tolist()[prefix:] if token not in (ROW_END, END)]
    return torch.tensor(tokens).view(1, 4, 6)


@pytest.mark.parametrize(
    ("name", "scale", "decoding"), [("nocfg", 1.0, "ar"), ("cfg", None, "ar"), ("cfg", None, "sjd-coupled")]
)
def test_greedy_codes_equal_the_original(golden, name, scale, decoding):
    pipe, expected = golden
    settings = {"guidance_scale": scale, "decoding": decoding, **GREEDY}
    codes = codes_in(expected[f"{name}_sequence"], len(expected["prefix_ids"]))
    ids = expected["prompt_ids"][None]
    output = pipe(input_ids=ids, attention_mask=torch.ones_like(ids), height=64, width=96, **settings)
    assert torch.equal(output.tokens, codes)


def test_prompts_may_be_padded_or_end_with_their_size(golden):
    pipe, expected = golden
    ids, codes = expected["prompt_ids"][None], codes_in(expected["cfg_sequence"], 11)
    padded = torch.cat([F.pad(ids, padding) for padding in ((3, 1), (0, 4))])
    mask = torch.cat([F.pad(torch.ones_like(ids), padding) for padding in ((3, 1), (0, 4))])
    output = pipe(input_ids=padded, attention_mask=mask, height=64, width=96, **GREEDY)
    assert torch.equal(output.tokens, codes.expand(2, -1, -1))
    prefix = expected["prefix_ids"]
    ended = torch.stack([F.pad(prefix, padding) for padding in ((2, 0), (0, 2), (1, 1))])
    mask = torch.stack([F.pad(torch.ones_like(prefix), padding) for padding in ((2, 0), (0, 2), (1, 1))])
    output = pipe(input_ids=ended, attention_mask=mask, **GREEDY)
    assert torch.equal(output.tokens, codes.expand(3, -1, -1))
    assert torch.equal(pipe(input_ids=prefix[None], **GREEDY).tokens, codes)
    mixed = torch.stack([prefix, F.pad(ids[0], (3, 0))])
    with pytest.raises(ValueError, match="the header of an image in some prompts only"):
        pipe(input_ids=mixed, **GREEDY)


@pytest.mark.parametrize("values", [[0, 0, 0], [0.5, 1, 1], [2, 1, 1]])
def test_masks_of_token_ids_are_zeros_and_ones(anole, values):
    with pytest.raises(ValueError, match="attention_mask must be zeros and ones, at least one per row"):
        anole(input_ids=torch.tensor([[0, 5, 6]]), attention_mask=torch.tensor([values]))


def test_logits_equal_the_original(golden):
    pipe, expected = golden
    codes = codes_in(expected["cfg_sequence"], 11).flatten(1)
    model = pipe.prepare(input_ids=expected["prefix_ids"][None]).model
    cache, logits = model.prefill(1)
    positions = torch.arange(23)[None]
    logits = torch.cat([logits[:, 0, None], model.forward(codes[:, :23], positions, cache)[:, 0]], dim=1)
    columns = expected["logit_vocab_ids"]
    kept = (columns >= 4) & (columns < 8196)
    # Before each code stand the prompt, or nothing, the size, and the codes and row ends before it.
    before = torch.arange(24) + torch.arange(24) // 6
    for group, (name, prefix) in enumerate((("cond", 11), ("uncond", 3))):
        theirs = expected[f"{name}_logits_sel"][prefix - 1 + before][:, kept]
        torch.testing.assert_close(logits[group][:, columns[kept] - 4], theirs, atol=1e-4, rtol=0)
        first = expected[f"{name}_logits_full_last_prefix"][4:8196]
        torch.testing.assert_close(logits[group, 0], first, atol=1e-4, rtol=0)
    # The probabilities of the first token: guidance and the 2000 largest.
    probabilities = pipe.sampling().probabilities(logits[:, None, :1], torch.zeros(1, 1, dtype=torch.long))[0, 0]
    theirs = expected["processed_scores_full_first"][4:8196].softmax(-1)
    torch.testing.assert_close(probabilities, theirs, atol=1e-5, rtol=0)


def test_pixels_and_encoded_codes_equal_the_original(golden):
    pipe, expected = golden
    ids = expected["prefix_ids"][None]
    assert torch.equal(pipe(input_ids=ids, **GREEDY).images[0], expected["image_codes"])
    decoded = pipe(input_ids=ids, top_k=1, output_type="pt").images[0]
    original = expected["vq_decoded_pixels"]
    torch.testing.assert_close(decoded, (original / 2 + 0.5).clamp(0, 1), atol=1e-5, rtol=0)
    image = np.asarray(pipe(input_ids=ids, top_k=1).images[0]).astype(int)
    levels = expected["decoded_uint8_hwc"].numpy().astype(int)
    # Float32 rounding next to the edge of a level.
    assert abs(image - levels).max() <= 1 and (image != levels).mean() < 1e-3
    image = expected["encode_input_uint8_hwc"].permute(2, 0, 1)[None] / 127.5 - 1
    with torch.no_grad():
        assert torch.equal(pipe.encode_image(image).flatten(), expected["encode_codes"])


def test_the_trained_sizes_are_those_of_the_authors(pipe):
    counts = {512: 49, 768: 73, 1024: 97}
    for size, count in counts.items():
        sizes = LuminaMGPTPipeline(pipe.transformer, pipe.vq, image_size=size).image_sizes
        assert len(set(sizes)) == count and (size, size) in sizes
        assert all(height % 32 == width % 32 == 0 and height * width <= size**2 for height, width in sizes)
        assert set(sizes) == {(width, height) for height, width in sizes}


def test_a_prompt_is_the_authors_template(pipe):
    ids, mask = pipe.encode_prompt(PROMPTS, (64, 96))
    names = {token: name for name, token in tiny.vocabulary().items()}
    assert mask[:, -1].all() and not mask.all()
    for row, kept, prompt in zip(ids, mask.bool(), PROMPTS, strict=True):
        begin, *text, end = (names[token] for token in row[kept].tolist())
        assert (begin, end) == ("<s>", "<reserved08706>")
        assert "".join(text) == f"Generate an image of 96x64 according to the following prompt:\n{prompt}"


def test_version_2_has_a_finer_grid_and_names_of_its_own(pipe2):
    assert pipe2.scale_factor == 8
    names = tiny.vocabulary(tiny.VERSION_2)
    tokens = pipe2(PROMPTS[1], height=32, width=64, guidance_scale=1.0, **GREEDY).tokens
    assert tokens.shape == (1, 4, 8)
    ids, _ = pipe2.encode_prompt(PROMPTS[1], (32, 64))
    prefix = ids[0].tolist() + [names[name] for name in ("<racm3:break>", "<reserved08801>", "<reserved08802>")]
    logits = tiny.plain_logits(pipe2, prefix, tokens[0], names["<reserved08799>"])
    assert torch.equal(logits.argmax(-1), tokens[0].flatten())


def test_a_map_is_generated_below_its_image(pipe2):
    assert pipe2.prompts.text("a cat", (64, 32), "hed", False) == (
        "Generate a dual-panel image of 32x64 where the <lower half> displays a <hed edge map>, while the <upper "
        "half> retains the original image for direct visual comparison:\na cat"
    )
    assert pipe2(PROMPTS[0], task="depth", height=64, width=32, **LATENT).tokens.shape == (1, 8, 4)
    with_task, without = (pipe2(PROMPTS[0], task=task, **GREEDY).tokens for task in ("depth", None))
    assert not torch.equal(with_task, without)


def test_an_image_is_generated_below_its_map(pipe2):
    names = tiny.vocabulary(tiny.VERSION_2)
    maps = torch.rand(2, 3, 32, 32, generator=seeded(4))
    output = pipe2(PROMPTS[:2], image=maps, task="canny", height=64, width=32, guidance_scale=2.0, **GREEDY)
    with torch.no_grad():
        above = pipe2.encode_image(maps * 2 - 1)
    assert output.tokens.shape == (2, 8, 4) and torch.equal(output.tokens[:, :4], above)
    # A pass for each code of the lower half.
    assert output.stats.forward_passes == 16
    header = [names[name] for name in ("<racm3:break>", "<reserved08802>", "<reserved08801>")]
    for prompt, tokens in zip(PROMPTS, output.tokens, strict=False):
        ids, _ = pipe2.encode_prompt(prompt, (64, 32), "canny", True)
        c, u = (
            tiny.plain_logits(pipe2, prefix, tokens, names["<reserved08799>"])[16:]
            for prefix in (ids[0].tolist() + header, header)
        )
        assert torch.equal((u + 2 * (c - u)).argmax(-1), tokens[4:].flatten())
    assert pipe2(PROMPTS[0], image=maps[:1], task="canny", output_type="pt").images.shape == (1, 3, 64, 64)
    # A callback gets whole images too.
    shapes = []

    def callback(pipe, step, passes, tensors):
        shapes.append(pipe.decode_tokens(pipe.current_call, tensors["tokens"]).shape)
        pipe._interrupt = True

    pipe2(PROMPTS[0], image=maps[:1], task="subject", callback_on_step_end=callback, **LATENT)
    assert shapes == [(1, 3, 64, 64)]


def test_anole_generates_one_size_without_row_ends(anole):
    names = tiny.vocabulary()
    output = anole(PROMPTS, guidance_scale=3.0, decoding="sjd", **GREEDY)
    begin = names["<racm3:break>"]
    for prompt, tokens in zip(PROMPTS, output.tokens, strict=True):
        ids, mask = anole.encode_prompt(prompt)
        text = "".join(name for token in ids[0].tolist() for name in names if names[name] == token)
        assert text == f"<s>{prompt}<reserved08706>"
        c, u = (
            tiny.plain_logits(anole, prefix, tokens, None)
            for prefix in (ids[0].tolist() + [begin], [names["<s>"], begin])
        )
        assert torch.equal((u + 3 * (c - u)).argmax(-1), tokens.flatten())
    ids, mask = anole.encode_prompt(PROMPTS)
    ids, mask = (F.pad(values, (0, 1), value=fill) for values, fill in ((ids, begin), (mask, 1)))
    again = anole(input_ids=ids, attention_mask=mask, guidance_scale=3.0, **GREEDY)
    assert torch.equal(again.tokens, output.tokens)
    assert anole.image_sizes == [(64, 64)]
    assert isinstance(anole, AnolePipeline)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "give either a prompt or input_ids"),
        ({"prompt": ["a"], "input_ids": torch.ones(1, 3).long()}, "give either a prompt or input_ids"),
        ({"input_ids": torch.ones(1, 3).long(), "attention_mask": torch.ones(1, 2)}, "attention_mask is"),
        ({"prompt": "a", "height": 40}, "height and width are 40 and 64: give multiples of 32 up to 256"),
        ({"prompt": "a", "task": "depth"}, "task is 'depth': Lumina-mGPT 2.0 has"),
        ({"prompt": "a", "task": ["depth"]}, "task is .*: give a string"),
    ],
)
def test_what_cannot_be_generated_is_refused(pipe, arguments, message):
    with pytest.raises(ValueError, match=message):
        pipe(**arguments)


def test_sizes_that_contradict_each_other_are_refused(pipe, pipe2, anole):
    names = tiny.vocabulary()
    sizes = [
        [names[name] for name in ("<s>", "<racm3:break>", "<reserved08802>", last)]
        for last in ("<reserved08801>", "a")
    ]
    with pytest.raises(ValueError, match="input_ids end with a size of 64x32: leave them out"):
        pipe(input_ids=torch.tensor(sizes[:1]), height=32)
    with pytest.raises(ValueError, match="tokens of no size"):
        pipe(input_ids=torch.tensor(sizes[1:]))
    with pytest.raises(ValueError, match="of different sizes"):
        pipe(input_ids=torch.tensor([sizes[0], sizes[0][:3] + sizes[0][2:3]]))
    with pytest.raises(ValueError, match="generates 64x64 pixels only"):
        anole("a", height=32)
    with pytest.raises(ValueError, match="leave out mask_image"):
        pipe2("a", task="depth", image=Image.new("RGB", (8, 8)), mask_image=Image.new("L", (8, 8)))


def test_parts_that_do_not_fit_are_refused(pipe):
    names = tiny.vocabulary()
    for changed, message in (
        ({name: token for name, token in names.items() if name != "<racm3:break>"}, "has no '<racm3:break>'"),
        ({name: token for name, token in names.items() if name != "IMGIMGBZ"}, "names 47 image tokens, expected 48"),
        (names | {"IMGIMGBZ": names["IMGIMGCZ"], "IMGIMGCZ": names["IMGIMGBZ"]}, "ids that follow each other"),
    ):
        with pytest.raises(ValueError, match=message):
            LuminaMGPTPipeline(tiny.transformer(changed), pipe.vq)
