"""What a pipeline says of itself is what its models and its calls can do."""

import inspect

import pytest
from families import EVERY, condition_of

from arimage.decoding import decoding_from_name, decoding_names
from arimage.decoding.contract.supports import traits_of


ARGUMENTS = set(
    "decoder_guidance_scale guidance_scale guided_tokens image image_reference mask_image negative_prompt num_frames "
    "num_inference_steps order prompt_suffix ratio task temperature top_k top_p min_p video".split()
)


@pytest.fixture(scope="module", params=EVERY)
def pipe(request):
    return EVERY[request.param]()


@pytest.mark.every(5)
def test_the_traits_of_a_pipeline_are_those_of_its_models(pipe):
    assert pipe.traits == traits_of(pipe.prepare(**condition_of(pipe)).model)


@pytest.mark.every(3)
def test_what_is_listed_can_run_and_nothing_else(pipe):
    model = pipe.prepare(**condition_of(pipe)).model
    for name in decoding_names():
        reason = decoding_from_name(name).supports(model)
        assert (name in pipe.decoding_names) == (reason is None), (name, reason)
    assert pipe.decoding.supports(model) is None


def test_abilities_name_the_arguments_of_a_call(pipe):
    parameters = inspect.signature(type(pipe).__call__).parameters
    arguments = pipe.abilities.arguments | pipe.abilities.decoder
    assert arguments <= ARGUMENTS & parameters.keys()
    # Lumina-mGPT 1.0 has no tasks, and its call is that of 2.0. MammothModa2 says why it takes no pictures.
    refused = {"MammothModa2Pipeline": {"image", "mask_image"}}.get(type(pipe).__name__, {"task"})
    assert ARGUMENTS & parameters.keys() - arguments <= refused
