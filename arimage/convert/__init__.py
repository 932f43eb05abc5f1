"""Converters from the files that the authors of a model published to folders of `save_pretrained`."""

from importlib import import_module
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from ..pipelines.arpg.convert import convert_arpg
    from ..pipelines.chameleon.convert import convert_anole, convert_lumina_mgpt
    from ..pipelines.cosmos.convert import convert_cosmos
    from ..pipelines.cosmos.convert_tokenizer import convert_cosmos_tokenizer
    from ..pipelines.distilled_decoding.convert import convert_llamagen_dd, convert_var_dd
    from ..pipelines.emu3.convert import convert_emu3
    from ..pipelines.emu35.convert import convert_emu35
    from ..pipelines.infinity.convert import convert_infinity
    from ..pipelines.janus.convert import convert_janus
    from ..pipelines.llamagen.convert import convert_llamagen
    from ..pipelines.lpd.convert import convert_lpd
    from ..pipelines.mammothmoda2.convert import convert_mammothmoda2
    from ..pipelines.mar.convert import convert_mar
    from ..pipelines.randar.convert import convert_randar
    from ..pipelines.var.convert import convert_var
    from ..published.fetch import load_published
    from ..published.registry import PUBLISHED, PublishedCheckpoint
    from .paths import CheckpointError

_MODULES = {
    "CheckpointError": ".paths",
    "convert_anole": "..pipelines.chameleon.convert",
    "convert_cosmos": "..pipelines.cosmos.convert",
    "convert_cosmos_tokenizer": "..pipelines.cosmos.convert_tokenizer",
    "convert_arpg": "..pipelines.arpg.convert",
    "convert_emu3": "..pipelines.emu3.convert",
    "convert_emu35": "..pipelines.emu35.convert",
    "convert_infinity": "..pipelines.infinity.convert",
    "convert_janus": "..pipelines.janus.convert",
    "convert_llamagen": "..pipelines.llamagen.convert",
    "convert_lpd": "..pipelines.lpd.convert",
    "convert_llamagen_dd": "..pipelines.distilled_decoding.convert",
    "convert_lumina_mgpt": "..pipelines.chameleon.convert",
    "convert_mammothmoda2": "..pipelines.mammothmoda2.convert",
    "convert_mar": "..pipelines.mar.convert",
    "convert_randar": "..pipelines.randar.convert",
    "convert_var": "..pipelines.var.convert",
    "convert_var_dd": "..pipelines.distilled_decoding.convert",
    "PUBLISHED": "..published.registry",
    "PublishedCheckpoint": "..published.registry",
    "load_published": "..published.fetch",
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
