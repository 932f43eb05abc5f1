"""Decoding methods: small frozen objects that turn any `TokenModel` or `ScaleModel` into tokens. Knows no model; imports only
torch."""

from .acceptance import ExactAcceptance, GroupAcceptance, NeighbourAcceptance
from .autoregressive import AutoregressiveDecoding
from .collaborative import CollaborativeDecoding
from .distribution import Sampling
from .draft_tree import DraftTreeDecoding
from .group import GroupDecoding
from .interface import Decoding, GroupModel, ScaleModel, TokenModel
from .layout import Layout
from .lazy_jacobi import LazyJacobiDecoding
from .loop import decode
from .next_scale import NextScaleDecoding
from .orders import Order, order_of
from .parallel_jacobi import ParallelJacobiDecoding
from .presets import (
    PRESETS,
    decoding_from_dict,
    decoding_from_name,
    decoding_from_text,
    decoding_names,
    decoding_to_dict,
    decoding_to_text,
    parse_decoding,
)
from .speculative_jacobi import SpeculativeJacobiDecoding
from .state import DecodingState
from .tree_jacobi import TreeJacobiDecoding
from .zipar import ZipARDecoding


__all__ = [
    "PRESETS",
    "AutoregressiveDecoding",
    "CollaborativeDecoding",
    "Decoding",
    "DecodingState",
    "DraftTreeDecoding",
    "ExactAcceptance",
    "GroupAcceptance",
    "GroupDecoding",
    "GroupModel",
    "Layout",
    "LazyJacobiDecoding",
    "NeighbourAcceptance",
    "NextScaleDecoding",
    "Order",
    "ParallelJacobiDecoding",
    "Sampling",
    "ScaleModel",
    "SpeculativeJacobiDecoding",
    "TokenModel",
    "TreeJacobiDecoding",
    "ZipARDecoding",
    "decode",
    "decoding_from_dict",
    "decoding_from_name",
    "decoding_from_text",
    "decoding_names",
    "decoding_to_dict",
    "decoding_to_text",
    "order_of",
    "parse_decoding",
]
