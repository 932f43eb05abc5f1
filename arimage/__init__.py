"""Autoregressive image generation: every model a diffusers-style pipeline, every faster decoding a small object."""

import importlib
from typing import TYPE_CHECKING


__version__ = "0.1.0"

_EXPORTS = {
    "ARPGPipeline": "pipelines.arpg.pipeline_arpg",
    "ARPGTransformer": "pipelines.arpg.transformer_arpg",
    "AnolePipeline": "pipelines.chameleon.pipeline_anole",
    "AutoPipeline": "auto",
    "AutoregressiveDecoding": "decoding",
    "CollaborativeDecoding": "decoding",
    "ContinuousSpeculativeDecoding": "decoding",
    "CosmosPipeline": "pipelines.cosmos.pipeline_cosmos",
    "CosmosTransformer": "pipelines.cosmos.transformer_cosmos",
    "CosmosVideoTokenizer": "pipelines.cosmos.fsq_cosmos",
    "DecodingStats": "pipelines.output",
    "DenoisingHead": "models.denoising_head",
    "DraftTreeDecoding": "decoding",
    "Emu3Pipeline": "pipelines.emu3.pipeline_emu3",
    "Emu35Pipeline": "pipelines.emu35.pipeline_emu35",
    "ExactAcceptance": "decoding",
    "FewStepDecoding": "decoding",
    "FlowDecoding": "decoding",
    "FramewiseVQModel": "tokenizers.vq_frames",
    "GlmImagePipeline": "pipelines.glm_image.pipeline_glm_image",
    "GroupAcceptance": "decoding",
    "GroupDecoding": "decoding",
    "IBQModel": "pipelines.emu35.ibq_emu35",
    "ImagePipelineOutput": "pipelines.output",
    "ImageUpscaler": "tokenizers.upscaler",
    "InfinityPipeline": "pipelines.infinity.pipeline_infinity",
    "InfinityTransformer": "pipelines.infinity.transformer_infinity",
    "InfinityVQModel": "pipelines.infinity.bsq_infinity",
    "JanusPipeline": "pipelines.janus.pipeline_janus",
    "LPDPipeline": "pipelines.lpd.pipeline_lpd",
    "LPDTransformer": "pipelines.lpd.transformer_lpd",
    "LatentLlamaPipeline": "pipelines.latent_llama.pipeline_latent_llama",
    "LatentLlamaTransformer": "pipelines.latent_llama.transformer_latent_llama",
    "LazyJacobiDecoding": "decoding",
    "LineCacheDecoding": "decoding",
    "LlamaGenDDPipeline": "pipelines.distilled_decoding.pipeline_llamagen_dd",
    "LlamaGenDDTransformer": "pipelines.distilled_decoding.transformer_llamagen_dd",
    "LlamaGenDenoiser": "pipelines.llamagen.denoiser_llamagen",
    "LlamaGenDrafter": "pipelines.llamagen.drafter_llamagen",
    "LlamaGenPipeline": "pipelines.llamagen.pipeline_llamagen",
    "LlamaGenTransformer": "pipelines.llamagen.transformer_llamagen",
    "LlamaGenVQModel": "tokenizers.vq_llamagen",
    "LuminaMGPTPipeline": "pipelines.chameleon.pipeline_lumina_mgpt",
    "MARPipeline": "pipelines.mar.pipeline_mar",
    "MARTransformer": "pipelines.mar.transformer_mar",
    "MammothModa2LanguageModel": "pipelines.mammothmoda2.transformer_mammothmoda2",
    "MammothModa2Pipeline": "pipelines.mammothmoda2.pipeline_mammothmoda2",
    "MammothModa2Transformer2DModel": "pipelines.mammothmoda2.decoder_mammothmoda2",
    "MaskedDecoding": "decoding",
    "NeighbourAcceptance": "decoding",
    "NextScaleDecoding": "decoding",
    "ParallelJacobiDecoding": "decoding",
    "PathJacobiDecoding": "decoding",
    "PathSpeculativeDecoding": "decoding",
    "RandARPipeline": "pipelines.randar.pipeline_randar",
    "RandARTransformer": "pipelines.randar.transformer_randar",
    "Sampling": "decoding",
    "SpeculativeJacobiDecoding": "decoding",
    "TreeJacobiDecoding": "decoding",
    "VARDDPipeline": "pipelines.distilled_decoding.pipeline_var_dd",
    "VARDDTransformer": "pipelines.distilled_decoding.transformer_var_dd",
    "VARPipeline": "pipelines.var.pipeline_var",
    "VARTransformer": "pipelines.var.transformer_var",
    "VARVQModel": "tokenizers.vq_var",
    "VideoPipelineOutput": "pipelines.output",
    "ZipARDecoding": "decoding",
    "accelerate": "pipelines.janus.accelerate",
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
    "IBQModel",
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
    "LlamaGenDenoiser",
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
    from .models.denoising_head import DenoisingHead
    from .pipelines.arpg.pipeline_arpg import ARPGPipeline
    from .pipelines.arpg.transformer_arpg import ARPGTransformer
    from .pipelines.chameleon.pipeline_anole import AnolePipeline
    from .pipelines.chameleon.pipeline_lumina_mgpt import LuminaMGPTPipeline
    from .pipelines.cosmos.fsq_cosmos import CosmosVideoTokenizer
    from .pipelines.cosmos.pipeline_cosmos import CosmosPipeline
    from .pipelines.cosmos.transformer_cosmos import CosmosTransformer
    from .pipelines.distilled_decoding.pipeline_llamagen_dd import LlamaGenDDPipeline
    from .pipelines.distilled_decoding.pipeline_var_dd import VARDDPipeline
    from .pipelines.distilled_decoding.transformer_llamagen_dd import LlamaGenDDTransformer
    from .pipelines.distilled_decoding.transformer_var_dd import VARDDTransformer
    from .pipelines.emu3.pipeline_emu3 import Emu3Pipeline
    from .pipelines.emu35.ibq_emu35 import IBQModel
    from .pipelines.emu35.pipeline_emu35 import Emu35Pipeline
    from .pipelines.glm_image.pipeline_glm_image import GlmImagePipeline
    from .pipelines.infinity.bsq_infinity import InfinityVQModel
    from .pipelines.infinity.pipeline_infinity import InfinityPipeline
    from .pipelines.infinity.transformer_infinity import InfinityTransformer
    from .pipelines.janus.accelerate import accelerate
    from .pipelines.janus.pipeline_janus import JanusPipeline
    from .pipelines.latent_llama.pipeline_latent_llama import LatentLlamaPipeline
    from .pipelines.latent_llama.transformer_latent_llama import LatentLlamaTransformer
    from .pipelines.llamagen.denoiser_llamagen import LlamaGenDenoiser
    from .pipelines.llamagen.drafter_llamagen import LlamaGenDrafter
    from .pipelines.llamagen.pipeline_llamagen import LlamaGenPipeline
    from .pipelines.llamagen.transformer_llamagen import LlamaGenTransformer
    from .pipelines.lpd.pipeline_lpd import LPDPipeline
    from .pipelines.lpd.transformer_lpd import LPDTransformer
    from .pipelines.mammothmoda2.decoder_mammothmoda2 import MammothModa2Transformer2DModel
    from .pipelines.mammothmoda2.pipeline_mammothmoda2 import MammothModa2Pipeline
    from .pipelines.mammothmoda2.transformer_mammothmoda2 import MammothModa2LanguageModel
    from .pipelines.mar.pipeline_mar import MARPipeline
    from .pipelines.mar.transformer_mar import MARTransformer
    from .pipelines.output import DecodingStats, ImagePipelineOutput, VideoPipelineOutput
    from .pipelines.randar.pipeline_randar import RandARPipeline
    from .pipelines.randar.transformer_randar import RandARTransformer
    from .pipelines.var.pipeline_var import VARPipeline
    from .pipelines.var.transformer_var import VARTransformer
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
