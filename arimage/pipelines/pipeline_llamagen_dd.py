"""LlamaGen-DD (https://arxiv.org/abs/2412.17153): images of a class in one or two forward passes."""

from collections.abc import Callable

import torch

from ..decoding import Decoding, Layout
from ..models.distilled import DistilledModel
from ..models.transformer_llamagen import LlamaGenTokenModel, LlamaGenTransformer
from ..models.transformer_llamagen_dd import LlamaGenDDTransformer
from ..tokenizers.vq_llamagen import LlamaGenVQModel
from .call import GenerationCall
from .distilled import DistilledPipeline
from .docstrings import fill_docstring
from .output import ImagePipelineOutput


EXAMPLE_DOC_STRING = """
    Examples:
        ```py
        >>> from arimage import FewStepDecoding, LlamaGenDDPipeline

        >>> # written by `arimage convert llamagen-dd`
        >>> pipe = LlamaGenDDPipeline.from_pretrained("path/to/llamagen-dd-b")
        >>> image = pipe("golden retriever", decoding=FewStepDecoding(starts=(0, 80))).images[0]
        ```
"""


class LlamaGenDDPipeline(DistilledPipeline):
    """Images of a class by a student of LlamaGen that was trained with Distilled Decoding.

    Args:
        transformer (`LlamaGenDDTransformer`): the student, from noise to vectors.
        vq (`LlamaGenVQModel`): turns vectors into images.
        teacher (`LlamaGenTransformer`, *optional*): what the student was distilled from, for `teacher_start` of
            `FewStepDecoding`.
        id2label (`dict[int, str]`, *optional*): the names of the classes.

    Raises:
        ValueError: if the components do not fit together.
    """

    model_cpu_offload_seq = "transformer->teacher->vq"

    def __init__(
        self,
        transformer: LlamaGenDDTransformer,
        vq: LlamaGenVQModel,
        teacher: LlamaGenTransformer | None = None,
        id2label: dict[int, str] | None = None,
    ):
        super().__init__(transformer, vq, teacher, id2label)

    @property
    def image_sizes(self) -> list[tuple[int, int]]:
        return [(self.transformer.config.grid_size * self.vq.scale_factor,) * 2]

    def bind_model(self, call: GenerationCall, class_labels: torch.LongTensor) -> DistilledModel:
        layout = Layout((self.transformer.config.grid_size,) * 2)
        teacher = None
        if self.teacher is not None:
            teacher = LlamaGenTokenModel(self.teacher, {"class_labels": class_labels}, layout, guided=call.guided)
        return DistilledModel(
            self.transformer,
            class_labels,
            range(layout.num_tokens + 1),
            self.vq.code_vectors(),
            layout=layout,
            teacher=teacher,
        )

    @torch.no_grad()
    def decode_tokens(self, call: GenerationCall, tokens: torch.LongTensor) -> torch.Tensor:
        """Pixels [B, 3, H, W], nominally in [-1, 1], of the tokens [B, N] of a call; -1 is not known yet. The images of the call
        are those of its vectors, which lie between the codes."""
        return self.vq.decode(self.whole_tokens(call, tokens.to(self._execution_device).clamp(min=0)))

    def decode_result(self, call: GenerationCall, result: torch.Tensor) -> torch.Tensor:
        maps = result.transpose(1, 2).unflatten(2, call.layout.shape)
        return self.vq.decode_latents(maps.to(self.vq.dtype))

    @fill_docstring(EXAMPLE_DOC_STRING)
    def __call__(
        self,
        prompt: str | list[str] | None = None,
        class_labels: int | str | list[int | str] | torch.LongTensor | None = None,
        *,
        noise: torch.Tensor | None = None,
        guidance_scale: float | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        guided_tokens: int | None = None,
        height: int | None = None,
        width: int | None = None,
        num_images_per_prompt: int = 1,
        batch_size: int | None = None,
        generator: torch.Generator | list[torch.Generator] | None = None,
        decoding: Decoding | str | None = None,
        output_type: str = "pil",
        return_dict: bool = True,
        callback_on_step_end: Callable | None = None,
        callback_on_step_end_tensor_inputs: list[str] = ["tokens"],  # noqa: B006
    ) -> ImagePipelineOutput | tuple:
        r"""
        Generate images. Guidance is part of the student; guidance_scale, temperature, top_k and top_p are those of the teacher
        and change nothing without `teacher_start`. The tokens of the output are the nearest of the vectors.

        Args:
            {class_or_text}
            {noise}
            {common}
                `"vectors"` [B, N, D] is what the image tokenizer decodes to pixels.

        {example}

        Returns:
            [`ImagePipelineOutput`] or `tuple`: the output, or the tuple `(images,)`.
        """
        return type(self).generate(**locals())
