"""The published shape of LPD."""

from functools import partial

from arimage.pipelines.lpd.transformer_lpd import LPDTokenModel, LPDTransformer

from . import Published, any_order


LPD_L = partial(any_order, transformer=LPDTransformer, token_model=LPDTokenModel)
PUBLISHED = {"lpd-l-256": Published(24, LPD_L, ("groups:groups=4",))}
