"""The presets for each kind of model that has all parts."""

import pytest

from arimage.decoding import decoding_names
from arimage.decoding.contract.supports import Traits


FOR_TOKENS = decoding_names(Traits("tokens", drafter=True, denoiser=True, codebook=True))
FOR_ANY_ORDER = decoding_names(Traits("tokens", raster=False, groups=True, codebook=True))
FOR_GRIDS = decoding_names(Traits("tokens", one_grid=False, codebook=True))
FOR_SCALES = decoding_names(Traits("scales", refiner=True, prunes=True))

# Differ from another preset in settings alone, which are the business of tests/decoding.
ALIKE = ("sjd-gumbel", "sjd++", "lantern", "lantern++", "eagle-lantern")


def quick(names):
    """Presets to parametrize a test of pipelines by, of which those that are like another are slow."""
    return [pytest.param(name, marks=pytest.mark.slow) if name in ALIKE else name for name in names]
