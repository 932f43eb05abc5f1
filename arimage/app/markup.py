"""What the demo says, as HTML: how far a drawing is, what it cost, and what a decoding does."""

from html import escape

from ..decoding import PRESETS
from .models import ModelInfo
from .pictures import data_uri, map_of
from .protocol import Progress, Result


INTRO = (
    '<div class="intro"><h1>arimage</h1><p>Pictures drawn code by code, and ways to draw them in fewer passes of the model.'
    "</p></div>"
)
EMPTY = '<p class="faint">Nothing is drawn yet.</p>'
STOPPED = '<p class="faint">Stopped.</p>'
LEGEND = (
    '<p class="faint">In the maps each square is one code of the picture, and its number the pass of the model that decided it. '
    "Squares of one colour were decided together, in one pass.</p>"
)
LAWS = {
    True: "Draws what the model itself draws.",
    False: "Trades some of what the model draws for speed.",
}


def badge(exact: bool) -> str:
    name = "exact" if exact else "relaxed"
    return f'<span class="badge {name}" title="{LAWS[exact]}">{name}</span>'


def about_decoding(info: ModelInfo, decoding: str) -> str:
    """What a decoding promises, what it does, and its paper; `decoding` may have settings."""
    name = decoding.partition(":")[0]
    preset = PRESETS[name]
    paper = ""
    if preset.paper:
        paper = f' <a href="https://arxiv.org/abs/{preset.paper}" target="_blank" rel="noopener">arXiv&nbsp;{preset.paper}</a>'
    does = preset.summary[0].upper() + preset.summary[1:]
    return f'<p class="faint">{badge(info.decodings[name])} {LAWS[info.decodings[name]]} {escape(does)}.{paper}</p>'


def about_editing(info: ModelInfo) -> str:
    if info.grid is None:
        return '<p class="faint">This model draws from coarse to fine: what is new fits what is kept on all sides.</p>'
    return (
        '<p class="faint">This model draws row by row: what is new fits what is above it and to its left, and does not see '
        "what is kept below. Best painted down to the lower edge.</p>"
    )


def progress(now: Progress, count: int) -> str:
    """How far a request of `count` images is."""
    if now.passes == 0:
        text = "Next in line" if now.queue_position <= 1 else f"Waiting, {now.queue_position - 1} before this one"
        return _status(text, 0)
    each = now.decided / now.passes / count
    text = f"Pass {now.passes} · {now.decided} of {now.codes} codes · {each:.1f} a pass"
    return _status(text, now.decided / now.codes)


def finished(result: Result) -> str:
    """What a request cost, and the seeds that draw its pictures again."""
    seeds = "seed" if len(result.seeds) == 1 else "seeds"
    cost = f"{result.passes} passes · {result.tokens_per_pass:.1f} codes a pass · {result.seconds:.2f} s"
    which = f"{escape(result.decoding)} {badge(result.exact)} · {seeds} {', '.join(map(str, result.seeds))}"
    return f'<div class="status"><p>{cost}</p><p class="faint">{which}</p></div>'


def card(decoding: str, info: ModelInfo, event: Progress | Result | None) -> str:
    """One decoding of a comparison, which waits (None), is being drawn, or is done."""
    head = f"<h3>{escape(decoding)} {badge(info.decodings[decoding.partition(':')[0]])}</h3>"
    if not isinstance(event, Result):
        text, part = "Waiting", 0
        if event and event.passes:
            text, part = f"Pass {event.passes} · {event.decided} of {event.codes} codes", event.decided / event.codes
        return f'<article class="card">{head}<p class="headline faint">…</p>{_bar(part)}<p class="faint">{text}</p></article>'
    passes = f"{event.passes} passes"
    if event.deciding_pass is None:
        headline = f"{event.tokens_per_pass:.0f} codes a pass"
        passes_map = '<p class="faint">Each pass decides all codes of a scale, from coarse to fine.</p>'
    else:
        headline = "One code a pass"
        if event.tokens_per_pass > 1:
            headline = f"{event.tokens_per_pass:.1f}× fewer passes"
            passes += f" instead of {info.codes}"
        source = data_uri(map_of(event.deciding_pass[0]))
        passes_map = f'<img class="map" src="{source}" alt="The pass that decided each code">'
    return (
        f'<article class="card">{head}<p class="headline">{headline}</p>{_bar(1 / event.tokens_per_pass)}'
        f'<p class="faint">{passes} · {event.seconds:.2f} s</p>'
        f'<img src="{data_uri(event.images[0])}" alt="The picture">{passes_map}</article>'
    )


def _status(text: str, part: float) -> str:
    return f'<div class="status"><p>{text}</p>{_bar(part)}</div>'


def _bar(part: float) -> str:
    return f'<div class="bar"><div style="width:{100 * part:.1f}%"></div></div>'
