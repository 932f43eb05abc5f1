"""Folders of images or videos: which files are rows, and the captions or classes that belong to them."""

import logging
import posixpath
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from ...media.folders import FOREIGN, IMAGE_SUFFIXES, VIDEO_SUFFIXES, Listing, finder, list_files, named, say_left_out
from ...media.texts import composed, read_table, read_text
from ...settings.schema import check_encodable
from .row import Source, data_file, matched_classes
from .splits import SPLIT_OF_WORD, base_of, part_of


logger = logging.getLogger(__name__)

METADATA = "metadata.jsonl"
TABLES = (METADATA, "metadata.csv")
CAPTIONS, LABELS = ("caption", "text", "txt"), ("label", "cls")
SHARDS = {".parquet": "parquet", ".tar": "webdataset", ".arrow": "arrow"}


@dataclass(frozen=True)
class Captioned:
    """An image or video that metadata.jsonl or metadata.csv lists, or that has a NAME.txt.

    Attributes:
        name: its file.
        where: what errors call its text.
        fields: those of the row; the whole caption, as `text`, of NAME.txt.
    """

    name: str
    where: str
    fields: dict[str, Any]


def list_data(folder: Path, videos: bool) -> tuple[Listing, list[str]]:
    """The images or videos below a folder, and its shards."""
    found = list_files(folder, {*(VIDEO_SUFFIXES if videos else IMAGE_SUFFIXES), *SHARDS})
    shards = [name for name in found.files if PurePosixPath(name).suffix.lower() in SHARDS]
    if shards and len(shards) < len(found.files):
        raise ValueError(
            f"{folder} has shards ({named(shards)}) next to {'videos' if videos else 'images'}: move one of the two "
            f"elsewhere, or give the shards as a pattern, as in {(folder / shards[0]).with_stem('*')}"
        )
    kinds = sorted({PurePosixPath(name).suffix.lower() for name in shards})
    if len(kinds) > 1:
        raise ValueError(f"{folder} has shards of several kinds, {', '.join(kinds)}: give those of one as a pattern")
    for name in found.files:
        check_encodable("name of a file", name)
    return found, shards


def captions_of(folder: Path, listing: Listing) -> tuple[list[Captioned], list[str]]:
    """The images or videos of a folder with captions, in the order of their names, and the files that hold those:
    every metadata.jsonl or metadata.csv, or a NAME.txt for each. A file that those list several times is there as
    often."""
    metadata = [name for name in listing.others if PurePosixPath(name).name in TABLES]
    notes = _notes(listing)
    if metadata and (notes or len({PurePosixPath(name).parent for name in metadata}) < len(metadata)):
        raise ValueError(
            f"{folder} has {metadata[0]} and {next(iter(notes.values()), metadata[-1])}: keep one of the two"
        )
    if not metadata:
        # What is not UTF-8 is named with its line.
        found = [
            Captioned(name, str(folder / note), {"text": read_text(folder / note)}) for name, note in notes.items()
        ]
        return found, list(notes.values())
    found, known, find = [], set(listing.files), finder(folder)
    for table in metadata:
        for where, row in read_table(folder / table):
            where = f"{where} of {folder / table}"
            given = row.get("file_name")
            if not isinstance(given, str) or not given:
                raise ValueError(f"{where} has no file_name: write the name of a file, such as 1.png")
            check_encodable(f"file_name in {where}", given)
            name = posixpath.normpath(PurePosixPath(table).parent / given)
            if name.startswith(("/", "../")):
                raise ValueError(f"{where} names {given}, which is outside of {folder}: move the file into it")
            if name not in known:
                path = find(name)
                if path is None:
                    raise ValueError(f"{where} names {given}, which is not there: correct the name")
                name = path.relative_to(folder).as_posix()
            found.append(Captioned(name, where, row))
    if not found:
        raise ValueError(f"{folder / metadata[0]} has no rows: write one per file")
    return sorted(found, key=lambda one: one.name.split("/")), metadata


