"""MammothModa2: tokens, hidden states, velocities and pixels against the authors' code, on small random models."""

import pytest
import torch
from families import close, seeded
from pipelines.mammothmoda2 import tiny as tiny_mammothmoda2
from pipelines.mammothmoda2.tiny import EXPECTED, VARIANTS
from safetensors.torch import load_file, save_file

from arimage import MammothModa2Pipeline


# Of what follows from the shared code, the second variant is slow.
one_variant = pytest.mark.parametrize("variant", [VARIANTS[0], pytest.param(VARIANTS[1], marks=pytest.mark.slow)])


@pytest.fixture(scope="module")
def loaded():
    return {variant: tiny_mammothmoda2.pipeline(variant, tokenizer=False) for variant in VARIANTS}


@pytest.fixture(params=VARIANTS)
def variant(request):
    return request.param


@pytest.fixture
def pipe(loaded, variant):
    return MammothModa2Pipeline.from_pipe(loaded[variant])


@pytest.fixture
def expected(variant):
    return EXPECTED[variant]


@pytest.fixture(scope="module")
def text_pipe():
    return tiny_mammothmoda2.pipeline()


def arguments(expected, rows=slice(None)):
    names = ("input_ids", "attention_mask", "negative_input_ids")
    given = {name: expected[name][rows] for name in names}
    return given | {"token_grid": (3, 4), "height": 32, "width": 32, "guidance_scale": 7.0}


def decoder(expected, rows=slice(None)):
    return {"latents": expected["latents"][rows], "num_inference_steps": 4, "decoder_guidance_scale": 9.0}


@torch.no_grad()
def test_logits_are_those_of_the_authors(pipe, expected):
    model = pipe.prepare(**arguments(expected)).model
    assert model.vocab_size == expected["cond_logits"].shape[-1]
    cache, first = model.prefill(2)
    codes = expected["image_codes"].flatten(1)[:, :-1]
    others = model.forward(codes, torch.arange(codes.shape[1]).expand(2, -1), cache)
    logits = torch.cat([first[:, :, None], others], dim=2)
    close(logits, torch.stack([expected["cond_logits"], expected["uncond_logits"]]))


def test_the_end_of_the_codes_is_a_setting(loaded, variant, expected):
    limited = MammothModa2Pipeline(**loaded[variant].components, num_codes=48)
    out = limited(**arguments(expected), top_k=1, output_type="latent")
    assert torch.equal(out.images, expected["image_codes_meant_interval"])
    with pytest.raises(ValueError, match="num_codes is 1000: give a number from 1 to"):
        MammothModa2Pipeline(**loaded[variant].components, num_codes=1000)


def test_hidden_states_are_handed_over(pipe, expected):
    names = ("input_ids", "attention_mask", "image_codes", "negative_input_ids")
    for i, found in enumerate(pipe.hand_off(*(expected[name] for name in names))):
        close(found.text, expected[f"text_condition_{i}"])
        close(found.image, expected["image_condition"][i])
        close(found.negative, expected["negative_condition"][i])


@torch.no_grad()
def test_velocities_are_those_of_the_authors(pipe, expected):
    text, image = [expected["text_condition_0"], expected["text_condition_1"]], list(expected["image_condition"])
    given = expected["latents"], expected["timestep"].expand(2)
    close(pipe.transformer.image_embedder(expected["image_condition"]), expected["image_queries"])
    close(pipe.transformer(*given, text, image), expected["velocity"])
    close(pipe.transformer(*given, list(expected["negative_condition"])), expected["velocity_negative"])
    references = [[one] for one in expected["reference_latents"]]
    close(pipe.transformer(*given, text, image, references), expected["velocity_reference"])
    # One image with references and one without.
    mixed = pipe.transformer(*given, text, image, [references[0], []])
    close(mixed, torch.stack([expected["velocity_reference"][0], expected["velocity"][1]]))
    with pytest.raises(ValueError, match="more than 5 reference images"):
        pipe.transformer(*given, text, image, [references[0] * 6, []])


