"""Lumina-mGPT (https://arxiv.org/abs/2408.02657) and Lumina-mGPT 2.0 (https://arxiv.org/abs/2507.17801): images from text, of
many sizes."""

import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from diffusers import VQModel
from diffusers.image_processor import PipelineImageInput
from diffusers.utils import replace_example_docstring
from transformers import ChameleonForConditionalGeneration, PreTrainedTokenizerBase

from ..decoding import Decoding, Layout, TokenModel
from ..kernels.codebook import nearest_code
from ..models.language_model import LanguageTokenModel, code_head
from .base import ARImagePipeline, as_texts, codes_to_keep
from .output import ImagePipelineOutput


# Names of tokens in the vocabulary, which are those of Chameleon in both versions.
BEGIN_OF_IMAGE = "<racm3:break>"
ROW_END = "<reserved08799>"
TURN_END = "<reserved08706>"
# Says that the image is so many times PATCH pixels high or wide.
SIZE = "<reserved{:05d}>"
FIRST_SIZE = 8800
PATCH = 32
LETTERS = str.maketrans("ABCDEFGHIJ", "0123456789")

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


def first_code_of(vocabulary: dict[str, int], count: int) -> int:
    """The id of image code 0 in a vocabulary with `count` codes, whose ids follow each other.

    Raises:
        ValueError: if they do not, or are not so many.
    """
    # Chameleon spells the code in letters; of Lumina-mGPT 2.0's names only the order is known.
    codes = {
        int(name[6:-1].translate(LETTERS)): token for name, token in vocabulary.items() if name.startswith("IMGIMG")
    } or dict(enumerate(sorted(token for name, token in vocabulary.items() if name.startswith("<MOVQGAN"))))
    if sorted(codes) != list(range(count)) or any(token != codes[0] + code for code, token in codes.items()):
        raise ValueError(
            f"the transformer's vocabulary_map names {len(codes)} image codes, expected {count} with ids that follow each "
            "other: load the image tokenizer and the transformer that belong together"
        )
    return codes[0]


