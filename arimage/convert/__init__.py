"""Converters from the files that the authors of a model published to folders of `save_pretrained`."""

from importlib import import_module


# Names that belong to no family, by module. The converters are in the `family.py` of their families. `__init__.pyi`
# lists all of them for editors and type checkers: `make exports` writes it.
_EXPORTS = {
    "CheckpointError": "convert.paths",
    "PUBLISHED": "published.registry",
    "PublishedCheckpoint": "pipelines.family",
    "load_published": "published.fetch",
}


def _exports() -> dict[str, str]:
    """The names of all exports and their modules within arimage."""
    from ..families import CONVERTERS

    return _EXPORTS | {converter.function: module for module, converter in CONVERTERS.values()}


# A converter imports torch and diffusers.
def __getattr__(name: str):
    if name == "__all__":
        return sorted(_exports())
    # Other names of this kind are Python's.
    module = None if name.startswith("__") else _EXPORTS.get(name) or _exports().get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"..{module}", __name__), name)


def __dir__() -> list[str]:
    return __getattr__("__all__")
