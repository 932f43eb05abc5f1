# Written by tools/exports.py.
# ruff: noqa: I001

from .acceptance import (
    ExactAcceptance as ExactAcceptance,
    GroupAcceptance as GroupAcceptance,
    NeighbourAcceptance as NeighbourAcceptance,
)
from .autoregressive import AutoregressiveDecoding as AutoregressiveDecoding
from .collaborative import CollaborativeDecoding as CollaborativeDecoding
from .continuous.path_jacobi import PathJacobiDecoding as PathJacobiDecoding
from .continuous.path_speculative import PathSpeculativeDecoding as PathSpeculativeDecoding
from .contract.cache import Cache as Cache
from .contract.distribution import LatentSampling as LatentSampling, Sampling as Sampling
from .contract.layout import Layout as Layout
from .contract.models import (
    CausalLatentModel as CausalLatentModel,
    GroupModel as GroupModel,
    LatentModel as LatentModel,
    MaskedLatentModel as MaskedLatentModel,
    MaskedTokenModel as MaskedTokenModel,
    ScaleModel as ScaleModel,
    TokenModel as TokenModel,
    VectorModel as VectorModel,
)
from .contract.orders import order_of as order_of
from .contract.state import DecodingState as DecodingState
from .contract.supports import Decoding as Decoding
from .draft_tree import DraftTreeDecoding as DraftTreeDecoding
from .few_step import FewStepDecoding as FewStepDecoding
from .flow import FlowDecoding as FlowDecoding
from .group import GroupDecoding as GroupDecoding
from .jacobi.lazy_jacobi import LazyJacobiDecoding as LazyJacobiDecoding
from .jacobi.parallel_jacobi import ParallelJacobiDecoding as ParallelJacobiDecoding
from .jacobi.speculative_jacobi import SpeculativeJacobiDecoding as SpeculativeJacobiDecoding
from .jacobi.tree_jacobi import TreeJacobiDecoding as TreeJacobiDecoding
from .line_cache import LineCacheDecoding as LineCacheDecoding
from .masked.confidence import ConfidenceDecoding as ConfidenceDecoding
from .masked.continuous_speculative import ContinuousSpeculativeDecoding as ContinuousSpeculativeDecoding
from .masked.halton import HaltonDecoding as HaltonDecoding, halton_order as halton_order
from .masked.latents import MaskedDecoding as MaskedDecoding
from .masked.lazy_mar import LazyMAR as LazyMAR
from .masked.ml_cache import MLCache as MLCache
from .masked.recap import ReCAP as ReCAP
from .names import PRESETS as PRESETS, Order as Order, parse_decoding as parse_decoding
from .next_scale import NextScaleDecoding as NextScaleDecoding
from .presets import (
    decoding_from_dict as decoding_from_dict,
    decoding_from_name as decoding_from_name,
    decoding_from_text as decoding_from_text,
    decoding_names as decoding_names,
    decoding_to_dict as decoding_to_dict,
    decoding_to_text as decoding_to_text,
)
from .run.batch import decode as decode
from .zipar import ZipARDecoding as ZipARDecoding