def test_pixels_are_those_of_the_authors(pipe, expected):
    out = pipe(**arguments(expected), **decoder(expected), top_k=1, output_type="pt")
    close(2 * out.images - 1, expected["pixels"].clamp(-1, 1), atol=1e-3)
    assert torch.equal(out.tokens, expected["image_codes"])
    assert out.stats.exact and out.stats.decoder_steps == 4
    out = pipe(**arguments(expected) | {"guidance_scale": 1.0}, top_k=1, output_type="latent")
    assert torch.equal(out.images, expected["image_codes_unguided"]) and set(out.stats.seconds) == {"tokens", "pixels"}
    close(pipe.decode_latents(expected["latents"]), expected["vae_pixels"])


def test_what_the_authors_code_of_preview_shows_by_mistake_is_a_setting(loaded):
    expected, pipe = EXPECTED["preview"], loaded["preview"]
    mistaken = MammothModa2Pipeline(**pipe.components, reads_last_tokens=True)
    found = mistaken.hand_off(expected["input_ids"], expected["attention_mask"], expected["image_codes"])
    for i, one in enumerate(found):
        queries = pipe.transformer.image_embedder(one.image[None])[0]
        close(torch.cat([one.text, queries]).detach(), expected[f"condition_published_{i}"])
    out = mistaken(**arguments(expected), **decoder(expected), top_k=1, output_type="pt")
    close(2 * out.images - 1, expected["pixels_published"].clamp(-1, 1), atol=1e-3)


def test_the_text_of_the_header_is_read_where_the_checkpoint_says_so(loaded):
    expected, parts = EXPECTED["dev"], loaded["dev"].components
    given = expected["input_ids"], expected["attention_mask"], expected["image_codes"]
    (plain, _), (more, _) = (
        MammothModa2Pipeline(**parts, reads_answer_text=answer).hand_off(*given) for answer in (False, True)
    )
    # "<|im_start|>assistant\n" and the digits and the sign of the grid.
    assert len(more.text) == len(plain.text) + 8 and torch.equal(more.text[: len(plain.text)], plain.text)


@one_variant
def test_the_decoder_runs_once_a_step_without_guidance(pipe, expected):
    times = []
    handle = pipe.transformer.register_forward_pre_hook(lambda module, given: times.append(given[1][0].item()))
    calls = {}
    for scale in (1.0, 9.0):
        settings = decoder(expected) | {"decoder_guidance_scale": scale}
        pipe(**arguments(expected), **settings, top_k=1, output_type="pt")
        calls[scale] = times.copy()
        times.clear()
    handle.remove()
    assert calls[1.0] == pytest.approx(expected["decoder_timesteps"].tolist(), abs=1e-6)
    assert calls[9.0] == [time for time in calls[1.0] for _ in range(2)]


def test_experts_of_text_do_not_run_while_tokens_are_generated(pipe, expected):
    model, seen = pipe.language_model, []
    handles = [
        layer.mlp.register_forward_pre_hook(lambda module, given: seen.append(given[0].shape[1]))
        for layer in model.layers
        if layer.gen_mlp is not None
    ]
    pipe(**arguments(expected), top_k=1, output_type="latent")
    for handle in handles:
        handle.remove()
    assert seen == [expected["input_ids"].shape[1]] * len(handles) and len(handles) == 2


@pytest.mark.parametrize(("key", "message"), [("gen_head.weight", "is missing"), ("other.weight", "is unexpected")])
def test_a_language_model_alone_is_refused_with_other_weights(pipe, key, message, tmp_path):
    pipe.language_model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    if weights.pop(key, None) is None:
        weights[key] = torch.zeros(2)
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(ValueError, match=f"{key}' {message}"):
        type(pipe.language_model).from_pretrained(tmp_path)