def _notes(listing: Listing) -> dict[str, str]:
    """The NAME.txt of each file that has one."""
    texts = {composed(name[:-4]): name for name in listing.others if name.lower().endswith(".txt")}
    if not texts:
        return {}
    found = {name: texts.get(composed(str(PurePosixPath(name).with_suffix("")))) for name in listing.files}
    return {name: note for name, note in found.items() if note is not None}


@dataclass
class Layout:
    """Which files of a folder are rows, in their order, with what belongs to each.

    Attributes:
        texts: a caption, or the id or name of a class, as it is in the folder.
        column: what captions or classes are called; None if there are neither.
        labelled, classes: as in `Source`.
        notes: files that hold captions.
        left: files that are no rows.
    """

    names: list[str]
    texts: list[Any]
    column: str | None = None
    labelled: bool = False
    classes: list[str] | None = None
    notes: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


def open_folder(
    data: str,
    listing: Listing,
    *,
    videos: bool,
    captions: bool,
    split: str,
    caption: str | None,
    label: str | None,
    classes: list[str] | None,
) -> Source:
    """Images or videos of a folder as rows, in the order of their names; see `open_source`."""
    folder, listing = split_folder(data, listing, split, videos, captions)
    check_found(folder, listing, videos)
    rest = [*listing.others, *listing.lost]
    found, notes = captions_of(folder, listing) if captions or not videos else ([], [])
    if found:
        layout = _captioned(data, folder, listing, found, notes, caption, label, classes)
    elif caption or label:
        raise ValueError(f"{data} has no {METADATA}, of which a field is named: leave out --caption and --label")
    elif videos and captions:
        raise ValueError(f"{data} has videos without captions: add a {METADATA} (file_name, text)")
    elif videos:
        layout = Layout(listing.files, [None] * len(listing.files), left=rest)
    else:
        layout = _class_folders(data, folder, listing, classes)
    say_left_out(data, layout.left)
    part = part_of(data, split, len(layout.names))
    names, texts = [layout.names[number] for number in part], [layout.texts[number] for number in part]

    def rows(start: int) -> Iterator[tuple[str, dict[str, Any], Any]]:
        for number in range(start, len(names)):
            file = {"bytes": None, "path": str(folder / names[number])}
            yield f"{data}, row {number + 1} ({names[number]})", file, texts[number]

    return Source(
        rows,
        data,
        "video" if videos else "image",
        layout.column,
        layout.classes,
        layout.labelled,
        files=tuple(data_file(folder, name) for name in (*names, *layout.notes)),
        left_out=len(layout.left),
    )


def check_found(folder: Path, listing: Listing, videos: bool) -> None:
    """Refuse a folder without images or videos, naming what it has instead."""
    if not listing.files:
        what, suffixes = ("videos", VIDEO_SUFFIXES) if videos else ("images", IMAGE_SUFFIXES)
        rest = [*listing.others, *listing.lost]
        but = f" but {named(rest)}" if rest else ""
        raise ValueError(f"{folder} has no {what}{but}: give a folder of {', '.join(suffixes)} files, or of shards")


def _captioned(
    data: str,
    folder: Path,
    listing: Listing,
    found: list[Captioned],
    notes: list[str],
    caption: str | None,
    label: str | None,
    classes: list[str] | None,
) -> Layout:
    fields = sorted({field for one in found for field in one.fields} - {"file_name"})
    labelled = label is not None or (caption is None and not set(fields) & set(CAPTIONS))
    usual = LABELS if labelled else CAPTIONS
    column = column_of(data, fields, label or caption, usual, "label" if labelled else "caption")
    layout = Layout(
        [one.name for one in found], [one.fields.get(column) for one in found], column, labelled, notes=notes
    )
    layout.classes = classes if labelled else None
    # At once, not after hours.
    check = Source(lambda start: iter(()), data, "image", column, layout.classes, labelled)
    for one, text in zip(found, layout.texts, strict=True):
        check.text_of(one.where, text)
    missing = sorted(set(listing.files) - set(layout.names))
    if missing and PurePosixPath(notes[0]).name not in TABLES:
        note = PurePosixPath(missing[0]).with_suffix(".txt")
        raise ValueError(f"{folder / missing[0]} has no caption: write it into {note}, or move the file elsewhere")
    others = set(listing.others) - set(notes)
    layout.left = [*missing, *sorted(others), *listing.lost]
    return layout


