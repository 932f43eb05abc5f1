"""Decoding methods: small frozen objects that generate tokens with any model that has one of the interfaces in
`contract.models`. Does not depend on any particular model; imports only torch."""

from importlib import import_module
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from .acceptance import ExactAcceptance, GroupAcceptance, NeighbourAcceptance
    from .autoregressive import AutoregressiveDecoding
    from .collaborative import CollaborativeDecoding
    from .continuous.continuous_speculative import ContinuousSpeculativeDecoding
    from .continuous.masked import MaskedDecoding
    from .continuous.path_jacobi import PathJacobiDecoding
    from .continuous.path_speculative import PathSpeculativeDecoding
    from .contract.distribution import LatentSampling, Sampling
    from .contract.layout import Layout
    from .contract.models import (
        CausalLatentModel,
        GroupModel,
        LatentModel,
        MaskedLatentModel,
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

_MODULES = {
    "AutoregressiveDecoding": ".autoregressive",
    "CausalLatentModel": ".contract.models",
    "CollaborativeDecoding": ".collaborative",
    "ContinuousSpeculativeDecoding": ".continuous.continuous_speculative",
    "Decoding": ".contract.supports",
    "DecodingState": ".contract.state",
    "DraftTreeDecoding": ".draft_tree",
    "ExactAcceptance": ".acceptance",
    "FewStepDecoding": ".few_step",
    "FlowDecoding": ".flow",
    "GroupAcceptance": ".acceptance",
    "GroupDecoding": ".group",
    "GroupModel": ".contract.models",
    "Layout": ".contract.layout",
    "LatentModel": ".contract.models",
    "LatentSampling": ".contract.distribution",
    "LazyJacobiDecoding": ".jacobi.lazy_jacobi",
    "LineCacheDecoding": ".line_cache",
    "MaskedDecoding": ".continuous.masked",
    "MaskedLatentModel": ".contract.models",
    "NeighbourAcceptance": ".acceptance",
    "NextScaleDecoding": ".next_scale",
    "Order": ".names",
    "PRESETS": ".names",
    "ParallelJacobiDecoding": ".jacobi.parallel_jacobi",
    "PathJacobiDecoding": ".continuous.path_jacobi",
    "PathSpeculativeDecoding": ".continuous.path_speculative",
    "Sampling": ".contract.distribution",
    "ScaleModel": ".contract.models",
    "SpeculativeJacobiDecoding": ".jacobi.speculative_jacobi",
    "TokenModel": ".contract.models",
    "TreeJacobiDecoding": ".jacobi.tree_jacobi",
    "VectorModel": ".contract.models",
    "ZipARDecoding": ".zipar",
    "decode": ".run.batch",
    "decoding_from_dict": ".presets",
    "decoding_from_name": ".presets",
    "decoding_from_text": ".presets",
    "decoding_names": ".presets",
    "decoding_to_dict": ".presets",
    "decoding_to_text": ".presets",
    "order_of": ".contract.orders",
    "parse_decoding": ".names",
}
__all__ = [
    "PRESETS",
    "AutoregressiveDecoding",
    "CausalLatentModel",
    "CollaborativeDecoding",
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
    "Layout",
    "LatentModel",
    "LatentSampling",
    "LazyJacobiDecoding",
    "LineCacheDecoding",
    "MaskedDecoding",
    "MaskedLatentModel",
    "NeighbourAcceptance",
    "NextScaleDecoding",
    "Order",
    "ParallelJacobiDecoding",
    "PathJacobiDecoding",
    "PathSpeculativeDecoding",
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
    "order_of",
    "parse_decoding",
]


# Imported lazily: the command line lists the names of decodings without importing torch.
def __getattr__(name: str):
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name], __name__), name)
