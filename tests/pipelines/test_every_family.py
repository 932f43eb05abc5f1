"""What holds of every family by one table: exact decodings, edits, batches, and folders to convert into."""

import inspect

import pytest
import torch
import torch.nn.functional as F
from accelerate.hooks import ModelHook, add_hook_to_module
from families import EVERY, KINDS, LATENT, condition_of, conditions_of, flat, one_of_each_kind, seeded

import arimage.convert
from arimage.convert import CheckpointError
from arimage.decoding import decoding_from_name, decoding_names
from arimage.decoding.contract.supports import traits_of
from arimage.families import FAMILIES


CONVERTERS = [f"convert_{one.name}".replace("-", "_") for family in FAMILIES.values() for one in family.converters]
# Those that generate a token after the other, of which the others are slow.
TOKENS = [name for name, build in EVERY.items() if build().abilities.kind == "tokens"]
SHOWN = ("llamagen-text", "janus", "emu3", "lumina", "emu3.5")
EDITING = [name for name, build in EVERY.items() if build().abilities.accepts("mask_image")]


@pytest.mark.parametrize("family", one_of_each_kind(TOKENS))
def test_exact_decodings_give_the_greedy_tokens(family, device):
    pipe = EVERY[family]().to(device)
    options = {**conditions_of(pipe, 2), "top_k": 1, **LATENT}
    if pipe.begins_with_text or not pipe.abilities.generates_video:
        options["guidance_scale"] = 3.0
    expected = pipe(**options, decoding="ar", generator=seeded(0))
    assert len(flat(expected.tokens).unique(dim=0)) == 2
    for name in pipe.decoding_names:
        if decoding_from_name(name).exact:
            out = pipe(**options, decoding=name, generator=seeded(0))
            assert torch.equal(flat(out.tokens), flat(expected.tokens)) and out.stats.exact, name
            assert out.stats.forward_passes <= expected.stats.forward_passes


