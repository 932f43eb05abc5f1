"""Which of its captions a model has learned: a caption counts if most of its images show the right picture."""

import hashlib
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from arimage.decoding import decoding_to_dict
from arimage.eval.bench.measure import quiet
from arimage.eval.runs.files import append, check_fields, check_same, hold, space_in, to_json, write_whole
from arimage.eval.runs.generate import weights_digest
from arimage.eval.runs.progress import progress_bar
from arimage.media.texts import as_words, parse_json
from arimage.pipelines.base import ARImagePipeline
from arimage.pipelines.kinds.upscaling import UpscalingPipeline
from arimage.pipelines.text.known import KNOWN_CAPTIONS
from arimage.settings.schema import read_object

from ..known import KnownCaptions
from ..metrics.retrieval import nearest_pictures
from ..training.captioned import ImageCaptions


SETTINGS, MEASURED = "settings.json", "measured.jsonl"
# Batches per call of the pipeline, in which a finished image makes room for the next one. An interruption loses one
# call.
BATCHES = 4
# Pictures at most this far apart look the same, as flags of territories do: 2 of 255 levels per value.
ALIKE = 0.5


@dataclass(frozen=True)
class Caption:
    """A caption, and the pictures that it may ask for: "dog" is a dog or the face of one."""

    text: str
    names: frozenset[str]
    is_name: bool


def list_captions(known: KnownCaptions) -> list[Caption]:
    """Every caption of the pictures once, unlearned ones included: first the names of the pictures, then the others
    from one word on, since people type short ones."""
    every: dict[str, list[str]] = {}
    for pictures in (known.pictures, known.unlearned):
        for name, others in pictures.items():
            every[name] = list(dict.fromkeys((*every.get(name, [name]), *others)))
    names, texts = defaultdict(set), {}
    for captions in (every.keys(), (other for others in every.values() for other in others)):
        for text in captions:
            texts.setdefault(as_words(text), text)
    for name, others in every.items():
        for text in others:
            names[as_words(text)].add(name)
    order = sorted(texts, key=lambda words: 0 if texts[words] in every else len(words))
    return [Caption(texts[words], frozenset(names[words]), texts[words] in every) for words in order]


class Gallery:
    """The pictures of a training set that a model knows by name, among which the nearest to an image is found.

    Raises:
        ValueError: if a picture that the model knows is missing.
    """

    def __init__(self, data: ImageCaptions, names: Iterable[str]):
        wanted = dict.fromkeys(names)
        missing = [name for name in wanted if name not in set(data.names)]
        if missing:
            raise ValueError(
                f"the training set has no picture of {missing[0]!r}, which the model knows ({len(missing)} of "
                f"{len(wanted)} are missing): give --data and --recipe that it was trained with"
            )
        index = [i for i, name in enumerate(data.names) if name in wanted]
        self.names = [data.names[i] for i in index]
        self.images = data.images[index].float() / 255
        distances, near = nearest_pictures(self.images, self.images, len(index))
        self.alike = {name: {name} for name in wanted}
        for name, row, others in zip(self.names, distances.tolist(), near.tolist(), strict=True):
            self.alike[name] |= {self.names[j] for distance, j in zip(row, others, strict=True) if distance <= ALIKE}

    @property
    def digest(self) -> str:
        text = "\n".join(self.names).encode()
        return hashlib.sha256(text + (self.images * 255).round().byte().numpy().tobytes()).hexdigest()

    def nearest(self, images: torch.Tensor) -> list[str]:
        """The name of the picture that is nearest to each of the images, float [M, 3, S, S] in [0, 1]."""
        _, index = nearest_pictures(images.cpu(), self.images, 1)
        return [self.names[i] for i in index[:, 0].tolist()]


