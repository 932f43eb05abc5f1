"""Autoregressive image generation: every model a diffusers-style pipeline, every faster decoding a small object."""

import importlib
from typing import TYPE_CHECKING


__version__ = "0.1.0"

_EXPORTS = {
    "ARPGPipeline": "pipelines.pipeline_arpg",
    "ARPGTransformer": "models.transformer_arpg",
    "AnolePipeline": "pipelines.pipeline_anole",
    "AutoPipeline": "auto",
    "AutoregressiveDecoding": "decoding",
    "CollaborativeDecoding": "decoding",
    "ContinuousSpeculativeDecoding": "decoding",
    "CosmosPipeline": "pipelines.pipeline_cosmos",
    "CosmosTransformer": "models.transformer_cosmos",
    "CosmosVideoTokenizer": "tokenizers.fsq_cosmos",
    "DecodingStats": "pipelines.output",
    "DenoisingHead": "models.denoising_head",
    "DraftTreeDecoding": "decoding",
    "Emu3Pipeline": "pipelines.pipeline_emu3",
    "Emu35Pipeline": "pipelines.pipeline_emu35",
    "ExactAcceptance": "decoding",
    "FewStepDecoding": "decoding",
    "FlowDecoding": "decoding",
    "FramewiseVQModel": "tokenizers.vq_frames",
    "GlmImagePipeline": "pipelines.pipeline_glm_image",
    "GroupAcceptance": "decoding",
    "GroupDecoding": "decoding",
    "ImagePipelineOutput": "pipelines.output",
    "ImageUpscaler": "tokenizers.upscaler",
    "InfinityPipeline": "pipelines.pipeline_infinity",
    "InfinityTransformer": "models.transformer_infinity",
    "InfinityVQModel": "tokenizers.bsq_infinity",
    "JanusPipeline": "pipelines.pipeline_janus",
    "LPDPipeline": "pipelines.pipeline_lpd",
    "LPDTransformer": "models.transformer_lpd",
    "LatentLlamaPipeline": "pipelines.pipeline_latent_llama",
    "LatentLlamaTransformer": "models.transformer_latent_llama",
    "LazyJacobiDecoding": "decoding",
    "LineCacheDecoding": "decoding",
    "LlamaGenDDPipeline": "pipelines.pipeline_llamagen_dd",
    "LlamaGenDDTransformer": "models.transformer_llamagen_dd",
    "LlamaGenDrafter": "models.drafter_llamagen",
    "LlamaGenPipeline": "pipelines.pipeline_llamagen",
    "LlamaGenTransformer": "models.transformer_llamagen",
    "LlamaGenVQModel": "tokenizers.vq_llamagen",
    "LuminaMGPTPipeline": "pipelines.pipeline_lumina_mgpt",
    "MARPipeline": "pipelines.pipeline_mar",
    "MARTransformer": "models.transformer_mar",
    "MammothModa2LanguageModel": "models.transformer_mammothmoda2",
    "MammothModa2Pipeline": "pipelines.pipeline_mammothmoda2",
    "MammothModa2Transformer2DModel": "models.decoder_mammothmoda2",
    "MaskedDecoding": "decoding",
    "NeighbourAcceptance": "decoding",
    "NextScaleDecoding": "decoding",
    "ParallelJacobiDecoding": "decoding",
    "PathJacobiDecoding": "decoding",
    "PathSpeculativeDecoding": "decoding",
    "RandARPipeline": "pipelines.pipeline_randar",
    "RandARTransformer": "models.transformer_randar",
    "Sampling": "decoding",
    "SpeculativeJacobiDecoding": "decoding",
    "TreeJacobiDecoding": "decoding",
    "VARDDPipeline": "pipelines.pipeline_var_dd",
    "VARDDTransformer": "models.transformer_var_dd",
    "VARPipeline": "pipelines.pipeline_var",
    "VARTransformer": "models.transformer_var",
    "VARVQModel": "tokenizers.vq_var",
    "VideoPipelineOutput": "pipelines.output",
    "ZipARDecoding": "decoding",
    "accelerate": "pipelines.accelerate",
    "decoding_from_name": "decoding",
    "decoding_names": "decoding",
}

