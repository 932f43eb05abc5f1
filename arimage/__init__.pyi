# Written by tools/exports.py.
# ruff: noqa: I001

from .auto import AutoPipeline as AutoPipeline
from .decoding import (
    AutoregressiveDecoding as AutoregressiveDecoding,
    CollaborativeDecoding as CollaborativeDecoding,
    ConfidenceDecoding as ConfidenceDecoding,
    ContinuousSpeculativeDecoding as ContinuousSpeculativeDecoding,
    DraftTreeDecoding as DraftTreeDecoding,
    ExactAcceptance as ExactAcceptance,
    FewStepDecoding as FewStepDecoding,
    FlowDecoding as FlowDecoding,
    GroupAcceptance as GroupAcceptance,
    GroupDecoding as GroupDecoding,
    HaltonDecoding as HaltonDecoding,
    LazyJacobiDecoding as LazyJacobiDecoding,
    LazyMAR as LazyMAR,
    LineCacheDecoding as LineCacheDecoding,
    MaskedDecoding as MaskedDecoding,
    MLCache as MLCache,
    NeighbourAcceptance as NeighbourAcceptance,
    NextScaleDecoding as NextScaleDecoding,
    ParallelJacobiDecoding as ParallelJacobiDecoding,
    PathJacobiDecoding as PathJacobiDecoding,
    PathSpeculativeDecoding as PathSpeculativeDecoding,
    ReCAP as ReCAP,
    Sampling as Sampling,
    SpeculativeJacobiDecoding as SpeculativeJacobiDecoding,
    TreeJacobiDecoding as TreeJacobiDecoding,
    ZipARDecoding as ZipARDecoding,
    decoding_from_name as decoding_from_name,
    decoding_names as decoding_names,
)
from .models.denoising_head import DenoisingHead as DenoisingHead
from .models.neighbours import NeighbourModel as NeighbourModel
from .models.window_drafter import WindowDrafter as WindowDrafter
from .pipelines.arpg.pipeline_arpg import ARPGPipeline as ARPGPipeline
from .pipelines.arpg.transformer_arpg import ARPGTransformer as ARPGTransformer
from .pipelines.chameleon.pipeline_anole import AnolePipeline as AnolePipeline
from .pipelines.chameleon.pipeline_lumina_mgpt import LuminaMGPTPipeline as LuminaMGPTPipeline
from .pipelines.cosmos.fsq_cosmos import CosmosVideoTokenizer as CosmosVideoTokenizer
from .pipelines.cosmos.pipeline_cosmos import CosmosPipeline as CosmosPipeline
from .pipelines.cosmos.transformer_cosmos import CosmosTransformer as CosmosTransformer
from .pipelines.distilled_decoding.pipeline_llamagen_dd import LlamaGenDDPipeline as LlamaGenDDPipeline
from .pipelines.distilled_decoding.pipeline_var_dd import VARDDPipeline as VARDDPipeline
from .pipelines.distilled_decoding.transformer_llamagen_dd import LlamaGenDDTransformer as LlamaGenDDTransformer
from .pipelines.distilled_decoding.transformer_var_dd import VARDDTransformer as VARDDTransformer
from .pipelines.emu3.pipeline_emu3 import Emu3Pipeline as Emu3Pipeline
from .pipelines.emu35.ibq_emu35 import IBQModel as IBQModel
from .pipelines.emu35.pipeline_emu35 import Emu35Pipeline as Emu35Pipeline
from .pipelines.glm_image.pipeline_glm_image import GlmImagePipeline as GlmImagePipeline
from .pipelines.halton_maskgit.pipeline_halton_maskgit import HaltonMaskGITPipeline as HaltonMaskGITPipeline
from .pipelines.halton_maskgit.transformer_halton_maskgit import HaltonMaskGITTransformer as HaltonMaskGITTransformer
from .pipelines.infinity.bsq_infinity import InfinityVQModel as InfinityVQModel
from .pipelines.infinity.pipeline_infinity import InfinityPipeline as InfinityPipeline
from .pipelines.infinity.transformer_infinity import InfinityTransformer as InfinityTransformer
from .pipelines.infinitystar.pipeline_infinitystar import InfinityStarPipeline as InfinityStarPipeline
from .pipelines.infinitystar.transformer_infinitystar import InfinityStarTransformer as InfinityStarTransformer
from .pipelines.infinitystar.vq_infinitystar import InfinityStarVideoTokenizer as InfinityStarVideoTokenizer
from .pipelines.janus.accelerate import accelerate as accelerate
from .pipelines.janus.pipeline_janus import JanusPipeline as JanusPipeline
from .pipelines.latent_llama.pipeline_latent_llama import LatentLlamaPipeline as LatentLlamaPipeline
from .pipelines.latent_llama.transformer_latent_llama import LatentLlamaTransformer as LatentLlamaTransformer
from .pipelines.llamagen.denoiser_llamagen import LlamaGenDenoiser as LlamaGenDenoiser
from .pipelines.llamagen.drafter_llamagen import LlamaGenDrafter as LlamaGenDrafter
from .pipelines.llamagen.pipeline_llamagen import LlamaGenPipeline as LlamaGenPipeline
from .pipelines.llamagen.transformer_llamagen import LlamaGenTransformer as LlamaGenTransformer
from .pipelines.lpd.pipeline_lpd import LPDPipeline as LPDPipeline
from .pipelines.lpd.transformer_lpd import LPDTransformer as LPDTransformer
from .pipelines.lumina_dimoo.pipeline_lumina_dimoo import LuminaDiMOOPipeline as LuminaDiMOOPipeline
from .pipelines.lumina_dimoo.transformer_lumina_dimoo import LuminaDiMOOTransformer as LuminaDiMOOTransformer
from .pipelines.mammothmoda2.decoder_mammothmoda2 import (
    MammothModa2Transformer2DModel as MammothModa2Transformer2DModel,
)
from .pipelines.mammothmoda2.pipeline_mammothmoda2 import MammothModa2Pipeline as MammothModa2Pipeline
from .pipelines.mammothmoda2.transformer_mammothmoda2 import MammothModa2LanguageModel as MammothModa2LanguageModel
from .pipelines.mar.pipeline_mar import MARPipeline as MARPipeline
from .pipelines.mar.transformer_mar import MARTransformer as MARTransformer
from .pipelines.nextstep.pipeline_nextstep import NextStepPipeline as NextStepPipeline
from .pipelines.nextstep.projector import NextStepProjector as NextStepProjector
from .pipelines.output import (
    DecodingStats as DecodingStats,
    ImagePipelineOutput as ImagePipelineOutput,
    VideoPipelineOutput as VideoPipelineOutput,
)
from .pipelines.randar.pipeline_randar import RandARPipeline as RandARPipeline
from .pipelines.randar.transformer_randar import RandARTransformer as RandARTransformer
from .pipelines.rar.pipeline_rar import RARPipeline as RARPipeline
from .pipelines.rar.transformer_rar import RARTransformer as RARTransformer
from .pipelines.rar.vq_maskgit import MaskGITVQModel as MaskGITVQModel
from .pipelines.var.pipeline_var import VARPipeline as VARPipeline
from .pipelines.var.transformer_var import VARTransformer as VARTransformer
from .pipelines.x_omni.pipeline_x_omni import XOmniPipeline as XOmniPipeline
from .pipelines.x_omni.projector_x_omni import XOmniProjector as XOmniProjector
from .pipelines.x_omni.transformer_x_omni import XOmniLanguageModel as XOmniLanguageModel
from .tokenizers.upscaler import ImageUpscaler as ImageUpscaler
from .tokenizers.vq_frames import FramewiseVQModel as FramewiseVQModel
from .tokenizers.vq_llamagen import LlamaGenVQModel as LlamaGenVQModel
from .tokenizers.vq_patches import PatchVQModel as PatchVQModel
from .tokenizers.vq_var import VARVQModel as VARVQModel

__version__: str
