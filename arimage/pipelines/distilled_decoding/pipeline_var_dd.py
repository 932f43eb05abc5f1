"""VAR-DD (https://arxiv.org/abs/2412.17153): images from a class in one or two forward passes."""

import itertools
from dataclasses import replace

import torch

from ...tokenizers.vq_var import VARVQModel
from ..call import GenerationCall
from ..components import check_parts
from ..var.transformer_var import VARScaleModel, VARTransformer
from .base import DistilledPipeline
from .transformer_var_dd import VARDDTransformer
from .vector_model import DistilledModel


class VARDDPipeline(DistilledPipeline):
    """Generates images from a class with a student of VAR that was trained with Distilled Decoding.

    Args:
        transformer (`VARDDTransformer`): the student, from noise to vectors.
        vq (`VARVQModel`): decodes vectors to images.
        teacher (`VARTransformer`, *optional*): the model that the student was distilled from, for `teacher_start` of
            `FewStepDecoding`.
        id2label (`dict[int, str]`, *optional*): the names of the classes.
    """

    model_cpu_offload_seq = "transformer->teacher->vq"
    # Its tokens form maps.
    abilities = replace(DistilledPipeline.abilities, in_maps=True)
    _teacher_kind = "scales"

    def __init__(
        self,
        transformer: VARDDTransformer,
        vq: VARVQModel,
        teacher: VARTransformer | None = None,
        id2label: dict[int, str] | dict[str, str] | None = None,
    ):
        super().__init__(transformer, vq, teacher, id2label)
        for name, part in (("transformer", transformer), ("teacher", teacher)):
            if part is not None and vq is not None:
                check_parts("scales", **{name: tuple(part.config.scales), "image_tokenizer": tuple(vq.config.scales)})

    @property
    def image_sizes(self) -> list[tuple[int, int]]:
        return [(self.vq.config.scales[-1] * self.vq.scale_factor,) * 2]

    def bind_model(self, call: GenerationCall, condition: dict[str, torch.Tensor]) -> DistilledModel:
        teacher = None
        if self.teacher is not None:
            teacher = VARScaleModel(self.teacher, self.vq, condition, guided=call.guided)
        offsets = itertools.accumulate((side**2 for side in self.vq.config.scales), initial=0)
        return DistilledModel(self.transformer, condition, [*offsets], self.vq.code_vectors(), teacher=teacher)

    def whole_tokens(self, call: GenerationCall, tokens: torch.LongTensor) -> list[torch.LongTensor]:
        return self.vq.to_maps(tokens)

    @torch.no_grad()
    def decode_tokens(self, call: GenerationCall, tokens: torch.LongTensor) -> torch.Tensor:
        """Pixels [B, 3, H, W], nominally in [-1, 1], of the tokens [B, N] of a call; -1 is not known yet. The call
        itself decodes its vectors, which lie between the codes."""
        return self.vq.decode(self.vq.to_maps(tokens.to(self._execution_device).clamp(min=0)))

    def decode_result(self, call: GenerationCall, result: torch.Tensor) -> torch.Tensor:
        maps = [vectors.permute(0, 3, 1, 2) for vectors in self.vq.to_maps(result)]
        latents = torch.zeros_like(maps[-1])
        for scale, vectors in enumerate(maps):
            latents = self.vq.accumulate(scale, latents, vectors)
        return self.vq.decode_latents(latents)
