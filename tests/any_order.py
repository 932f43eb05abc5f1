"""The families whose tokens come in any order, by name, for the tests that they share."""

from pipelines.arpg import tiny as tiny_arpg
from pipelines.lpd import tiny as tiny_lpd
from pipelines.randar import tiny as tiny_randar


# Their folders' tiny.py, and arguments of its functions.
FAMILIES = {
    "arpg": (tiny_arpg, {}),
    "arpg with places": (tiny_arpg, {"places": True}),
    "lpd": (tiny_lpd, {}),
    "randar": (tiny_randar, {}),
}


def classes(family: str) -> tuple[type, type]:
    """Of the transformer and of the pipeline."""
    return FAMILIES[family][0].CLASSES


def transformer(family: str, **settings):
    tiny, own = FAMILIES[family]
    return tiny.transformer(**own | settings)


def pipeline(family: str):
    tiny, own = FAMILIES[family]
    return tiny.pipeline(**own)
