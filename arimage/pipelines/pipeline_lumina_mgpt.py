"""Lumina-mGPT (https://arxiv.org/abs/2408.02657) and Lumina-mGPT 2.0 (https://arxiv.org/abs/2507.17801): images from text, of
many sizes."""

import itertools
from collections.abc import Callable

import torch
from diffusers import VQModel
from diffusers.image_processor import PipelineImageInput
from transformers import ChameleonForConditionalGeneration, PreTrainedTokenizerBase

from ..decoding import Decoding
from .call import GenerationCall
from .chameleon import BEGIN_OF_IMAGE, ChameleonPipeline
from .conditioning import as_texts
from .docstrings import fill_docstring
from .images import prepare_image
from .output import ImagePipelineOutput


# Names of tokens in the vocabulary, which are those of Chameleon in both versions.
ROW_END = "<reserved08799>"
# Says that the image is so many times PATCH pixels high or wide.
SIZE = "<reserved{:05d}>"
FIRST_SIZE = 8800
PATCH = 32

PROMPT = "Generate an image of {width}x{height} according to the following prompt:\n{prompt}"
PANELS = (
    "Generate a dual-panel image of {width}x{height} where the <{shown} half> displays a <{what}>, while the <{kept} half> "
    "retains the original image for direct visual comparison:\n{prompt}"
)
TASKS = {
    "depth": "depth map",
    "canny": "canny edge map",
    "hed": "hed edge map",
    "pose": "pose estimation map",
    "subject": "Bubbly and effervescent with a sparkling allure.",
}

EXAMPLE_DOC_STRING = """
    Examples:
        ```py
        >>> import torch
        >>> from arimage import AutoPipeline

        >>> pipe = AutoPipeline.from_pretrained("lumina-mgpt-7b-768", dtype=torch.bfloat16).to("cuda")
        >>> pipe.decoding = "sjd-coupled"
        >>> image = pipe("a red heart", height=576, width=1024, generator=torch.Generator().manual_seed(0)).images[0]
        ```
"""