__all__ = [
    "ARPGPipeline",
    "ARPGTransformer",
    "AnolePipeline",
    "AutoPipeline",
    "AutoregressiveDecoding",
    "CollaborativeDecoding",
    "ContinuousSpeculativeDecoding",
    "CosmosPipeline",
    "CosmosTransformer",
    "CosmosVideoTokenizer",
    "DecodingStats",
    "DenoisingHead",
    "DraftTreeDecoding",
    "Emu3Pipeline",
    "Emu35Pipeline",
    "ExactAcceptance",
    "FewStepDecoding",
    "FlowDecoding",
    "FramewiseVQModel",
    "GlmImagePipeline",
    "GroupAcceptance",
    "GroupDecoding",
    "ImagePipelineOutput",
    "ImageUpscaler",
    "InfinityPipeline",
    "InfinityTransformer",
    "InfinityVQModel",
    "JanusPipeline",
    "LPDPipeline",
    "LPDTransformer",
    "LatentLlamaPipeline",
    "LatentLlamaTransformer",
    "LazyJacobiDecoding",
    "LineCacheDecoding",
    "LlamaGenDDPipeline",
    "LlamaGenDDTransformer",
    "LlamaGenDrafter",
    "LlamaGenPipeline",
    "LlamaGenTransformer",
    "LlamaGenVQModel",
    "LuminaMGPTPipeline",
    "MARPipeline",
    "MARTransformer",
    "MammothModa2LanguageModel",
    "MammothModa2Pipeline",
    "MammothModa2Transformer2DModel",
    "MaskedDecoding",
    "NeighbourAcceptance",
    "NextScaleDecoding",
    "ParallelJacobiDecoding",
    "PathJacobiDecoding",
    "PathSpeculativeDecoding",
    "RandARPipeline",
    "RandARTransformer",
    "Sampling",
    "SpeculativeJacobiDecoding",
    "TreeJacobiDecoding",
    "VARDDPipeline",
    "VARDDTransformer",
    "VARPipeline",
    "VARTransformer",
    "VARVQModel",
    "VideoPipelineOutput",
    "ZipARDecoding",
    "__version__",
    "accelerate",
    "decoding_from_name",
    "decoding_names",
]

if TYPE_CHECKING:
    from .auto import AutoPipeline
    from .decoding import (
        AutoregressiveDecoding,
        CollaborativeDecoding,
        ContinuousSpeculativeDecoding,
        DraftTreeDecoding,
        ExactAcceptance,
        FewStepDecoding,
        FlowDecoding,
        GroupAcceptance,
        GroupDecoding,
        LazyJacobiDecoding,
        LineCacheDecoding,
        MaskedDecoding,
        NeighbourAcceptance,
        NextScaleDecoding,
        ParallelJacobiDecoding,
        PathJacobiDecoding,
        PathSpeculativeDecoding,
        Sampling,
        SpeculativeJacobiDecoding,
        TreeJacobiDecoding,
        ZipARDecoding,
        decoding_from_name,
        decoding_names,
    )
    from .models.decoder_mammothmoda2 import MammothModa2Transformer2DModel
    from .models.denoising_head import DenoisingHead
    from .models.drafter_llamagen import LlamaGenDrafter
    from .models.transformer_arpg import ARPGTransformer
    from .models.transformer_cosmos import CosmosTransformer
    from .models.transformer_infinity import InfinityTransformer
    from .models.transformer_latent_llama import LatentLlamaTransformer
    from .models.transformer_llamagen import LlamaGenTransformer
    from .models.transformer_llamagen_dd import LlamaGenDDTransformer
    from .models.transformer_lpd import LPDTransformer
    from .models.transformer_mammothmoda2 import MammothModa2LanguageModel
    from .models.transformer_mar import MARTransformer
    from .models.transformer_randar import RandARTransformer
    from .models.transformer_var import VARTransformer
    from .models.transformer_var_dd import VARDDTransformer
    from .pipelines.accelerate import accelerate
    from .pipelines.output import DecodingStats, ImagePipelineOutput, VideoPipelineOutput
    from .pipelines.pipeline_anole import AnolePipeline
    from .pipelines.pipeline_arpg import ARPGPipeline
    from .pipelines.pipeline_cosmos import CosmosPipeline
    from .pipelines.pipeline_emu3 import Emu3Pipeline
    from .pipelines.pipeline_emu35 import Emu35Pipeline
    from .pipelines.pipeline_glm_image import GlmImagePipeline
    from .pipelines.pipeline_infinity import InfinityPipeline
    from .pipelines.pipeline_janus import JanusPipeline
    from .pipelines.pipeline_latent_llama import LatentLlamaPipeline
    from .pipelines.pipeline_llamagen import LlamaGenPipeline
    from .pipelines.pipeline_llamagen_dd import LlamaGenDDPipeline
    from .pipelines.pipeline_lpd import LPDPipeline
    from .pipelines.pipeline_lumina_mgpt import LuminaMGPTPipeline
    from .pipelines.pipeline_mammothmoda2 import MammothModa2Pipeline
    from .pipelines.pipeline_mar import MARPipeline
    from .pipelines.pipeline_randar import RandARPipeline
    from .pipelines.pipeline_var import VARPipeline
    from .pipelines.pipeline_var_dd import VARDDPipeline
    from .tokenizers.bsq_infinity import InfinityVQModel
    from .tokenizers.fsq_cosmos import CosmosVideoTokenizer
    from .tokenizers.upscaler import ImageUpscaler
    from .tokenizers.vq_frames import FramewiseVQModel
    from .tokenizers.vq_llamagen import LlamaGenVQModel
    from .tokenizers.vq_var import VARVQModel


def __getattr__(name: str):
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_EXPORTS[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
