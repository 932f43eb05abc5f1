"""The published shape of ARPG."""

from functools import partial

from arimage.pipelines.arpg.transformer_arpg import ARPGTokenModel, ARPGTransformer

from . import Published, any_order


ARPG_L = partial(any_order, transformer=ARPGTransformer, token_model=ARPGTokenModel)
PUBLISHED = {"arpg-l-256": Published(24, ARPG_L, ("sjd-coupled", "groups:groups=4"))}
