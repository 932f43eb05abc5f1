"""Thirty pictures with captions to train an adapter on: the 26 flags and 4 pennants of the International Code of
Signals, which no packaged model knows. See benchmarks/notes/training.md.

python examples/signal_flags.py flags
"""

import json
import sys
from pathlib import Path

from PIL import Image, ImageDraw


# Pictures are made larger and averaged, so that edges are smooth. The units of all places are pixels of a picture.
SIZE, FACTOR = 64, 8
# left, upper, right, lower
FLAG, POLE = (8, 12, 60, 48), (4, 8, 8, 64)
BLUE, RED, YELLOW, BLACK, WHITE, GREY = "#1565c0", "#d32f2f", "#ffc107", "#303030", "#ffffff", "#9e9e9e"
CAPTIONS, PENNANT_CAPTIONS = ("signal flag {}", "flag {}", "{} flag"), ("{}", "the {}", "{} flag")

NAMES = (
    "alfa bravo charlie delta echo foxtrot golf hotel india juliett kilo lima mike november oscar papa quebec romeo "
    "sierra tango uniform victor whiskey xray yankee zulu"
).split()
PENNANTS = ["first substitute", "second substitute", "third substitute", "answering pennant"]


class Flag:
    """A flag on a pole. Places are shares of its width and height."""

    def __init__(self, ground: str):
        self.picture = Image.new("RGB", (SIZE * FACTOR, SIZE * FACTOR), WHITE)
        self.draw = ImageDraw.Draw(self.picture)
        self.polygon(ground, (0, 0), (1, 0), (1, 1), (0, 1))

    def place(self, x: float, y: float) -> tuple[float, float]:
        left, upper, right, lower = FLAG
        return (left + x * (right - left)) * FACTOR, (upper + y * (lower - upper)) * FACTOR

    def polygon(self, colour: str, *corners: tuple[float, float]) -> "Flag":
        self.draw.polygon([self.place(*corner) for corner in corners], fill=colour)
        return self

    def box(self, colour: str, left: float, upper: float, right: float, lower: float) -> "Flag":
        return self.polygon(colour, (left, upper), (right, upper), (right, lower), (left, lower))

    def columns(self, *colours: str) -> "Flag":
        for i, colour in enumerate(colours):
            self.box(colour, i / len(colours), 0, (i + 1) / len(colours), 1)
        return self

    def rows(self, *colours: str) -> "Flag":
        for i, colour in enumerate(colours):
            self.box(colour, 0, i / len(colours), 1, (i + 1) / len(colours))
        return self

    def grid(self, *rows: list[str]) -> "Flag":
        for i, row in enumerate(rows):
            for j, colour in enumerate(row):
                self.box(colour, j / len(row), i / len(rows), (j + 1) / len(row), (i + 1) / len(rows))
        return self

    def disc(self, colour: str) -> "Flag":
        (left, upper), (right, lower) = self.place(0.5, 0.5), self.place(0.5, 0.5)
        radius = 0.3 * (FLAG[3] - FLAG[1]) * FACTOR
        self.draw.ellipse((left - radius, upper - radius, right + radius, lower + radius), fill=colour)
        return self

    def cross(self, colour: str) -> "Flag":
        return self.box(colour, 0, 0.38, 1, 0.62).box(colour, 0.42, 0, 0.58, 1)

    def saltire(self, colour: str) -> "Flag":
        a, b = 0.14, 0.2
        self.polygon(colour, (0, 0), (a, 0), (1, 1 - b), (1, 1), (1 - a, 1), (0, b))
        return self.polygon(colour, (1, 0), (1, b), (a, 1), (0, 1), (0, 1 - b), (1 - a, 0))

    def swallowtail(self) -> "Flag":
        return self.polygon(WHITE, (1.01, 0), (0.75, 0.5), (1.01, 1))

    def triangle(self) -> "Flag":
        return self.polygon(WHITE, (0, 0), (1.01, 0), (1.01, 0.5)).polygon(WHITE, (0, 1), (1.01, 0.5), (1.01, 1))

    def pennant(self) -> "Flag":
        return self.polygon(WHITE, (0, 0), (1.01, 0), (1.01, 0.3)).polygon(WHITE, (0, 1), (1.01, 0.7), (1.01, 1))

    def outline(self, *corners: tuple[float, float]) -> Image.Image:
        """The finished picture, with the outline of the flag and its pole."""
        self.draw.line([self.place(*corner) for corner in (*corners, corners[0])], fill=GREY, width=FACTOR)
        self.draw.rectangle([side * FACTOR for side in POLE], fill=GREY)
        return self.picture.resize((SIZE, SIZE), Image.Resampling.BOX)


