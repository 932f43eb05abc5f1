"""The outputs of pipelines."""

from dataclasses import dataclass

import numpy as np
import torch
from diffusers.utils import BaseOutput
from PIL import Image


# Tokens [B, h, w] of images or [B, t, h, w] of videos, or one map per scale, coarse to fine.
Tokens = torch.LongTensor | list[torch.LongTensor]


def passes_text(count: int) -> str:
    return "1 forward pass" if count == 1 else f"{count} forward passes"


@dataclass(frozen=True, repr=False)
class DecodingStats:
    """Statistics of a call.

    Attributes:
        forward_passes: forward passes of the transformer over a batch, prefills included. Images that begin together
            share a prefill.
        head_calls: sequential calls of the denoising heads of a model of continuous tokens; 0 for other models.
        student_passes: forward passes of a distilled student that drafts tokens; `forward_passes` does not include
            them.
        tokens_per_pass: tokens of all images divided by `forward_passes` and the number of images in a batch; 1 for
            autoregressive decoding of one batch.
        exact: whether the decoding samples exactly from the model's distribution, and no callback replaced tokens.
        prefill_seconds, decode_seconds, tokenizer_seconds: wall-clock time of the first prefill, of the other forward
            passes, and of decoding tokens to images.
        seconds: wall-clock time of the stages: `"tokens"` is `prefill_seconds` and `decode_seconds`, and `"pixels"` is
            `tokenizer_seconds`. A pipeline with a diffusion decoder divides these into `"hand_off"`, `"decoder"` and
            `"pixels"`.
        decoder_steps: denoising steps of a diffusion decoder per image; 0 without one.
        steps: how the steps ran: "captured" if they were replayed from CUDA graphs, "compiled" if `pipe.compile()` has
            compiled whole steps, else "eager": on other devices, where steps cannot be captured or a capture has
            failed, and in a first call whose steps happen once per image. See `ARPipeline.capture`. After it, why a
            language model takes its layers in torch on a GPU, or by transformers on a CPU, if it does, such as
            "(layers in torch: ...)".
        accepted: int64 [S, B], how many tokens each forward pass of an image decided, starting with its prefill. S is
            the largest number of forward passes of an image, which is `forward_passes` if all images begin together.
    """

    forward_passes: int
    head_calls: int
    student_passes: int
    tokens_per_pass: float
    exact: bool
    prefill_seconds: float
    decode_seconds: float
    tokenizer_seconds: float
    seconds: dict[str, float]
    decoder_steps: int
    steps: str
    accepted: torch.LongTensor

    def __repr__(self) -> str:
        return f"DecodingStats({self.summary}, {'exact' if self.exact else 'lossy'})"

    @property
    def summary(self) -> str:
        """The figures of a call in one line."""
        parts = [passes_text(self.forward_passes)]
        parts += [f"{self.head_calls} calls of the denoising head"] if self.head_calls else []
        parts += [f"{self.tokens_per_pass:.1f} tokens per pass", f"{self.seconds['tokens']:.1f} s decoding"]
        parts += [f"{self.steps} steps"] if self.steps != "eager" else []
        if self.decoder_steps:
            parts.append(f"{self.seconds['decoder']:.1f} s in {self.decoder_steps} decoder steps")
        return ", ".join([*parts, f"{self.seconds['pixels']:.1f} s pixels"])


@dataclass
class ImagePipelineOutput(BaseOutput):
    """Images, their tokens, and statistics.

    Attributes:
        images: a list of B PIL images; or float32 [B, H, W, 3] in [0, 1] for "np"; or [B, 3, H, W] in [0, 1] for "pt";
            or the tokens for "latent".
        tokens: int64 [B, h, w], the tokens in their places. For a next-scale model, or where a small grid comes before
            the image, a list of grids, coarse to fine; for a model of continuous tokens, the latents of its image
            tokenizer, float32 [B, C, h, w].
        stats: see `DecodingStats`.
        seeds: the B seeds of the images: the same call for one of them, with `torch.Generator().manual_seed(seed)`,
            generates it again.
    """

    images: list[Image.Image] | np.ndarray | torch.Tensor | Tokens
    tokens: Tokens
    stats: DecodingStats
    seeds: list[int]


@dataclass
class VideoPipelineOutput(BaseOutput):
    """Videos, their tokens, and statistics.

    Attributes:
        frames: a list of B lists of PIL images; or float32 [B, T, H, W, 3] in [0, 1] for "np"; or [B, T, 3, H, W] in
            [0, 1] for "pt"; or the tokens for "latent".
        tokens: int64 [B, t, h, w], the tokens in their places, given maps included. For a next-scale model, a list of
            maps of bits [B, t, h, w, n], one per pass.
        stats: see `DecodingStats`.
        seeds: the B seeds of the videos, as those of `ImagePipelineOutput`.
    """

    frames: list[list[Image.Image]] | np.ndarray | torch.Tensor | Tokens
    tokens: Tokens
    stats: DecodingStats
    seeds: list[int]
