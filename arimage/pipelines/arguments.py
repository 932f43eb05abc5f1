"""The arguments that all families' calls end with, and the decorator that makes a call of a family's function."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypedDict, TypeVar, cast, get_args

import torch

from ..decoding import Decoding
from .call import GenerationCall
from .docstrings import filled
from .run import CallRun
from .text.checks import describe


class RunArguments(TypedDict, total=False):
    """How a call runs: the last arguments of every family."""

    batch_size: int | None
    generator: torch.Generator | list[torch.Generator] | None
    decoding: Decoding | str | None
    output_type: str
    return_dict: bool
    callback_on_step_end: Callable | None
    callback_on_step_end_tensor_inputs: list[str]


class ImageArguments(RunArguments, total=False):
    """The size and the number of images."""

    height: int | None
    width: int | None
    num_images_per_prompt: int


class Guidance(TypedDict, total=False):
    guidance_scale: float | None
    temperature: float | None


class ScaleGuidance(TypedDict, total=False):
    """Guidance and temperature may differ from scale to scale."""

    guidance_scale: float | list[float] | None
    temperature: float | list[float] | None


class Cuts(TypedDict, total=False):
    top_k: int | None
    top_p: float | None
    min_p: float | None


class MaskedTokenArguments(Guidance, Cuts, ImageArguments, total=False):
    """How tokens are sampled that are decided in any order."""


class TokenArguments(MaskedTokenArguments, total=False):
    """How tokens are sampled."""

    guided_tokens: int | None


class ScaleArguments(ScaleGuidance, Cuts, ImageArguments, total=False):
    """How scales are sampled."""

    guided_tokens: int | None


class LatentArguments(ImageArguments, total=False):
    """How continuous tokens are sampled."""

    guidance_scale: float | None
    guidance_schedule: str | None
    temperature: float | None


class VideoArguments(Guidance, Cuts, RunArguments, total=False):
    """How the tokens of videos are sampled, and how many videos."""

    num_videos_per_prompt: int


class VideoScaleArguments(ScaleGuidance, Cuts, RunArguments, total=False):
    """How the scales of videos are sampled, and how many videos."""

    num_videos_per_prompt: int


# The defaults that are not None.
DEFAULTS: dict[str, Any] = {
    "num_images_per_prompt": 1,
    "num_videos_per_prompt": 1,
    "output_type": "pil",
    "return_dict": True,
    "callback_on_step_end_tensor_inputs": ["tokens"],
}
# What `check_options` checks: the arguments of a run without the seeds, which belong to the images.
OPTIONS = [name for name in RunArguments.__annotations__ if name != "generator"]

# The mask of a condition that was encoded before, and what it is the mask of.
MASKS = {
    "attention_mask": "input_ids",
    "negative_attention_mask": "negative_input_ids",
    "prompt_attention_mask": "prompt_embeds",
    "negative_prompt_attention_mask": "negative_prompt_embeds",
}

# What to do without arguments that pipelines of diffusion models have.
REMEDIES = {
    "seed": "give generator=torch.Generator().manual_seed(...)",
    "strength": "a token is kept or generated again, where mask_image says so",
    "num_inference_steps": "there is no scheduler, a step is one forward pass, and the decoding sets their number",
}

# Arguments that take one value. Comparisons of arrays have no truth value.
SINGLE = ("height", "width", "ratio", "output_type", "sampler", "guidance_schedule")

P = ParamSpec("P")
Pipe = TypeVar("Pipe")
Output = TypeVar("Output")


def pipeline_call(
    example: str, output: type[Output], reads: tuple[str, ...] = ()
) -> Callable[[Callable[Concatenate[Pipe, P], GenerationCall]], Callable[Concatenate[Pipe, P], Output | tuple]]:
    """Make a family's `__call__` of one function, which checks the arguments of a call, encodes its condition and
    returns it with its model. `prepare` is made of the same function.

    The last parameter of the function, as in `**common: Unpack[TokenArguments]`, stands for the arguments that
    families share. It holds those that the user gives, without those of a run. inspect.signature and help() show them
    one by one.

    Args:
        example: lines of code at the end of the docstring.
        output: what a call returns.
        reads: arguments of a run that the function takes too.
    """

    def decorate(function: Callable[Concatenate[Pipe, P], GenerationCall]) -> Any:
        *own, common = inspect.signature(function).parameters.values()
        [arguments] = get_args(common.annotation)
        hints = arguments.__annotations__
        # Those that fewer families have come first.
        shared = sorted(
            hints, key=lambda name: (name in RunArguments.__annotations__, name in ImageArguments.__annotations__)
        )
        of_call = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=DEFAULTS.get(name), annotation=hints[name])
            for name in shared
        ]
        of_prepare = [parameter for parameter in of_call if parameter.name not in {*OPTIONS} - {*reads}]
        function.__doc__ = filled(function.__doc__ or "", example, output)

        def call(pipe: Any, *args: Any, **kwargs: Any) -> Any:
            given = _bound(call, pipe, args, kwargs)
            options = pipe.check_options(**{name: given.pop(name, DEFAULTS.get(name)) for name in OPTIONS})
            prepared = pipe.prepare(**given, **{name: getattr(options, name) for name in reads})
            pipe.check_known(given.get("prompt"))
            return CallRun(pipe, prepared, options).run()

        @torch.no_grad()
        def prepare(pipe: Any, *args: Any, **kwargs: Any) -> GenerationCall:
            return cast(Any, function)(pipe, **_bound(prepare, pipe, args, kwargs))

        _show(call, "__call__", function, [*own, *of_call], output | tuple)
        _show(prepare, "prepare", function, [*own, *of_prepare], GenerationCall)
        prepare.__doc__ = None
        call.prepare = prepare
        return call

    return decorate


class CallMixin:
    """Gives a pipeline the `prepare` of its `__call__`."""

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        if "__call__" in vars(cls):
            cls.prepare = getattr(cls.__call__, "prepare", cls.prepare)

    def prepare(self, *args: Any, **kwargs: Any) -> GenerationCall:
        """Check the arguments of a call, encode its condition, and return it with its model. Takes the arguments of
        `__call__` but those of a run: batch_size, decoding, output_type, return_dict and those of the callback.
        Families whose images depend on the decoding take that, too."""
        raise NotImplementedError


def _show(made: Any, name: str, function: Callable, parameters: list[inspect.Parameter], returns: Any) -> None:
    """Let `made` look as a family's `function` does, with a name and a signature of its own."""
    functools.update_wrapper(made, function)
    made.__name__, made.__qualname__ = name, function.__qualname__.replace("__call__", name)
    made.__signature__ = inspect.Signature(parameters, return_annotation=returns)


def _bound(function: Any, pipe: Any, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a function by name, but for its pipeline."""
    try:
        given = function.__signature__.bind(pipe, *args, **kwargs).arguments
    except TypeError as error:
        shown = f"{type(pipe).__name__}.{function.__name__}"
        unknown = [name for name in kwargs if name not in function.__signature__.parameters]
        remedy = REMEDIES.get(unknown[0]) if unknown else None
        raise TypeError(f"{shown}() {error}: {remedy or f'help({shown}) lists what it takes'}") from None
    del given["self"]
    for name in SINGLE:
        if getattr(given.get(name), "shape", ()):
            raise ValueError(f"{name} is {describe(given[name])}: give one value, or leave it out")
    for mask, masked in MASKS.items():
        if given.get(mask) is not None and given.get(masked) is None:
            raise ValueError(f"{mask} is given without {masked}, whose mask it is: give both, or neither")
    return given
