"""Decoding methods: small frozen objects that generate tokens with any model that has one of the interfaces in
`contract.models`. Does not depend on any particular model; imports only torch."""

from importlib import import_module

from .exports import EXPORTS


def _exports() -> dict[str, str]:
    """The names of all exports and their modules."""
    return EXPORTS


# Imported lazily: the command line lists the names of decodings without importing torch.
def __getattr__(name: str):
    if name == "__all__":
        return sorted(EXPORTS)
    if name not in EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{EXPORTS[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(EXPORTS)
