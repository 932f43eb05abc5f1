"""The published shape of RandAR."""

from functools import partial

from ..shapes import Published, any_order
from .transformer_randar import RandARTokenModel, RandARTransformer


RANDAR_L = partial(any_order, transformer=RandARTransformer, token_model=RandARTokenModel)
PUBLISHED = {"randar-l-256": Published(24, RANDAR_L, ("sjd-coupled",))}
