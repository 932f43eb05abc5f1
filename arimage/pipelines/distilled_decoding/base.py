"""The base of pipelines for students of Distilled Decoding (https://arxiv.org/abs/2412.17153)."""

from collections.abc import Collection
from dataclasses import replace
from typing import Unpack

import torch
from torch import nn

from ...decoding import FewStepDecoding
from ...decoding.contract.models import Kind
from ...decoding.contract.supports import Traits
from ..abilities import TOKEN_SAMPLING, Abilities
from ..arguments import TokenArguments, pipeline_call
from ..call import GenerationCall
from ..components import check_parts
from ..kinds.class_or_text import ClassOrTextPipeline
from ..output import ImagePipelineOutput
from ..text.checks import describe, prompt_names
from .family import FAMILY
from .vector_model import DistilledModel


EXAMPLE = """from arimage import LlamaGenDDPipeline

# A converted student, in one forward pass
pipe = LlamaGenDDPipeline.from_pretrained("path/to/llamagen-dd-b")
image = pipe("otter", decoding="few-step", generator=torch.Generator().manual_seed(0)).images[0]
"""


class DistilledPipeline(ClassOrTextPipeline):
    """Base class of pipelines with the components `transformer`, a student, `vq` and `teacher`. A family adds
    `bind_model(call, condition)`, the `DistilledModel` of a call."""

    family = FAMILY
    abilities = Abilities("vectors", TOKEN_SAMPLING)
    _teacher_kind: Kind
    decoded_tensor = "vectors"
    _optional_components = ["teacher"]
    _callback_tensor_inputs = ["tokens", "decided", "work", "vectors"]

    def __init__(self, transformer: nn.Module, vq: nn.Module, teacher: nn.Module | None, id2label):
        super().__init__()
        for name, part in (("transformer", transformer), ("teacher", teacher)):
            if part is not None and vq is not None:
                check_parts("tokens", **{name: part.config.vocab_size, "image_tokenizer": vq.config.codebook_size})
        if teacher is not None and transformer is not None:
            own = transformer.config.get("conditioning", "class")
            check_parts("condition", teacher=teacher.config.conditioning, transformer=own)
        self.register_modules(transformer=transformer, vq=vq, teacher=teacher)
        self.name_classes(id2label)
        self.decoding = FewStepDecoding()

    @classmethod
    def traits_with(cls, parts: Collection[str]) -> Traits:
        return replace(super().traits_with(parts), teacher=cls._teacher_kind if "teacher" in parts else None)

    def bind_model(self, call: GenerationCall, condition: dict[str, torch.Tensor]) -> DistilledModel:
        raise NotImplementedError

    @pipeline_call(EXAMPLE, ImagePipelineOutput)
    def __call__(
        self,
        prompt: str | list[str] | None = None,
        class_labels: int | str | list[int | str] | torch.LongTensor | None = None,
        *,
        noise: torch.Tensor | None = None,
        prompt_embeds: torch.Tensor | None = None,
        prompt_attention_mask: torch.Tensor | None = None,
        **common: Unpack[TokenArguments],
    ) -> GenerationCall:
        r"""
        Generate images. Guidance is built into the student: guidance_scale, temperature, top_k, top_p and min_p apply
        to the teacher only, and have no effect where it is not used. The tokens of the output are those nearest to
        the vectors.

        Args:
            {class_or_text}
            {noise}
            {prompt_embeds}
            {common}
                `"vectors"` [B, N, D], in the order of the tokens, are what the image tokenizer decodes to pixels.
        """
        condition = prompt, class_labels, prompt_embeds, prompt_attention_mask
        count = self.check_condition(*condition)
        call = self.begin_call(count, **common)
        condition = self.encode_prefix(*condition)
        call.bind(self.bind_model(call, condition), prompt_names(prompt, count, count))
        if noise is not None:
            shape = (len(call.seeds), call.model.num_tokens, self.transformer.config.codebook_dim)
            if not isinstance(noise, torch.Tensor) or tuple(noise.shape) != shape or not noise.is_floating_point():
                raise ValueError(f"noise is {describe(noise)}: give floating-point numbers {list(shape)}")
            assert call.model.kind == "vectors"
            call.model.noise = noise.to(self._execution_device, torch.float32)
        return call