def _class_folders(data: str, folder: Path, listing: Listing, classes: list[str] | None) -> Layout:
    stray = [name for name in listing.files if "/" not in name]
    names = [name for name in listing.files if "/" in name]
    if len(stray) >= len(names):
        raise ValueError(
            f"{data} has images without captions or classes ({named(stray)}): add a {METADATA} (file_name, text) or a "
            "NAME.txt next to each image, or put the images into one folder per class"
        )
    found = sorted({name.partition("/")[0] for name in names})
    ids = dict(
        zip(found, range(len(found)) if classes is None else matched_classes(data, found, classes), strict=True)
    )
    empty = [
        f"{path.name}/ (no images)"
        for path in sorted(folder.iterdir())
        if path.is_dir() and path.name not in ids and not path.name.startswith(".") and path.name not in FOREIGN
    ]
    left = [*stray, *listing.others, *listing.lost, *empty]
    labels = [ids[name.partition("/")[0]] for name in names]
    return Layout(names, labels, "label", True, found if classes is None else classes, left=left)


def split_folder(data: str, listing: Listing, split: str, videos: bool, captions: bool) -> tuple[Path, Listing]:
    """The folder of a split, and what it holds, where all files are in folders that are named after splits, and those
    are no classes: they hold folders of classes, captions, or videos that need none."""
    folder, base = Path(data), base_of(split)
    tops = sorted({name.partition("/")[0] for name in listing.files if "/" in name})
    whole = any("/" not in name for name in listing.files) or not {*TABLES}.isdisjoint(listing.others)
    if whole or not tops or not all(top.lower() in SPLIT_OF_WORD for top in tops):
        if base != "train":
            raise ValueError(f"{data} has no splits, and {base!r} is asked for: leave out --split")
        return folder, listing
    noted = any(PurePosixPath(name).name in TABLES for name in listing.others) or _notes(listing)
    if not ((videos and not captions) or noted or all(name.count("/") > 1 for name in listing.files)):
        if len(tops) == 1:
            return folder, listing
        raise ValueError(
            f"{data} has the folders {', '.join(tops)}, which are splits by their names, with images and neither "
            "captions nor folders of classes: give one of them, with captions, or rename folders that are classes"
        )
    chosen = [top for top in tops if top == base]
    chosen = chosen or [top for top in tops if SPLIT_OF_WORD[top.lower()] == SPLIT_OF_WORD.get(base.lower())]
    if len(chosen) != 1:
        raise ValueError(f"{data} has the splits {', '.join(tops)}: name one of them with --split")
    others = [top for top in tops if top not in chosen]
    if others:
        logger.warning("%s of %s is read, not %s: name another split with --split", chosen[0], data, ", ".join(others))
    return folder / chosen[0], list_data(folder / chosen[0], videos)[0]


def column_of(data: str, columns: list[str], given: str | None, usual: tuple[str, ...], option: str) -> str:
    """The column that is named, or the first of the usual ones that there is."""
    found = next((name for name in (usual if given is None else (given,)) if name in columns), None)
    if found is None:
        remedy = f"name that of its {option}s with --{option}"
        if given is None and usual == LABELS:
            # It has no captions either.
            remedy = "call that of its captions text, or that of its classes label, or name it by --caption or --label"
        raise ValueError(f"{data} has the columns {', '.join(columns)}: {remedy}")
    return found
