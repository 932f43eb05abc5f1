"""The demo's named endpoints, for gradio_client and REST."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, get_args

import gradio as gr
from PIL import Image

from ...decoding import Order
from ..engine.engine import Engine
from ..engine.ticket import Ticket
from ..engine.types import Progress, Request, Result
from .controls import client_of, events, random_seed
from .pictures import map_of, saved
from .race_tab import Comparison


ABOUT_GENERATE = """Generate images. Partial results arrive during the run: the images so far, and {passes, decided,
tokens, queue_position}. The last result has the finished PNGs, with their settings in the text field "arimage", and
{passes, head_calls, tokens_per_pass, seconds, exact, decoding, seeds, settings}."""
ABOUT_COMPARE = """Generate one image with several decodings and the same seed. After each decoding: the images so far,
maps of the forward pass that decided each token (none for next-scale models), and for each image {decoding, exact,
passes, head_calls, tokens_per_pass, seconds}."""
ABOUT_EDIT = """Generate a part of an image again. Partial results as in /generate; the last has the finished PNG."""
PROGRESS = ("passes", "decided", "tokens", "queue_position")
COST = ("decoding", "exact", "passes", "head_calls", "tokens_per_pass", "seconds")


def add_endpoints(engine: Engine, comparison: Comparison) -> None:
    """Add /generate, /compare and /edit to the demo that is being built."""
    models = list(engine.models)
    with gr.Row(visible=False):
        model = gr.Dropdown(models, value=models[0], label="model")
        prompt = gr.Textbox(label="prompt: for models that generate from text")
        class_label = gr.Number(label="class_label: for class-conditional models", precision=0)
        decoding = gr.Textbox(
            label="decoding: a name, or one with settings as in sjd-lazy:window=64; the model's by default"
        )
        decodings = gr.JSON(label="decodings: a list of 2 to 4, as decoding in /generate")
        seed = gr.Number(label="seed: a whole number; a random one by default", precision=0)
        count = gr.Number(1, label="count: images", precision=0)
        guidance_scale = gr.Number(label="guidance_scale: 1 is off; the model's by default, as the next three")
        temperature = gr.Number(label="temperature: above 0")
        top_k = gr.Number(label="top_k: 0 is off, 1 is greedy", precision=0)
        top_p = gr.Number(label="top_p: 1 is off")
        min_p = gr.Number(label="min_p: 0 is off; the model's by default")
        preview_every = gr.Number(
            4, label="preview_every: forward passes between partial images; 0 means none", precision=0
        )
        image = gr.Image(label="image: the image to change", type="pil", image_mode=None)
        mask_image = gr.Image(label="mask_image: white where to change the image", type="pil", image_mode=None)
        references = gr.Gallery(label="references: images that the model reads with the prompt", type="pil")
        width = gr.Number(label="width: in pixels, with height one of the sizes of the model", precision=0)
        height = gr.Number(label="height: in pixels", precision=0)
        negative_prompt = gr.Textbox(label="negative_prompt: what not to show, for models that accept it")
        order = gr.Dropdown(list(get_args(Order)), value=None, label="order: of the tokens, for models that accept it")
        num_inference_steps = gr.Number(
            label="num_inference_steps: from tokens to pixels, for models that accept them", precision=0
        )
        decoder_guidance_scale = gr.Number(label="decoder_guidance_scale: that of these steps")
        picture = gr.Image(label="picture", format="png")
        pictures = gr.Gallery(label="pictures", format="png")
        maps = gr.Gallery(label="maps", format="png")
        state = gr.JSON(label="progress of the run, then its cost")
        call = gr.Button()

    def submit_of(page: gr.Request) -> Callable[[Request], Ticket]:
        return lambda request: engine.submit(replace(request, client=client_of(page)))

    def run(page: gr.Request, request: Request) -> Iterator[tuple[list[str], dict]]:
        for event in events(submit_of(page), request):
            if isinstance(event, Result):
                yield [*map(saved, event.images)], _state(event, (*COST, "seeds", "settings"))
            elif event.previews or not event.passes or not request.preview_every:
                yield [*map(saved, event.previews or [])], _state(event, PROGRESS)

    def asked(decoding: str | None, seed: int | None, **fields: Any) -> Request:
        return Request(decoding=decoding or None, seed=random_seed() if seed is None else seed, **fields)

    def generate(
        page: gr.Request,
        prompt: str | None = None,
        model: str = models[0],
        class_label: int | None = None,
        decoding: str | None = None,
        seed: int | None = None,
        count: int = 1,
        guidance_scale: float | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        preview_every: int = 4,
        min_p: float | None = None,
        references: list[tuple[Image.Image, str | None]] | None = None,
        width: int | None = None,
        height: int | None = None,
        negative_prompt: str | None = None,
        order: Any = None,
        num_inference_steps: int | None = None,
        decoder_guidance_scale: float | None = None,
    ) -> Iterator[tuple[list[str], dict]]:
        request = asked(
            decoding,
            seed,
            model=model,
            prompt=prompt,
            class_label=class_label,
            count=count,
            guidance_scale=guidance_scale,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            references=tuple(image for image, _ in references or []),
            width=width,
            height=height,
            negative_prompt=negative_prompt,
            order=order,
            num_inference_steps=num_inference_steps,
            decoder_guidance_scale=decoder_guidance_scale,
            preview_every=preview_every,
        )
        yield from run(page, request)

    def compare(
        page: gr.Request,
        prompt: str | None = None,
        model: str = models[0],
        class_label: int | None = None,
        decodings: list[str] | None = None,
        seed: int | None = None,
    ) -> Iterator[tuple[list[str], list[str], list[dict]]]:
        request = {"prompt": prompt, "class_label": class_label, "seed": random_seed() if seed is None else seed}
        results, runs = [], [(model, decoding) for decoding in decodings or []]
        for _, event in comparison.run(submit_of(page), request, runs):
            if isinstance(event, Result):
                results.append(event)
                images = [saved(image) for result in results for image in result.images]
                passes = [saved(map_of(each.deciding_pass[0])) for each in results if each.deciding_pass is not None]
                yield images, passes, [_state(result, COST) for result in results]

    def edit(
        page: gr.Request,
        image: Image.Image | None,
        mask_image: Image.Image | None,
        prompt: str | None = None,
        model: str = models[0],
        class_label: int | None = None,
        decoding: str | None = None,
        seed: int | None = None,
        preview_every: int = 4,
    ) -> Iterator[tuple[str | None, dict]]:
        subject = {"model": model, "prompt": prompt, "class_label": class_label}
        images = {"image": image, "mask_image": mask_image}
        request = asked(decoding, seed, **subject, **images, preview_every=preview_every)
        for pictures, state in run(page, request):
            yield pictures[0] if pictures else None, state

    subject = [prompt, model, class_label]
    sampling = [guidance_scale, temperature, top_k, top_p]
    others = [references, width, height, negative_prompt, order, num_inference_steps, decoder_guidance_scale]
    asks = [*subject, decoding, seed, count, *sampling, preview_every, min_p, *others]
    call.click(generate, asks, [pictures, state], api_name="generate", api_description=ABOUT_GENERATE)
    asks = [*subject, decodings, seed]
    call.click(compare, asks, [pictures, maps, state], api_name="compare", api_description=ABOUT_COMPARE)
    asks = [image, mask_image, *subject, decoding, seed, preview_every]
    call.click(edit, asks, [picture, state], api_name="edit", api_description=ABOUT_EDIT)


def _state(event: Progress | Result, names: tuple[str, ...]) -> dict:
    return {name: getattr(event, name) for name in names}
