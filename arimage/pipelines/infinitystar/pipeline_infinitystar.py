"""InfinityStar (https://arxiv.org/abs/2511.04675): videos from a text, an image or a video by next-scale prediction of
bits."""

import math
import numbers
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Unpack

import numpy as np
import torch
import torch.nn.functional as F
from diffusers.image_processor import PipelineImageInput
from diffusers.utils import logging
from diffusers.video_processor import VideoProcessor
from PIL import Image
from transformers import PreTrainedTokenizerBase, T5EncoderModel

from ...decoding import NextScaleDecoding, Sampling
from ...decoding.contract.distribution import PER_SCALE
from ..abilities import TOKEN_SAMPLING, Abilities
from ..arguments import VideoScaleArguments, pipeline_call
from ..base import ARPipeline
from ..call import GenerationCall
from ..components import check_parts
from ..kinds.class_or_text import check_text_encoder
from ..output import VideoPipelineOutput
from ..pictures.images import round_levels_down
from ..pictures.videos import cover_levels, prepare_images, prepare_videos
from ..text.checks import MAX_PROMPT_CHARACTERS, as_text, as_texts, prompt_names
from ..text.t5_texts import T5Texts, Text
from .family import FAMILY
from .pyramid import add_bits, quantise
from .scale_model import InfinityStarScaleModel, fed_passes
from .schedules import PER_CLIP, SCHEDULES, Pass, passes, repetitions_of
from .transformer_infinitystar import InfinityStarTransformer
from .vq_infinitystar import FRAMES, InfinityStarVideoTokenizer


logger = logging.get_logger(__name__)

# What the authors add to the prompt of a film.
PROMPT_SUFFIX = ", Close-up on big objects, emphasize scale and detail"
# Frames per second of the training films, and of a clip together with the first frame.
FPS, CLIP_FRAMES = 16, 1 + FRAMES * PER_CLIP
NUM_FRAMES = (1, *range(FPS + 1, CLIP_FRAMES + 1, FPS), 2 * CLIP_FRAMES - 1)
# The numbers of frames that the published models were trained for.
TRAINED = {"0.40M": (CLIP_FRAMES, 2 * CLIP_FRAMES - 1), "0.90M": (CLIP_FRAMES,)}
# The largest side of a preview in pixels.
PREVIEW = 256
EXAMPLE = """
from diffusers.utils import export_to_video

pipe = AutoPipeline.from_pretrained("infinitystar-480p", dtype=torch.bfloat16).to("cuda")
frames = pipe("a fox runs through the snow").frames[0]
export_to_video(frames, "fox.mp4", fps=16)
"""


