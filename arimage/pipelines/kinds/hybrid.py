"""Pipelines in two stages: tokens, and a diffusion decoder that generates the pixels under the condition of these."""

import math
import numbers
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F

from ...decoding.contract.noise import Purpose, normals
from ..base import ARImagePipeline
from ..call import DecoderSettings, GenerationCall
from ..text.checks import describe


MAX_STEPS = 1000
# Of unknown tokens, in [-1, 1].
GREY = 0.7


class HybridPipeline(ARImagePipeline):
    """Base class of pipelines whose tokens are the condition of a diffusion decoder. A family adds `latent_shape` and
    the steps from tokens to latents, `decoder_inputs` and `denoise`; its `__call__` sets
    `call.decoder`, and `call.conditions` to what the decoder reads about each image besides its tokens.

    `decoding`, `stats.exact` and `stats.forward_passes` are about the tokens. `stats.seconds` has the seconds of
    `"tokens"`, `"hand_off"`, `"decoder"` and `"pixels"`. With `output_type="latent"` the decoder does not run. Tokens
    that an interrupted call has not decided are 0 for the decoder.
    """

    @property
    def tiling(self) -> Any:
        """The image tokenizer, on which `enable_vae_slicing` and `enable_vae_tiling` act."""
        return self.vae

    def latent_shape(self, size: tuple[int, int]) -> tuple[int, int, int]:
        """Channels, height and width of the latents of an image of `size`."""
        raise NotImplementedError

    def decoder_inputs(self, call: GenerationCall, tokens: torch.LongTensor) -> list[Any]:
        """What the decoder reads about each image with these tokens [B, N]."""
        raise NotImplementedError

    def denoise(self, call: GenerationCall, read: list[Any], latents: torch.FloatTensor) -> torch.Tensor:
        """Run the decoder from noise, [B, C, h, w]."""
        raise NotImplementedError

    def flow_schedule(self, steps: int, shift: float, device: torch.device) -> Any:
        """A copy of the scheduler, which holds the state of its run, with the times of so many steps."""
        scheduler = type(self.scheduler).from_config(self.scheduler.config)
        sigmas = torch.linspace(1, 1 / steps, steps, dtype=torch.float32).tolist()
        scheduler.set_timesteps(sigmas=sigmas, mu=shift, device=device)
        return scheduler

    def decode_latents(self, latents: torch.Tensor) -> torch.Tensor:
        """Pixels [B, 3, H, W], nominally in [-1, 1], of latents [B, C, h, w]."""
        config = self.vae.config
        latents = latents / config.scaling_factor + (config.shift_factor or 0)
        return self.vae.decode(latents.to(self.vae.dtype)).sample

    def decoder_settings(
        self,
        call: GenerationCall,
        latents: torch.Tensor | None,
        num_inference_steps: int | None,
        **guidance: float | None,
    ) -> DecoderSettings:
        """The checked settings of the decoder, by default the checkpoint's. `guidance` is its guidance scale, by the
        name of the argument.

        Raises:
            ValueError: if one of them is out of its range or has the wrong shape.
        """
        steps = self.generation_config["num_inference_steps"] if num_inference_steps is None else num_inference_steps
        whole = isinstance(steps, numbers.Integral) and not isinstance(steps, bool)
        if not whole or steps not in range(1, MAX_STEPS + 1):
            raise ValueError(f"num_inference_steps is {steps!r}: give a whole number from 1 to {MAX_STEPS}")
        [(name, scale)] = guidance.items()
        scale = self.generation_config[name] if scale is None else scale
        if not isinstance(scale, numbers.Real) or isinstance(scale, bool) or not math.isfinite(scale):
            raise ValueError(f"{name} is {scale!r}: give a finite number, 1 for no guidance")
        if latents is not None:
            shape = (len(call.seeds), *self.latent_shape(call.size))
            if not isinstance(latents, torch.Tensor) or latents.shape != shape or not latents.is_floating_point():
                raise ValueError(f"latents are {describe(latents)}: give floats {shape}, noise for each image")
            if not latents.isfinite().all():
                raise ValueError("latents are not finite: give standard normal noise")
            latents = latents.to(call.seeds.device)
        return DecoderSettings(int(steps), float(scale), latents)

    def initial_latents(self, call: GenerationCall) -> torch.FloatTensor:
        """The noise [B, C, h, w] that the decoder begins with: that of the call, or of the seed of each image."""
        if call.decoder.latents is not None:
            return call.decoder.latents.float()
        channels, height, width = self.latent_shape(call.size)
        places = torch.arange(channels, device=call.seeds.device).expand(len(call.seeds), -1)
        return normals(call.seeds, places, None, Purpose.LATENTS, height * width).unflatten(-1, (height, width))

    @torch.no_grad()
    def decode_tokens(self, call: GenerationCall, tokens: torch.LongTensor) -> torch.Tensor:
        """Pixels [B, 3, H, W], nominally in [-1, 1], of tokens [B, N] of a call: all steps of the decoder."""
        with self._timed(call, "hand_off"):
            read = self.decoder_inputs(call, tokens.to(self._execution_device).clamp(min=0))
        with self._timed(call, "decoder"):
            latents = self.denoise(call, read, self.initial_latents(call))
        with self._timed(call, "pixels"):
            return self.decode_latents(latents)

    def preview(self, call: GenerationCall, tokens: torch.LongTensor) -> torch.Tensor:
        """Pixels [1, 3, H, W] that show the grid of the tokens so far [1, N] of one image: tokens with similar vectors
        have similar colours, and unknown ones are grey."""
        assert call.model.kind == "tokens" and call.model.codebook is not None
        grid, codebook = call.layout.current(tokens, tokens >= 0), call.model.codebook
        axes = torch.randn(codebook.shape[1], 3, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
        vectors = F.normalize(codebook[grid.clamp(min=0).to(codebook.device)].float(), dim=-1)
        colours = (
            (vectors @ axes.to(vectors.device)).tanh().masked_fill((grid < 0)[..., None].to(vectors.device), GREY)
        )
        return F.interpolate(colours.movedim(-1, 1), call.size)

    @contextmanager
    def _timed(self, call: GenerationCall, stage: str):
        began = call.now()
        yield
        call.seconds[stage] = call.seconds.get(stage, 0.0) + call.now() - began
