"""The run of a call: its images pass through the lanes of a batch, and finished ones are decoded to pixels
meanwhile."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..decoding.run.batch import INTERVAL, Batch, Images, run_batch
from .call import GenerationCall, RunOptions, running
from .output import DecodingStats


class CallRun:
    """A call of an `ARPipeline` for B images, which are generated as many at a time as its options say.

    Attributes:
        tensors: int64 `tokens` and bool `decided`, [B, N], and other tensors [B, ...] of a state that the callback or
            the image tokenizer needs. They cover finished, running and waiting images; waiting images have tokens of
            -1. Continuous tokens are float32 [B, N, D], zeros for waiting images.
    """

    def __init__(self, pipe: Any, call: GenerationCall, options: RunOptions):
        self.pipe, self.call, self.count, self._return_dict = pipe, call, len(call.seeds), options.return_dict
        call.decoding, call.output_type = options.decoding, options.output_type
        call.callback, call.callback_tensor_inputs = options.callback, options.callback_tensor_inputs
        size = min(options.batch_size or self.count, self.count)
        self.batch = Batch(call.decoding, size, pipe.steps_of(call.decoding))
        self.tensors: dict[str, torch.Tensor] = {}
        self._names = dict.fromkeys(["tokens", "decided", pipe.decoded_tensor, *call.callback_tensor_inputs])
        self._accepted: list[torch.LongTensor] = [torch.empty(0, dtype=torch.long)] * self.count
        self._images: list[Any] = [None] * self.count
        # The number of images that have begun, and the finished images that are not decoded to pixels yet.
        self._begun, self._undecoded = 0, []
        self._indices: dict[tuple[int, ...], torch.LongTensor] = {}
        self._tokenizer_seconds = self._prefill_seconds = 0.0
        # Whether the callback has replaced tokens.
        self._replaced = False

    @torch.no_grad()
    def run(self) -> Any:
        """Generate the images, and return what the call of the pipeline returns."""
        pipe, call = self.pipe, self.call
        self._began = call.now()
        # Tokens, and the pixels of finished images while others wait
        with running(pipe, call), pipe.progress_bar(total=call.model.num_tokens) as self._progress:
            run_batch(self.batch, self._next_images, self._finish, self._on_step)
            # The images that were unfinished at an interruption.
            if lanes := self.batch.running:
                self._finish(lanes)
                self.batch.release(lanes)
            self._show_progress()
        # Language models have a reason.
        self._slow_layers = getattr(call.model, "slow_layers", "")
        self._student_passes = self.batch.begins * self.batch.state.student_passes
        # Decoding to pixels needs the memory of the cache.
        self.batch.state = None
        self._seconds = call.now() - self._began - self._tokenizer_seconds

        self._undecoded += range(self._begun, self.count)
        if self._undecoded:
            self._decode(self._undecoded)
        tokens = pipe.whole_tokens(call, self.tensors["tokens"])
        images: Any = self._images
        if call.output_type == "latent":
            images = pipe.latents_of(tokens)
        elif call.output_type != "pil":
            images = np.stack(images) if call.output_type == "np" else torch.stack(images)
        pipe.maybe_free_model_hooks()
        return pipe._output(images, tokens, self.stats(), call.image_seeds) if self._return_dict else (images,)

    def stats(self) -> DecodingStats:
        accepted = torch.nn.utils.rnn.pad_sequence(self._accepted)
        passes = self.batch.forward_passes
        return DecodingStats(
            forward_passes=passes,
            head_calls=sum(self.batch.calls_per_pass),
            student_passes=self._student_passes,
            tokens_per_pass=float(accepted.sum()) / (passes * self.batch.size),
            exact=self.call.decoding.exact and not self._replaced,
            prefill_seconds=self._prefill_seconds,
            decode_seconds=self._seconds - self._prefill_seconds,
            tokenizer_seconds=self._tokenizer_seconds,
            seconds={"tokens": self._seconds} | (self.call.seconds or {"pixels": self._tokenizer_seconds}),
            decoder_steps=self.call.decoder.num_inference_steps if self.call.seconds else 0,
            steps=self.batch.how + (f" ({self._slow_layers})" if self._slow_layers else ""),
            accepted=accepted,
        )

    def _next_images(self, room: int) -> Images | None:
        names = range(self._begun, min(self._begun + room, self.count))
        if not names:
            return None
        self._begun = names.stop
        call = self.call
        if len(names) == self.count:
            return Images(names, call.model, call.sampling, call.seeds)
        images = self._index(names)
        return Images(names, call.model.take(images), call.sampling.take(images), call.seeds[images])

    def _on_step(self) -> bool:
        call, passes = self.call, self.batch.forward_passes
        if passes == 1:
            self._prefill_seconds = self.call.now() - self._began
        # Reading the progress from an accelerator synchronizes with it.
        if call.seeds.device.type == "cpu" or passes % INTERVAL == 0:
            self._show_progress()
        if call.callback is not None:
            self._copy(self.batch.running)
            tensors = {name: self.tensors[name].clone() for name in call.callback_tensor_inputs}
            self._use(call.callback(self.pipe, passes - 1, passes, tensors))
            # The callback may have changed weights or adapters.
            self.batch.use(self.pipe.steps_of(call.decoding))
        return call.interrupted

    def _use(self, returned: Any) -> None:
        """Replace tokens with those that the callback returned, if any."""
        if returned is None:
            return
        if not isinstance(returned, dict):
            raise ValueError(f'callback_on_step_end returned {returned!r}: return None, or {{"tokens": ...}}')
        current, returned = self.tensors, dict(returned)
        for name, values in returned.items():
            if name not in current or not isinstance(values, torch.Tensor) or values.is_meta:
                raise ValueError(
                    f"callback_on_step_end returned {name!r}, not as a tensor that it was given: return only what it "
                    'was given, with other "tokens"'
                )
            returned[name] = values.to(current[name].device)
            if name != "tokens" and not torch.equal(returned[name], current[name]):
                raise ValueError(f'callback_on_step_end changed {name!r}: it may change "tokens" only')
        before = current["tokens"]
        tokens = returned.get("tokens", before)
        if tokens.shape != before.shape or tokens.dtype != before.dtype:
            raise ValueError(f"callback_on_step_end returned tokens that are not int64 {tuple(before.shape)}")
        changed = tokens != before
        if not changed.any():
            return
        state, lanes = self.batch.state, self._index(self.batch.running)
        if not state.replaceable:
            raise ValueError(
                f"callback_on_step_end returned other tokens, but {type(self.call.decoding).__name__} has computed "
                'from them already: use decoding="ar", or "next-scale" for scales'
            )
        images = self._index(self._images_in(self.batch.running))
        newest = torch.zeros_like(changed)
        newest[images] = state.newest[lanes]
        chosen = tokens[changed]
        if (changed & ~newest).any() or chosen.min() < 0 or chosen.max() >= state.model.vocab_size:
            raise ValueError(
                "callback_on_step_end returned tokens that it may not change: change those that the last step "
                f"decided, to 0 .. {state.model.vocab_size - 1}"
            )
        replaced = state.tokens.clone()
        replaced[lanes] = tokens[images]
        state.replace(replaced)
        self._copy(self.batch.running)
        self._replaced = True

    def _show_progress(self) -> None:
        if self._progress.disable:
            return
        state, lanes = self.batch.state, self.batch.running
        finished = self._begun - len(lanes)
        done = finished + float(state.work[self._index(lanes)].sum())
        self._progress.update(round(done / self.count * state.model.num_tokens) - self._progress.n)

    def _copy(self, lanes: list[int]) -> None:
        """Copy the current tensors of the images in `lanes` to the tensors of the call."""
        images, at = self._index(self._images_in(lanes)), self._index(lanes)
        for name in self._names:
            values = getattr(self.batch.state, name)
            if name not in self.tensors:
                absent = -1 if name == "tokens" and not values.is_floating_point() else 0
                self.tensors[name] = values.new_full((self.count, *values.shape[1:]), absent)
            self.tensors[name][images] = values[at]

    def _images_in(self, lanes: list[int]) -> list[int]:
        return [self.batch.names[lane] for lane in lanes]

    def _index(self, numbers: Sequence[int]) -> torch.LongTensor:
        """`numbers` as an index tensor on the device, copied there once, since indexing with a list synchronizes every
        time."""
        key = tuple(numbers)
        if key not in self._indices:
            self._indices[key] = torch.tensor(key, dtype=torch.long, device=self.call.seeds.device)
        return self._indices[key]

    def _finish(self, lanes: list[int]) -> None:
        state = self.batch.state
        state.check(self.batch.names)
        self._copy(lanes)
        for lane, passes in zip(lanes, self.batch.passes_of(lanes), strict=True):
            self._accepted[self.batch.names[lane]] = state.accepted[:passes, lane].to("cpu", copy=True)
            self._undecoded.append(self.batch.names[lane])
        if self.count > self.batch.size and len(self._undecoded) >= self.batch.size:
            self._decode(self._undecoded[: self.batch.size])

    def _decode(self, images: list[int]) -> None:
        """Decode finished images to pixels."""
        pipe, call = self.pipe, self.call.select(images)
        self._undecoded = self._undecoded[len(images) :]
        if call.output_type == "latent":
            return
        began = call.now()
        tokens = self.tensors[pipe.decoded_tensor][self._index(images)]
        pixels = self.batch.with_room(pipe.decode_result, call, tokens).float()
        for image, finished in zip(images, pipe.to_images(call, pixels), strict=True):
            self._images[image] = finished
        self._tokenizer_seconds += call.now() - began
