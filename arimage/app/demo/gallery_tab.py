"""The tab that shows the pictures that the models know."""

from functools import cache
from html import escape
from pathlib import Path

import gradio as gr
import numpy as np
from PIL import Image

from ...media.gallery import GALLERY_SIZE, read_gallery
from ..engine.engine import Engine
from .controls import AT_ONCE, refusal
from .generate_tab import GenerateTab
from .pictures import webp_uri


COLUMNS = 32
# Sends the name of the picture that is clicked.
CLICK = """element.addEventListener("click", ({target}) => {
    const picture = target.closest("[data-name]");
    if (picture) trigger("click", {name: picture.dataset.name});
})"""
# Hides pictures unless every word of the search begins a word of their names.
SEARCH = r"""(text) => {
    const words = (text) => text.toLowerCase().match(/[\p{L}\p{N}]+/gu) ?? [];
    const asked = words(text), buttons = [...document.querySelectorAll("#gallery button")];
    for (const button of buttons) {
        const name = words(button.dataset.name);
        button.hidden = !asked.every((word) => name.some((part) => part.startsWith(word)));
    }
    const found = buttons.filter((button) => !button.hidden).length;
    return asked.length ? `<p class="faint">${found} found</p>` : "";
}"""
ABOUT = (
    '<p class="faint">The {count} pictures that {model} has learned, as they are in its training data. Click one, and '
    "the model makes its own.</p>"
)


def gallery_tab(engine: Engine, tab: gr.Tab, tabs: gr.Tabs, generate: GenerateTab) -> None:
    """Build the tab, which is filled when it is opened. `generate` generates the picture that is clicked."""
    about = gr.HTML('<p class="faint">The pictures are on their way.</p>')
    search = gr.Textbox(label="Search", placeholder="cat", max_lines=1, elem_id="search")
    found = gr.HTML(elem_id="found")
    pictures = gr.HTML(js_on_load=CLICK, elem_id="gallery")

    def show(model: str) -> tuple[str, str]:
        info = engine.models[model]
        if not info.names:
            return f'<p class="faint">{escape(model)} has no list of pictures.</p>', ""
        about = ABOUT.format(count=f"{len(info.names):,}", model=escape(model))
        return about, sheet(tuple(info.names.items()), info.gallery)

    def choose(event: gr.EventData) -> tuple[str, dict]:
        name = getattr(event, "name", None)
        if not isinstance(name, str):
            raise refusal("no picture was clicked: click one")
        return name, gr.Tabs(selected="generate")

    opened = tab.select(show, generate.subject.model, [about, pictures], **AT_ONCE)
    for trigger in (opened.success, search.change):
        trigger(None, search, found, js=SEARCH, **AT_ONCE)
    generate.generate_on(pictures.click(choose, None, [generate.subject.prompt, tabs], **AT_ONCE).success)


@cache
def sheet(known: tuple[tuple[str, str], ...], folder: Path | None) -> str:
    """HTML with a button per prompt, with the picture of its name in the gallery in `folder`. One image holds all
    pictures; prompts without one are text."""
    if folder is None:
        return f'<div class="known">{"".join(_text_button(prompt) for prompt, _ in known)}</div>'
    pictures, gallery = read_gallery(folder)
    places = {name: place for place, name in enumerate(gallery)}
    shown = {prompt: places[name] for prompt, name in known if name in places}
    pixels = (pictures[[*shown.values()]].permute(0, 2, 3, 1).numpy() * 255).round().astype(np.uint8)
    rows = -(-len(shown) // COLUMNS)
    image = Image.new("RGB", (COLUMNS * GALLERY_SIZE, rows * GALLERY_SIZE), "white")
    buttons = []
    for number, (prompt, picture) in enumerate(zip(shown, pixels, strict=True)):
        left, top = number % COLUMNS * GALLERY_SIZE, number // COLUMNS * GALLERY_SIZE
        image.paste(Image.fromarray(picture), (left, top))
        buttons.append(
            f'<button data-name="{escape(prompt)}" title="{escape(prompt)}">'
            f'<i style="background-position:-{left}px -{top}px"></i><span>{escape(prompt)}</span></button>'
        )
    buttons += [_text_button(prompt) for prompt, _ in known if prompt not in shown]
    style = f"<style>#gallery i {{ background-image: url({webp_uri(image)}); }}</style>"
    return f'{style}<div class="known">{"".join(buttons)}</div>'


def _text_button(prompt: str) -> str:
    return f'<button data-name="{escape(prompt)}"><span>{escape(prompt)}</span></button>'
