"""The published shape of RandAR."""

from functools import partial

from arimage.pipelines.randar.transformer_randar import RandARTokenModel, RandARTransformer

from . import Published, any_order


RANDAR_L = partial(any_order, transformer=RandARTransformer, token_model=RandARTokenModel)
PUBLISHED = {"randar-l-256": Published(24, RANDAR_L, ("sjd-coupled",))}
