# Written by tools/exports.py.
# ruff: noqa: I001

from ..convert.paths import CheckpointError as CheckpointError
from ..pipelines.arpg.convert import convert_arpg as convert_arpg
from ..pipelines.chameleon.convert import convert_anole as convert_anole, convert_lumina_mgpt as convert_lumina_mgpt
from ..pipelines.cosmos.convert import convert_cosmos as convert_cosmos
from ..pipelines.cosmos.convert_tokenizer import convert_cosmos_tokenizer as convert_cosmos_tokenizer
from ..pipelines.distilled_decoding.convert import (
    convert_llamagen_dd as convert_llamagen_dd,
    convert_var_dd as convert_var_dd,
)
from ..pipelines.emu3.convert import convert_emu3 as convert_emu3
from ..pipelines.emu35.convert import convert_emu35 as convert_emu35
from ..pipelines.family import PublishedCheckpoint as PublishedCheckpoint
from ..pipelines.halton_maskgit.convert import convert_halton_maskgit as convert_halton_maskgit
from ..pipelines.infinity.convert import convert_infinity as convert_infinity
from ..pipelines.infinitystar.convert import convert_infinitystar as convert_infinitystar
from ..pipelines.janus.convert import convert_janus as convert_janus
from ..pipelines.llamagen.convert import convert_llamagen as convert_llamagen
from ..pipelines.lpd.convert import convert_lpd as convert_lpd
from ..pipelines.lumina_dimoo.convert import convert_lumina_dimoo as convert_lumina_dimoo
from ..pipelines.mammothmoda2.convert import convert_mammothmoda2 as convert_mammothmoda2
from ..pipelines.mar.convert import convert_mar as convert_mar
from ..pipelines.nextstep.convert import convert_nextstep as convert_nextstep
from ..pipelines.randar.convert import convert_randar as convert_randar
from ..pipelines.rar.convert import convert_rar as convert_rar
from ..pipelines.var.convert import convert_var as convert_var
from ..pipelines.x_omni.convert import convert_x_omni as convert_x_omni
from ..published.fetch import load_published as load_published
from ..published.registry import PUBLISHED as PUBLISHED
