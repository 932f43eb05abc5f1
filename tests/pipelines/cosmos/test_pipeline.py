"""Videos from frames: the pipeline equals the authors' end to end, and does what every pipeline does."""

import numpy as np
import pytest
import tiny
import torch
from PIL import Image
from pipelines.cosmos import tiny as tiny_cosmos
from pipelines.cosmos.tiny import FOLDER, FRAMES, SHAPE, SIZE, TOKENIZER
from safetensors.torch import load_file

from arimage import AutoPipeline
from arimage.decoding import Layout
from arimage.pipelines.cosmos.pipeline_cosmos import CosmosPipeline
from arimage.pipelines.cosmos.transformer_cosmos import CosmosTokenModel
from arimage.pipelines.pictures.videos import prepare_images, prepare_videos


KEPT = [0, 1, 8, 9, 16]


@pytest.fixture(scope="module")
def film():
    """The authors' video [T, 3, H, W] in [0, 1]."""
    video = load_file(TOKENIZER / "expected.safetensors")["t17.video_uint8"]
    return video[0].movedim(1, 0).float() / 255


@pytest.fixture(scope="module")
def pipes():
    return {kind: tiny_cosmos.pipeline(kind) for kind in ("video", "text")}


@pytest.fixture(scope="module", params=["base", "video2world"])
def golden(request):
    """The pipeline, the authors' outputs, and the text of a call for one video and for two."""
    expected = load_file(FOLDER / f"{request.param}.expected.safetensors")
    context = expected.get("context")
    texts = [{} if context is None else {"prompt_embeds": context[:count]} for count in (1, 2)]
    return tiny_cosmos.golden_pipeline(request.param), expected, texts


def arguments_of(kind, count=1):
    return {"tokens": tiny_cosmos.given()} | (
        {"prompt": ["a red heart", "a blue book"][:count]} if kind == "text" else {}
    )


@pytest.mark.every(2)
@pytest.mark.parametrize(("decoding", "given"), [("ar", 1), ("sjd-coupled", 9)])
def test_videos_equal_the_original_from_frames_to_frames(golden, film, given, decoding):
    pipe, expected, texts = golden
    first = {"image": film[0]} if given == 1 else {"video": film[:9]}
    output = pipe(**first, **texts[0], top_k=1, decoding=decoding, output_type="pt")
    assert torch.equal(output.tokens[0], expected[f"e2e_frames{given}.codes"])
    assert output.frames.shape == (1, FRAMES, 3, *SIZE)
    video = expected[f"e2e_frames{given}.video"]
    torch.testing.assert_close(output.frames[0, KEPT].movedim(1, 0), video, atol=1e-4, rtol=0)


@pytest.mark.parametrize("maps", [1, 2])
def test_tokens_of_a_batch_equal_the_original(golden, maps):
    pipe, expected, texts = golden
    tokens = expected["tf_tokens"].unflatten(1, SHAPE)[:, :maps]
    output = pipe(tokens=tokens, **texts[1], top_k=1, decoding="ar", output_type="latent")
    assert torch.equal(output.frames.flatten(1), expected[f"greedy_tokens_prefix{maps}"])
    assert output.stats.forward_passes == 12 * (3 - maps)


def test_text_alone_equals_the_original():
    pipe, expected = tiny_cosmos.golden_pipeline("video2world"), load_file(FOLDER / "video2world.expected.safetensors")
    none = torch.empty(2, 0, *SHAPE[1:], dtype=torch.long)
    output = pipe(tokens=none, prompt_embeds=expected["context"], top_k=1, output_type="latent")
    assert torch.equal(output.frames.flatten(1), expected["greedy_tokens_prefix0"])


def test_sampling_is_that_of_the_original_by_default(golden):
    pipe, expected, _ = golden
    top_p = 0.7 if "context" in expected else 0.8
    assert pipe.generation_config == {"guidance_scale": 1.0, "temperature": 1.0, "top_k": 0, "top_p": top_p}
    assert pipe.decoding.exact


def test_only_the_last_frames_of_a_video_count(golden, film):
    pipe, _, texts = golden
    settings = {"top_k": 1, "decoding": "ar", "output_type": "latent"} | texts[0]
    assert torch.equal(pipe(video=film, **settings).frames, pipe(video=film[-9:], **settings).frames)


def test_every_kind_of_frames_is_the_same(film):
    frames = (film * 255).round().byte().permute(0, 2, 3, 1).numpy()
    pictures = [Image.fromarray(frame) for frame in frames]
    [expected] = prepare_videos(film, SIZE)
    assert expected.shape == (3, FRAMES, *SIZE)
    for video in (pictures, list(film), frames / 255.0, [pictures], film[None], [film], frames[None] / 255.0):
        [prepared] = prepare_videos(video, SIZE)
        torch.testing.assert_close(prepared, expected, atol=1e-6, rtol=0)
    assert len(prepare_videos([pictures[:9], pictures], SIZE)) == 2
    for image in (pictures[0], film[0], frames[0] / 255.0, [pictures[0]], film[:1]):
        torch.testing.assert_close(prepare_images(image, SIZE)[0], expected[:, :1], atol=1e-6, rtol=0)


