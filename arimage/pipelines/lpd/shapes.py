"""The published shape of LPD."""

from functools import partial

from ..shapes import Published, any_order
from .transformer_lpd import LPDTokenModel, LPDTransformer


LPD_L = partial(any_order, transformer=LPDTransformer, token_model=LPDTokenModel)
PUBLISHED = {"lpd-l-256": Published(24, LPD_L, ("groups:groups=4",))}
