# Written by tools/exports.py.

from .acceptance import ExactAcceptance, GroupAcceptance, NeighbourAcceptance
from .autoregressive import AutoregressiveDecoding
from .collaborative import CollaborativeDecoding
from .continuous.path_jacobi import PathJacobiDecoding
from .continuous.path_speculative import PathSpeculativeDecoding
from .contract.distribution import LatentSampling, Sampling
from .contract.layout import Layout
from .contract.models import (
    CausalLatentModel,
    GroupModel,
    LatentModel,
    MaskedLatentModel,
    MaskedTokenModel,
    ScaleModel,
    TokenModel,
    VectorModel,
)
from .contract.orders import order_of
from .contract.state import DecodingState
from .contract.supports import Decoding
from .draft_tree import DraftTreeDecoding
from .few_step import FewStepDecoding
from .flow import FlowDecoding
from .group import GroupDecoding
from .jacobi.lazy_jacobi import LazyJacobiDecoding
from .jacobi.parallel_jacobi import ParallelJacobiDecoding
from .jacobi.speculative_jacobi import SpeculativeJacobiDecoding
from .jacobi.tree_jacobi import TreeJacobiDecoding
from .line_cache import LineCacheDecoding
from .masked.confidence import ConfidenceDecoding
from .masked.continuous_speculative import ContinuousSpeculativeDecoding
from .masked.halton import HaltonDecoding, halton_order
from .masked.latents import MaskedDecoding
from .masked.lazy_mar import LazyMAR
from .masked.ml_cache import MLCache
from .masked.recap import ReCAP
from .names import PRESETS, Order, parse_decoding
from .next_scale import NextScaleDecoding
from .presets import (
    decoding_from_dict,
    decoding_from_name,
    decoding_from_text,
    decoding_names,
    decoding_to_dict,
    decoding_to_text,
)
from .run.batch import decode
from .zipar import ZipARDecoding

__all__ = [
    "AutoregressiveDecoding",
    "CausalLatentModel",
    "CollaborativeDecoding",
    "ConfidenceDecoding",
    "ContinuousSpeculativeDecoding",
    "Decoding",
    "DecodingState",
    "DraftTreeDecoding",
    "ExactAcceptance",
    "FewStepDecoding",
    "FlowDecoding",
    "GroupAcceptance",
    "GroupDecoding",
    "GroupModel",
    "HaltonDecoding",
    "LatentModel",
    "LatentSampling",
    "Layout",
    "LazyJacobiDecoding",
    "LazyMAR",
    "LineCacheDecoding",
    "MLCache",
    "MaskedDecoding",
    "MaskedLatentModel",
    "MaskedTokenModel",
    "NeighbourAcceptance",
    "NextScaleDecoding",
    "Order",
    "PRESETS",
    "ParallelJacobiDecoding",
    "PathJacobiDecoding",
    "PathSpeculativeDecoding",
    "ReCAP",
    "Sampling",
    "ScaleModel",
    "SpeculativeJacobiDecoding",
    "TokenModel",
    "TreeJacobiDecoding",
    "VectorModel",
    "ZipARDecoding",
    "decode",
    "decoding_from_dict",
    "decoding_from_name",
    "decoding_from_text",
    "decoding_names",
    "decoding_to_dict",
    "decoding_to_text",
    "halton_order",
    "order_of",
    "parse_decoding",
]
