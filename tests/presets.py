"""The presets for each kind of model that has all parts."""

from arimage.decoding import decoding_names
from arimage.decoding.contract.supports import Traits


FOR_TOKENS = decoding_names(Traits("tokens", drafter=True, denoiser=True, codebook=True))
FOR_ANY_ORDER = decoding_names(Traits("tokens", raster=False, groups=True, codebook=True))
FOR_SCALES = decoding_names(Traits("scales", refiner=True))
