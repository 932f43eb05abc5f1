"""Continuous batching: images of requests pass through the lanes of one batch."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from diffusers.image_processor import VaeImageProcessor
from PIL import Image

from ...decoding.run.batch import INTERVAL, Batch, Images, run_batch
from ...media.film import Film
from ...media.trace import draw_steps, is_known
from ...pipelines.base import ARImagePipeline
from ...pipelines.call import GenerationCall, running
from .ticket import Ticket
from .types import FILM_STEPS, SAMPLING


# Drafts are mixed with grey: the share of grey, and its brightness.
VEIL, GREY = 0.75, 0.85

# Requests, and the indices of those of their images that begin.
Parts = list[tuple[Ticket, list[int]]]


@dataclass(eq=False)
class Place:
    """An image that is being generated: image `index` of a request, and image `number` of the call that prepared it.
    `began` counts the forward passes of the request before the image. If a film is requested, `recorded` has the
    tokens, which of them are decided, and the seconds, after each forward pass."""

    ticket: Ticket
    index: int
    call: GenerationCall
    number: int
    began: int
    recorded: list[tuple[torch.LongTensor, torch.BoolTensor, float]] = field(default_factory=list)


class RequestBatch:
    """Generates images that may share a batch, as long as there are requests: each image begins when there is room,
    and is delivered when it is finished.

    Args:
        kind: the properties that all requests of the batch share, see `Ticket.kind`.
        size: how many images are generated at a time.
        take: called with the number of images that may begin and their kind; takes images of requests with equal plans
            out of the queue, or returns an empty list.
        give_back: called with a request after a failure that another request may have caused, so that it is generated
            alone.
        fail: called with a request that has failed, and the error.
        on_pass: called after every forward pass with the number of images in it.
        on_images: called with the number of finished images and their tokens.
        decode_later: calls a function, which decodes an image to pixels, in another thread where that takes long, so
            that other images go on; None decodes in the thread of the batch.
    """

    def __init__(
        self,
        pipe: ARImagePipeline,
        kind: tuple,
        size: int,
        take: Callable[[int, tuple], Parts],
        give_back: Callable[[Ticket], None],
        fail: Callable[[Ticket, Exception], None],
        on_pass: Callable[[int], None],
        on_images: Callable[[int, int], None],
        decode_later: Callable[[Callable[[], None]], None] | None = None,
    ):
        self.pipe, self.kind, self._take, self._give_back, self._fail = pipe, kind, take, give_back, fail
        self._on_pass, self._on_images, self._decode_later = on_pass, on_images, decode_later
        self._batch = Batch(kind[1], size, pipe.steps_of(kind[1]))
        # The images that the current forward pass prefills.
        self._beginning: list[Place] = []
        # Int64 [lanes, N], the forward passes before the one that decided each token, of the images `_counted`.
        self._late = torch.zeros(0, 0, dtype=torch.long)
        self._counted: list[Place | None] = []
        # Requests that failed when prepared together, and are prepared one by one.
        self._retried: list[Parts] = []

    @torch.no_grad()
    def run(self) -> Exception | None:
        """Generate until no request of this kind is left. Returns the error that ended the batch before, if one did.

        Raises:
            torch.AcceleratorError: after an error of the device, from which no process recovers.
        """
        try:
            run_batch(self._batch, self._begin, self._deliver, self._on_step)
        except torch.AcceleratorError:
            raise
        except Exception as error:
            places = [*self._beginning, *(self._batch.names[lane] for lane in self._batch.running)]
            suspects = list(dict.fromkeys(place.ticket for place in places))
            if len(suspects) == 1:
                self._fail(suspects.pop(), error)
            waiting = [ticket for parts in self._retried for ticket, _ in parts]
            # Each on its own, so that only the request at fault fails.
            for ticket in dict.fromkeys([*suspects, *waiting]):
                self._give_back(ticket)
            return error
        return None

    def _begin(self, room: int) -> Images | None:
        while parts := self._retried.pop(0) if self._retried else self._take(room, self.kind):
            parts = [(ticket, indices) for ticket, indices in parts if not ticket.future.done()]
            try:
                if parts:
                    return self._prepare(parts)
            except torch.AcceleratorError:
                raise
            except Exception as error:
                if len(parts) == 1:
                    self._fail(parts[0][0], error)
                else:
                    self._retried += [[part] for part in parts]
        return None

    def _prepare(self, parts: Parts) -> Images:
        plan = parts[0][0].plan
        images = [(ticket, index) for ticket, indices in parts for index in indices]
        requests = [ticket.request for ticket, _ in images]
        arguments = {
            "height": plan.size[0],
            "width": plan.size[1],
            **{name: getattr(plan.sampling, name) for name in SAMPLING if self.pipe.abilities.accepts(name)},
        }
        if requests[0].class_label is None:
            arguments["prompt"] = [request.prompt for request in requests]
        else:
            arguments["class_labels"] = [request.class_label for request in requests]
        arguments |= dict(plan.decoder)
        if plan.negative_prompt is not None:
            arguments["negative_prompt"] = plan.negative_prompt
        if plan.order is not None:
            arguments |= {"order": plan.order, "decoding": plan.decoding}
        if plan.edits:
            arguments["image"] = [request.image for request in requests]
            arguments["mask_image"] = [request.mask_image for request in requests]
        if plan.reads:
            name = "image_reference" if plan.edits else "image"
            arguments[name] = [list(request.references) for request in requests]
        generators = [torch.Generator().manual_seed(ticket.seeds[index]) for ticket, index in images]
        for ticket, _ in parts:
            ticket.start()
        call = self.pipe.prepare(**arguments, generator=generators)
        self._beginning = [
            Place(ticket, index, call, number, ticket.passes) for number, (ticket, index) in enumerate(images)
        ]
        # Pixels may be decoded in another thread after other images have taken their lanes.
        return Images(self._beginning, call.model, call.sampling, call.seeds).copy()

    def _on_step(self) -> bool:
        batch, state = self._batch, self._batch.state
        self._on_pass(len(batch.running))
        batch.release([lane for lane in batch.running if batch.names[lane].ticket.future.done()])
        # A prefill is a forward pass of its own images only.
        lanes = [lane for lane in batch.running if not self._beginning or batch.names[lane] in self._beginning]
        decided = state.decided
        self._count_late(~decided, lanes if self._beginning else None)
        self._beginning = []
        by_ticket: dict[Ticket, list[int]] = {}
        for lane in lanes:
            place = batch.names[lane]
            by_ticket.setdefault(place.ticket, []).append(lane)
            if place.ticket.request.film and place.index == 0:
                place.recorded.append((state.tokens[lane].clone(), decided[lane].clone(), place.ticket.seconds))
        # Reading from an accelerator synchronizes with it.
        on_cpu = decided.device.type == "cpu"
        counts = decided.sum(1).tolist() if on_cpu or batch.forward_passes % INTERVAL == 0 else None
        for ticket, its_lanes in by_ticket.items():
            ticket.calls_per_pass.append(batch.calls_per_pass[-1])
            ticket.finished.lanes = max(ticket.finished.lanes, len(batch.names))
            self._report(ticket, its_lanes, counts)
        return False

    def _count_late(self, undecided: torch.BoolTensor, lanes: list[int] | None) -> None:
        """Count a forward pass of the images in `lanes`, by default of all, after which `undecided` [lanes, N] tokens
        are left."""
        if self._counted != self._batch.names:
            before = {place: lane for lane, place in enumerate(self._counted)}
            self._counted = list(self._batch.names)
            kept = [(lane, before[place]) for lane, place in enumerate(self._counted) if place in before]
            old, self._late = self._late, undecided.new_zeros(undecided.shape, dtype=torch.long)
            if kept:
                to, source = torch.tensor(kept, device=old.device).T
                self._late[to] = old[source]
        if lanes is None:
            self._late += undecided
        else:
            # There are none if nobody waits any more for the images that begin.
            at = torch.tensor(lanes, dtype=torch.long, device=undecided.device)
            self._late[at] += undecided[at]

    def _report(self, ticket: Ticket, lanes: list[int], counts: list[int] | None) -> None:
        """Report the progress of a request whose images are in `lanes`, with `counts` decided tokens each, if
        known."""
        request, state = ticket.request, self._batch.state
        due = request.preview_every > 0 and ticket.passes % request.preview_every == 0
        if counts is None and not due:
            return
        decided: list[int] = state.decided.sum(1).tolist() if counts is None else counts
        so_far = ticket.finished.tokens + sum(decided[lane] for lane in lanes)
        share = min(request.previews, so_far * (request.previews + 1) // ticket.tokens)
        due, ticket.shown = due or share > ticket.shown, share
        previews = None
        if due:
            previews = []
            for lane in sorted(lanes, key=lambda lane: self._batch.names[lane].index):
                place = self._batch.names[lane]
                call = place.call.select([place.number])
                shown = partial(preview, self.pipe, call, state.tokens[lane][None], state.decided[lane][None])
                previews += self._batch.with_room(shown)
        ticket.report(ticket.passes, so_far, previews)

    def _deliver(self, lanes: list[int]) -> None:
        """Decode the images in `lanes` to pixels and deliver them; an error affects only the request of its image."""
        batch, size = self._batch, self._batch.state.model.num_tokens
        try:
            batch.state.check([place.index if lane in lanes else None for lane, place in enumerate(batch.names)])
            images = self._images(lanes) if self._decode_later is None else {}
        except torch.AcceleratorError:
            raise
        except Exception as error:
            if len(lanes) > 1:
                for lane in lanes:
                    self._deliver([lane])
            else:
                self._fail(self._batch.names[lanes[0]].ticket, error)
            return
        seconds = [batch.names[lane].ticket.seconds for lane in lanes]
        if self._decode_later is None:
            self._on_images(len(lanes), len(lanes) * size)
        for lane, passes, ended in zip(lanes, batch.passes_of(lanes), seconds, strict=True):
            place = batch.names[lane]
            # On an accelerator, the host sees a few steps late that an image is finished.
            del place.recorded[passes:]
            deciding = None
            if not self.pipe.abilities.in_maps:
                deciding = place.call.select([place.number]).layout.to_places(self._late[lane][None] + 1)[0].cpu()
            film = self._film(place, ended) if place.recorded else None
            place.ticket.decide(place.index, passes, place.began + passes, size, deciding, film)
            if self._decode_later is None:
                place.ticket.finish(place.index, images[lane], ended)
            else:
                result = getattr(batch.state, self.pipe.decoded_tensor)[lane][None].clone()
                self._decode_later(partial(self._deliver_later, place, result, size))
        running = {batch.names[lane].ticket for lane in batch.running if lane not in lanes}
        for ticket in {batch.names[lane].ticket for lane in lanes} - running:
            ticket.forget_idle_passes()

    @torch.no_grad()
    def _deliver_later(self, place: Place, result: torch.Tensor, tokens: int) -> None:
        """Decode one image of `tokens` tokens to pixels and deliver it, in another thread."""
        if place.ticket.future.done():
            return
        try:
            [image] = self._decode(place.call, [place.number], result)
            self._on_images(1, tokens)
            place.ticket.finish(place.index, image, place.ticket.seconds)
        except torch.AcceleratorError:
            raise
        except Exception as error:
            self._fail(place.ticket, error)

    def _film(self, place: Place, ended: float) -> Film:
        """The film of an image that was finished after `ended` seconds."""
        pipe, request, count = self.pipe, place.ticket.request, len(place.recorded)
        steps = [count * frame // min(count, FILM_STEPS) for frame in range(min(count, FILM_STEPS))]
        tokens, decided = (torch.stack([each[part] for each in place.recorded]).cpu() for part in (0, 1))
        call = place.call.select([place.number])
        title = f"{request.model}, {place.ticket.decoding}: {request.prompt or f'class {request.class_label}'}"
        layout = None if pipe.abilities.in_maps else call.layout
        with running(pipe, call):
            frames = draw_steps(tokens, decided, layout, partial(pipe.preview, call), title, steps)
        return Film(frames, [*(place.recorded[step][2] for step in steps), ended], count)

    def _images(self, lanes: list[int]) -> dict[int, Image.Image]:
        batch = self._batch
        images: dict[int, Image.Image] = {}
        results = getattr(batch.state, self.pipe.decoded_tensor)
        for call in {id(call): call for call in (batch.names[lane].call for lane in lanes)}.values():
            some = [lane for lane in lanes if batch.names[lane].call is call]
            shown = self._decode(call, [batch.names[lane].number for lane in some], results[some])
            images.update(zip(some, shown, strict=True))
        return images

    def _decode(self, call: GenerationCall, numbers: list[int], results: torch.Tensor) -> list[Image.Image]:
        part = call.select(numbers)
        with running(self.pipe, call):
            pixels = self._batch.with_room(self.pipe.decode_result, part, results).float()
        return list(self.pipe.to_images(part, pixels))


def preview(
    pipe: ARImagePipeline, call: GenerationCall, tokens: torch.Tensor, decided: torch.BoolTensor
) -> list[Image.Image]:
    """Images of the tokens so far of one image, [1, N] or continuous [1, N, D], with those that are not `decided`
    [1, N] greyed out."""
    with running(pipe, call):
        pixels = pipe.preview(call, tokens).float().clamp(-1, 1)
    if not pipe.abilities.in_maps:
        # Drafts are visible through the grey; unknown tokens are plain grey.
        veil = torch.where(decided, 0.0, torch.where(is_known(tokens), VEIL, 1.0))
        veil = call.layout.current(veil, is_known(tokens))[:, None]
        veil = torch.nn.functional.interpolate(veil, pixels.shape[-2:])
        pixels = pixels * (1 - veil) + (2 * GREY - 1) * veil
    return VaeImageProcessor().postprocess(pixels, output_type="pil")
