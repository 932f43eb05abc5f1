"""Generates the images of many clients' requests with one worker thread, in batches."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from diffusers.image_processor import VaeImageProcessor
from PIL import Image

from ..decoding import decoding_to_text
from ..pipelines.base import ARImagePipeline
from ..pipelines.output import DecodingStats
from .models import ModelInfo, describe
from .plan import check
from .protocol import Limits, Progress, Refused, Request, Result
from .ticket import Ticket


logger = logging.getLogger(__name__)

# Drafts are mixed with grey: this share of it, and this brightness.
VEIL, GREY = 0.75, 0.85


class _Watch:
    """The callback after every forward pass of a batch: reports progress, makes previews, records which forward pass decided
    each token, and stops a batch that nobody waits for."""

    def __init__(self, parts: list[tuple[Ticket, slice]], info: ModelInfo):
        self.parts, self.info, self.late = parts, info, torch.tensor(0)

    def __call__(self, pipe: ARImagePipeline, step: int, passes: int, tensors: dict[str, torch.Tensor]) -> None:
        if all(ticket.future.done() for ticket, _ in self.parts):
            pipe._interrupt = True
            return
        tokens, decided = tensors["tokens"], tensors["decided"]
        self.late = self.late + (~decided).long()
        # Reading from an accelerator waits for it.
        counts = decided.sum(1).tolist() if tokens.device.type == "cpu" or passes % 8 == 0 else None
        for ticket, rows in self.parts:
            request = ticket.request
            due = request.preview_every > 0 and passes % request.preview_every == 0
            if counts is None and not due:
                continue
            so_far = ticket.finished.tokens + (int(decided[rows].sum()) if counts is None else sum(counts[rows]))
            share = min(request.previews, so_far * (request.previews + 1) // ticket.tokens)
            due, ticket.shown = due or share > ticket.shown, share
            previews = self._preview(pipe, rows, tokens[rows], decided[rows]) if due else None
            ticket.report(ticket.finished.passes + passes, so_far, previews)

    def _preview(
        self, pipe: ARImagePipeline, rows: slice, tokens: torch.LongTensor, decided: torch.BoolTensor
    ) -> list[Image.Image]:
        running = pipe.current_call
        assert running is not None
        call = running.select(rows)
        pixels = pipe.decode_tokens(call, tokens).float().clamp(-1, 1)
        if not pipe.generates_scales:
            # Drafts shine through; tokens not known yet (-1) are grey.
            veil = torch.where(decided, 0.0, torch.where(tokens >= 0, VEIL, 1.0))
            veil = call.layout.to_places(veil)[:, None]
            veil = torch.nn.functional.interpolate(veil, pixels.shape[-2:])
            pixels = pixels * (1 - veil) + (2 * GREY - 1) * veil
        return VaeImageProcessor().postprocess(pixels, output_type="pil")


class Engine:
    """Serves requests, first come, first served. Requests with the same model, decoding, sampling and size that wait together
    are generated as one batch; each image has its own generator, so it does not depend on the others.

    Args:
        pipelines: by the names that requests use.
        limits: which requests to accept.

    Attributes:
        models: the abilities of each pipeline, by name.
        on_batch: called in the engine's thread after every batch with the number of its images and its statistics.
        on_failure: called in the engine's thread when it ends by an error; requests are cancelled and refused from then on.
        failure: that error, or None.

    Raises:
        ValueError: if a pipeline takes neither text nor classes.
    """

    def __init__(self, pipelines: dict[str, ARImagePipeline], limits: Limits | None = None):
        self.limits = limits or Limits()
        self.models: dict[str, ModelInfo] = {}
        for name, pipe in pipelines.items():
            pipe.set_progress_bar_config(disable=True)
            self.models[name] = describe(pipe)
        self.on_batch: Callable[[int, DecodingStats], None] | None = None
        self.on_failure: Callable[[], None] | None = None
        self.failure: BaseException | None = None
        self._pipelines = pipelines
        self._waiting: list[Ticket] = []
        self._running: list[Ticket] = []
        self._arrived, self._closed = threading.Condition(), False
        self._worker = threading.Thread(target=self._work, name="arimage-engine", daemon=True)
        self._worker.start()

    @property
    def waiting(self) -> int:
        """The number of waiting requests."""
        return len(self._waiting)

    @property
    def alive(self) -> bool:
        """Whether it accepts requests."""
        return self._worker.is_alive() and not self._closed

    def submit(self, request: Request, on_progress: Callable[[Progress], None] | None = None) -> Ticket:
        """Queue a request. `on_progress` is called in the engine's thread, and must return at once.

        Raises:
            Refused: if the model is not able to do it, the limits do not allow it, the queue is full (`busy`) or the engine
                is closed.
        """
        if request.model not in self.models:
            raise Refused(f"there is no model {request.model[:80]!r}: choose among {', '.join(self.models)}", "model")
        info = self.models[request.model]
        plan = check(request, self._pipelines[request.model], info, self.limits)
        if request.image is not None and request.mask_image is not None:
            try:
                # Pillow reads the pixels only now.
                picture, mask = request.image.convert("RGB"), request.mask_image.convert("L")
            except OSError as error:
                raise Refused(f"image or mask_image cannot be read ({error}): send whole files", "image") from error
            request = replace(request, image=picture, mask_image=mask)
        ticket = Ticket(request, plan, self._drop, on_progress)
        with self._arrived:
            if self._closed:
                raise Refused("the engine is closed: start it again")
            if len(self._waiting) >= self.limits.queue:
                raise Refused(f"{self.limits.queue} requests are waiting already: try again later", busy=True)
            self._waiting.append(ticket)
            ticket.report(0, 0, queue_position=len(self._waiting))
            self._arrived.notify()
        return ticket

    def close(self) -> None:
        """Cancel all requests, and end the worker after the current forward pass."""
        with self._arrived:
            self._closed = True
            tickets = [*self._waiting, *self._running]
            self._arrived.notify()
        for ticket in tickets:
            ticket.cancel()
        self._worker.join()

    def _drop(self, ticket: Ticket) -> None:
        with self._arrived:
            if ticket in self._waiting:
                self._waiting.remove(ticket)

    def _work(self) -> None:
        try:
            self._generate_batches()
        # BaseException, because a SystemExit raised in a thread ends it without a message.
        except BaseException as error:
            logger.critical("the engine has failed", exc_info=True)
            with self._arrived:
                self.failure, self._closed = error, True
                tickets = [*self._waiting, *self._running]
            for ticket in tickets:
                ticket.cancel()
            if self.on_failure is not None:
                self.on_failure()

    def _generate_batches(self) -> None:
        while True:
            with self._arrived:
                idle = not self._waiting
                self._arrived.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
            if idle:
                time.sleep(self.limits.gathering)
            with self._arrived:
                batch = self._take()
            if batch:
                self._generate(batch)
            self._running = []

    def _take(self) -> list[tuple[Ticket, int]]:
        """The requests of the next batch, with the plan of the first one, and how many images of each. A request is taken
        as a whole unless it is larger than a batch."""
        batch, room = [], self.limits.batch
        for ticket in list(self._waiting):
            count = min(ticket.request.count - ticket.begun, self.limits.batch)
            if count <= room and ticket.plan == self._waiting[0].plan:
                batch.append((ticket, count))
                room -= count
        for ticket, count in batch:
            ticket.begun += count
            if ticket.begun == ticket.request.count:
                self._waiting.remove(ticket)
        self._running = [ticket for ticket, _ in batch]
        for position, ticket in enumerate(self._waiting, start=1):
            if not ticket.begun:
                ticket.report(0, 0, queue_position=position)
        return batch

    def _generate(self, batch: list[tuple[Ticket, int]]) -> None:
        try:
            self._generate_together(batch)
        except Exception as error:
            if len(batch) > 1:
                # Run each alone, so that only the request at fault fails.
                for part in batch:
                    self._generate([part])
                return
            ticket = batch[0][0]
            if not isinstance(error, ValueError):
                logger.exception("a request of %s failed", ticket.request.model)
            ticket.settle(Refused(str(error)) if isinstance(error, ValueError) else error)
            self._drop(ticket)

    def _generate_together(self, batch: list[tuple[Ticket, int]]) -> None:
        plan = batch[0][0].plan
        pipe, info = self._pipelines[plan.model], self.models[plan.model]
        requests = [ticket.request for ticket, count in batch for _ in range(count)]
        parts, seeds = [], []
        for ticket, count in batch:
            first = len(ticket.finished.images)
            parts.append((ticket, slice(len(seeds), len(seeds) + count)))
            seeds += ticket.seeds[first : first + count]
        arguments = {
            "height": plan.size[0],
            "width": plan.size[1],
            **{name: getattr(plan.sampling, name) for name in ("guidance_scale", "temperature", "top_k", "top_p")},
        }
        if info.classes is None:
            arguments["prompt"] = [request.prompt for request in requests]
        else:
            arguments["class_labels"] = [request.class_label for request in requests]
        if plan.negative_prompt is not None:
            arguments["negative_prompt"] = plan.negative_prompt
        if plan.edits:
            arguments["image"] = [request.image for request in requests]
            arguments["mask_image"] = [request.mask_image for request in requests]
        watch = _Watch(parts, info)
        began = time.perf_counter()
        output = pipe(
            **arguments,
            decoding=plan.decoding,
            generator=[torch.Generator().manual_seed(seed) for seed in seeds],
            callback_on_step_end=watch,
            callback_on_step_end_tensor_inputs=["tokens", "decided"],
        )
        seconds = time.perf_counter() - began
        if self.on_batch is not None:
            self.on_batch(len(seeds), output.stats)
        deciding = None if info.grid is None else (watch.late + 1).cpu().view(output.tokens.shape)
        for ticket, rows in parts:
            if ticket.future.done():
                continue
            finished = ticket.finished
            accepted = output.stats.accepted[:, rows]
            image_passes = (accepted > 0).sum(0).tolist()
            finished.images += output.images[rows]
            finished.image_passes += image_passes
            finished.deciding += [] if deciding is None else list(deciding[rows])
            finished.passes += max(image_passes)
            finished.tokens += int(accepted.sum())
            finished.seconds += seconds
            finished.exact = output.stats.exact
            if len(finished.images) == ticket.request.count:
                ticket.settle(self._result(ticket))

    def _result(self, ticket: Ticket) -> Result:
        request, plan, finished = ticket.request, ticket.plan, ticket.finished
        tokens = finished.tokens / request.count
        decoding = request.decoding or decoding_to_text(plan.decoding)
        condition = {"prompt": request.prompt} if request.class_label is None else {"class_label": request.class_label}
        negative = {} if plan.negative_prompt is None else {"negative_prompt": plan.negative_prompt}
        return Result(
            images=finished.images,
            seeds=ticket.seeds,
            passes=finished.passes,
            tokens_per_pass=sum(tokens / passes for passes in finished.image_passes) / request.count,
            seconds=finished.seconds,
            exact=finished.exact,
            decoding=decoding,
            deciding_pass=torch.stack(finished.deciding).numpy() if finished.deciding else None,
            settings={
                "model": request.model,
                **condition,
                **negative,
                "count": request.count,
                "seed": request.seed,
                "decoding": decoding,
                "guidance_scale": plan.sampling.guidance_scale,
                "temperature": plan.sampling.temperature,
                "top_k": plan.sampling.top_k,
                "top_p": plan.sampling.top_p,
                "height": plan.size[0],
                "width": plan.size[1],
            },
        )