class LuminaMGPTPipeline(ARImagePipeline):
    """Images of a text by Lumina-mGPT, of every size that its vocabulary has words for.

    Args:
        transformer (`ChameleonForConditionalGeneration`): the language model, with its `vocabulary_map`.
        vq (`VQModel`): turns image codes into images: Chameleon's VQGAN, or the MoVQGAN of Lumina-mGPT 2.0.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): of the text. Without it the pipeline takes `input_ids`.
        image_size (`int`): side in pixels of the square of the area that the weights were trained for: 512, 768 or 1024.

    Raises:
        ValueError: if the parts do not fit together.
    """

    model_cpu_offload_seq = "transformer->vq"
    _optional_components = ["tokenizer"]
    # Tokens between a prompt and the first code.
    _header_length = 3

    def __init__(
        self,
        transformer: ChameleonForConditionalGeneration,
        vq: VQModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        image_size: int = 768,
    ):
        super().__init__()
        self._vocabulary = transformer.config.vocabulary_map or {}
        missing = {BEGIN_OF_IMAGE, TURN_END} - self._vocabulary.keys()
        if missing:
            raise ValueError(f"the transformer's vocabulary_map has no {min(missing)!r}: convert the checkpoint again")
        self._first_code = first_code_of(self._vocabulary, vq.config.num_vq_embeddings)
        # Pixels that each token of a size stands for.
        names = itertools.takewhile(
            self._vocabulary.__contains__, (SIZE.format(FIRST_SIZE + n) for n in itertools.count(1))
        )
        self._sizes = {self._vocabulary[name]: PATCH * n for n, name in enumerate(names, start=1)}
        self.register_modules(transformer=transformer, vq=vq, tokenizer=tokenizer)
        self.register_to_config(image_size=image_size)

    @property
    def scale_factor(self) -> int:
        """Pixels of a code along each side."""
        return 2 ** (len(self.vq.config.block_out_channels) - 1)

    @property
    def image_sizes(self) -> list[tuple[int, int]]:
        """The sizes (height, width) in pixels that the weights were trained for: multiples of 32, as large as the area
        allows and up to four times as long as wide."""
        area = (self.config.image_size // PATCH) ** 2
        return [
            (PATCH * height, PATCH * width)
            for height in range(1, area + 1)
            for width in range(max(1, area // (height + 1)), area // height + 1)
            if max(height, width) <= 4 * min(height, width)
        ]

    def check_size(
        self, height: int | None, width: int | None, input_ids: torch.LongTensor | None = None
    ) -> tuple[int, int]:
        """Height and width of the images of a call: those given, those that the prompts end with, or the square.

        Raises:
            ValueError: if the vocabulary has no words for them, or the prompts end with others.
        """
        told = self._told_size(input_ids)
        square = (self.config.image_size,) * 2
        size = tuple(given or default for given, default in zip((height, width), told or square, strict=True))
        if told not in (None, size):
            raise ValueError(
                f"height and width are {height} and {width} but input_ids end with a size of {told[0]}x{told[1]}: "
                "leave them out"
            )
        largest = max(self._sizes.values())
        if not set(size) <= set(self._sizes.values()):
            raise ValueError(
                f"height and width are {size[0]} and {size[1]}: give multiples of {PATCH} up to {largest}, such as those of "
                "pipe.image_sizes"
            )
        return size

    def _has_header(self, input_ids: torch.LongTensor) -> bool:
        begin = input_ids[:, -self._header_length :][:, :1]
        return bool((begin == self._vocabulary[BEGIN_OF_IMAGE]).all())

    def _told_size(self, input_ids: torch.LongTensor | None) -> tuple[int, int] | None:
        if input_ids is None or not self._has_header(input_ids):
            return None
        told = {tuple(map(self._sizes.get, row)) for row in input_ids[:, -2:].tolist()}
        size = told.pop()
        if told or None in size:
            raise ValueError("input_ids end with tokens of no size, or of different sizes: give images of one size")
        return size

    def _layout(self, size: tuple[int, int]) -> tuple[list[int], list[int], int | None]:
        """The tokens between a prompt and its first code, all that comes before it without a prompt, and the row end."""
        tokens = {pixels: token for token, pixels in self._sizes.items()}
        header = [self._vocabulary[BEGIN_OF_IMAGE], *map(tokens.get, size)]
        return header, header, self._vocabulary[ROW_END]

    def _text(self, prompt: str, size: tuple[int, int], task: str | None, given: bool) -> str:
        fields = {"height": size[0], "width": size[1], "prompt": prompt}
        if task is None:
            return PROMPT.format(**fields)
        shown, kept = ("upper", "lower") if given else ("lower", "upper")
        return PANELS.format(shown=shown, kept=kept, what=TASKS[task], **fields)

    def check_inputs(self, prompt, input_ids, attention_mask, task) -> int:
        """Refuse what cannot be a prompt; return how many prompts there are."""
        if (prompt is None) == (input_ids is None):
            raise ValueError("give either a prompt or input_ids")
        if task is not None and (task not in TASKS or self.vq.config.norm_type != "spatial"):
            raise ValueError(f"task is {task!r}: Lumina-mGPT 2.0 has {', '.join(TASKS)}, other checkpoints have none")
        if input_ids is None:
            if self.tokenizer is None:
                raise ValueError("this pipeline has no tokenizer: give input_ids and attention_mask, not a prompt")
            return len(as_texts(prompt))
        if input_ids.ndim != 2 or not input_ids.numel():
            raise ValueError(f"input_ids have the shape {tuple(input_ids.shape)}: give [B, P]")
        if attention_mask is not None and attention_mask.shape != input_ids.shape:
            raise ValueError(
                f"attention_mask has the shape {tuple(attention_mask.shape)}, input_ids {tuple(input_ids.shape)}: "
                "give one of the same shape"
            )
        return len(input_ids)

    def encode_prompt(
        self, prompt: str | list[str], size: tuple[int, int], task: str | None = None, given: bool = False
    ) -> tuple[torch.LongTensor, torch.LongTensor]:
        """Token ids [B, P] of texts up to the turn end, padded on the left, and their mask. With a `task` they ask for two
        panels, of which the upper one may be `given`."""
        texts = [self._text(text, size, task, given) for text in as_texts(prompt)]
        begin = self.tokenizer.bos_token_id
        begin = self.tokenizer.eos_token_id if begin is None else begin
        end = self._vocabulary[TURN_END]
        rows = [[begin, *self.tokenizer.encode(text, add_special_tokens=False), end] for text in texts]
        length = max(map(len, rows))
        ids = torch.tensor([[end] * (length - len(row)) + row for row in rows])
        counts = torch.tensor([len(row) for row in rows])[:, None]
        return ids, (torch.arange(length) >= length - counts).long()

    @torch.no_grad()
    def bind(
        self,
        prompt: str | list[str] | None = None,
        guidance_scale: float | None = None,
        height: int | None = None,
        width: int | None = None,
        num_images_per_prompt: int = 1,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        task: str | None = None,
        panel: torch.Tensor | None = None,
    ) -> TokenModel:
        """The next-code model of the images that a call with these arguments draws, for `arimage.decoding.decode`.

        With a `panel`, pictures [B, 3, height / 2, width] in [-1, 1], these are the upper halves and the model's codes are
        those of the lower ones.
        """
        self.check_inputs(prompt, input_ids, attention_mask, task)
        device = self._execution_device
        size = self.check_size(height, width, input_ids)
        header, alone, row_end = self._layout(size)
        if input_ids is None:
            input_ids, attention_mask = self.encode_prompt(prompt, size, task, panel is not None)
        elif self._has_header(input_ids):
            input_ids = input_ids[:, : -len(header)]
            attention_mask = None if attention_mask is None else attention_mask[:, : -len(header)]
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask.long()
        ids, mask = (values.to(device).repeat_interleave(num_images_per_prompt, dim=0) for values in (input_ids, mask))
        count, rows = len(ids), size[0] // self.scale_factor
        prefix, alone = (torch.tensor(tokens, device=device).expand(count, -1) for tokens in (header, alone))
        self._above = None
        if panel is not None:
            self._above = self.encode_image(panel)
            above = F.pad(self._above + self._first_code, (0, 1), value=row_end).flatten(1)
            prefix, alone = torch.cat([prefix, above], dim=1), torch.cat([alone, above], dim=1)
            rows -= self._above.shape[1]
        ids, mask = torch.cat([ids, prefix], dim=1), torch.cat([mask, torch.ones_like(prefix)], dim=1)
        guided = self.sampling(guidance_scale=guidance_scale).guidance_scale > 1
        if guided:
            padding = (ids.shape[1] - alone.shape[1], 0)
            ids = torch.cat([ids, F.pad(alone, padding)])
            mask = torch.cat([mask, F.pad(torch.ones_like(alone), padding)])

        # First, since bringing one component to the device sends the one before it away.
        codebook = self.code_vectors()
        transformer = self.on_device(self.transformer)
        embedding, first = transformer.get_input_embeddings(), self._first_code
        model = LanguageTokenModel(
            transformer.model,
            embed=lambda codes: embedding(codes + first),
            head=code_head(transformer.lm_head, first, self.vq.config.num_vq_embeddings),
            layout=Layout((rows, size[1] // self.scale_factor)),
            input_ids=ids,
            attention_mask=mask,
            row_end=row_end,
            codebook=codebook,
            groups=2 if guided else 1,
        )
        self._grid = model.layout.shape
        return model

    def code_vectors(self) -> torch.Tensor:
        """The vectors of all codes in the image tokenizer [V, D]."""
        codes = torch.arange(self.vq.config.num_vq_embeddings, device=self._execution_device)
        return self.on_device(self.vq).quantize.embedding(codes)

    def decode_image(self, codes: torch.LongTensor) -> torch.Tensor:
        """Pictures [B, 3, H, W], nominally in [-1, 1], of codes [B, h, w]."""
        vectors = self.on_device(self.vq).quantize.embedding(codes).permute(0, 3, 1, 2)
        return self.vq.decode(vectors, force_not_quantize=True).sample

    def encode_image(self, pixels: torch.Tensor) -> torch.LongTensor:
        """The codes [B, h, w] of pictures [B, 3, H, W] in [-1, 1]."""
        latents = self.vq.encode(pixels.to(self.vq.dtype)).latents.permute(0, 2, 3, 1)
        return nearest_code(latents.flatten(0, 2), self.code_vectors()).view(latents.shape[:3])

    def _whole(self, tokens: torch.LongTensor) -> torch.LongTensor:
        """The codes [B, h, w] of whole images, given panels included, from those that the latest model drew [B, N]."""
        drawn = tokens.unflatten(1, self._grid)
        return drawn if self._above is None else torch.cat([self._above, drawn], dim=1)

    @torch.no_grad()
    def draw_codes(self, tokens: torch.LongTensor, decided: torch.BoolTensor) -> torch.Tensor:
        """Pictures [B, 3, H, W], nominally in [-1, 1], of codes [B, N], drafts included, as a callback of the latest call gets
        them."""
        pictures = self.decode_image(self._whole(tokens.to(self._execution_device).clamp(min=0)))
        # The next pass needs it.
        self.on_device(self.transformer)
        return pictures

    def kept_codes(self, pixels: torch.Tensor, repaint: torch.BoolTensor) -> torch.LongTensor:
        """The codes [B, N] of pictures [B, 3, H, W] in [-1, 1], but -1 where any pixel of a code is in `repaint` [B, 1, H, W]."""
        return codes_to_keep(self.encode_image(pixels), repaint)

    @torch.no_grad()
    @replace_example_docstring(EXAMPLE_DOC_STRING)
    def __call__(
        self,
        prompt: str | list[str] | None = None,
        image: PipelineImageInput | None = None,
        mask_image: PipelineImageInput | None = None,
        task: str | None = None,
        guidance_scale: float | None = None,
        height: int | None = None,
        width: int | None = None,
        num_images_per_prompt: int = 1,
        generator: torch.Generator | list[torch.Generator] | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        decoding: Decoding | str | None = None,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        output_type: str = "pil",
        return_dict: bool = True,
        callback_on_step_end: Callable | None = None,
        callback_on_step_end_tensor_inputs: list[str] = ["tokens"],  # noqa: B006
    ) -> ImagePipelineOutput | tuple:
        r"""
        Draw images.

        Args:
            prompt (`str` or `list[str]`, *optional*):
                What to draw.
            image (`PIL.Image.Image`, `np.ndarray`, `torch.Tensor` or a list of them, *optional*):
                A picture to change, with `mask_image`; or the upper panel, with `task`. One for all prompts, or one a prompt.
                It is resized to what it takes.
            mask_image (as `image`, *optional*):
                White where the picture is drawn anew, black where it is kept pixel by pixel. A code is drawn if any of its
                pixels is white. Codes are drawn row by row: what is new fits what is kept above it and to its left in the
                row, and knows nothing of what is kept below it and to its right.
            task (`str`, *optional*):
                Of Lumina-mGPT 2.0: `"depth"`, `"canny"`, `"hed"`, `"pose"` draw two panels in an image of this height and
                width, above the picture of the prompt and below its map. With `image`, it is the upper panel, a map (or for
                `"subject"` a picture of something), and the picture is drawn below it.
            guidance_scale (`float`, *optional*, defaults to the checkpoint's):
                s in u + s (c - u), with logits c given the prompt and u without it; 1 or less switches it off.
            height (`int`, *optional*), width (`int`, *optional*):
                The size in pixels, multiples of 32; by default the square that the weights were trained for, whose other
                sizes are `pipe.image_sizes`.
            num_images_per_prompt (`int`, *optional*, defaults to 1):
                Images of each prompt.
            generator (`torch.Generator` or `list[torch.Generator]`, *optional*):
                Makes the images reproducible: one for the call, or one an image.
            temperature (`float`, *optional*), top_k (`int`, *optional*), top_p (`float`, *optional*):
                Sampling settings of the image codes, by default the checkpoint's; see `Sampling`. `top_k=1` is greedy
                decoding.
            decoding (`Decoding` or `str`, *optional*, defaults to `pipe.decoding`):
                The decoding method of this call.
            input_ids (`torch.LongTensor`, *optional*), attention_mask (`torch.Tensor`, *optional*):
                Token ids [B, P] in place of `prompt`, up to the turn end or up to the two tokens of the size, padded on
                either side, and their mask.
            output_type (`str`, *optional*, defaults to `"pil"`):
                `"pil"`, `"np"`, `"pt"`, or `"latent"` for the codes [B, h, w].
            return_dict (`bool`, *optional*, defaults to `True`):
                Return an `ImagePipelineOutput` instead of a tuple.
            callback_on_step_end (`Callable`, *optional*):
                Called after every forward pass as `callback(pipe, step, passes, tensors)`; what it returns is ignored. Set
                `pipe._interrupt = True` in it to stop.
            callback_on_step_end_tensor_inputs (`list[str]`, *optional*, defaults to `["tokens"]`):
                What `tensors` holds: `"tokens"` [B, N], drafts included, and `"decided"` [B, N].

        Examples:

        Returns:
            [`ImagePipelineOutput`] or `tuple`: the output, or the tuple `(images,)`.
        """
        # 1. Check inputs
        self.check_call(height, width, None, output_type, callback_on_step_end_tensor_inputs, num_images_per_prompt)
        count = self.check_inputs(prompt, input_ids, attention_mask, task)
        size = self.check_size(height, width, input_ids)
        forced = pixels = repaint = panel = None
        if image is not None and task is not None and mask_image is None:
            half = (size[0] // 2, size[1])
            everywhere = torch.ones(1, 1, *half)
            panel, _ = self.prepare_image(image, everywhere, half, count, num_images_per_prompt)
        elif image is not None or mask_image is not None:
            if task is not None:
                raise ValueError("task draws whole panels: leave out mask_image")
            pixels, repaint = self.prepare_image(image, mask_image, size, count, num_images_per_prompt)
            forced = self.kept_codes(pixels, repaint)
        sampling = self.sampling(
            guidance_scale=guidance_scale, temperature=temperature, top_k=top_k, top_p=top_p, forced=forced
        )
        seeds = self.draw_seeds(generator, count * num_images_per_prompt)

        # 2. Encode the prompts
        model = self.bind(prompt, guidance_scale, *size, num_images_per_prompt, input_ids, attention_mask, task, panel)

        # 3. Decode the codes
        state, stats = self.run_decoding(
            model, decoding, sampling, seeds, callback_on_step_end, callback_on_step_end_tensor_inputs
        )

        # 4. Turn codes into images
        tokens = self._whole(state.tokens)

        def draw() -> torch.Tensor:
            drawn = self.decode_image(tokens).float()
            if output_type == "pil" and self.vq.config.norm_type == "group":
                # Chameleon's authors cut levels off where everybody else rounds.
                drawn = ((drawn.clamp(-1, 1) + 1) * 127.5).floor() / 127.5 - 1
            return drawn if pixels is None else torch.where(repaint, drawn, pixels)

        images, stats = self.to_images(tokens, draw, output_type, stats)
        self.maybe_free_model_hooks()
        if not return_dict:
            return (images,)
        return ImagePipelineOutput(images=images, tokens=tokens, stats=stats)