RECTANGLE = (0, 0), (1, 0), (1, 1), (0, 1)
SWALLOWTAIL = (0, 0), (1, 0), (0.75, 0.5), (1, 1), (0, 1)
TRIANGLE = (0, 0), (1, 0.5), (0, 1)
PENNANT = (0, 0), (1, 0.3), (1, 0.7), (0, 1)


def flags() -> dict[str, Image.Image]:
    """The flags and pennants by their names."""
    whiskey = Flag(BLUE).box(WHITE, 0.18, 0.2, 0.82, 0.8).box(RED, 0.36, 0.4, 0.64, 0.6)
    zulu = Flag(BLACK).polygon(YELLOW, (0, 0), (1, 0), (0.5, 0.5)).polygon(BLUE, (1, 0), (1, 1), (0.5, 0.5))
    yankee = Flag(YELLOW)
    for k in range(0, 10, 2):
        yankee.polygon(RED, ((k + 1) / 5, 0), ((k + 2) / 5, 0), ((k + 2) / 5 - 1, 1), ((k + 1) / 5 - 1, 1))
    yankee.draw.rectangle((0, 0, FLAG[0] * FACTOR, SIZE * FACTOR), fill=WHITE)
    yankee.draw.rectangle((FLAG[2] * FACTOR, 0, SIZE * FACTOR, SIZE * FACTOR), fill=WHITE)
    letters = [
        Flag(WHITE).box(BLUE, 0.5, 0, 1, 1).swallowtail().outline(*SWALLOWTAIL),
        Flag(RED).swallowtail().outline(*SWALLOWTAIL),
        Flag(BLUE).rows(BLUE, WHITE, RED, WHITE, BLUE),
        Flag(YELLOW).box(BLUE, 0, 0.25, 1, 0.75),
        Flag(BLUE).box(RED, 0, 0.5, 1, 1),
        Flag(WHITE).polygon(RED, (0.5, 0), (1, 0.5), (0.5, 1), (0, 0.5)),
        Flag(YELLOW).columns(YELLOW, BLUE, YELLOW, BLUE, YELLOW, BLUE),
        Flag(WHITE).box(RED, 0.5, 0, 1, 1),
        Flag(YELLOW).disc(BLACK),
        Flag(BLUE).box(WHITE, 0, 1 / 3, 1, 2 / 3),
        Flag(YELLOW).box(BLUE, 0.5, 0, 1, 1),
        Flag(YELLOW).grid([YELLOW, BLACK], [BLACK, YELLOW]),
        Flag(BLUE).saltire(WHITE),
        Flag(BLUE).grid(*[[BLUE, WHITE, BLUE, WHITE], [WHITE, BLUE, WHITE, BLUE]] * 2),
        Flag(RED).polygon(YELLOW, (0, 0), (1, 1), (0, 1)),
        Flag(BLUE).box(WHITE, 0.3, 0.3, 0.7, 0.7),
        Flag(YELLOW),
        Flag(RED).cross(YELLOW),
        Flag(WHITE).box(BLUE, 0.3, 0.3, 0.7, 0.7),
        Flag(RED).columns(RED, WHITE, BLUE),
        Flag(RED).grid([RED, WHITE], [WHITE, RED]),
        Flag(WHITE).saltire(RED),
        whiskey,
        Flag(WHITE).cross(BLUE),
        yankee,
        zulu.polygon(RED, (0, 1), (1, 1), (0.5, 0.5)),
    ]
    pennants = [
        Flag(BLUE).polygon(YELLOW, (0, 0.25), (0.5, 0.5), (0, 0.75)).triangle().outline(*TRIANGLE),
        Flag(BLUE).box(WHITE, 0.4, 0, 1, 1).triangle().outline(*TRIANGLE),
        Flag(WHITE).box(BLACK, 0, 0.36, 1, 0.64).triangle().outline(*TRIANGLE),
        Flag(RED).columns(RED, WHITE, RED, WHITE, RED).pennant().outline(*PENNANT),
    ]
    finished = [flag.outline(*RECTANGLE) if isinstance(flag, Flag) else flag for flag in letters]
    return dict(zip([*NAMES, *PENNANTS], [*finished, *pennants], strict=True))


def main(folder: str) -> None:
    Path(folder).mkdir(parents=True, exist_ok=True)
    rows = []
    for name, picture in flags().items():
        file = f"{name.replace(' ', '-')}.png"
        picture.save(Path(folder) / file)
        captions = [caption.format(name) for caption in (CAPTIONS if name in NAMES else PENNANT_CAPTIONS)]
        # The text is for training, the others for `arimage eval generate --prompts`.
        rows += [{"file_name": file, "text": text, "prompt": text, "name": captions[0]} for text in captions]
    lines = [json.dumps(row) + "\n" for row in rows]
    (Path(folder) / "metadata.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
