"""The published shape of ARPG."""

from functools import partial

from ..shapes import Published, any_order
from .transformer_arpg import ARPGTokenModel, ARPGTransformer


ARPG_L = partial(any_order, transformer=ARPGTransformer, token_model=ARPGTokenModel)
PUBLISHED = {"arpg-l-256": Published(24, ARPG_L, ("sjd-coupled", "groups:groups=4"))}
