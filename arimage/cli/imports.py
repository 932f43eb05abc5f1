"""What makes the imports of a command fast: no search for garbage, and nothing that the libraries import for what the
command does not do."""

import atexit
import functools
import gc
import importlib.metadata
import sys
from collections import UserDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any, cast


# Packages that diffusers and transformers import where they are installed: for losses, schedulers and adapters.
OPTIONAL = ("peft", "scipy", "sklearn", "torchvision")


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """For imports: the frameworks allocate half a million objects that all stay, and searching them for garbage over
    and over takes a fifth of the time to a picture. They are searched neither inside nor later."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        # Triton reports what is still frozen when Python ends as leaked.
        atexit.register(gc.unfreeze)
        gc.enable()


@contextmanager
def few_imports(optional: tuple[str, ...] = OPTIONAL) -> Iterator[None]:
    """Let the libraries import neither the `optional` packages, as if they were not installed, nor what computes in
    several processes, as if torch could not, nor the compiler of torch before it is used.

    Only on a CPU, and for a process in which nothing is compiled, since what they mark for the compiler meanwhile is
    not marked, and that needs none of the packages later: the libraries keep what they have found."""
    if "torch" in sys.modules:
        # The libraries have found what is installed.
        yield
        return
    # It stays, so that a module is loaded before the modules in it.
    sys.meta_path.insert(0, finder := _LateFinder())
    import torch

    if torch.cuda.is_available():
        # Its kernels are compiled.
        finder.finds = False
        yield
        return
    # Without Triton there are no operators to register, which takes long.
    hidden = [name for name in (*optional, "triton") if name not in sys.modules]
    listed = importlib.metadata.packages_distributions
    sys.modules.update(cast(dict[str, ModuleType], dict.fromkeys(hidden)))
    importlib.metadata.packages_distributions = lambda: _Listed(listed)
    several = torch.distributed.is_available
    torch.distributed.is_available = lambda: False
    try:
        yield
    finally:
        torch.distributed.is_available = several
        finder.finds = False
        importlib.metadata.packages_distributions = listed
        for name in hidden:
            del sys.modules[name]


class _Listed(UserDict):
    """The distributions by package, for which every file that is installed is listed, once they are asked for."""

    def __init__(self, listed: Callable[[], Any]):
        self._listed = listed

    @functools.cached_property
    def data(self) -> Any:
        return self._listed()


def _unmarked(function: Any = None, *_args: Any, **_options: Any) -> Any:
    """In place of decorators that say how to compile a function or a class."""
    return _unmarked if function is None else function


class _Nothing:
    """In place of a class that has no instances before its module is loaded."""


def _when_called(module: str, name: str) -> Callable:
    """A function of a late module, which its call loads."""

    def call(*args: Any, **options: Any) -> Any:
        late = sys.modules[module]
        if isinstance(late, _LateModule):
            late.load()
        return getattr(late, name)(*args, **options)

    return call


FLEX, FLEX_LAYER = "torch.nn.attention.flex_attention", "transformers.integrations.flex_attention"


# What the libraries use of the compiler and of attention that needs it before they compile: they mark functions, and
# ask whether a module is compiled. Every other attribute loads the module.
LATE: dict[str, dict[str, Any]] = {
    "torch.export": {},
    "torch._dynamo": {
        "allow_in_graph": _unmarked,
        "assume_constant_result": _unmarked,
        "disable": _unmarked,
        "eval_frame": SimpleNamespace(OptimizedModule=_Nothing),
    },
    FLEX: {"BlockMask": _Nothing, "create_block_mask": _when_called(FLEX, "create_block_mask")},
    FLEX_LAYER: {"flex_attention_forward": _when_called(FLEX_LAYER, "flex_attention_forward")},
}


# A module that does without the package that it is in.
EARLY = "torch._dynamo._trace_wrapped_higher_order_op"


class _LateModule(ModuleType):
    """A module of `LATE` until it is loaded."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        known = LATE[self.__name__]
        if name in known:
            return known[name]
        self.load()
        return getattr(self, name)

    def load(self) -> None:
        self.__class__ = ModuleType  # pyright: ignore[reportAttributeAccessIssue]
        loader = self.__spec__ and self.__spec__.loader
        assert loader is not None
        loader.exec_module(self)


class _LateLoader(Loader):
    """Leaves a module empty, and lets `loader` load it later."""

    def __init__(self, loader: Loader):
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        module.__class__ = _LateModule


class _KnownLoader(Loader):
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        pass


class _LateFinder(MetaPathFinder):
    finds = True

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        package = sys.modules.get(fullname.rpartition(".")[0])
        if isinstance(package, _LateModule) and fullname != EARLY:
            package.load()
            # Unless it has loaded this one too.
            return ModuleSpec(fullname, _KnownLoader()) if fullname in sys.modules else None
        if fullname not in LATE or not self.finds:
            return None
        others = (each for each in sys.meta_path if each is not self)
        spec = next(filter(None, (each.find_spec(fullname, path, target) for each in others)), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _LateLoader(spec.loader)
        return spec
