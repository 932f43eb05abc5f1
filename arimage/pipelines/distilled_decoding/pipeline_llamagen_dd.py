"""LlamaGen-DD (https://arxiv.org/abs/2412.17153): images from a class or a text in one or two forward passes."""

import torch
from transformers import PreTrainedTokenizerBase, T5EncoderModel

from ...decoding import Layout
from ...tokenizers.upscaler import ImageUpscaler
from ...tokenizers.vq_llamagen import LlamaGenVQModel
from ..call import GenerationCall
from ..kinds.class_or_text import check_text_encoder
from ..kinds.upscaling import UpscalingPipeline
from ..llamagen.transformer_llamagen import LlamaGenTokenModel, LlamaGenTransformer
from .base import DistilledPipeline
from .transformer_llamagen_dd import LlamaGenDDTransformer
from .vector_model import DistilledModel


class LlamaGenDDPipeline(DistilledPipeline, UpscalingPipeline):
    """Generates images from a class or a text with a student of LlamaGen that was trained with Distilled Decoding.

    Args:
        transformer (`LlamaGenDDTransformer`): the student, from noise to vectors.
        vq (`LlamaGenVQModel`): decodes vectors to images.
        teacher (`LlamaGenTransformer`, *optional*): the model that the student was distilled from, for `FlowDecoding`
            and for `teacher_start` of `FewStepDecoding`.
        id2label (`dict[int, str]`, *optional*): the names of the classes.
        tokenizer (`PreTrainedTokenizerBase`, *optional*), text_encoder (`T5EncoderModel`, *optional*): for text, as in
            `LlamaGenPipeline`.
        upscaler (`ImageUpscaler`, *optional*): enlarges the decoded images, as in `LlamaGenPipeline`.
    """

    model_cpu_offload_seq = "text_encoder->transformer->teacher->vq->upscaler"
    _teacher_kind = "tokens"
    _optional_components = ["teacher", "tokenizer", "text_encoder", "upscaler"]

    def __init__(
        self,
        transformer: LlamaGenDDTransformer,
        vq: LlamaGenVQModel,
        teacher: LlamaGenTransformer | None = None,
        id2label: dict[int, str] | dict[str, str] | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        text_encoder: T5EncoderModel | None = None,
        upscaler: ImageUpscaler | None = None,
    ):
        super().__init__(transformer, vq, teacher, id2label)
        check_text_encoder(text_encoder, transformer)
        self.register_modules(tokenizer=tokenizer, text_encoder=text_encoder, upscaler=upscaler)

    def bind_model(self, call: GenerationCall, condition: dict[str, torch.Tensor]) -> DistilledModel:
        layout, codebook, teacher = Layout((self.transformer.config.grid_size,) * 2), self.vq.code_vectors(), None
        if self.teacher is not None:
            teacher = LlamaGenTokenModel(self.teacher, condition, layout, guided=call.guided, codebook=codebook)
        offsets = range(layout.num_tokens + 1)
        return DistilledModel(self.transformer, condition, offsets, codebook, layout=layout, teacher=teacher)

    def decode_result(self, call: GenerationCall, result: torch.Tensor) -> torch.Tensor:
        # The vectors of a call lie between the codes of its tokens.
        maps = result.transpose(1, 2).unflatten(2, call.layout.shape)
        return self.upscaled(call, self.vq.decode_latents(maps.to(self.vq.dtype)))