def test_frames_cover_the_size_and_are_cropped_around_their_centre():
    frame = torch.zeros(3, 10, 40)
    frame[:, :, 15:25] = 1
    assert (prepare_images(frame, (20, 20))[..., 1:-1] == 1).all()
    row = prepare_images(frame, (20, 30))[0, 0, 0, 0]
    assert (row > 0).tolist() == [False] * 5 + [True] * 20 + [False] * 5
    assert prepare_images(frame.transpose(1, 2), (33, 47)).shape == (1, 3, 1, 33, 47)
    # A list may hold batches.
    assert prepare_images([frame, torch.stack([frame] * 2)], (20, 30)).shape == (3, 3, 1, 20, 30)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "image, video and tokens"),
        ({"image": []}, "image is empty"),
        ({"image": "street.jpg"}, "image cannot be used"),
        ({"video": torch.zeros(5, 3, 48, 64)}, "video has 5 frames: give one frame, or at least 9"),
        ({"tokens": torch.zeros(1, 3, 4, dtype=torch.long)}, "tokens must be int64"),
        ({"video": []}, "video is empty"),
        ({"tokens": torch.full((1, 1, 3, 4), 240)}, "ids from 0 to 239"),
        ({"tokens": torch.zeros(1, 0, 3, 4, dtype=torch.long)}, "given holds no map"),
        ({"tokens": tiny_cosmos.given(maps=3)}, "num_frames is 17, but 17 are given"),
        ({"tokens": tiny_cosmos.given(), "num_frames": 25}, "num_frames is 25: give at most 17"),
        ({"tokens": tiny_cosmos.given(), "height": 64}, "leave out height"),
        ({"tokens": tiny_cosmos.given(), "width": 65}, "width is 65: give a multiple of 16 up to 4096"),
        ({"tokens": tiny_cosmos.given(), "prompt": "a red heart"}, "reads no text"),
    ],
)
def test_wrong_arguments_are_refused(pipes, arguments, message):
    with pytest.raises(ValueError, match=message):
        pipes["video"](**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "either a prompt or prompt_embeds"),
        (
            {"prompt_embeds": torch.zeros(1, 5, 17)},
            r"prompt_embeds are .*\(1, 5, 17\): give a tensor of floats \[B, S, 16\]",
        ),
        ({"prompt": ["a"] * 3, "tokens": tiny_cosmos.given(2)}, "holds 2 for 3 videos|holds 3 for 2"),
    ],
)
def test_wrong_texts_are_refused(pipes, arguments, message):
    with pytest.raises(ValueError, match=message):
        pipes["text"](**({"tokens": tiny_cosmos.given()} | arguments))


def test_other_sizes_than_the_trained_are_warned_of(pipes, caplog):
    with caplog.at_level("WARNING"):
        output = pipes["video"](image=Image.new("RGB", (20, 20)), height=32, width=32, num_frames=9, output_type="np")
    assert output.frames.shape == (1, 9, 32, 32, 3)
    assert "32x32 pixels were asked for, but these weights were trained for 48x64" in caplog.text


def test_texts_are_padded_with_zeros_that_count(pipes):
    pipe = pipes["text"]
    text = pipe.tokenizer(["green tree"], return_tensors="pt")
    with torch.no_grad():
        embeds = pipe.text_encoder(**text).last_hidden_state

    def padded(length):
        return torch.nn.functional.pad(embeds, (0, 0, 0, length - embeds.shape[1]))

    def call(length, **condition):
        seed = torch.Generator().manual_seed(1)
        settings = {"tokens": tiny_cosmos.given(), "generator": seed, "output_type": "latent"}
        return pipe(**condition, **settings, **length).frames

    ours = call({"max_sequence_length": 20}, prompt="green tree")
    assert torch.equal(ours, call({}, prompt_embeds=padded(20)))
    assert not torch.equal(ours, call({}, prompt_embeds=padded(embeds.shape[1])))


def test_components_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="tokens: the transformer has 240, the video tokenizer 64000"):
        with torch.device("meta"):
            CosmosPipeline(tiny_cosmos.transformer(), type(tiny_cosmos.video_tokenizer())())
    with pytest.raises(ValueError, match="text encoder has 24, the transformer 16"):
        CosmosPipeline(
            tiny_cosmos.transformer("text"), tiny_cosmos.video_tokenizer(), None, tiny.text_encoder(300, width=24)
        )