@pytest.mark.parametrize(
    "family", [it if it in KINDS | {"emu3", "lumina"} else pytest.param(it, marks=pytest.mark.slow) for it in EDITING]
)
def test_an_edit_keeps_what_the_mask_leaves_out(family):
    pipe = EVERY[family]()
    height, width = pipe.image_sizes[0]
    image, mask = torch.rand(2, 3, height, width, generator=seeded(3)), torch.zeros(1, 1, height, width)
    # Whole cells of every grid.
    mask[..., height // 2 :, width // 2 :] = 1
    options = {**conditions_of(pipe, 2), "image": image, "mask_image": mask}
    call = pipe.prepare(**options, generator=seeded(0))
    for decoding in pipe.decoding_names[:2]:
        out = pipe(**options, decoding=decoding, output_type="pt", generator=seeded(0))
        white = mask[0, 0].bool()
        torch.testing.assert_close(out.images[..., ~white], image[..., ~white], atol=1e-5, rtol=0)
        assert not torch.allclose(out.images[..., white], image[..., white], atol=1e-2)
        other = pipe(**options, decoding=decoding, generator=seeded(1), **LATENT).tokens
        assert not torch.equal(flat(other), flat(out.tokens))
        if pipe.abilities.kind in ("tokens", "masked_tokens"):
            grid = call.model.layout.shape
            generated = F.adaptive_max_pool2d(mask[0], grid)[0] > 0
            with torch.no_grad():
                given = pipe.encode_image(image * 2 - 1).reshape(2, *grid)
            assert torch.equal(out.tokens[:, ~generated], given[:, ~generated])


@pytest.mark.parametrize("family", ["var-class", "mar", "halton-maskgit-class"])
def test_the_label_after_the_last_stands_for_no_class(family):
    pipe = EVERY[family]()

    def tokens(label, scale):
        return flat(pipe(class_labels=label, guidance_scale=scale, generator=seeded(0), **LATENT).tokens).float()

    none = tokens(pipe.num_classes, 1.0)
    # Where both conditions are the same guidance changes nothing.
    torch.testing.assert_close(tokens(pipe.num_classes, 4.0), none, atol=1e-2, rtol=1e-3)
    assert not torch.allclose(tokens(3, 1.0), none, atol=1e-1)
    with pytest.raises(ValueError, match=f"ids from 0 to {pipe.num_classes}"):
        pipe(class_labels=pipe.num_classes + 1)


# Which a call may leave alone.
SPARE = {"drafter", "denoiser", "neighbours", "refiner", "teacher", "drafter_head", "drafter_projector"}


@pytest.mark.every(4)
@pytest.mark.parametrize("family", one_of_each_kind(EVERY))
def test_a_part_is_brought_before_it_computes_and_whenever_another_was(family):
    """As model offloading brings a part by the hook of the whole component, and sends the part before it away."""
    pipe, brought, here, early = EVERY[family](), set(), [None], set()

    class Bring(ModelHook):
        def __init__(self, name):
            self.name = name

        def pre_forward(self, module, *args, **kwargs):
            brought.add(self.name)
            here[0] = self.name
            return args, kwargs

    parts = {name: part for name, part in pipe.components.items() if isinstance(part, torch.nn.Module)}
    for name, part in parts.items():
        for place, leaf in part.named_modules():
            # A codebook and what follows it are read where they wait.
            if not list(leaf.children()) and place.partition(".")[0] not in ("codebook", "phi"):
                leaf.register_forward_pre_hook(lambda *_, name=name: None if here[0] == name else early.add(name))
        add_hook_to_module(part, Bring(name))

    def show(pipe, step, passes, tensors):
        pipe.decode_tokens(pipe.current_call, tensors["tokens"])

    pipe(**conditions_of(pipe, 1), callback_on_step_end=show if family in SHOWN else None)
    assert early == set() and parts.keys() - SPARE <= brought


@pytest.mark.parametrize("name", CONVERTERS)
def test_a_converter_refuses_an_occupied_folder_before_any_work(name, tmp_path):
    (tmp_path / "mine").write_text("kept")
    convert = getattr(arimage.convert, name)
    parameters = inspect.signature(convert).parameters.values()
    needed = {one.name: "nowhere" for one in parameters if one.default is inspect.Parameter.empty}
    with pytest.raises(CheckpointError, match="exists already"):
        convert(**needed, out=tmp_path)
    assert (tmp_path / "mine").read_text() == "kept"


def test_the_arguments_of_a_command_are_those_of_its_converter():
    for family in FAMILIES.values():
        for converter in family.converters:
            function = getattr(arimage.convert, f"convert_{converter.name}".replace("-", "_"))
            parameters = inspect.signature(function).parameters
            for argument in converter.arguments or ():
                assert argument.name in parameters, (converter.name, argument.name)


ARGUMENTS = set(
    "decoder_guidance_scale guidance_scale guided_tokens image image_reference mask_image negative_prompt num_frames "
    "num_inference_steps order prompt_suffix ratio task temperature top_k top_p min_p video".split()
)


@pytest.fixture(scope="module", params=EVERY)
def any_pipe(request):
    return EVERY[request.param]()


@pytest.mark.every(5)
def test_the_traits_of_a_pipeline_are_those_of_its_models(any_pipe):
    assert any_pipe.traits == traits_of(any_pipe.prepare(**condition_of(any_pipe)).model)


@pytest.mark.every(3)
def test_what_is_listed_can_run_and_nothing_else(any_pipe):
    model = any_pipe.prepare(**condition_of(any_pipe)).model
    for name in decoding_names():
        reason = decoding_from_name(name).supports(model)
        assert (name in any_pipe.decoding_names) == (reason is None), (name, reason)
    assert any_pipe.decoding.supports(model) is None


def test_abilities_name_the_arguments_of_a_call(any_pipe):
    parameters = inspect.signature(type(any_pipe).__call__).parameters
    arguments = any_pipe.abilities.arguments | any_pipe.abilities.decoder
    assert arguments <= ARGUMENTS & parameters.keys()
    # Lumina-mGPT 1.0 has no tasks, and its call is that of 2.0. MammothModa2 says why it takes no pictures.
    refused = {"MammothModa2Pipeline": {"image", "mask_image"}}.get(type(any_pipe).__name__, {"task"})
    assert ARGUMENTS & parameters.keys() - arguments <= refused
