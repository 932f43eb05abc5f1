"""The students of Distilled Decoding: the authors' results on random weights in their file format, and what holds of
every call."""

import json

import pytest
import tiny
import torch
from families import flat, seeded
from pipelines.distilled_decoding import tiny as tiny_distilled
from pipelines.distilled_decoding.tiny import FIXTURES
from pipelines.llamagen import tiny as tiny_llamagen
from pipelines.var import tiny as tiny_var
from safetensors.torch import load_file

from arimage import (
    FewStepDecoding,
    FlowDecoding,
    LlamaGenDDPipeline,
    LlamaGenDDTransformer,
    LlamaGenPipeline,
    Sampling,
    VARPipeline,
)
from arimage.convert import convert_llamagen_dd, convert_var_dd
from arimage.decoding import decode


TOKENIZERS = {"llamagen": tiny_llamagen.FIXTURES / "c2i/vq_ds4_c2i.pt", "var": tiny_var.FOLDER / "vae_ch32v64z8.pth"}
FAMILIES = pytest.mark.parametrize("family", ["llamagen", "var"])


@pytest.fixture(scope="module", params=["llamagen", "var"])
def golden(request, tmp_path_factory):
    name, folder = request.param, tmp_path_factory.mktemp(request.param)
    config = json.loads((FIXTURES / name / "config.json").read_text())
    files = [FIXTURES / name / config["model_file"], TOKENIZERS[name]]
    if name == "llamagen":
        files.append(tiny_llamagen.FIXTURES / "c2i/c2i_tiny.pt")
    for file in files:
        (folder / file.name).symlink_to(file)
    expected = load_file(FIXTURES / name / "expected.safetensors")
    if name == "llamagen":
        pipe, split = convert_llamagen_dd(folder, image_size=24, num_heads=4), config["split_t"]
        expected |= {key: value / 2 + 0.5 for key, value in expected.items() if key.endswith("image")}
    else:
        pipe, split = convert_var_dd(folder), config["loss_split_t"]
    pipe.set_progress_bar_config(disable=True)
    return pipe, expected, config, split


def generate(pipe, vectors, **options):
    """A call that also writes the vectors after each pass."""

    def callback(pipe, step, passes, tensors):
        vectors.append(tensors["vectors"])
        assert passes <= pipe.num_timesteps

    options |= {"callback_on_step_end": callback, "callback_on_step_end_tensor_inputs": ["vectors"]}
    return pipe(output_type="pt", **options)


@pytest.mark.parametrize("steps", ["onestep", "twostep"])
def test_vectors_and_images_equal_the_original(golden, steps):
    pipe, expected, config, split = golden
    starts, vectors = tuple(config[f"t_list_{steps}"]), []
    decoding = FewStepDecoding(starts=starts, codes_until=split)
    output = generate(pipe, vectors, class_labels=config["class_labels"], noise=expected["noise"], decoding=decoding)
    assert output.stats.forward_passes == len(starts) and not output.stats.exact
    for i, found in enumerate(vectors):
        torch.testing.assert_close(found, expected[f"{steps}_call{i}_output"], atol=1e-4, rtol=0)
    torch.testing.assert_close(output.images, expected[f"{steps}_image"].clamp(0, 1), atol=1e-4, rtol=0)
    if f"{steps}_codes" in expected:
        assert torch.equal(flat(output.tokens), expected[f"{steps}_codes"])


def test_the_teacher_in_the_middle_equals_the_original(golden):
    pipe, expected, config, split = golden
    if pipe.teacher is None:
        pytest.skip("the original has no reference with a teacher")
    involved, vectors = config["teacher_involved"], []
    decoding = FewStepDecoding(tuple(involved["t_list"]), split, involved["teacher_start_t"])
    settings = {"guidance_scale": involved["cfg_scale"], "top_k": 1, "decoding": decoding}
    output = generate(pipe, vectors, class_labels=config["class_labels"], noise=expected["noise"], **settings)
    assert torch.equal(flat(output.tokens)[:, : involved["t_list"][1]], expected["teacher_codes"])
    torch.testing.assert_close(vectors[-1], expected["teacher_output"], atol=1e-4, rtol=0)
    torch.testing.assert_close(output.images, expected["teacher_image"].clamp(0, 1), atol=1e-4, rtol=0)
    # Reading the tokens before its first one takes a forward pass of its own here.
    assert output.stats.forward_passes == 1 + 1 + 7 + 1


