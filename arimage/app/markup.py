"""The texts of the demo, as HTML: progress, cost, and what a decoding does."""

from html import escape

from ..decoding import PRESETS
from .models import ModelInfo
from .pictures import data_uri, map_of
from .protocol import Progress, Result


INTRO = (
    '<div class="intro"><h1>arimage</h1><p>Type a prompt and watch a small AI model make the image piece by piece; different '
    "decoding methods need more or fewer steps for it.</p></div>"
)
EMPTY = '<p class="faint">Press Generate to make the first image.</p>'
STOPPED = '<p class="faint">Stopped.</p>'
LEGEND = (
    '<p class="faint">In the maps each square is one token, a small piece of the image, and its number is the forward pass '
    "of the model that decided it. Squares of one colour were decided in the same forward pass.</p>"
)
PROMISES = {
    True: "Samples from exactly the distribution of the model.",
    False: "Changes the distribution of the model to be faster.",
}


def badge(exact: bool) -> str:
    name = "exact" if exact else "relaxed"
    return f'<span class="badge {name}" title="{PROMISES[exact]}">{name}</span>'


def about_decoding(info: ModelInfo, decoding: str) -> str:
    """What a decoding promises, what it does, and its paper; `decoding` may have settings."""
    name = decoding.partition(":")[0]
    preset = PRESETS[name]
    paper = ""
    if preset.paper:
        paper = f' <a href="https://arxiv.org/abs/{preset.paper}" target="_blank" rel="noopener">arXiv&nbsp;{preset.paper}</a>'
    does = preset.summary[0].upper() + preset.summary[1:]
    return (
        f'<p class="faint">{badge(info.decodings[name])} {PROMISES[info.decodings[name]]} {escape(does)}.{paper}</p>'
    )


def about_editing(info: ModelInfo) -> str:
    if info.grid is None:
        return '<p class="faint">This model works from coarse to fine: the new part fits the rest of the image on all sides.</p>'
    return (
        '<p class="faint">This model works row by row: the new part fits what is above it and to its left, but cannot see what '
        "is below. Paint down to the lower edge for the best result.</p>"
    )


def progress(now: Progress, count: int) -> str:
    """The progress of a request for `count` images."""
    if now.passes == 0:
        text = "Next in line" if now.queue_position <= 1 else f"Waiting for {now.queue_position - 1} other requests"
        return _status(text, 0)
    each = now.decided / now.passes / count
    text = f"Forward pass {now.passes} · {now.decided} of {now.tokens} tokens · {each:.1f} tokens per forward pass"
    return _status(text, now.decided / now.tokens)


def finished(result: Result) -> str:
    """The cost of a request, and the seeds that generate its images again."""
    seeds = "seed" if len(result.seeds) == 1 else "seeds"
    cost = f"{result.passes} forward passes · {result.tokens_per_pass:.1f} tokens per forward pass · {result.seconds:.2f} s"
    which = f"{escape(result.decoding)} {badge(result.exact)} · {seeds} {', '.join(map(str, result.seeds))}"
    note = f"<p>{escape(result.unknown.message)}.</p>" if result.unknown else ""
    return f'<div class="status">{note}<p>{cost}</p><p class="faint">{which}</p></div>'


def card(decoding: str, info: ModelInfo, event: Progress | Result | None) -> str:
    """One decoding of a comparison, which is waiting (None), running, or finished."""
    head = f"<h3>{escape(decoding)} {badge(info.decodings[decoding.partition(':')[0]])}</h3>"
    if not isinstance(event, Result):
        text, part = "Waiting", 0
        if event and event.passes:
            text, part = (
                f"Forward pass {event.passes} · {event.decided} of {event.tokens} tokens",
                event.decided / event.tokens,
            )
        return f'<article class="card">{head}<p class="headline faint">…</p>{_bar(part)}<p class="faint">{text}</p></article>'
    passes = f"{event.passes} forward passes"
    if event.deciding_pass is None:
        headline = f"{event.tokens_per_pass:.0f} tokens per forward pass"
        passes_map = '<p class="faint">Each forward pass decides all tokens of one scale, from coarse to fine.</p>'
    else:
        headline = "One token per forward pass"
        if event.tokens_per_pass > 1:
            headline = f"{event.tokens_per_pass:.1f}× fewer forward passes"
            passes += f" instead of {info.tokens}"
        source = data_uri(map_of(event.deciding_pass[0]))
        passes_map = f'<img class="map" src="{source}" alt="The forward pass that decided each token">'
    return (
        f'<article class="card">{head}<p class="headline">{headline}</p>{_bar(1 / event.tokens_per_pass)}'
        f'<p class="faint">{passes} · {event.seconds:.2f} s</p>'
        f'<img src="{data_uri(event.images[0])}" alt="The image">{passes_map}</article>'
    )


def _status(text: str, part: float) -> str:
    return f'<div class="status"><p>{text}</p>{_bar(part)}</div>'


def _bar(part: float) -> str:
    return f'<div class="bar"><div style="width:{100 * part:.1f}%"></div></div>'
