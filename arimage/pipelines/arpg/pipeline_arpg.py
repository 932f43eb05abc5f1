"""ARPG (https://arxiv.org/abs/2503.10568): images of a class or of a text, in any order."""

from transformers import PreTrainedTokenizerBase, T5EncoderModel

from ...tokenizers.upscaler import ImageUpscaler
from ...tokenizers.vq_llamagen import LlamaGenVQModel
from ...tokenizers.vq_patches import PatchVQModel
from ..kinds.any_order import AnyOrderPipeline
from .family import FAMILY
from .transformer_arpg import ARPGTokenModel, ARPGTransformer


class ARPGPipeline(AnyOrderPipeline):
    """Generates images from a class or a text with ARPG.

    Args:
        transformer (`ARPGTransformer`): the any-order model, conditioned on a class or on text.
        vq (`LlamaGenVQModel` or `PatchVQModel`, *optional*): turns its tokens into images. Without it calls return
            tokens.
        tokenizer (`PreTrainedTokenizerBase`, *optional*), text_encoder (`T5EncoderModel`, *optional*): for text.
            Without them a text-conditional pipeline takes `prompt_embeds`.
        upscaler (`ImageUpscaler`, *optional*): enlarges the decoded images. Calls that ask for the size that the image
            tokenizer decodes do without it.
        id2label (`dict[int, str]`, *optional*): the names of the classes of a class-conditional transformer.

    Attributes:
        order: the default order of the tokens.
    """

    family = FAMILY
    model_cpu_offload_seq = "text_encoder->transformer->vq->upscaler"
    _optional_components = ["vq", "tokenizer", "text_encoder", "upscaler"]
    _token_model = ARPGTokenModel

    def __init__(
        self,
        transformer: ARPGTransformer,
        vq: LlamaGenVQModel | PatchVQModel | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        text_encoder: T5EncoderModel | None = None,
        upscaler: ImageUpscaler | None = None,
        id2label: dict[int, str] | dict[str, str] | None = None,
    ):
        parts = {"tokenizer": tokenizer, "text_encoder": text_encoder, "upscaler": upscaler}
        super().__init__(transformer, vq, id2label, **parts)