@FAMILIES
def test_the_teacher_generates_what_it_generates_alone(family):
    """From the first level, and after tokens that are known."""
    pipe = tiny_distilled.pipeline(family)
    alone = (LlamaGenPipeline if family == "llamagen" else VARPipeline)(pipe.teacher, pipe.vq)
    alone.set_progress_bar_config(disable=True)
    options = {"class_labels": [3, 5], "guidance_scale": 2.0, "top_k": 5, "output_type": "latent"}
    count = 3 if family == "llamagen" else 1 + 4 + 9
    decoding = FewStepDecoding(starts=(0, 3), teacher_start=0)
    tokens = flat(pipe(**options, generator=seeded(1), decoding=decoding).tokens)
    expected = flat(alone(**options, generator=seeded(1)).tokens)
    assert torch.equal(tokens[:, :count], expected[:, :count])

    later = FewStepDecoding(starts=(0, 3), teacher_start=2)
    tokens = flat(pipe(**options, generator=seeded(1), decoding=later).tokens)
    known = 2 if family == "llamagen" else 1 + 4
    forced = torch.where(torch.arange(tokens.shape[1]) < known, tokens, -1)
    sampling = Sampling(guidance_scale=2.0, top_k=5, forced=forced)
    call = alone.prepare(class_labels=[3, 5], guidance_scale=2.0)
    state = decode(call.model, alone.decoding, sampling, alone.prepare_seeds(seeded(1), 2)[1])
    assert torch.equal(tokens[:, :count], state.tokens[:, :count])


def with_teacher(kind):
    """A student, its teacher alone, and what both are asked for."""
    if kind == "class":
        pipe = tiny_distilled.pipeline("llamagen")
        return pipe, LlamaGenPipeline(pipe.teacher, pipe.vq), {"class_labels": [3, 3, 5]}
    alone = tiny_llamagen.text_pipeline()
    student = LlamaGenDDTransformer.for_teacher(alone.transformer, alone.vq.code_vectors())
    texts = {"tokenizer": alone.tokenizer, "text_encoder": alone.text_encoder}
    pipe = LlamaGenDDPipeline(student, alone.vq, alone.transformer, **texts)
    return pipe, alone, {"prompt": ["a red heart", "a tree", "a tree"]}


@pytest.mark.every(2)
@pytest.mark.parametrize("kind", ["class", "text"])
def test_a_verified_student_generates_what_its_teacher_does_alone(kind):
    pipe, alone, condition = with_teacher(kind)
    for one in (pipe, alone):
        one.set_progress_bar_config(disable=True)
    options = {"guidance_scale": 2.0, "top_k": 5, "top_p": 0.9, "temperature": 0.8, "output_type": "pt"}
    options |= {**condition, "decoding": FlowDecoding(window=5)}
    expected = alone(**options | {"decoding": "flow:window=5,guesses=random"}, generator=seeded(1))
    found = pipe(**options, generator=seeded(1))
    assert torch.equal(found.tokens, expected.tokens)
    torch.testing.assert_close(found.images, expected.images, atol=1e-5, rtol=0)
    assert found.stats.exact and (found.stats.student_passes, expected.stats.student_passes) == (1, 0)
    assert (found.stats.accepted.sum(0) == 16).all() and found.stats.forward_passes <= 16
    few = pipe(**options, generator=seeded(1), batch_size=2)
    assert torch.equal(few.tokens, expected.tokens) and few.stats.student_passes == 2
    twice = pipe(**options | {"decoding": FlowDecoding(16, starts=(0, 6))}, generator=seeded(1))
    assert torch.equal(twice.tokens, expected.tokens) and twice.stats.student_passes == 2


def test_a_student_reads_texts():
    pipe, _, condition = with_teacher("text")
    pipe.set_progress_bar_config(disable=True)
    together = pipe(**condition, generator=seeded(0), output_type="pt")
    assert together.stats.forward_passes == 1 and not torch.equal(*together.images[1:])
    embeds, mask = pipe.encode_prompt(condition["prompt"])
    given = {"prompt_embeds": embeds, "prompt_attention_mask": mask, "output_type": "pt"}
    torch.testing.assert_close(pipe(**given, generator=seeded(0)).images, together.images, atol=1e-5, rtol=0)
    noise = torch.randn(1, 16, 4, generator=seeded(3))
    images = [pipe(text, noise=noise, output_type="pt").images for text in condition["prompt"]]
    assert torch.equal(images[1], images[2]) and not torch.equal(images[0], images[1])
    with pytest.raises(ValueError, match="teacher"):
        LlamaGenDDPipeline(pipe.transformer, pipe.vq, tiny_llamagen.transformer("class"))


@FAMILIES
def test_what_does_not_fit_is_refused(family):
    pipe = tiny_distilled.pipeline(family)
    with pytest.raises(ValueError, match="noise"):
        pipe(class_labels=3, noise=torch.zeros(1, 3, 4))
    starts, codes = FewStepDecoding(starts=(0, 500)), FewStepDecoding(codes_until=500)
    for decoding, said in (("ar", "few-step"), (starts, "starts"), (codes, "codes_until")):
        with pytest.raises(ValueError, match=said):
            pipe(class_labels=3, decoding=decoding)
    other = tiny_llamagen.class_pipeline() if family == "llamagen" else tiny_var.pipeline("class")
    with pytest.raises(ValueError, match="FewStepDecoding"):
        other(class_labels=3, decoding="few-step")
    with pytest.raises(ValueError, match="tokens"):
        type(pipe)(pipe.transformer, tiny.image_tokenizer(codes=32) if family == "llamagen" else other_codes())


def other_codes():
    vq = tiny.scale_tokenizer()
    return type(vq)(**{**vq.config, "codebook_size": 32})