@dataclass
class Measurement:
    """What was measured so far.

    Attributes:
        captions: what is to be measured.
        gallery: the pictures.
        seeds: the most images per caption; they have the seeds 0, 1, ...
        needed: how many of them must show the right picture.
        shown: by the text of a caption, the names of the pictures that its images show, by their seeds.
    """

    captions: list[Caption]
    gallery: Gallery
    seeds: int
    needed: int
    shown: dict[str, dict[int, str]] = field(default_factory=lambda: defaultdict(dict))

    def __post_init__(self):
        self.open = self.captions
        self._right = {
            caption.text: set().union(*(self.gallery.alike[name] for name in caption.names))
            for caption in self.captions
        }

    def right(self, caption: Caption) -> int:
        """How many of the images of a caption show the right picture."""
        shown = self.shown.get(caption.text, {})
        return sum(name in self._right[caption.text] for seed, name in shown.items() if seed < self.seeds)

    def lacks(self, caption: Caption) -> tuple[int, int]:
        """How many more images decide about a caption at least and at most; (0, 0) if it is decided."""
        right = self.right(caption)
        done = sum(seed < self.seeds for seed in self.shown.get(caption.text, {}))
        to_pass, to_fail = self.needed - right, self.seeds - self.needed + 1 - (done - right)
        return (0, 0) if to_pass <= 0 or to_fail <= 0 else (min(to_pass, to_fail), self.seeds - done)

    def learned(self, caption: Caption) -> bool | None:
        """Whether the model has learned a caption; None if that is not decided yet."""
        return None if any(self.lacks(caption)) else self.right(caption) >= self.needed

    def next(self, count: int) -> list[tuple[Caption, int]]:
        """Up to `count` images, captions and seeds. All of them will be needed."""
        self.open = [caption for caption in self.open if any(self.lacks(caption))]
        tasks = []
        for caption in self.open:
            missing = [seed for seed in range(self.seeds) if seed not in self.shown.get(caption.text, {})]
            tasks += [(caption, seed) for seed in missing[: self.lacks(caption)[0]]]
            if len(tasks) >= count:
                break
        return tasks[:count]

    def apply(self, known: KnownCaptions) -> KnownCaptions:
        """`known` with what was measured: captions that are not decided stay where they are. Patterns are not
        measured; those with a picture take its learned captions."""
        verdicts = {as_words(caption.text): self.learned(caption) for caption in self.captions}
        pictures, unlearned = {}, {}
        for name in dict.fromkeys((*known.pictures, *known.unlearned)):
            bad = known.unlearned.get(name, [])
            texts = dict.fromkeys((name, *known.pictures.get(name, []), *bad))
            is_learned = {}
            for text in texts:
                verdict = verdicts.get(as_words(text))
                is_learned[text] = text not in bad if verdict is None else verdict
            if any(is_learned.values()):
                pictures[name] = [text for text, learned in is_learned.items() if learned and text != name]
            if not all(is_learned.values()):
                unlearned[name] = [text for text, learned in is_learned.items() if not learned]
        return replace(known, pictures=pictures, unlearned=unlearned)

    def summary(self) -> str:
        """A text with the counts."""
        lines = []
        for kind, is_name in (("names of pictures", True), ("other captions", False)):
            verdicts = [self.learned(caption) for caption in self.captions if caption.is_name == is_name]
            decided = len(verdicts) - verdicts.count(None)
            if decided:
                share = f"{verdicts.count(True):,} of {decided:,} learned ({verdicts.count(True) / decided:.1%})"
                lines.append(
                    f"{kind}: {share}" + (f", {verdicts.count(None):,} not measured" if None in verdicts else "")
                )
        return "\n".join(lines)


def read_measured(path: Path, measurement: Measurement) -> None:
    """Take over the images that were measured before. A last line that was cut short is ignored.

    Raises:
        ValueError: if a line is damaged.
    """
    names = set(measurement.gallery.names)
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1] if path.is_file() else (), 1):
        where, remedy = f"line {number} of {path}", "delete the line, and its image is generated again"
        row = check_fields(parse_json(line, where, remedy), {"caption": str, "seed": int, "shows": str}, where, remedy)
        if row["shows"] not in names:
            raise ValueError(f"{where} names {row['shows']!r}, which is not a picture of the model: {remedy}")
        measurement.shown[row["caption"]][row["seed"]] = row["shows"]


def generate_and_look(
    pipe: ARImagePipeline, gallery: Gallery, tasks: list[tuple[Caption, int]], batch_size: int
) -> list[dict]:
    """Generate images of captions and seeds, without upscaling them; a row with the name of the picture that each of
    them shows."""
    height, width = pipe.decoded_size if isinstance(pipe, UpscalingPipeline) else pipe.image_sizes[0]
    images = pipe(
        [caption.text for caption, _ in tasks],
        generator=[torch.Generator().manual_seed(seed) for _, seed in tasks],
        batch_size=batch_size,
        height=height,
        width=width,
        output_type="pt",
    ).images
    return [
        {"caption": caption.text, "seed": seed, "shows": name}
        for (caption, seed), name in zip(tasks, gallery.nearest(images), strict=True)
    ]


