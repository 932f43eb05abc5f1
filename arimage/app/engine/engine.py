"""Generates the images of requests from many clients with one worker thread and continuous batching."""

import bisect
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from tqdm import tqdm

from ...cli.made import notes_of
from ...pipelines.base import ARImagePipeline
from .adapters import NAME, Active, name_in_pipeline
from .batch import Parts, RequestBatch
from .models import SAMPLE_PROMPT, ModelInfo, describe
from .ticket import Ticket
from .types import NOTED, Cancelled, Limits, Progress, Refused, Request
from .uploads import reduce_uploads
from .validation import Plan, check, check_types, with_class


logger = logging.getLogger(__name__)

# After so many failed requests in a row, the engine checks whether its models still work.
FAILURES = 3
# What a request is refused with that leaves a full queue.
MADE_ROOM = "this request made room for one of a client with fewer waiting requests: try again later"


def unloaded(model: str) -> str:
    """Why a request for an adapter is refused that was unloaded meanwhile."""
    return f"{model} was unloaded: choose another model"


class Engine:
    """Serves requests, first come, first served. Clients with several waiting requests take turns, image for image,
    and the last one of the client with the most leaves a full queue for one of a client with fewer. Images with the
    same model, decoding and size, all with or all without guidance, share a batch: an image begins as soon as another
    makes room, unless a request of another kind is first in the queue. Each image has its own seed and settings and
    does not depend on the others. For next-scale models and continuous tokens, images that share a batch have equal
    settings.

    Args:
        pipelines: the pipelines by the names that requests use.
        limits: which requests to accept.
        adapters: which adapters are active for a model, and for those that share its pipeline; see `active_adapters`.

    Attributes:
        models: the abilities of each pipeline, by name.
        on_begin: called in the engine's thread with the model of a request that begins, and the seconds it waited.
        on_pass: called in the engine's thread after every forward pass with its model and the number of images in it.
        on_images: called in a thread of the engine with a model, the number of finished images, and of their tokens.
        on_failure: called in a thread of the engine when an error ends it; all requests are then cancelled, and new
            ones refused. Errors of a request end only the request. An error of the device ends the engine, and so do
            several failed requests in a row if no model generates an image of its defaults either.
        failure: the error that ended the engine, or None.

    Raises:
        ValueError: if a pipeline cannot generate from a text or a class alone.
    """

    def __init__(
        self,
        pipelines: dict[str, ARImagePipeline],
        limits: Limits | None = None,
        adapters: Mapping[str, Active] | None = None,
    ):
        self.limits = limits or Limits()
        self.models: dict[str, ModelInfo] = {}
        for name, pipe in pipelines.items():
            pipe.set_progress_bar_config(disable=True)
            self.models[name] = describe(name, pipe, self.limits)
        self.on_begin: Callable[[str, float], None] = lambda model, seconds: None
        self.on_pass: Callable[[str, int], None] = lambda model, images: None
        self.on_images: Callable[[str, int, int], None] = lambda model, images, tokens: None
        self.on_failure: Callable[[], None] | None = None
        self.failure: BaseException | None = None
        self._pipelines, self._adapters = pipelines, dict(adapters or {})
        # What is done when no images are being generated.
        self._changes: list[tuple[Callable[[], None], Future]] = []
        # In the order of their turns.
        self._waiting: list[Ticket] = []
        # That of the last request that began: the number of images that a client which always waits has had.
        self._turn = 0
        self._running: list[Ticket] = []
        self._arrived, self._closed = threading.Condition(), False
        # Failed requests since the last finished image.
        self._failures = 0
        self._decoder = ThreadPoolExecutor(1, "arimage-decoder")
        # Images whose tokens are decided, and whose pixels the decoder's thread has not decoded yet.
        self._undecoded = 0
        self._worker = threading.Thread(target=self._work, name="arimage-engine", daemon=True)
        self._worker.start()

    @property
    def waiting(self) -> int:
        """The number of waiting requests."""
        return len(self._waiting)

    @property
    def alive(self) -> bool:
        """Whether the engine accepts requests."""
        return self._worker.is_alive() and not self._closed

    def submit(self, request: Request, on_progress: Callable[[Progress], None] | None = None) -> Ticket:
        """Queue a request. `on_progress` is called in the engine's thread, and must return at once.

        Raises:
            Refused: if the model does not support the request, the limits do not allow it, or the queue is full
                (`busy`).
            Cancelled: if the engine is closed.
        """
        request, plan = self.check(request)
        request = reduce_uploads(request, self._info(request.model))
        ticket = self._ticket(request, plan, on_progress)
        pipe = self._pipelines[request.model]
        if pipe.known_captions is not None and request.prompt is not None:
            ticket.unknown = pipe.known_captions.check(request.prompt, request.model)
        with self._arrived:
            if self._closed:
                raise Cancelled("the engine is closed: start it again")
            if request.model not in self.models:
                raise Refused(unloaded(request.model), "model")
            ticket.turn = max(
                [
                    self._turn,
                    *(one.turn + one.request.count for one in self._waiting if one.request.client == request.client),
                ]
            )
            surplus = None
            if len(self._waiting) >= self.limits.queue:
                surplus = self._waiting[-1]
                if surplus.turn <= ticket.turn or surplus.begun:
                    raise Refused(f"{self.limits.queue} requests are waiting already: try again later", busy=True)
                self._waiting.pop()
            bisect.insort(self._waiting, ticket, key=lambda one: one.turn)
            ticket.report(0, 0, queue_position=self._waiting.index(ticket) + 1)
            self._arrived.notify()
        if surplus is not None:
            surplus.settle(Refused(MADE_ROOM, busy=True))
        return ticket

    def check(self, request: Request) -> tuple[Request, Plan]:
        """A request with the id of the class that its prompt names, and its plan.

        Raises:
            Refused: if the model does not support the request, or the limits do not allow it.
        """
        check_types(request)
        info, pipe = self._info(request.model), self._pipelines[request.model]
        request = with_class(request, pipe)
        return request, check(request, pipe, info, self.limits)

    def _info(self, model: str) -> ModelInfo:
        # Another thread may unload it at any time.
        models = self.models
        if model not in models:
            raise Refused(f"unknown model {model[:80]!r}: choose among {', '.join(models)}", "model")
        return models[model]

    def made_with(self, model: str) -> dict[str, Any]:
        """The model without an adapter of its own, and the active adapters, FILE:SCALE each, of one of `models`."""
        return {"model": self._pipelines_of(model)[0], "lora": self._adapters.get(model, Active([], [], [])).texts}

    def load_adapter(self, model: str, name: str, source: Path, scale: float) -> str:
        """Load an adapter of a model when no images are being generated, and return the name by which requests choose
        it, MODEL:NAME.

        Raises:
            Refused: if the name is taken or unsuitable, or the adapter does not fit the model.
            Cancelled: if the engine is closed.
        """
        if not NAME.fullmatch(name):
            raise Refused(f"the name {name[:80]!r} has other characters than letters, digits, _ and -", "lora_name")
        pipe, adapted, own = self._pipelines[model], f"{model}:{name}", name_in_pipeline(name)

        def load() -> None:
            if adapted in self.models:
                raise Refused(f"there is a model {adapted} already: unload it, or choose another name", "lora_name")
            if self._pipelines_of(model)[0] != model:
                raise Refused(f"{model} has an adapter itself: name the model without one", "model")
            always = self._adapters.setdefault(model, Active([], [], []))
            try:
                pipe.load_lora_weights(source, adapter_name=own)
            except ValueError as error:
                raise Refused(str(error), "lora_path") from error
            pipe.set_adapters(always.names, always.scales)
            self._adapters[adapted] = always.with_one(own, source, scale)
            # Other threads read these.
            self._pipelines = self._pipelines | {adapted: pipe}
            self.models = self.models | {adapted: self.models[model]}

        self._change(load)
        return adapted

    def unload_adapter(self, adapted: str) -> None:
        """Free an adapter, MODEL:NAME, when no images are being generated. Requests that wait for it are refused.

        Raises:
            Refused: if no adapter has this name.
            Cancelled: if the engine is closed.
        """

        def unload() -> None:
            if adapted not in self.models or self._pipelines_of(adapted)[0] == adapted:
                raise Refused(f"{adapted[:80]!r} is not a loaded adapter: name one of /v1/models", "lora_name")
            pipe, base = self._pipelines[adapted], self._pipelines_of(adapted)[0]
            with self._arrived:
                waiting = [ticket for ticket in self._waiting if ticket.plan.model == adapted]
                self.models = {name: info for name, info in self.models.items() if name != adapted}
            for ticket in waiting:
                ticket.settle(Refused(unloaded(adapted), "model"))
                self._drop(ticket)
            always = self._adapters[base]
            pipe.set_adapters(always.names, always.scales)
            pipe.delete_adapters(self._adapters.pop(adapted).names[-1])
            if not pipe.get_list_adapters():
                pipe.unload_lora_weights()

        self._change(unload)

    def _pipelines_of(self, model: str) -> list[str]:
        """The models that share the pipeline of one, the one without an adapter of its own first."""
        return [name for name in self.models if self._pipelines[name] is self._pipelines[model]]

    def _change(self, change: Callable[[], None]) -> None:
        """Do something in the engine's thread when no images are being generated, and wait for it."""
        future = Future()
        with self._arrived:
            if self._closed:
                raise Cancelled("the engine is closed: start it again")
            self._changes.append((change, future))
            self._arrived.notify()
        future.result()

    def captures(self, model: str) -> bool:
        """Whether the steps of a model are captured."""
        return self._pipelines[model].captures

    def until_captured(self, model: str) -> Iterator[None]:
        """See `ARPipeline.until_captured`."""
        return self._pipelines[model].until_captured()

    def warm_up(self) -> None:
        """Where steps are captured, on a CUDA device, capture those of each model's defaults for one image and for a
        full batch, with a progress bar. Called before requests are accepted.

        Raises:
            Exception: if a model does not generate them, for example because a full batch does not fit into memory.
        """
        sizes = sorted({1, self.limits.batch})
        kinds = [(name, size) for name in self.models if self.captures(name) for size in sizes]
        with tqdm(kinds, desc="warming up", unit="batch", disable=not kinds) as progress:
            for name, size in progress:
                progress.set_postfix_str(f"{name}, {size} at a time")
                for _ in self.until_captured(name):
                    error = self._run_now([self._default_ticket(name) for _ in range(size)])
                    if error is not None:
                        raise error

    def close(self) -> None:
        """Cancel all requests, and end the worker after the current forward pass."""
        with self._arrived:
            self._closed = True
            tickets = [*self._waiting, *self._running]
            self._arrived.notify()
        for ticket in tickets:
            ticket.cancel()
        self._worker.join()
        self._decoder.shutdown()

    def fail(self, error: BaseException) -> None:
        """End the engine because of an error that every later request would meet too, such as one of the device, and
        cancel all requests. May be called in any thread."""
        with self._arrived:
            if self.failure is not None:
                return
            self.failure, self._closed = error, True
            tickets = [*self._waiting, *self._running]
            self._arrived.notify()
        logger.critical("the engine has failed", exc_info=error)
        for ticket in tickets:
            ticket.cancel()
        if self.on_failure is not None:
            self.on_failure()

    def _ticket(self, request: Request, plan: Plan, on_progress: Callable[[Progress], None] | None = None) -> Ticket:
        # Images with and without an order cannot share a batch.
        raster = plan.order == "raster" and not plan.edits
        kind = (plan.model, plan.decoding, plan.size, plan.sampling.guided, raster, plan.reads)
        if self._pipelines[request.model].abilities.kind != "tokens":
            kind = (plan.model, plan.decoding, plan)
        return Ticket(request, plan, kind, self._drop, on_progress, self._notes if self.limits.metadata else None)

    def _notes(self, ticket: Ticket, images: list[Image.Image]) -> list[str]:
        """The metadata of the images of a request."""
        request = ticket.request
        given = {name: getattr(request, name) for name in NOTED} | self.made_with(request.model)
        given |= {"decoding": ticket.decoding, "batch_size": ticket.finished.lanes, "made_from": ticket.inputs}
        pipe = self._pipelines[request.model]
        return notes_of(pipe, given, [{}], images, ticket.seeds, ticket.plan.reads)[0]

    def _drop(self, ticket: Ticket) -> None:
        with self._arrived:
            if ticket in self._waiting:
                self._waiting.remove(ticket)

    def _work(self) -> None:
        try:
            self._generate()
        # BaseException, because a SystemExit raised in a thread ends it without a message.
        except BaseException as error:
            self.fail(error)
        for _, future in self._changes:
            future.set_exception(Cancelled("the engine is closed: start it again"))

    def _generate(self) -> None:
        while True:
            with self._arrived:
                idle = not self._waiting
                self._arrived.wait_for(lambda: self._closed or self._may_change or (self._waiting and self._has_room))
                if self._closed:
                    return
            if self._may_change:
                self._do(*self._changes.pop(0))
                continue
            if self._failures >= FAILURES:
                self._check_models()
            if idle:
                time.sleep(self.limits.gathering)
            with self._arrived:
                first = self._waiting[0] if self._waiting else None
            if first is not None:
                self._run(first, self._take)

    def _run(self, first: Ticket, take: Callable[[int, tuple], Parts]) -> Exception | None:
        """Generate the images of requests of the same kind as `first`. Returns the error that ended their batch."""
        model = first.plan.model
        pipe, adapters = self._pipelines[model], self._adapters.get(model)
        if adapters is not None and pipe.get_active_adapters() != adapters.names:
            pipe.set_adapters(adapters.names, adapters.scales)
        # Pixels that are decoded later would meet the adapters of another batch.
        several = len(self._pipelines_of(model)) > 1
        at_once = pipe.abilities.decodes_quickly or pipe.has_hooks or several
        return RequestBatch(
            pipe,
            first.kind,
            self.limits.batch,
            take,
            self._give_back,
            self._fail,
            lambda images: self.on_pass(model, images),
            partial(self._count, model),
            None if at_once else self._decode_later,
        ).run()

    def _check_models(self) -> None:
        """Raise the error of the last model unless one of them generates an image of its defaults."""
        error = None
        for name in self.models:
            error = self._run_now([self._default_ticket(name)])
            if error is None or isinstance(error, Cancelled):
                return
        assert error is not None
        raise error

    def _default_ticket(self, name: str) -> Ticket:
        """One image of the defaults of a model."""
        if self.models[name].classes is None:
            request = Request(name, prompt=SAMPLE_PROMPT[: self.limits.prompt_characters])
        else:
            request = Request(name, class_label=0)
        return self._ticket(*self.check(request))

    def _run_now(self, tickets: list[Ticket]) -> BaseException | None:
        """Generate the images of requests of one kind, which are not in the queue, in this thread. Returns the error
        that ended the engine, or that of the first request that failed."""
        with self._arrived:
            if self._closed:
                return Cancelled("the engine is closed: start it again")
            # If the engine ends, so do they.
            self._running += tickets
        parts = [[(ticket, [0]) for ticket in tickets]]
        error = self._run(tickets[0], lambda room, kind: parts.pop() if parts else [])
        if error is not None:
            # Several requests at once are given back to the queue.
            for ticket in tickets:
                ticket.cancel()
            return error
        failed = next(filter(None, (ticket.future.exception() for ticket in tickets)), None)
        return self.failure or failed

    @property
    def _has_room(self) -> bool:
        """Whether more images may begin: while as many wait for the decoder as fit into a batch, none may, and none
        before what is done between images."""
        return self._undecoded < self.limits.batch and not self._changes

    @property
    def _may_change(self) -> bool:
        """Whether something is to be done between images, and none is being decoded to pixels."""
        return bool(self._changes) and not self._undecoded

    def _do(self, change: Callable[[], None], future: Future) -> None:
        try:
            change()
            future.set_result(None)
        except Exception as error:
            future.set_exception(error)
            if isinstance(error, torch.AcceleratorError):
                raise

    def _decode_later(self, decode: Callable[[], None]) -> None:
        """Run `decode`, which decodes an image to pixels, in the decoder's thread."""

        def run() -> None:
            try:
                decode()
            except torch.AcceleratorError as error:
                self.fail(error)
            finally:
                with self._arrived:
                    self._undecoded -= 1
                    self._arrived.notify()

        with self._arrived:
            self._undecoded += 1
        self._decoder.submit(run)

    def _count(self, model: str, images: int, tokens: int) -> None:
        self._failures = 0
        self.on_images(model, images, tokens)

    def _fail(self, ticket: Ticket, error: Exception) -> None:
        """End a request that has failed."""
        self._failures += 1
        if not isinstance(error, ValueError):
            logger.error("a request of %s failed", ticket.request.model, exc_info=error)
        ticket.settle(Refused(str(error)) if isinstance(error, ValueError) else error)
        self._drop(ticket)

    def _take(self, room: int, kind: tuple) -> list[tuple[Ticket, list[int]]]:
        """Requests of this kind with equal plans, and the indices of those of their images that begin, at most `room`;
        none if a request of another kind is first in the queue."""
        parts = []
        with self._arrived:
            self._running = [ticket for ticket in self._running if not ticket.future.done()]
            blocked = self._closed or self._failures >= FAILURES or not self._has_room
            if blocked or not self._waiting or self._waiting[0].kind != kind:
                return parts
            first = self._waiting[0]
            for ticket in list(self._waiting):
                if ticket.kind == kind and ticket.plan == first.plan and room:
                    self._turn = max(self._turn, ticket.turn)
                    if not ticket.begun:
                        self.on_begin(ticket.plan.model, ticket.waited)
                    indices = [ticket.unbegun.popleft() for _ in range(min(room, len(ticket.unbegun)))]
                    room -= len(indices)
                    parts.append((ticket, indices))
                    if ticket not in self._running:
                        self._running.append(ticket)
                    if not ticket.unbegun:
                        self._waiting.remove(ticket)
            for position, ticket in enumerate(self._waiting, start=1):
                if not ticket.begun:
                    ticket.report(0, 0, queue_position=position)
        return parts

    def _give_back(self, ticket: Ticket) -> None:
        ticket.again()
        with self._arrived:
            if ticket not in self._waiting and not ticket.future.done():
                bisect.insort_left(self._waiting, ticket, key=lambda one: one.turn)
