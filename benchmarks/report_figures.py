"""Makes the figures of notes/report.md from the tables of report_measure.py, in seconds. Needs matplotlib.

python benchmarks/report_figures.py
"""

import csv
from pathlib import Path
from typing import Annotated

import typer
from matplotlib.figure import Figure


TABLES = Path(__file__).with_name("report")
IMAGES = Path(__file__).parent / "notes" / "images"
# They differ in grey too, and each line has its own marker.
BLACK, BLUE, ORANGE, PURPLE, GREY = "#111111", "#2166ac", "#e8930c", "#7b3294", "#8c8c8c"
Rows = list[dict[str, str]]


def read(folder: Path, name: str) -> Rows:
    with (folder / f"{name}.tsv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, delimiter="\t"))


def where(rows: Rows, **values: str) -> Rows:
    return [row for row in rows if all(row[name] == value for name, value in values.items())]


def column(rows: Rows, name: str) -> list[float]:
    return [float(row[name]) for row in rows]


def axes_of(width: int, columns: int = 1, height: float = 3.0):
    """A figure of `width` inches, and its panels."""
    figure = Figure(figsize=(width, height), layout="constrained")
    panels = figure.subplots(1, columns, squeeze=False, sharey=True)[0]
    for panel in panels:
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
        panel.tick_params(labelsize=8)
    return figure, panels


def line(panel, across: list[float], up: list[float], label: str, color: str, marker: str, filled: bool) -> None:
    """A line with filled markers, or a broken one with open markers."""
    panel.plot(
        across,
        up,
        label=label,
        color=color,
        marker=marker,
        linestyle="-" if filled else (0, (2, 2)),
        markersize=4,
        markerfacecolor=color if filled else "white",
        linewidth=1.3,
    )


def ticks(axis, values: list[float]) -> None:
    axis.set_ticks(values, [f"{value:g}" for value in values])
    axis.set_ticks([], minor=True)


def windows(folder: Path) -> Figure:
    known, new, mesh = (
        where(read(folder, "windows"), prompts="known"),
        where(read(folder, "windows"), prompts="new"),
        [row | {"model": "mesh", "order": "raster"} for row in read(folder, "mesh")],
    )
    figure, panels = axes_of(7, 3, 3.4)
    lines = {
        ("emoji-llamagen", "raster"): ("emoji-llamagen, raster", ORANGE, "s"),
        ("emoji-arpg", "raster"): ("emoji-arpg, raster", BLUE, "^"),
        ("emoji-arpg", "farthest"): ("emoji-arpg, farthest", BLACK, "o"),
        ("mesh", "raster"): ("Markov mesh", PURPLE, "D"),
    }
    titles = ("known prompts", "new prompts", "Markov mesh")
    for panel, rows, title in zip(panels, (known, new, mesh), titles, strict=True):
        sizes = sorted({int(row["window"]) for row in rows})
        panel.axhline(1, color=GREY, linestyle="--", label="ar")
        panel.plot(sizes, sizes, color=GREY, linestyle=":", label="every draft accepted")
        for (model, order), (label, color, marker) in lines.items():
            for refresh in ("coupled", "independent"):
                some = where(rows, model=model, order=order, refresh=refresh)
                if some:
                    per_pass = [float(row.get("tokens", 256)) / float(row["passes"]) for row in some]
                    name = f"{label}, {refresh}"
                    line(panel, column(some, "window"), per_pass, name, color, marker, refresh == "coupled")
        panel.set(xscale="log", yscale="log")
        ticks(panel.xaxis, sizes)
        ticks(panel.yaxis, [1, 2, 4, 8, 16, 32, 64])
        panel.set_ylim(0.9, 100)
        panel.set_xlabel("window (tokens)", fontsize=9)
        panel.text(0.04, 0.93, title, transform=panel.transAxes, fontsize=8.5, weight="bold")
    panels[0].set_ylabel("tokens per forward pass", fontsize=9)
    found = {
        label: handle for panel in panels for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    figure.legend(found.values(), found, loc="outside lower center", ncols=3, fontsize=7.5, frameon=False)
    return figure


def seconds(folder: Path) -> Figure:
    rows = read(folder, "seconds")
    figure, (panel,) = axes_of(7)
    for model, color, marker in (("emoji-llamagen", ORANGE, "s"), ("emoji-arpg", BLACK, "o")):
        some = [row for row in where(rows, model=model) if row["window"] != "1"]
        middle = column(some, "speed")
        ranges = [
            [value - low for value, low in zip(middle, column(some, "slowest"), strict=True)],
            [high - value for value, high in zip(middle, column(some, "fastest"), strict=True)],
        ]
        panel.errorbar(
            column(some, "window"), middle, ranges, label=model, color=color, marker=marker, capsize=3, linewidth=1.3
        )
    panel.axhline(1, color=GREY, linestyle="--", label="ar")
    panel.set(xscale="log", ylim=(0, None))
    ticks(panel.xaxis, sorted({float(row["window"]) for row in rows if row["window"] != "1"}))
    panel.set_xlabel("window (tokens)", fontsize=9)
    panel.set_ylabel("times as fast as ar, batch 1", fontsize=9)
    panel.legend(fontsize=8, frameon=False)
    return figure


def drafts(folder: Path) -> Figure:
    rows = read(folder, "drafts")
    figure, (panel,) = axes_of(7)
    for model, color, marker in (("emoji-llamagen", ORANGE, "s"), ("emoji-arpg", BLACK, "o")):
        some = where(rows, model=model)
        uniform = column(some, "passes")[0]
        panel.errorbar(
            [100 * share for share in column(some, "share")],
            [100 * passes / uniform for passes in column(some, "passes")],
            [100 * error / uniform for error in column(some, "error")],
            label=f"{model}, window {some[0]['window']} (100 % = {uniform:.1f})",
            color=color,
            marker=marker,
            capsize=3,
            linewidth=1.3,
        )
    panel.set_ylim(0, 110)
    panel.set_xlabel("share of first drafts from the model, the others uniform (%)", fontsize=9)
    panel.set_ylabel("forward passes (%)", fontsize=9)
    panel.legend(fontsize=8, frameon=False, loc="lower left")
    return figure


# What the figure names, and where: by points to the right of and above its mark.
NAMED = {
    "ar": ("ar", 6, 4),
    "sjd, coupled": ("sjd, sjd-coupled, sjd-gumbel, sjd-lazy", 8, -1),
    "sjd-tree": ("sjd-tree", 6, -9),
    "siblings follow another distribution": ("tree with siblings of another distribution", 7, -10),
    "a rejected draft is sampled again from the target": ("rejected drafts sampled from p", 8, -1),
    "survivors above a threshold stay": ("survivors above a threshold stay", 8, 0),
    "drafts after noise are decided": ("drafts after noise are decided", 8, -3),
    "every survivor stays": ("every survivor stays", -10, 6),
    "relax=2.0": ("relax=2", -40, -4),
    "gsd, gap=1.0": ("gsd, gap=1", 8, -3),
    "lantern, delta=0.2": ("lantern, delta=0.2", 8, -1),
    "zipar, window=1": ("zipar, window=1", 6, 3),
    "zipar, window=2": ("zipar, window=2", 6, 3),
    "pjd, context=1": ("pjd, context=1", -14, 7),
    "pjd, context=2": ("pjd, context=2", -70, -4),
}
KINDS = {
    "exact": ("exact", BLACK, "o"),
    "relaxed": ("relaxed", BLUE, "s"),
    "cut": ("part of the tokens before is not seen", GREY, "D"),
    "faulty": ("meant to be exact, with a fault", ORANGE, "X"),
}


def exactness(folder: Path) -> Figure:
    rows = read(folder, "exactness")
    figure, (panel,) = axes_of(7, height=4.2)
    for kind, (label, color, marker) in KINDS.items():
        some = where(rows, kind=kind)
        panel.plot(
            column(some, "passes"), column(some, "distance"), marker, color=color, label=label, markersize=6, mew=0
        )
        for row in some:
            if row["method"] in NAMED:
                text, right, up = NAMED[row["method"]]
                point = float(row["passes"]), float(row["distance"])
                panel.annotate(text, point, (right, up), textcoords="offset points", fontsize=7.5)
    panel.axhline(float(rows[0]["floor"]), color=GREY, linestyle="--", label="exact samples, by chance")
    panel.set(yscale="log")
    ticks(panel.yaxis, [0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5])
    panel.margins(x=0.06, y=0.1)
    panel.set_xlabel("forward passes per image of six tokens", fontsize=9)
    panel.set_ylabel("total variation from the model's distribution", fontsize=9)
    figure.legend(loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    return figure


def paths(folder: Path) -> Figure:
    rows = read(folder, "paths")
    figure, (panel,) = axes_of(7, height=3.4)
    some = where(rows, coupling="path", steps=rows[0]["steps"])
    panel.plot(
        column(some, "distance"), column(some, "most"), color=BLACK, linestyle="--", label="the most of any coupling"
    )
    for steps, color, marker in zip(
        dict.fromkeys(row["steps"] for row in rows), (ORANGE, BLUE, BLACK), "so^", strict=False
    ):
        for coupling, name in (("path", "whole paths"), ("reflection", "reflection")):
            some = where(rows, coupling=coupling, steps=steps)
            label = f"{name}, {steps} steps"
            line(panel, column(some, "distance"), column(some, "kept"), label, color, marker, coupling == "path")
    panel.set(xscale="log", ylim=(0, 1))
    ticks(panel.xaxis, sorted(set(column(rows, "distance"))))
    panel.set_xlabel("distance of the token's distribution when drafted and now (standard deviations)", fontsize=9)
    panel.set_ylabel("share of tokens kept", fontsize=9)
    panel.legend(fontsize=7.5, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


FIGURES = {"windows": windows, "seconds": seconds, "drafts": drafts, "exactness": exactness, "paths": paths}


def main(
    only: Annotated[list[str] | None, typer.Option(help=f"Figures, of {', '.join(FIGURES)}. Default: all.")] = None,
    tables: Annotated[Path, typer.Option(help="The folder of the tables.")] = TABLES,
    out: Annotated[Path, typer.Option(help="The folder of the figures.")] = IMAGES,
) -> None:
    for name in only or FIGURES:
        FIGURES[name](tables).savefig(out / f"report-{name}.png", dpi=160, pil_kwargs={"optimize": True})


if __name__ == "__main__":
    typer.run(main)
