"""Cosmos-Predict1's autoregressive models (https://arxiv.org/abs/2501.03575), which continue an image or a video."""

import numbers
from collections.abc import Container, Sequence
from dataclasses import replace
from typing import Any, Unpack

import numpy as np
import torch
from diffusers.image_processor import PipelineImageInput
from diffusers.utils import is_cosmos_guardrail_available, logging
from diffusers.video_processor import VideoProcessor
from PIL import Image
from transformers import PreTrainedTokenizerBase, T5EncoderModel

from ...decoding import Layout
from ...decoding.contract.supports import Traits
from ...tokenizers.vq_frames import FramewiseVQModel
from ..abilities import TOKEN_SAMPLING, Abilities
from ..arguments import VideoArguments, pipeline_call
from ..base import ARPipeline
from ..call import GenerationCall
from ..components import check_parts
from ..output import VideoPipelineOutput
from ..pictures.videos import prepare_images, prepare_videos
from ..text.checks import (
    MAX_PROMPT_CHARACTERS,
    TEXT_TOKENS,
    as_texts,
    check_sides,
    describe,
    prompt_names,
    text_length,
)
from ..text.tokenizing import tokenize
from .family import FAMILY
from .fsq_cosmos import CosmosVideoTokenizer
from .transformer_cosmos import CosmosTokenModel, CosmosTransformer


logger = logging.get_logger(__name__)

LICENCE = "https://www.nvidia.com/en-us/agreements/enterprise-software/nvidia-open-model-license"
EXAMPLE = """
from diffusers.utils import export_to_video, load_image

# the folder that `arimage convert cosmos` wrote
pipe = AutoPipeline.from_pretrained("cosmos-4b", dtype=torch.bfloat16).to("cuda")
frames = pipe(image=load_image("street.jpg"), decoding="sjd-gumbel").frames[0]
export_to_video(frames, "street.mp4", fps=24)
"""