class InfinityStarPipeline(T5Texts, ARPipeline):
    """Generates videos from a text, and continues an image or a video, with InfinityStar.

    Args:
        transformer (`InfinityStarTransformer`): the next-scale model of bits.
        vq (`InfinityStarVideoTokenizer`): decodes the sum of its bits to frames.
        tokenizer (`PreTrainedTokenizerBase`, *optional*), text_encoder (`T5EncoderModel`, *optional*): flan-t5-xl for
            the published models. Without them the pipeline takes `prompt_embeds`.
        fps (`int`): frames per second of the training videos.
    """

    family = FAMILY
    model_cpu_offload_seq = "text_encoder->transformer->vq"
    _optional_components = ["tokenizer", "text_encoder"]
    _output = VideoPipelineOutput
    abilities = Abilities(
        "scales",
        (TOKEN_SAMPLING - {"guided_tokens"}) | {"image", "video", "num_frames", "negative_prompt", "prompt_suffix"},
        generates_video=True,
        in_maps=True,
    )
    per_prompt = "num_videos_per_prompt"
    decoded_tensor = "latents"
    _callback_tensor_inputs = ["tokens", "decided", "work", "latents"]

    def __init__(
        self,
        transformer: InfinityStarTransformer,
        vq: InfinityStarVideoTokenizer,
        tokenizer: PreTrainedTokenizerBase | None = None,
        text_encoder: T5EncoderModel | None = None,
        fps: int = FPS,
    ):
        super().__init__()
        check_text_encoder(text_encoder, transformer)
        if transformer is not None and vq is not None:
            channels = transformer.config.latent_channels
            check_parts("latent channels", transformer=channels, video_tokenizer=4 * vq.config.latent_channels)
        self.register_modules(transformer=transformer, vq=vq, tokenizer=tokenizer, text_encoder=text_encoder)
        self.register_to_config(fps=fps)
        self.generation_config |= {"guidance_scale": 34.0, "temperature": [1.0, 0.4]}
        self.decoding = NextScaleDecoding()

    @property
    def image_sizes(self) -> list[tuple[int, int]]:
        own, factor = self.transformer.config.pixels, self.vq.scale_factor
        return [(rows * factor, columns * factor) for pixels, (rows, columns) in SCHEDULES if pixels == own]

    @property
    def frame_counts(self) -> list[int]:
        """The numbers of frames that are offered, the default first."""
        return [CLIP_FRAMES, *(count for count in NUM_FRAMES if count != CLIP_FRAMES)]

    @property
    def _card(self) -> tuple[str, str]:
        return "text-to-video", 'frames = pipe("a fox in the snow").frames[0]  # a list of PIL images'

    # Parts of `__call__`

    def film(self, size: tuple[int, int], num_frames: int) -> tuple[Pass, ...]:
        """All passes of a film of a size in pixels."""
        config, factor = self.transformer.config, self.vq.scale_factor
        return passes(
            SCHEDULES[config.pixels, (size[0] // factor, size[1] // factor)],
            self.vq.num_latent_frames(num_frames),
            config.bits,
            repetitions_of(
                config.pixels,
                config.semantic_scales,
                config.image_scale_repetition,
                config.video_scale_repetition,
            ),
        )

    def encode_prompt(
        self,
        prompt: str | list[str],
        num_frames: int = CLIP_FRAMES,
        prompt_suffix: str | None = None,
        max_sequence_length: int | None = None,
    ) -> Text:
        """Encode prompts to `prompt_embeds`, right-padded text embeddings [B, P, D], and `prompt_attention_mask`
        [B, P]. Needs only the tokenizer and the text encoder.

        Args:
            prompt: one text or several.
            num_frames: of the videos. The length of a video is written in front of its prompt, as in training.
            prompt_suffix: see `__call__`.
            max_sequence_length: the most tokens that are read, by default as many as the transformer reads, or 512.

        Raises:
            ValueError: if `prompt` is not text, `max_sequence_length` is not a number of tokens, or the pipeline has
                no text encoder.
        """
        texts = as_texts(prompt, limit=MAX_PROMPT_CHARACTERS)
        return self.encode_texts(
            [_text_of_film(text, num_frames, prompt_suffix) for text in texts], max_sequence_length
        )

    def _first_frames(
        self, image: PipelineImageInput | None, video: Any, size: tuple[int, int]
    ) -> torch.Tensor | None:
        """The given frames [B', 3, T, H, W]: images, or the last frames of videos."""
        if image is not None and video is not None:
            raise ValueError("image and video are both given: give the one that is continued")
        if image is not None:
            return prepare_images(image, size, cover_levels)
        if video is None:
            return None
        videos = prepare_videos(video, size, CLIP_FRAMES, cover_levels)
        for frames in videos:
            if frames.shape[1] != CLIP_FRAMES:
                raise ValueError(
                    f"video has {frames.shape[1]} frames: give at least {CLIP_FRAMES}, of which the last are "
                    "continued, or an image"
                )
        return torch.stack(videos)

    def _num_frames(self, num_frames: int | None, given: int) -> int:
        """The number of frames of a call, of which so many are given."""
        frames = (CLIP_FRAMES if given <= 1 else NUM_FRAMES[-1]) if num_frames is None else num_frames
        choices = [count for count in NUM_FRAMES if count > given]
        if not isinstance(frames, numbers.Integral) or isinstance(frames, bool) or frames not in choices:
            raise ValueError(f"num_frames is {frames!r}: choose among {', '.join(map(str, choices))}")
        pixels = self.transformer.config.pixels
        if frames not in TRAINED.get(pixels, NUM_FRAMES):
            trained = " or ".join(map(str, TRAINED[pixels]))
            logger.warning(f"videos of {frames} frames may be poor: this checkpoint was trained for {trained}")
        return int(frames)

    def _per_pass(self, sampling: Sampling, film: Sequence[Pass], fed: Sequence[int]) -> Sampling:
        """The settings with one number for each pass that is fed, where several are given."""
        changes = {}
        for name in PER_SCALE:
            value = getattr(sampling, name)
            if not isinstance(value, tuple):
                continue
            if len(value) == 2:
                value = tuple(value[one.clip > 0] for one in film)
            elif len(value) != len(film):
                raise ValueError(
                    f"{name} holds {len(value)} numbers: give one, two (the first frame and the rest), or one for "
                    f"each of the {len(film)} passes"
                )
            changes[name] = tuple(value[number] for number in fed)
        return replace(sampling, **changes)

    def _give(
        self, call: GenerationCall, begun: torch.Tensor, film: Sequence[Pass], fed: Sequence[int]
    ) -> torch.FloatTensor:
        """Make a call continue given frames [B', 3, T', H, W], of which its film has the first passes. Returns the sum
        of those that are not fed, [B, C, T, h, w] for B prompts."""
        count = len(call.seeds) // call.num_images_per_prompt
        latents = self.vq.encode_latents(begun.to(self._execution_device, self.vq.dtype)).float()
        known = quantise(latents, [one for one in film if one.first < latents.shape[2]])
        skipped, forced = [], []
        start = F.pad(
            torch.zeros_like(latents), (0, 0, 0, 0, 0, film[-1].first + film[-1].shape[0] - latents.shape[2])
        )
        for number, bits in enumerate(known):
            (forced if number in fed else skipped).append(bits.flatten(1))
            if number not in fed:
                add_bits(film[number], start, bits)
        sampled = sum(math.prod(one.shape) * one.bits for one in film[len(known) :])
        tokens = F.pad(torch.cat(forced, dim=1), (0, sampled), value=-1)
        call.sampling = replace(call.sampling, forced=call.per_image(tokens.expand(count, -1)))
        call.given_tokens = call.per_image(torch.cat(skipped, dim=1).expand(count, -1))
        return start.expand(count, -1, -1, -1, -1)

    # From tokens to frames

    def whole_tokens(self, call: GenerationCall, tokens: torch.LongTensor) -> list[torch.LongTensor]:
        """The tokens [B, N] of a call as the bits [B, t, h, w, n] of each pass, given ones included."""
        model = call.model
        assert isinstance(model, InfinityStarScaleModel)
        parts = {"fed": tokens, "given": call.given_tokens}
        ends = dict.fromkeys(parts, 0)
        found = []
        for number, one in enumerate(model.film):
            name = "fed" if number in model.fed else "given"
            shape = *one.shape, one.bits
            start, ends[name] = ends[name], ends[name] + math.prod(shape)
            found.append(parts[name][:, start : ends[name]].unflatten(1, shape).to(tokens.device, tokens.dtype))
        return found

    @torch.no_grad()
    def decode_tokens(self, call: GenerationCall, tokens: torch.LongTensor) -> torch.Tensor:
        """Pixels [B, 3, T, H, W], nominally in [-1, 1], of the tokens [B, N] of a call; -1 is not known yet. The sum
        of the passes that are known is decoded."""
        return self.decode_result(call, self._latents(call, tokens))

    @torch.no_grad()
    def preview(self, call: GenerationCall, tokens: torch.Tensor) -> torch.Tensor:
        """Pixels [1, 3, T, h, w] of the tokens so far of one film, [1, N], at most `PREVIEW` wide or high, so that
        they cost little."""
        latents = self._latents(call, tokens)
        shrink = -(-max(latents.shape[-2:]) * self.vq.scale_factor // PREVIEW)
        return self.vq.decode_latents(F.avg_pool3d(latents, (1, shrink, shrink)).to(self.vq.dtype))

    def shown_frames(self, call: GenerationCall, frames: Sequence) -> list:
        """The first frame of every second of a film, from all of its frames."""
        return list(frames[::FPS])

    def _latents(self, call: GenerationCall, tokens: torch.LongTensor) -> torch.FloatTensor:
        """The latents [B, C, T, h, w] of the tokens [B, N] of a call, given passes included; -1 is not known yet."""
        model = call.model
        assert isinstance(model, InfinityStarScaleModel)
        tokens = tokens.to(self._execution_device)
        latents = model.empty(len(tokens))
        for one, bits in zip(model.film, self.whole_tokens(call, tokens), strict=True):
            add_bits(one, latents, bits)
        return latents

    def decode_result(self, call: GenerationCall, result: torch.Tensor) -> torch.Tensor:
        pixels = self.vq.decode_latents(result.to(self.vq.dtype))
        if pixels.shape[2] > 1:
            # As the authors do: the first frame, an image of its own, is less sharp than the film.
            pixels[:, :, 0] = pixels[:, :, 1]
        return pixels

    def to_images(
        self, call: GenerationCall, pixels: torch.Tensor
    ) -> list[list[Image.Image]] | np.ndarray | torch.Tensor:
        """Convert pixels [B, 3, T, H, W], nominally in [-1, 1], to the `output_type` of the call."""
        self.check_finite(pixels)
        if call.output_type == "pil":
            pixels = round_levels_down(pixels)
        return VideoProcessor().postprocess_video(pixels, output_type=call.output_type)

    @pipeline_call(EXAMPLE, VideoPipelineOutput)
    def __call__(
        self,
        prompt: str | list[str] | None = None,
        *,
        image: PipelineImageInput | None = None,
        video: Any = None,
        negative_prompt: str | list[str] | None = None,
        prompt_suffix: str | None = None,
        prompt_embeds: torch.Tensor | None = None,
        prompt_attention_mask: torch.Tensor | None = None,
        negative_prompt_embeds: torch.Tensor | None = None,
        negative_prompt_attention_mask: torch.Tensor | None = None,
        height: int | None = None,
        width: int | None = None,
        num_frames: int | None = None,
        apg_norm_threshold: float | None = 0.05,
        **common: Unpack[VideoScaleArguments],
    ) -> GenerationCall:
        r"""
        Generate videos. A token is a bit; the tokens of the output are the bits [B, t, h, w, n] of each pass. Steps
        are passes: an interrupted call returns the video of the passes so far.

        Args:
            prompt (`str` or `list[str]`, *optional*):
                What happens in the video.
            {first_frame}
            video (`list[PIL.Image.Image]`, `np.ndarray`, `torch.Tensor` or a list of them, *optional*):
                A video, [T, H, W, 3] or [T, 3, H, W] in [0, 1] as an array or a tensor, the last 81 frames of which
                are continued. One for all prompts, or one per prompt.
            negative_prompt (`str` or `list[str]`, *optional*):
                What the video is guided away from, in place of no text: one for all prompts, or one for each. "" is no
                text.
            prompt_suffix (`str`, *optional*, defaults to the authors' words for videos):
                Appended to each prompt, but not to negative prompts; "" for none.
            {prompt_embeds}
            {negative_prompt_embeds}
            height (`int`, *optional*), width (`int`, *optional*):
                The size of the frames in pixels, by default the first of `pipe.image_sizes`.
            num_frames (`int`, *optional*):
                The number of frames of the video, given ones included: 81, the default, or 161, the default with
                `video`. The published models may be poor at 1, 17, 33, 49 and 65.
            apg_norm_threshold (`float`, *optional*, defaults to 0.05):
                The largest root mean square of the difference that guidance adds, see `projected_guidance`. None for
                plain guidance.
            guidance_scale (`float` or `list[float]`, *optional*, defaults to the checkpoint's):
                s in c + (s - 1) d, with logits c with the text and d their difference to those without it after
                `projected_guidance`: one number, two for the first frame and the rest, or one for each pass. 1 or less
                disables guidance.
            temperature (`float` or `list[float]`, *optional*), top_k (`int`, *optional*), top_p (`float`, *optional*):
                Sampling settings, by default the checkpoint's; see `Sampling`. The temperature may be several numbers,
                as `guidance_scale`. A bit has two values: `top_k=1` is greedy.
            min_p (`float`, *optional*):
                Sample only values that are at least `min_p` times as probable as the other one.
            num_videos_per_prompt (`int`, *optional*, defaults to 1):
                Videos per prompt, image or video.
            {run}
        """
        if negative_prompt is not None and not any(as_texts(negative_prompt, "negative_prompt")):
            negative_prompt = None
        text = prompt, prompt_embeds, prompt_attention_mask
        negative = negative_prompt, negative_prompt_embeds, negative_prompt_attention_mask
        texts, negatives = self.check_texts(text, negative)
        if prompt_suffix is not None:
            as_text(prompt_suffix, "prompt_suffix")
        _check_threshold(apg_norm_threshold)
        size = self.check_size(height, width)
        begun = self._first_frames(image, video, size)
        frames = self._num_frames(num_frames, 0 if begun is None else begun.shape[2])
        count = max(texts, 0 if begun is None else len(begun))
        for name, held in (("prompt", texts), ("image or video", 1 if begun is None else len(begun))):
            if held not in (1, count):
                raise ValueError(f"{name} holds {held} for {count} videos: give one for all, or one for each")
        number = common.pop("num_videos_per_prompt", 1)
        call = self.begin_call(count, size, num_images_per_prompt=number, **common)
        film = self.film(size, frames)
        given = 0 if begun is None else sum(one.first < self.vq.num_latent_frames(begun.shape[2]) for one in film)
        fed = fed_passes(film, given)
        call.sampling = self._per_pass(call.sampling, film, fed)

        written = None if prompt is None else [_text_of_film(one, frames, prompt_suffix) for one in as_texts(prompt)]
        positive = self.encoded(written, *text[1:])
        assert positive is not None
        condition = self.encode_condition(
            (positive[0].expand(count, -1, -1), positive[1].expand(count, -1)),
            self.encoded(None if negative_prompt is None else as_texts(negative_prompt), *negative[1:]),
            call.guided,
        )
        if call.guided and negative_prompt is not None:
            _leave_out(condition, [not text for text in as_texts(negative_prompt)])
        start = None if begun is None else self._give(call, begun, film, fed)
        model = InfinityStarScaleModel(
            self.transformer,
            condition,
            film,
            (size[0] // self.vq.scale_factor, size[1] // self.vq.scale_factor),
            guided=call.guided,
            padded=not bool(condition["prompt_attention_mask"].all()),
            threshold=apg_norm_threshold,
            given=given,
            start=start,
        )
        others = prompt_names(negative_prompt, negatives or 1, count)
        call.bind(model, prompt_names(prompt, texts, count), others)
        return call


def _text_of_film(text: str, num_frames: int, suffix: str | None) -> str:
    """The text that the model reads, as in training."""
    if num_frames == 1:
        return text + (suffix or "")
    return f"<<<t={num_frames // FPS}s>>>{text}{PROMPT_SUFFIX if suffix is None else suffix}"


def _leave_out(condition: dict[str, torch.Tensor], empty: list[bool]) -> None:
    """Give the rows of `empty` negative prompts no text, in place, as where all of them are empty."""
    if any(empty):
        of_prompts, of_negatives = condition["prompt_attention_mask"].chunk(2)
        rows = torch.tensor(empty, device=of_prompts.device)
        condition["unconditional"] = torch.cat([torch.zeros_like(rows), rows])
        of_negatives.copy_(torch.where(rows[:, None], of_prompts, of_negatives))


def _check_threshold(threshold: Any) -> None:
    if threshold is None:
        return
    number = float(threshold) if isinstance(threshold, numbers.Real) and threshold is not True else math.nan
    if not 0 < number < math.inf:
        raise ValueError(f"apg_norm_threshold is {threshold!r}: give a number above 0, or None for plain guidance")