class Guardrail(torch.nn.Module):
    """What NVIDIA's does, for the word "knife" and by a black square."""

    device, dtype = torch.device("cpu"), torch.float32

    def __init__(self):
        super().__init__()
        self.places = []

    def to(self, device):
        self.places.append(str(device))
        return self

    def check_text_safety(self, prompt):
        return "knife" not in prompt

    def check_video_safety(self, frames):
        assert frames.shape == (FRAMES, *SIZE, 3) and frames.dtype == np.uint8
        frames = frames.copy()
        frames[:, :8, :8] = 0
        return frames


def test_the_guardrail_checks_texts_and_frames():
    pipe = tiny_cosmos.pipeline("text", safety_checker=Guardrail(), requires_safety_checker=True)
    with pytest.raises(ValueError, match="refuses the prompt 'a knife'"):
        pipe(["a red heart", "a knife"], tokens=tiny_cosmos.given())
    settings = {"tokens": tiny_cosmos.given(), "output_type": "pt"}
    frames = pipe("a red heart", generator=torch.Generator().manual_seed(0), **settings).frames
    assert (frames[..., :8, :8] == 0).all()
    assert pipe.safety_checker.places[-1] == "cpu"
    free = tiny_cosmos.pipeline("text")
    other = free("a red heart", generator=torch.Generator().manual_seed(0), **settings).frames
    assert (frames[..., 8:, 8:] - other[..., 8:, 8:]).abs().max() <= 1 / 255
    pipe.safety_checker.check_video_safety = lambda frames: None
    with pytest.raises(ValueError, match="refuses the frames"):
        pipe("a red heart", **settings)


@pytest.mark.parametrize("kind", ["video", "text"])
def test_weights_that_ask_for_the_guardrail_do_not_run_without_it(kind, monkeypatch, tmp_path):
    monkeypatch.setattr("arimage.pipelines.cosmos.pipeline_cosmos.is_cosmos_guardrail_available", lambda: False)
    pipe = tiny_cosmos.pipeline(kind, requires_safety_checker=True)
    pipe.save_pretrained(tmp_path)
    card = (tmp_path / "README.md").read_text()
    assert "image-to-video" in card and ".frames[0]" in card and ("prompt=" in card) == (kind == "text")
    for one in (pipe, AutoPipeline.from_pretrained(tmp_path)):
        one.set_progress_bar_config(disable=True)
        with pytest.raises(ValueError, match="pip install cosmos_guardrail"):
            one(**arguments_of(kind))


PROMPTS = ["a red heart", "a blue book"]


@pytest.fixture(scope="module")
def text_pipe():
    return tiny_cosmos.pipeline("text", begins_with_text=True)


def test_a_text_alone_begins_a_video(text_pipe, tmp_path):
    settings = {"generator": torch.Generator().manual_seed(0), "output_type": "latent"}
    videos = text_pipe(PROMPTS, **settings).tokens
    none = torch.empty(1, 0, *SHAPE[1:], dtype=torch.long)
    settings["generator"].manual_seed(0)
    assert videos.shape == (2, *SHAPE) and torch.equal(videos, text_pipe(PROMPTS, tokens=none, **settings).tokens)
    assert not torch.equal(videos[0], videos[1])
    assert text_pipe("a red heart", num_frames=9, output_type="latent").tokens.shape == (1, 2, *SHAPE[1:])
    text_pipe.save_pretrained(tmp_path)
    assert "text-to-video" in (tmp_path / "README.md").read_text()


@pytest.mark.parametrize("given", [0, 1])
def test_guided_logits_are_those_with_the_text_and_without(text_pipe, given):
    embeds = torch.randn(2, 5, text_pipe.transformer.config.context_dim, generator=torch.Generator().manual_seed(0))
    maps = tiny_cosmos.given(2, given)
    layout = Layout((SHAPE[0] - given, *SHAPE[1:]))

    def logits(embeds, guided):
        model = CosmosTokenModel(text_pipe.transformer, layout, maps, embeds, guided=guided)
        model.merge_prompts()
        cache, first = model.prefill(2)
        tokens = torch.tensor([[3, 5, -1], [7, 1, 2]])
        positions = torch.tensor([[0, 1, -1], [0, 1, 2]])
        return first, model.forward(tokens, positions, cache)

    with torch.no_grad():
        for both, with_text, without in zip(
            logits(embeds, True), logits(embeds, False), logits(torch.zeros_like(embeds), False), strict=True
        ):
            torch.testing.assert_close(both, torch.cat([with_text, without]), atol=1e-4, rtol=1e-4)


def test_only_models_of_text_alone_are_guided():
    with pytest.raises(ValueError, match="guidance_scale is 2.0, but this checkpoint was trained without"):
        tiny_cosmos.pipeline("text")("a red heart", tokens=tiny_cosmos.given(), guidance_scale=2.0)
    with pytest.raises(ValueError, match="guided needs a model with text"):
        CosmosTokenModel(tiny_cosmos.transformer(), Layout((2, 3, 4)), tiny_cosmos.given(), guided=True)