class CosmosPipeline(ARPipeline):
    """Generates videos that continue an image or a video. Video2World models also read a text; some models can
    generate from a text alone.

    Args:
        transformer (`CosmosTransformer`): the next-token model.
        vq (`CosmosVideoTokenizer` or `FramewiseVQModel`): turns its tokens into frames.
        tokenizer (`PreTrainedTokenizerBase`, *optional*), text_encoder (`T5EncoderModel`, *optional*): for text.
            Without them a pipeline that reads text takes `prompt_embeds`.
        safety_checker (`CosmosSafetyChecker`, *optional*): NVIDIA's guardrail, from the package `cosmos_guardrail`.
        begins_with_text (`bool`): whether the weights were trained to generate videos from a text alone, and without a
            text for guidance.
        requires_safety_checker (`bool`): whether the licence of the weights requires the guardrail, as NVIDIA's does.
            The first call then loads it if it is not given.
        fps (`int`): frames per second of the training videos.
    """

    family = FAMILY
    model_cpu_offload_seq = "text_encoder->transformer->vq"
    _optional_components = ["tokenizer", "text_encoder", "safety_checker"]
    _output = VideoPipelineOutput
    abilities = Abilities(
        "tokens", (TOKEN_SAMPLING - {"guided_tokens"}) | {"image", "video", "num_frames"}, generates_video=True
    )
    per_prompt = "num_videos_per_prompt"

    def __init__(
        self,
        transformer: CosmosTransformer,
        vq: CosmosVideoTokenizer | FramewiseVQModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        text_encoder: T5EncoderModel | None = None,
        safety_checker: Any = None,
        requires_safety_checker: bool = False,
        begins_with_text: bool = False,
        fps: int = 24,
    ):
        super().__init__()
        check_parts("tokens", transformer=transformer.config.vocab_size, video_tokenizer=vq.codebook_size)
        if text_encoder is not None:
            widths = {"text_encoder": text_encoder.config.d_model, "transformer": transformer.config.context_dim}
            check_parts("channels of a text", **widths)
        self.register_modules(
            transformer=transformer,
            vq=vq,
            tokenizer=tokenizer,
            text_encoder=text_encoder,
            safety_checker=safety_checker,
        )
        self.register_to_config(
            requires_safety_checker=requires_safety_checker, begins_with_text=begins_with_text, fps=fps
        )

    @property
    def traits(self) -> Traits:
        return replace(super().traits, block=self.transformer.config.block_tokens)

    @property
    def image_sizes(self) -> list[tuple[int, int]]:
        _, rows, columns = self.transformer.config.shape
        return [(rows * self.vq.scale_factor, columns * self.vq.scale_factor)]

    @property
    def begins_with_text(self) -> bool:
        return self.config.begins_with_text

    @property
    def _card(self) -> tuple[str, str]:
        if self.begins_with_text:
            return "text-to-video", 'frames = pipe("a red heart, moving right").frames[0]  # a list of PIL images'
        prompt = ', prompt="a street in the rain"' if self.transformer.reads_text else ""
        return "image-to-video", f"frames = pipe(image=image{prompt}).frames[0]  # a PIL image becomes a list of them"

    @property
    def num_frames(self) -> int:
        """The number of frames that the weights were trained for, and the largest that a call generates."""
        return self.vq.num_frames(self.transformer.config.shape[0])

    @property
    def frame_counts(self) -> list[int]:
        """The numbers of frames that are offered, the default first."""
        return [self.num_frames]

    def _example(self, given: Container[str]) -> dict[str, Any]:
        example: dict[str, Any] = {}
        if self.transformer.reads_text and "prompt" not in given and "prompt_embeds" not in given:
            example["prompt"] = "a red heart"
        if not self.begins_with_text and all(name not in given for name in ("image", "video", "tokens")):
            height, width = self.image_sizes[0]
            example["image"] = Image.new("RGB", (width, height), "grey")
        return example

    # Parts of `__call__`

    def check_text(self, prompt: str | list[str] | None, prompt_embeds: torch.Tensor | None) -> int:
        """Refuse a text that the checkpoint cannot read; return the number of texts."""
        if not self.transformer.reads_text:
            if prompt is not None or prompt_embeds is not None:
                raise ValueError("this checkpoint reads no text: leave out prompt and prompt_embeds")
            return 0
        if (prompt is None) == (prompt_embeds is None):
            raise ValueError("this checkpoint reads a text: give either a prompt or prompt_embeds")
        if prompt is not None:
            if self.text_encoder is None or self.tokenizer is None:
                raise ValueError(
                    "this pipeline has no text encoder: give prompt_embeds, or convert the checkpoint again with "
                    "--text-encoder"
                )
            return len(as_texts(prompt, limit=MAX_PROMPT_CHARACTERS))
        assert prompt_embeds is not None
        width = self.transformer.config.context_dim
        floats = isinstance(prompt_embeds, torch.Tensor) and prompt_embeds.is_floating_point()
        shape = prompt_embeds.shape if floats else ()
        if len(shape) != 3 or shape[2] != width or 0 in shape:
            raise ValueError(f"prompt_embeds are {describe(prompt_embeds)}: give a tensor of floats [B, S, {width}]")
        return len(prompt_embeds)

    def check_size(
        self, height: int | None, width: int | None, maps: tuple[int, int] | None = None
    ) -> tuple[int, int]:
        """Height and width of the frames of a call: the given ones, those of `maps` (rows, columns), or those that the
        weights were trained for. Warns about any other than the trained size."""
        factor, trained = self.vq.scale_factor, self.image_sizes[0]
        own = trained if maps is None else (maps[0] * factor, maps[1] * factor)
        size = check_sides((own[0] if height is None else height, own[1] if width is None else width), factor)
        if maps is not None and size != own:
            raise ValueError(
                f"tokens are those of {own[0]}x{own[1]} pixels, not of {size[0]}x{size[1]}: leave out height and width"
            )
        if size != trained:
            logger.warning(
                f"frames of {size[0]}x{size[1]} pixels were asked for, but these weights were trained for "
                f"{trained[0]}x{trained[1]}"
            )
        return size

    def _check_tokens(self, tokens: torch.LongTensor) -> torch.LongTensor:
        if not isinstance(tokens, torch.Tensor) or tokens.ndim != 4 or tokens.is_floating_point() or not len(tokens):
            raise ValueError("tokens must be int64 [B, t, h, w], the maps that the video continues")
        last = self.vq.codebook_size - 1
        if tokens.numel() and (tokens.min() < 0 or tokens.max() > last):
            raise ValueError(f"tokens must be ids from 0 to {last}")
        return tokens.long()

    def _first_frames(self, image: PipelineImageInput | None, video: Any, size: tuple[int, int]) -> torch.Tensor:
        """The first frames of the videos, [B', 3, T, H, W]: images, or the last frames of given videos, which are
        encoded to two maps."""
        if image is not None:
            return prepare_images(image, size)
        last = self.vq.num_frames(2)
        videos = prepare_videos(video, size, last)
        for frames in videos:
            if 1 < frames.shape[1] < last:
                raise ValueError(
                    f"video has {frames.shape[1]} frames: give one frame, or at least {last}; "
                    f"only the last {last} are used"
                )
        if len({frames.shape[1] for frames in videos}) > 1:
            raise ValueError(f"video holds single frames and videos: give at least {last} frames each")
        return torch.stack(videos)

    def _maps(self, num_frames: int | None, given: int) -> int:
        """The number of maps of the videos of a call, given ones included."""
        most = self.num_frames
        frames = most if num_frames is None else num_frames
        if not isinstance(frames, numbers.Integral) or isinstance(frames, bool) or frames > most:
            raise ValueError(f"num_frames is {frames!r}: give at most {most}, for which the weights were trained")
        maps = self.vq.num_maps(int(frames))
        if maps <= given:
            raise ValueError(
                f"num_frames is {frames}, but {self.vq.num_frames(given)} are given: give more, up to {most}"
            )
        return maps

    def embed_text(self, prompt: str | list[str], max_sequence_length: int | None = None) -> torch.Tensor:
        """The `prompt_embeds` [B', S, D] of prompts. Those after the end of a prompt are zero; the models read them
        too."""
        assert self.tokenizer is not None and self.text_encoder is not None
        length = text_length(max_sequence_length, min(TEXT_TOKENS, self.tokenizer.model_max_length))
        text = tokenize(
            self.tokenizer,
            as_texts(prompt),
            padding="max_length",
            max_length=length,
            truncation=True,
            return_tensors="pt",
        ).to(self._execution_device)
        mask = text.attention_mask.bool()
        if mask.all(1).any():
            logger.warning(f"a prompt may be longer than the {length} tokens that are read, and was cut")
        embeds = self.text_encoder(text.input_ids, attention_mask=mask).last_hidden_state
        return embeds.masked_fill(~mask[..., None], 0)

    # The guardrail, as in the Cosmos pipelines of diffusers

    def _guardrail(self) -> Any:
        """NVIDIA's guardrail; None if the weights do not require it."""
        if self.safety_checker is None and self.config.requires_safety_checker:
            if not is_cosmos_guardrail_available():
                raise ValueError(
                    f"these weights may be used with NVIDIA's guardrail only, by their licence ({LICENCE}): pip "
                    "install cosmos_guardrail, and accept its terms"
                )
            from cosmos_guardrail import CosmosSafetyChecker  # pyright: ignore[reportMissingImports] it is optional

            self.register_modules(safety_checker=CosmosSafetyChecker())
        return self.safety_checker

    def _guard_texts(self, prompts: list[str]) -> None:
        guardrail = self._guardrail()
        if guardrail is None:
            return
        guardrail.to(self._execution_device)
        for prompt in prompts:
            if not guardrail.check_text_safety(prompt):
                raise ValueError(f"NVIDIA's guardrail refuses the prompt {prompt!r}: change it")
        guardrail.to("cpu")

    def _guard_frames(self, video: torch.Tensor) -> torch.Tensor:
        """Videos [B, 3, T, H, W] in [-1, 1] with faces blurred."""
        guardrail = self._guardrail()
        if guardrail is None:
            return video
        guardrail.to(self._execution_device)
        checked = []
        for frames in VideoProcessor().postprocess_video(video, output_type="np"):
            safe = guardrail.check_video_safety((frames * 255).astype(np.uint8))
            if safe is None:
                raise ValueError("NVIDIA's guardrail refuses the frames of this video: change the prompt or the image")
            checked.append(torch.from_numpy(safe).movedim(-1, 0).float() / 127.5 - 1)
        guardrail.to("cpu")
        return torch.stack(checked)

    # From tokens to frames

    @torch.no_grad()
    def decode_tokens(self, call: GenerationCall, tokens: torch.LongTensor) -> torch.Tensor:
        """Pixels [B, 3, T, H, W], nominally in [-1, 1], of the tokens [B, N] of a call, drafts included; -1 is not
        known yet. The given maps come first."""
        tokens = tokens.to(self._execution_device).clamp(min=0)
        return self.vq.decode(self.whole_tokens(call, tokens))

    def shown_frames(self, call: GenerationCall, frames: Sequence) -> list:
        """The last frame of every map that a call generates, from all frames of its video."""
        given, generated = 0 if call.given_tokens is None else call.given_tokens.shape[1], call.layout.shape[0]
        frames_per_map = (len(frames) - 1) // max(given + generated - 1, 1)
        return [frames[number * frames_per_map] for number in range(given, given + generated)]

    def to_images(
        self, call: GenerationCall, pixels: torch.Tensor
    ) -> list[list[Image.Image]] | np.ndarray | torch.Tensor:
        """Convert pixels [B, 3, T, H, W], nominally in [-1, 1], to the `output_type` of the call."""
        self.check_finite(pixels)
        return VideoProcessor().postprocess_video(self._guard_frames(pixels), output_type=call.output_type)

    @pipeline_call(EXAMPLE, VideoPipelineOutput)
    def __call__(
        self,
        prompt: str | list[str] | None = None,
        *,
        image: PipelineImageInput | None = None,
        video: Any = None,
        tokens: torch.LongTensor | None = None,
        prompt_embeds: torch.Tensor | None = None,
        max_sequence_length: int | None = None,
        height: int | None = None,
        width: int | None = None,
        num_frames: int | None = None,
        **common: Unpack[VideoArguments],
    ) -> GenerationCall:
        r"""
        Generate videos that continue an image or a video or, if the weights were trained for it, from a text
        alone.

        Args:
            prompt (`str` or `list[str]`, *optional*):
                What happens in the video, for checkpoints that read text.
            {first_frame}
            video (`list[PIL.Image.Image]`, `np.ndarray`, `torch.Tensor` or a list of them, *optional*):
                A video, [T, H, W, 3] or [T, 3, H, W] in [0, 1] as an array or a tensor, the last frames of which are
                continued: 9 with the published models. One for all prompts, or one per prompt.
            tokens (`torch.LongTensor`, *optional*):
                Token maps [B, t, h, w] in place of `image` or `video`, as returned by `pipe.vq.encode` and in
                `VideoPipelineOutput.tokens`. The published models were trained to continue one map or two.
            prompt_embeds (`torch.Tensor`, *optional*):
                The output of the text encoder [B, S, D], zero after the end of each prompt, in place of `prompt`.
            max_sequence_length (`int`, *optional*):
                The number of prompt tokens that are read, padding included, since the model reads it too; by default
                the limit of the text tokenizer, 512 with the published models.
            height (`int`, *optional*), width (`int`, *optional*):
                The size of the frames in pixels, by default that of `pipe.image_sizes`. The published models fail at
                other sizes.
            num_frames (`int`, *optional*):
                The number of frames of the video, given ones included, at most `pipe.num_frames`, the default. With
                the published models it is 1 more than a multiple of 8.
            guidance_scale (`float`, *optional*):
                s in u + s (c - u), with logits c with the text and u without it; 1 disables guidance. By default the
                checkpoint's. NVIDIA's models do not support guidance.
            {cuts}
            num_videos_per_prompt (`int`, *optional*, defaults to 1):
                Videos per prompt, image or video.
            {run}
        """
        texts = self.check_text(prompt, prompt_embeds)
        given = sum(value is not None for value in (image, video, tokens))
        if given > 1 or (given == 0 and not self.begins_with_text):
            raise ValueError("give one of image, video and tokens, which the video continues")
        if given == 0:
            # A video that continues nothing
            grid = (side // self.vq.scale_factor for side in self.check_size(height, width))
            tokens = torch.empty(1, 0, *grid, dtype=torch.long)
        if tokens is not None:
            begun = self._check_tokens(tokens)
            size, given_maps = self.check_size(height, width, begun.shape[2:]), begun.shape[1]
        else:
            size = self.check_size(height, width)
            begun = self._first_frames(image, video, size)
            given_maps = self.vq.num_maps(begun.shape[2])
        count = max(texts, len(begun))
        for name, held in (("prompt", texts), ("image, video or tokens", len(begun))):
            if held not in (0, 1, count):
                raise ValueError(f"{name} holds {held} for {count} videos: give one for all, or one for each")
        maps = self._maps(num_frames, given_maps)
        number = common.pop("num_videos_per_prompt", 1)
        call = self.begin_call(count, size, num_images_per_prompt=number, **common)
        if call.guided and not self.begins_with_text:
            raise ValueError(
                f"guidance_scale is {call.sampling.guidance_scale}, but this checkpoint was trained without: leave it "
                "out"
            )

        if prompt is not None:
            self._guard_texts(as_texts(prompt))
            prompt_embeds = self.embed_text(prompt, max_sequence_length)
        device = self._execution_device
        given = begun.to(device) if tokens is not None else self.vq.encode(begun.to(device, self.vq.dtype))
        given = given.expand(count, -1, -1, -1)
        call.given_tokens = call.per_image(given)
        model = CosmosTokenModel(
            self.transformer,
            Layout((maps - given_maps, *given.shape[2:])),
            given,
            None if prompt_embeds is None else prompt_embeds.to(device).expand(count, -1, -1),
            guided=call.guided,
            codebook=self.vq.code_vectors(),
        )
        call.bind(model, prompt_names(prompt, texts or 1, count))
        return call
