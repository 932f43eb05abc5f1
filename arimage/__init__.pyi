# Written by tools/exports.py.

from .auto import AutoPipeline
from .decoding import (
    AutoregressiveDecoding,
    CollaborativeDecoding,
    ConfidenceDecoding,
    ContinuousSpeculativeDecoding,
    DraftTreeDecoding,
    ExactAcceptance,
    FewStepDecoding,
    FlowDecoding,
    GroupAcceptance,
    GroupDecoding,
    HaltonDecoding,
    LazyJacobiDecoding,
    LazyMAR,
    LineCacheDecoding,
    MaskedDecoding,
    MLCache,
    NeighbourAcceptance,
    NextScaleDecoding,
    ParallelJacobiDecoding,
    PathJacobiDecoding,
    PathSpeculativeDecoding,
    ReCAP,
    Sampling,
    SpeculativeJacobiDecoding,
    TreeJacobiDecoding,
    ZipARDecoding,
    decoding_from_name,
    decoding_names,
)
from .models.denoising_head import DenoisingHead
from .models.neighbours import NeighbourModel
from .models.window_drafter import WindowDrafter
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
from .pipelines.halton_maskgit.pipeline_halton_maskgit import HaltonMaskGITPipeline
from .pipelines.halton_maskgit.transformer_halton_maskgit import HaltonMaskGITTransformer
from .pipelines.infinity.bsq_infinity import InfinityVQModel
from .pipelines.infinity.pipeline_infinity import InfinityPipeline
from .pipelines.infinity.transformer_infinity import InfinityTransformer
from .pipelines.infinitystar.pipeline_infinitystar import InfinityStarPipeline
from .pipelines.infinitystar.transformer_infinitystar import InfinityStarTransformer
from .pipelines.infinitystar.vq_infinitystar import InfinityStarVideoTokenizer
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
from .pipelines.lumina_dimoo.pipeline_lumina_dimoo import LuminaDiMOOPipeline
from .pipelines.lumina_dimoo.transformer_lumina_dimoo import LuminaDiMOOTransformer
from .pipelines.mammothmoda2.decoder_mammothmoda2 import MammothModa2Transformer2DModel
from .pipelines.mammothmoda2.pipeline_mammothmoda2 import MammothModa2Pipeline
from .pipelines.mammothmoda2.transformer_mammothmoda2 import MammothModa2LanguageModel
from .pipelines.mar.pipeline_mar import MARPipeline
from .pipelines.mar.transformer_mar import MARTransformer
from .pipelines.nextstep.pipeline_nextstep import NextStepPipeline
from .pipelines.nextstep.projector import NextStepProjector
from .pipelines.output import DecodingStats, ImagePipelineOutput, VideoPipelineOutput
from .pipelines.randar.pipeline_randar import RandARPipeline
from .pipelines.randar.transformer_randar import RandARTransformer
from .pipelines.rar.pipeline_rar import RARPipeline
from .pipelines.rar.transformer_rar import RARTransformer
from .pipelines.rar.vq_maskgit import MaskGITVQModel
from .pipelines.var.pipeline_var import VARPipeline
from .pipelines.var.transformer_var import VARTransformer
from .pipelines.x_omni.pipeline_x_omni import XOmniPipeline
from .pipelines.x_omni.projector_x_omni import XOmniProjector
from .pipelines.x_omni.transformer_x_omni import XOmniLanguageModel
from .tokenizers.upscaler import ImageUpscaler
from .tokenizers.vq_frames import FramewiseVQModel
from .tokenizers.vq_llamagen import LlamaGenVQModel
from .tokenizers.vq_patches import PatchVQModel
from .tokenizers.vq_var import VARVQModel

__version__: str

__all__ = [
    "ARPGPipeline",
    "ARPGTransformer",
    "AnolePipeline",
    "AutoPipeline",
    "AutoregressiveDecoding",
    "CollaborativeDecoding",
    "ConfidenceDecoding",
    "ContinuousSpeculativeDecoding",
    "CosmosPipeline",
    "CosmosTransformer",
    "CosmosVideoTokenizer",
    "DecodingStats",
    "DenoisingHead",
    "DraftTreeDecoding",
    "Emu35Pipeline",
    "Emu3Pipeline",
    "ExactAcceptance",
    "FewStepDecoding",
    "FlowDecoding",
    "FramewiseVQModel",
    "GlmImagePipeline",
    "GroupAcceptance",
    "GroupDecoding",
    "HaltonDecoding",
    "HaltonMaskGITPipeline",
    "HaltonMaskGITTransformer",
    "IBQModel",
    "ImagePipelineOutput",
    "ImageUpscaler",
    "InfinityPipeline",
    "InfinityStarPipeline",
    "InfinityStarTransformer",
    "InfinityStarVideoTokenizer",
    "InfinityTransformer",
    "InfinityVQModel",
    "JanusPipeline",
    "LPDPipeline",
    "LPDTransformer",
    "LatentLlamaPipeline",
    "LatentLlamaTransformer",
    "LazyJacobiDecoding",
    "LazyMAR",
    "LineCacheDecoding",
    "LlamaGenDDPipeline",
    "LlamaGenDDTransformer",
    "LlamaGenDenoiser",
    "LlamaGenDrafter",
    "LlamaGenPipeline",
    "LlamaGenTransformer",
    "LlamaGenVQModel",
    "LuminaDiMOOPipeline",
    "LuminaDiMOOTransformer",
    "LuminaMGPTPipeline",
    "MARPipeline",
    "MARTransformer",
    "MLCache",
    "MammothModa2LanguageModel",
    "MammothModa2Pipeline",
    "MammothModa2Transformer2DModel",
    "MaskGITVQModel",
    "MaskedDecoding",
    "NeighbourAcceptance",
    "NeighbourModel",
    "NextScaleDecoding",
    "NextStepPipeline",
    "NextStepProjector",
    "ParallelJacobiDecoding",
    "PatchVQModel",
    "PathJacobiDecoding",
    "PathSpeculativeDecoding",
    "RARPipeline",
    "RARTransformer",
    "RandARPipeline",
    "RandARTransformer",
    "ReCAP",
    "Sampling",
    "SpeculativeJacobiDecoding",
    "TreeJacobiDecoding",
    "VARDDPipeline",
    "VARDDTransformer",
    "VARPipeline",
    "VARTransformer",
    "VARVQModel",
    "VideoPipelineOutput",
    "WindowDrafter",
    "XOmniLanguageModel",
    "XOmniPipeline",
    "XOmniProjector",
    "ZipARDecoding",
    "__version__",
    "accelerate",
    "decoding_from_name",
    "decoding_names",
]