def test_texts_are_prompts_with_a_header(text_pipe):
    tokenizer, prompts = text_pipe.tokenizer, text_pipe.prompts
    ids, mask = prompts.encode(["a heart", "two"], (3, 4))
    texts = [tokenizer.decode(row[seen.bool()]).replace(" ", "") for row, seen in zip(ids, mask, strict=True)]
    system = "<|im_start|>system\nYouareahelpfulimagegenerator.<|im_end|>\n"
    header = "<|im_start|>assistant\n<|imagestart|>4*3<|imagetoken|>"
    wanted = [f"{system}<|im_start|>user\n{text}<|im_end|>\n{header}" for text in ("aheart", "two")]
    assert texts == wanted
    (negative,) = prompts.negative_ids("ugly", None, None, 1)
    assert tokenizer.decode(negative).replace(" ", "") == f"{system}<|im_start|>user\nugly<|im_end|>\n"
    # The same image from the text and from its ids.
    given = {"generator": seeded(0), "output_type": "pt"}
    from_text = text_pipe(["a heart", "two"], **given | {"generator": seeded(0)})
    from_ids = text_pipe(input_ids=ids, attention_mask=mask, **given)
    assert torch.equal(from_text.images, from_ids.images)
    other = text_pipe(["a heart", "two"], "ugly", **given | {"generator": seeded(0)})
    assert torch.equal(other.tokens, from_text.tokens) and not torch.equal(other.images, from_text.images)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"token_grid": (10, 4)}, r"token_grid is \(10, 4\): give rows and columns from 1 to 9"),
        ({"token_grid": 3}, "token_grid is 3"),
        ({"height": 24}, "height is 24: give a multiple of 16"),
        ({"image": torch.zeros(1, 3, 32, 32)}, "cannot edit an image"),
        ({"num_inference_steps": 0}, "num_inference_steps is 0"),
        ({"decoder_guidance_scale": float("nan")}, "decoder_guidance_scale is nan"),
        ({"latents": torch.zeros(1, 4, 2, 2)}, r"latents are .*give floats \(1, 4, 4, 4\)"),
        ({"prompt": "x <|image token|>"}, r"contains '<\|image token\|>'"),
        ({"negative_prompt": "<|im_end|>"}, r"contains '<\|im_end\|>'"),
        ({"negative_prompt": ["a", "b"]}, "there are 2 negative prompts for 1 prompts"),
        ({"negative_prompt": "a", "negative_input_ids": torch.ones(1, 2).long()}, "either a negative_prompt or"),
    ],
)
def test_bad_input_is_refused(text_pipe, given, message):
    with pytest.raises(ValueError, match=message):
        text_pipe(**{"prompt": "a red heart"} | given)


def test_bad_token_ids_are_refused(text_pipe, pipe, expected):
    ids, _ = text_pipe.prompts.encode(["a heart"], (3, 4))
    with pytest.raises(ValueError, match="announce another grid than 4x4"):
        text_pipe(input_ids=ids, token_grid=(4, 4))
    with pytest.raises(ValueError, match="must end with the header of an image, its last token 286"):
        text_pipe(input_ids=ids[:, :-1])
    given = arguments(expected)
    with pytest.raises(ValueError, match="no tokenizer: give input_ids"):
        pipe("a heart")
    with pytest.raises(ValueError, match=r"token_grid is \(3, 100\): give rows and columns from 1 to 99"):
        pipe(**given | {"token_grid": (3, 100)})
    with pytest.raises(ValueError, match="has the token id 9999, which the model does not have"):
        pipe(**given | {"negative_input_ids": torch.tensor([[1, 9999]])})
    with pytest.raises(ValueError, match="give prompts that end with the header"):
        pipe(**given | {"input_ids": given["input_ids"][:, -9:], "attention_mask": None})
    with pytest.raises(ValueError, match="give negative_input_ids, or decoder_guidance_scale=1"):
        pipe(**given | {"negative_input_ids": None})
    assert pipe(**given | {"negative_input_ids": None}, output_type="latent").tokens.shape == (2, 3, 4)


def test_a_tokenizer_of_another_model_is_refused(text_pipe, loaded):
    with pytest.raises(ValueError, match=r"the tokenizer has another id for <\|endofline\|> than 304"):
        MammothModa2Pipeline(**{**loaded["dev"].components, "tokenizer": text_pipe.tokenizer})
    headless = tiny_mammothmoda2.character_tokenizer()
    headless.chat_template = "{{ messages[0].content[0].text }}"
    pipe = MammothModa2Pipeline(**{**text_pipe.components, "tokenizer": headless}, token_grid=(3, 4))
    with pytest.raises(ValueError, match=r"chat_template does not end with <\|image token\|>"):
        pipe("a heart")