class LuminaMGPTPipeline(ChameleonPipeline):
    """Images of a text by Lumina-mGPT, of every size that its vocabulary has words for.

    Args:
        transformer (`ChameleonForConditionalGeneration`): the language model, with its `vocabulary_map`.
        vq (`VQModel`): turns image codes into images: Chameleon's VQGAN, or the MoVQGAN of Lumina-mGPT 2.0.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): of the text. Without it the pipeline takes `input_ids`.
        image_size (`int`): side in pixels of the square of the area that the weights were trained for: 512, 768 or 1024.

    Raises:
        ValueError: if the parts do not fit together.
    """

    # The begin of an image, its height and its width.
    _header_length = 3

    def __init__(
        self,
        transformer: ChameleonForConditionalGeneration,
        vq: VQModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        image_size: int = 768,
    ):
        super().__init__(transformer, vq, tokenizer, image_size)
        # Pixels that each token of a size stands for.
        names = itertools.takewhile(
            self._vocabulary.__contains__, (SIZE.format(FIRST_SIZE + n) for n in itertools.count(1))
        )
        self._sizes = {self._vocabulary[name]: PATCH * n for n, name in enumerate(names, start=1)}

    @property
    def accepts_task(self) -> bool:
        """Whether the weights are those of Lumina-mGPT 2.0, which has tasks."""
        return self.vq.config.norm_type == "spatial"

    @property
    def image_sizes(self) -> list[tuple[int, int]]:
        """The sizes (height, width) in pixels that the weights were trained for, the square first: multiples of 32, as large
        as the area allows and up to four times as long as wide."""
        side = self.config.image_size // PATCH
        sizes = [
            (PATCH * height, PATCH * width)
            for height in range(1, side**2 + 1)
            for width in range(max(1, side**2 // (height + 1)), side**2 // height + 1)
            if max(height, width) <= 4 * min(height, width)
        ]
        return list(dict.fromkeys([(PATCH * side, PATCH * side), *sizes]))

    def check_size(
        self, height: int | None, width: int | None, input_ids: torch.LongTensor | None = None
    ) -> tuple[int, int]:
        """Height and width of the images of a call: those given, those at the end of the token ids, or the square.

        Raises:
            ValueError: if the vocabulary has no words for them, or the prompts end with others.
        """
        told = self._told_size(input_ids)
        square = (self.config.image_size,) * 2
        size = tuple(
            default if given is None else given for given, default in zip((height, width), told or square, strict=True)
        )
        if told not in (None, size):
            raise ValueError(
                f"height and width are {height} and {width} but input_ids end with a size of {told[0]}x{told[1]}: "
                "leave them out"
            )
        largest = max(self._sizes.values())
        if not all(side in self._sizes.values() for side in size):
            raise ValueError(
                f"height and width are {size[0]} and {size[1]}: give multiples of {PATCH} up to {largest}, such as those of "
                "pipe.image_sizes"
            )
        return size

    def _told_size(self, input_ids: torch.LongTensor | None) -> tuple[int, int] | None:
        if input_ids is None or not self.has_header(input_ids):
            return None
        told = {tuple(map(self._sizes.get, row)) for row in input_ids[:, -2:].tolist()}
        size = told.pop()
        if told or None in size:
            raise ValueError("input_ids end with tokens of no size, or of different sizes: give images of one size")
        return size

    def header(self, size: tuple[int, int]) -> list[int]:
        """The tokens between a prompt and its first image token."""
        tokens = {pixels: token for token, pixels in self._sizes.items()}
        return [self._vocabulary[BEGIN_OF_IMAGE], *map(tokens.get, size)]

    def _text(self, prompt: str, size: tuple[int, int], task: str | None, given: bool) -> str:
        fields = {"height": size[0], "width": size[1], "prompt": prompt}
        if task is None:
            return PROMPT.format(**fields)
        shown, kept = ("upper", "lower") if given else ("lower", "upper")
        return PANELS.format(shown=shown, kept=kept, what=TASKS[task], **fields)

    def encode_prompt(
        self, prompt: str | list[str], size: tuple[int, int], task: str | None = None, given: bool = False
    ) -> tuple[torch.LongTensor, torch.LongTensor]:
        """Token ids [B, P] of texts up to the turn end, padded on the left, and their mask. With a `task` they ask for two
        panels; `given` says that the upper one is an image of the user."""
        return self.encode_texts([self._text(text, size, task, given) for text in as_texts(prompt)])

    @torch.no_grad()
    def prepare(
        self,
        prompt: str | list[str] | None = None,
        *,
        task: str | None = None,
        image: PipelineImageInput | None = None,
        mask_image: PipelineImageInput | None = None,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        height: int | None = None,
        width: int | None = None,
        **settings,
    ) -> GenerationCall:
        """Check the arguments of a call, encode its condition, and return it with its model. `settings` are the arguments of
        `__call__` from guidance_scale to guided_tokens, num_images_per_prompt and generator."""
        count = self.check_prompt(prompt, input_ids, attention_mask)
        if task is not None and (task not in TASKS or not self.accepts_task):
            raise ValueError(f"task is {task!r}: Lumina-mGPT 2.0 has {', '.join(TASKS)}, other checkpoints have none")
        if task is not None and mask_image is not None:
            raise ValueError("task generates whole panels: leave out mask_image")
        size = self.check_size(height, width, input_ids)
        call = self.begin_call(count, size, **settings)
        if task is None:
            self.edit(call, image, mask_image)
        elif image is not None:
            half = (size[0] // 2, size[1])
            panel, _ = prepare_image(image, torch.ones(1, 1, *half), half, count)
            call.above = self.encode_image(call.per_image(panel))
        if prompt is not None:
            input_ids, attention_mask = self.encode_prompt(prompt, size, task, call.above is not None)
        header = self.header(size)
        self.add_model(call, input_ids, attention_mask, header, header, self._vocabulary[ROW_END])
        return call

    @fill_docstring(EXAMPLE_DOC_STRING)
    def __call__(
        self,
        prompt: str | list[str] | None = None,
        *,
        task: str | None = None,
        image: PipelineImageInput | None = None,
        mask_image: PipelineImageInput | None = None,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        guidance_scale: float | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        guided_tokens: int | None = None,
        height: int | None = None,
        width: int | None = None,
        num_images_per_prompt: int = 1,
        generator: torch.Generator | list[torch.Generator] | None = None,
        decoding: Decoding | str | None = None,
        output_type: str = "pil",
        return_dict: bool = True,
        callback_on_step_end: Callable | None = None,
        callback_on_step_end_tensor_inputs: list[str] = ["tokens"],  # noqa: B006
    ) -> ImagePipelineOutput | tuple:
        r"""
        Generate images. Sizes are multiples of 32 pixels.

        Args:
            prompt (`str` or `list[str]`, *optional*):
                What to generate.
            task (`str`, *optional*):
                Of Lumina-mGPT 2.0: `"depth"`, `"canny"`, `"hed"` or `"pose"` generate two panels in an image of this height and
                width, the image of the prompt on top and its map below. With `image`, that is the upper panel, a map (or for
                `"subject"` a picture of something), and the image is generated below it.
            {image}
            {raster_mask}
            input_ids (`torch.LongTensor`, *optional*), attention_mask (`torch.Tensor`, *optional*):
                Token ids [B, P] in place of `prompt`, up to the turn end or up to the two tokens of the size, padded on
                either side, and their mask.
            {common}

        {example}

        Returns:
            [`ImagePipelineOutput`] or `tuple`: the output, or the tuple `(images,)`.
        """
        return type(self).generate(**locals())
