"""What the pipelines of the students of Distilled Decoding (https://arxiv.org/abs/2412.17153) share."""

from typing import Any

import torch
from torch import nn

from ..decoding import FewStepDecoding
from ..decoding.interface import generates_vectors
from ..models.distilled import DistilledModel
from .call import GenerationCall
from .class_or_text import ClassOrTextPipeline


class DistilledPipeline(ClassOrTextPipeline):
    """Base of class-conditional pipelines with the components `transformer`, a student, `vq` and `teacher`. A family adds
    `bind_model(call, class_labels)`, the `DistilledModel` of a call."""

    generates_vectors = True
    accepts_image = accepts_mask_image = False
    decoded_tensor = "vectors"
    _optional_components = ["teacher"]
    _callback_tensor_inputs = ["tokens", "decided", "vectors"]

    def __init__(self, transformer: nn.Module, vq: nn.Module, teacher: nn.Module | None, id2label):
        super().__init__()
        for name, part in (("transformer", transformer), ("teacher", teacher)):
            if part is None or vq is None:
                continue
            tokens, codes = part.config.vocab_size, vq.config.codebook_size
            if tokens != codes:
                raise ValueError(
                    f"the {name} has {tokens} tokens, the image tokenizer {codes}: load the two that were trained together"
                )
        if teacher is not None and teacher.config.conditioning != "class":
            raise ValueError(
                "the teacher is conditioned on text: load the one that the transformer was distilled from"
            )
        self.register_modules(transformer=transformer, vq=vq, teacher=teacher)
        self.name_classes(id2label)
        self.decoding = FewStepDecoding()

    @property
    def num_classes(self) -> int | None:
        return None if self.transformer is None else self.transformer.config.num_classes

    @property
    def decoding_names(self) -> list[str]:
        return ["few-step"]

    def bind_model(self, call: GenerationCall, class_labels: torch.LongTensor) -> DistilledModel:
        raise NotImplementedError

    @torch.no_grad()
    def prepare(
        self,
        prompt: str | list[str] | None = None,
        class_labels: Any = None,
        *,
        noise: torch.Tensor | None = None,
        height: int | None = None,
        width: int | None = None,
        **settings,
    ) -> GenerationCall:
        """Check the arguments of a call and return it with its model. `settings` are the arguments of `__call__` from
        guidance_scale to guided_tokens, num_images_per_prompt and generator."""
        condition = prompt, class_labels, None, None
        count, size = self.check_condition(*condition), self.check_size(height, width)
        call = self.begin_call(count, size, **settings)
        call.bind(self.bind_model(call, **self.encode_condition(*condition)))
        if noise is not None:
            shape = (len(call.seeds), call.model.num_tokens, self.transformer.config.codebook_dim)
            if not isinstance(noise, torch.Tensor) or tuple(noise.shape) != shape or not noise.is_floating_point():
                given = f"{noise.dtype} {tuple(noise.shape)}" if isinstance(noise, torch.Tensor) else repr(noise)
                raise ValueError(f"noise is {given}: give floating-point numbers {list(shape)}")
            assert generates_vectors(call.model)
            call.model.noise = noise.to(self._execution_device, torch.float32)
        return call