def estimate(pipe: ARImagePipeline, measurement: Measurement, batch_size: int) -> str:
    """A text that says how many images are missing, and how long they take, from one measured call."""
    lacking = [measurement.lacks(caption) for caption in measurement.captions]
    least, most = (sum(counts) for counts in zip(*lacking, strict=True)) if lacking else (0, 0)
    decided = lacking.count((0, 0))
    lines = [
        f"captions: {len(lacking):,}, of which {decided:,} are decided; "
        f"{sum(caption.is_name for caption in measurement.captions):,} are names of pictures, which come first",
        f"images: {least:,} to {most:,}, since a caption needs no more once it is decided",
    ]
    tasks = measurement.next(BATCHES * batch_size)
    if tasks:
        # The first call includes one-time setup.
        generate_and_look(quiet(pipe), measurement.gallery, tasks[:batch_size], batch_size)
        start = time.perf_counter()
        generate_and_look(quiet(pipe), measurement.gallery, tasks, batch_size)
        rate = len(tasks) / (time.perf_counter() - start)
        lines += [
            f"measured: {rate:.3g} images per second, of {len(tasks)} images at batch size {batch_size}",
            f"time: {least / rate / 3600:.2g} to {most / rate / 3600:.2g} hours",
        ]
    return "\n".join(lines)


def run_known(
    pipe: ARImagePipeline,
    model: str,
    data: ImageCaptions,
    out: Path,
    *,
    seeds: int,
    needed: int,
    batch_size: int,
    limit: int | None = None,
    dry_run: bool = False,
) -> str:
    """Measure which captions a pipeline has learned; `out`/known_captions.json is its list with what is known so far,
    from the first call on. A second run resumes: `out`/measured.jsonl has a line per image.

    Args:
        model: the name that `pipe` was loaded by.
        data: the pictures that it was trained on.
        limit: measure only so many captions.
        dry_run: only say how many images there are and how long they take.

    Returns:
        A text for the user.

    Raises:
        ValueError: if the model has no list of captions, the data lack one of its pictures, a number is wrong, or
            `out` holds the measurement of another model.
    """
    known = pipe.known_captions
    if not isinstance(known, KnownCaptions):
        raise ValueError(f"{model} has no list of what it knows: measure a model with {KNOWN_CAPTIONS}")
    if not 1 <= needed <= seeds:
        raise ValueError(f"--needed is {needed} of {seeds} --seeds: give 1 to {seeds}")
    gallery = Gallery(data, dict.fromkeys((*known.pictures, *known.unlearned)))
    measurement = Measurement(list_captions(known)[:limit], gallery, seeds, needed)
    settings = {
        "model": model,
        "dtype": str(pipe.dtype).removeprefix("torch."),
        # What an image shows does not depend on its size.
        "weights": weights_digest(pipe, without=("upscaler",)),
        "decoding": decoding_to_dict(pipe.decoding),
        "sampling": pipe.generation_config,
        "pictures": gallery.digest,
    }
    settings_file = out / SETTINGS
    if settings_file.is_file():
        check_same(settings_file, read_object(settings_file), settings)
    read_measured(out / MEASURED, measurement)
    if dry_run:
        return estimate(pipe, measurement, batch_size)
    with space_in(out):
        out.mkdir(parents=True, exist_ok=True)
        lock = hold(out)
        write_whole(settings_file, lambda file: file.write_text(to_json(settings)))
    try:
        _measure(quiet(pipe), measurement, known, out, batch_size)
    finally:
        lock.release()
    return measurement.summary()


def _measure(
    pipe: ARImagePipeline, measurement: Measurement, known: KnownCaptions, out: Path, batch_size: int
) -> None:
    def save() -> None:
        with space_in(out):
            write_whole(
                out / KNOWN_CAPTIONS,
                lambda file: file.write_text(measurement.apply(known).to_text(), encoding="utf-8"),
            )

    save()
    total = len(measurement.captions)
    with progress_bar(total=total, unit="caption", desc=out.name) as progress:
        while tasks := measurement.next(BATCHES * batch_size):
            progress.update(total - len(measurement.open) - progress.n)
            rows = generate_and_look(pipe, measurement.gallery, tasks, batch_size)
            with space_in(out):
                append(out / MEASURED, rows)
            for row in rows:
                measurement.shown[row["caption"]][row["seed"]] = row["shows"]
            save()
        progress.update(total - progress.n)
