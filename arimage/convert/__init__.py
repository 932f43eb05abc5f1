"""Converters from the files that the authors of a model published to folders of `save_pretrained`."""

from importlib import import_module
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from .arpg import convert_arpg
    from .cosmos import convert_cosmos
    from .cosmos_tokenizer import convert_cosmos_tokenizer
    from .distilled import convert_llamagen_dd, convert_var_dd
    from .emu3 import convert_emu3
    from .emu35 import convert_emu35
    from .fetch import load_published
    from .infinity import convert_infinity
    from .janus import convert_janus
    from .llamagen import convert_llamagen
    from .lpd import convert_lpd
    from .lumina_mgpt import convert_anole, convert_lumina_mgpt
    from .mammothmoda2 import convert_mammothmoda2
    from .mar import convert_mar
    from .paths import CheckpointError
    from .randar import convert_randar
    from .registry import PUBLISHED, PublishedCheckpoint
    from .var import convert_var

_MODULES = {
    "CheckpointError": ".paths",
    "convert_anole": ".lumina_mgpt",
    "convert_cosmos": ".cosmos",
    "convert_cosmos_tokenizer": ".cosmos_tokenizer",
    "convert_arpg": ".arpg",
    "convert_emu3": ".emu3",
    "convert_emu35": ".emu35",
    "convert_infinity": ".infinity",
    "convert_janus": ".janus",
    "convert_llamagen": ".llamagen",
    "convert_lpd": ".lpd",
    "convert_llamagen_dd": ".distilled",
    "convert_lumina_mgpt": ".lumina_mgpt",
    "convert_mammothmoda2": ".mammothmoda2",
    "convert_mar": ".mar",
    "convert_randar": ".randar",
    "convert_var": ".var",
    "convert_var_dd": ".distilled",
    "PUBLISHED": ".registry",
    "PublishedCheckpoint": ".registry",
    "load_published": ".fetch",
}
__all__ = [
    "PUBLISHED",
    "CheckpointError",
    "PublishedCheckpoint",
    "convert_anole",
    "convert_cosmos",
    "convert_cosmos_tokenizer",
    "convert_arpg",
    "convert_emu3",
    "convert_emu35",
    "convert_infinity",
    "convert_janus",
    "convert_llamagen",
    "convert_lpd",
    "convert_llamagen_dd",
    "convert_lumina_mgpt",
    "convert_mammothmoda2",
    "convert_mar",
    "convert_randar",
    "convert_var",
    "convert_var_dd",
    "load_published",
]


# The console command lists the table and must not wait for torch and diffusers.
def __getattr__(name: str):
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name], __name__), name)
