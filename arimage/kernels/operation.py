"""An operation: its definition in torch, its kernels in Triton, and the custom operator of torch that has both."""

import inspect
from collections.abc import Callable
from functools import reduce, wraps
from importlib import import_module
from importlib.util import find_spec
from operator import or_
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import torch
from torch import library


F = TypeVar("F", bound=Callable)
# The types of devices that run the kernels: GPUs, if Triton is installed.
DEVICES = {"cuda"} if find_spec("triton") else set()


def operation(
    writes: tuple[str, ...] = (), whole: tuple[str, ...] = (), when: Callable[..., bool] | None = None
) -> Callable[[F], F]:
    """Make an operation of its definition: on `DEVICES` it is one operator, which launches kernels, and elsewhere the
    definition itself, since dispatch takes microseconds and compilers do not look into operators.

    The kernels are those of the function of the same name in `triton.py` next to the definition. It first yields its
    results, as yet without values, and then launches what fills them: of fake tensors it is asked for the former only.
    Both take the same arguments by the same names, of which the first is a tensor.

    Args:
        writes: the arguments that are changed in place.
        whole: the arguments that kernels take contiguous. They are copied outside of the operator, where compilers and
            those who count launches see it.
        when: whether the kernels fit the arguments, which is asked on `DEVICES` only.
    """

    def decorate(definition: F) -> F:
        if not DEVICES:
            return definition
        package, name = definition.__module__, definition.__name__.lstrip("_")
        parameters = inspect.signature(definition).parameters
        defaults = tuple(each.default for each in parameters.values())
        contiguous = [name in whole for name in parameters]

        def begin(args: tuple):
            # Arguments that equal their defaults do not arrive if none follows.
            return getattr(import_module(f"{package}.triton"), name)(*args, *defaults[len(args) :])

        def run(*args):
            if args[0].device.type not in DEVICES:
                return definition(*args)
            launches = begin(args)
            results = next(launches)
            with torch.cuda.device_of(args[0]):
                next(launches, None)
            return results

        folders = package.split(".")[2:-1]
        operator: Any = library.custom_op(
            "arimage::" + "_".join([*folders, name]), run, mutates_args=writes, schema=schema_of(definition, writes)
        )
        operator.register_fake(lambda *args: next(begin(args)))

        @wraps(definition)
        def call(*args, **kwargs):
            if args[0].device.type not in DEVICES or not (when is None or when(*args, **kwargs)):
                return definition(*args, **kwargs)
            if whole:
                pairs = zip(args, contiguous, strict=False)
                args = [each.contiguous() if copied and each is not None else each for each, copied in pairs]
                named = kwargs.items()
                kwargs = {k: v.contiguous() if k in whole and v is not None else v for k, v in named}
            return operator(*args, **kwargs)

        return call  # pyright: ignore[reportReturnType]

    return decorate


def schema_of(definition: Callable, writes: tuple[str, ...]) -> str:
    """The schema of the operator of a definition. Schemas know tensors of any dtype only, and no literals."""
    signature = inspect.signature(definition)
    parameters = [each.replace(annotation=_type_of(each.annotation)) for each in signature.parameters.values()]

    def typed(): ...

    typed.__signature__ = inspect.Signature(parameters, return_annotation=_type_of(signature.return_annotation))  # pyright: ignore[reportFunctionMemberAccess]
    return library.infer_schema(typed, mutates_args=writes)


def _type_of(hint: Any) -> Any:
    if get_origin(hint) is Literal:
        return str
    if get_origin(hint) is tuple:
        return tuple[tuple(map(_type_of, get_args(hint)))]
    if get_origin(hint) in (Union, UnionType):
        return reduce(or_, map(_type_of, get_args(hint)))
    typed = (torch.LongTensor, torch.IntTensor, torch.FloatTensor, torch.BoolTensor)
    return torch.Tensor if hint in typed else hint
