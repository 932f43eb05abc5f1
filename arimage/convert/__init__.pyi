# Written by tools/exports.py.

from ..convert.paths import CheckpointError
from ..pipelines.arpg.convert import convert_arpg
from ..pipelines.chameleon.convert import convert_anole, convert_lumina_mgpt
from ..pipelines.cosmos.convert import convert_cosmos
from ..pipelines.cosmos.convert_tokenizer import convert_cosmos_tokenizer
from ..pipelines.distilled_decoding.convert import convert_llamagen_dd, convert_var_dd
from ..pipelines.emu3.convert import convert_emu3
from ..pipelines.emu35.convert import convert_emu35
from ..pipelines.family import PublishedCheckpoint
from ..pipelines.halton_maskgit.convert import convert_halton_maskgit
from ..pipelines.infinity.convert import convert_infinity
from ..pipelines.infinitystar.convert import convert_infinitystar
from ..pipelines.janus.convert import convert_janus
from ..pipelines.llamagen.convert import convert_llamagen
from ..pipelines.lpd.convert import convert_lpd
from ..pipelines.lumina_dimoo.convert import convert_lumina_dimoo
from ..pipelines.mammothmoda2.convert import convert_mammothmoda2
from ..pipelines.mar.convert import convert_mar
from ..pipelines.nextstep.convert import convert_nextstep
from ..pipelines.randar.convert import convert_randar
from ..pipelines.rar.convert import convert_rar
from ..pipelines.var.convert import convert_var
from ..pipelines.x_omni.convert import convert_x_omni
from ..published.fetch import load_published
from ..published.registry import PUBLISHED

__all__ = [
    "CheckpointError",
    "PUBLISHED",
    "PublishedCheckpoint",
    "convert_anole",
    "convert_arpg",
    "convert_cosmos",
    "convert_cosmos_tokenizer",
    "convert_emu3",
    "convert_emu35",
    "convert_halton_maskgit",
    "convert_infinity",
    "convert_infinitystar",
    "convert_janus",
    "convert_llamagen",
    "convert_llamagen_dd",
    "convert_lpd",
    "convert_lumina_dimoo",
    "convert_lumina_mgpt",
    "convert_mammothmoda2",
    "convert_mar",
    "convert_nextstep",
    "convert_randar",
    "convert_rar",
    "convert_var",
    "convert_var_dd",
    "convert_x_omni",
    "load_published",
]
