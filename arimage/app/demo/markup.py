"""The texts of the demo, as HTML: progress, cost, and what a decoding does."""

from collections.abc import Sequence
from html import escape
from urllib.parse import urlencode

from ...decoding import PRESETS
from ...pipelines.output import passes_text
from ...pipelines.text.known import Unknown
from ..engine.engine import Engine
from ..engine.models import ModelInfo
from ..engine.types import Progress, Result
from .pictures import file_url, map_of


EMPTY = '<p class="faint">Press Generate to make an image.</p>'
ADD_REFERENCES = "These settings had reference images: add them, then press Generate."
STOPPED = '<p class="faint">Stopped.</p>'
LEGEND = (
    '<p class="faint">In the maps each square is one token, a small piece of the image, and its number is the forward '
    "pass of the model that decided it. Squares of one colour were decided in the same forward pass.</p>"
)
RACE = (
    '<p class="faint">The decodings run one after another, so that none slows down the others. Then you see them side '
    "by side, from one start.</p>"
)
PROMISES = {
    True: "Samples from exactly the distribution of the model.",
    False: "Changes the distribution of the model to be faster.",
}


def intro(engine: Engine) -> str:
    """The introduction at the top of the page."""
    name, info = next(iter(engine.models.items()))
    knows = f" {escape(name)} knows {len(info.names):,} pictures: see the gallery." if info.names else ""
    return (
        '<div class="intro"><h1>arimage</h1><p>Type a few words and watch an AI model make a picture of them, piece '
        "by piece. It can decide many pieces in one step instead of one: a race shows how much faster that is."
        f"{knows}</p></div>"
    )


def suggestions(engine: Engine) -> str:
    """The pictures that each model knows, as lists for page.js."""
    lists = []
    for number, info in enumerate(engine.models.values()):
        options = "".join(f'<option value="{escape(name)}">' for name in info.names)
        lists.append(f'<datalist id="suggests-{number}">{options}</datalist>')
    return "".join(lists)


def badge(exact: bool) -> str:
    name = "exact" if exact else "lossy"
    return f'<span class="badge {name}" title="{PROMISES[exact]}">{name}</span>'


def about_decoding(info: ModelInfo, decoding: str) -> str:
    """What a decoding promises, what it does, and its paper; `decoding` may have settings."""
    name = decoding.partition(":")[0]
    preset = PRESETS[name]
    paper = ""
    if preset.paper:
        link = f"https://arxiv.org/abs/{preset.paper}"
        paper = f' <a href="{link}" target="_blank" rel="noopener">arXiv&nbsp;{preset.paper}</a>'
    does = preset.summary[0].upper() + preset.summary[1:]
    return (
        f'<p class="faint">{badge(info.decodings[name])} {PROMISES[info.decodings[name]]} {escape(does)}.{paper}</p>'
    )


def about_editing(info: ModelInfo) -> str:
    if info.grid is None:
        text = "This model works from coarse to fine: the new part fits the rest of the image on all sides."
    elif info.order is not None or {"mar", "halton"} & {*info.decodings}:
        text = "This model generates the painted part last: it fits the rest of the image on all sides."
    else:
        text = (
            "This model works row by row: the new part fits what is above it and to its left, but cannot see what is "
            "below. Paint down to the lower edge for the best result."
        )
    return f'<p class="faint">{text} Change the prompt: with the same one, the part looks much the same again.</p>'


def progress(now: Progress, count: int) -> str:
    """The progress of a request for `count` images."""
    if now.passes == 0:
        text = "Next in line" if now.queue_position <= 1 else f"Waiting for {now.queue_position - 1} other requests"
        return _status(text, 0)
    each = now.decided / now.passes / count
    text = f"Forward pass {now.passes} · {now.decided} of {now.tokens} tokens · {each:.1f} tokens per forward pass"
    return _status(text, now.decided / now.tokens)


def finished(result: Result) -> str:
    """The cost of a request, the seeds of its images, and a note if the model does not know the prompt."""
    seeds = "seed" if len(result.seeds) == 1 else "seeds"
    cost = f"{passes_of(result)} · {result.seconds:.2f} s"
    which = f"{escape(result.decoding)} {badge(result.exact)} · {seeds} {', '.join(map(str, result.seeds))}"
    note = "" if result.unknown is None else _note(result.unknown, result.settings["model"])
    return f'<div class="status"><p>{cost}</p><p class="faint">{which}</p>{note}</div>'


def lacking(sentences: Sequence[str]) -> str:
    """What the settings of a picture or a link need, and the form lacks."""
    return f'<div class="status"><p class="note">{escape(" ".join(sentences))}</p></div>'


def passes_of(result: Result) -> str:
    """The forward passes of a result, its calls of the denoising head if any, and its tokens per forward pass."""
    heads = f"{result.head_calls} calls of the denoising head · " if result.head_calls else ""
    return f"{passes_text(result.passes)} · {heads}{result.tokens_per_pass:.1f} tokens per forward pass"


def _note(unknown: Unknown, model: str) -> str:
    """The sentence about an unknown prompt. The names of the nearest pictures are links that generate them."""
    sentence = escape(unknown.message)
    for name in unknown.nearest:
        link = f'<a href="?{escape(urlencode({"model": model, "prompt": name}))}">{escape(name)}</a>'
        sentence = sentence.replace(escape(f'"{name}"'), link)
    return f'<p class="note">{sentence}.</p>'


def card(label: str, exact: bool, event: Progress | Result | None, seconds: float = 0.0) -> str:
    """One run of a race: waiting (`event` is None), running for `seconds`, or finished."""
    head = f"<h3>{escape(label)} {badge(exact)}</h3>"
    if not isinstance(event, Result):
        headline, text, part = "…", "Waiting", 0
        if event and event.passes:
            headline, part = f"{seconds:.1f} s", event.decided / event.tokens
            text = f"Forward pass {event.passes} · {event.decided} of {event.tokens} tokens"
        return (
            f'<article class="card">{head}<p class="headline faint">{headline}</p>{_bar(part)}'
            f'<p class="faint">{text}</p></article>'
        )
    passes_map = '<p class="faint">Each forward pass decides all tokens of one scale, from coarse to fine.</p>'
    if event.deciding_pass is not None:
        source = file_url(map_of(event.deciding_pass[0]))
        passes_map = f'<img class="map" src="{source}" alt="The forward pass that decided each token">'
    return (
        f'<article class="card">{head}<p class="headline">{event.seconds:.2f} s</p>'
        f'<p class="faint">{passes_of(event)}</p>'
        f'<img src="{file_url(event.images[0])}" alt="The image">{passes_map}</article>'
    )


def _status(text: str, part: float) -> str:
    return f'<div class="status"><p>{text}</p>{_bar(part)}</div>'


def _bar(part: float) -> str:
    return f'<div class="bar"><div style="width:{100 * part:.1f}%"></div></div>'
