"""Autoregressive image generation: every model a diffusers-style pipeline, every faster decoding a small object."""

import importlib
from typing import TYPE_CHECKING


__version__ = "0.1.0"

_EXPORTS = {
    "AnolePipeline": "pipelines.pipeline_anole",
    "AutoPipeline": "auto",
    "AutoregressiveDecoding": "decoding",
    "CollaborativeDecoding": "decoding",
    "DecodingStats": "pipelines.output",
    "DenoisingHead": "models.denoising_head",
    "DraftTreeDecoding": "decoding",
    "Emu3Pipeline": "pipelines.pipeline_emu3",
    "ExactAcceptance": "decoding",
    "GroupAcceptance": "decoding",
    "ImagePipelineOutput": "pipelines.output",
    "JanusPipeline": "pipelines.pipeline_janus",
    "LazyJacobiDecoding": "decoding",
    "LlamaGenDrafter": "models.drafter_llamagen",
    "LlamaGenPipeline": "pipelines.pipeline_llamagen",
    "LlamaGenTransformer": "models.transformer_llamagen",
    "LlamaGenVQModel": "tokenizers.vq_llamagen",
    "LuminaMGPTPipeline": "pipelines.pipeline_lumina_mgpt",
    "MARPipeline": "pipelines.pipeline_mar",
    "MARTransformer": "models.transformer_mar",
    "MaskedDecoding": "decoding",
    "NeighbourAcceptance": "decoding",
    "NextScaleDecoding": "decoding",
    "ParallelJacobiDecoding": "decoding",
    "Sampling": "decoding",
    "SpeculativeJacobiDecoding": "decoding",
    "TreeJacobiDecoding": "decoding",
    "VARPipeline": "pipelines.pipeline_var",
    "VARTransformer": "models.transformer_var",
    "VARVQModel": "tokenizers.vq_var",
    "ZipARDecoding": "decoding",
    "decoding_from_name": "decoding",
    "decoding_names": "decoding",
}

__all__ = [
    "AnolePipeline",
    "AutoPipeline",
    "AutoregressiveDecoding",
    "CollaborativeDecoding",
    "DecodingStats",
    "DenoisingHead",
    "DraftTreeDecoding",
    "Emu3Pipeline",
    "ExactAcceptance",
    "GroupAcceptance",
    "ImagePipelineOutput",
    "JanusPipeline",
    "LazyJacobiDecoding",
    "LlamaGenDrafter",
    "LlamaGenPipeline",
    "LlamaGenTransformer",
    "LlamaGenVQModel",
    "LuminaMGPTPipeline",
    "MARPipeline",
    "MARTransformer",
    "MaskedDecoding",
    "NeighbourAcceptance",
    "NextScaleDecoding",
    "ParallelJacobiDecoding",
    "Sampling",
    "SpeculativeJacobiDecoding",
    "TreeJacobiDecoding",
    "VARPipeline",
    "VARTransformer",
    "VARVQModel",
    "ZipARDecoding",
    "__version__",
    "decoding_from_name",
    "decoding_names",
]

if TYPE_CHECKING:
    from .auto import AutoPipeline
    from .decoding import (
        AutoregressiveDecoding,
        CollaborativeDecoding,
        DraftTreeDecoding,
        ExactAcceptance,
        GroupAcceptance,
        LazyJacobiDecoding,
        MaskedDecoding,
        NeighbourAcceptance,
        NextScaleDecoding,
        ParallelJacobiDecoding,
        Sampling,
        SpeculativeJacobiDecoding,
        TreeJacobiDecoding,
        ZipARDecoding,
        decoding_from_name,
        decoding_names,
    )
    from .models.denoising_head import DenoisingHead
    from .models.drafter_llamagen import LlamaGenDrafter
    from .models.transformer_llamagen import LlamaGenTransformer
    from .models.transformer_mar import MARTransformer
    from .models.transformer_var import VARTransformer
    from .pipelines.output import DecodingStats, ImagePipelineOutput
    from .pipelines.pipeline_anole import AnolePipeline
    from .pipelines.pipeline_emu3 import Emu3Pipeline
    from .pipelines.pipeline_janus import JanusPipeline
    from .pipelines.pipeline_llamagen import LlamaGenPipeline
    from .pipelines.pipeline_lumina_mgpt import LuminaMGPTPipeline
    from .pipelines.pipeline_mar import MARPipeline
    from .pipelines.pipeline_var import VARPipeline
    from .tokenizers.vq_llamagen import LlamaGenVQModel
    from .tokenizers.vq_var import VARVQModel


def __getattr__(name: str):
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_EXPORTS[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
