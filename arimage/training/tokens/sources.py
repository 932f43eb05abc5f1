"""Data sets of every layout as rows of images or videos with captions or classes."""

from collections import Counter

from ..data.folder import open_folder
from ..data.found import find_data
from ..data.row import Source
from ..data.shards import open_shards
from ..data.splits import base_of


def open_source(
    data: str,
    *,
    videos: bool = False,
    captions: bool = True,
    split: str = "train",
    image: str | None = None,
    caption: str | None = None,
    label: str | None = None,
    classes: list[str] | None = None,
) -> Source:
    """Open a data set. Images are not read; files of a folder that are no rows are counted and named in a warning.

    Args:
        data: a folder with one folder of images per class, or with images or videos and a metadata.jsonl
            (`file_name`, and `text` or another field) or a NAME.txt next to each; a folder or a pattern
            (`shards/*.tar`) of .parquet, .arrow or webdataset .tar files; or the id of a data set of the Hugging Face
            Hub. All files below a class's folder belong to it, and links are followed.
        videos: whether it has videos with captions, not images.
        captions: whether captions are read; False for videos without.
        split: of a data set of the Hub, of shards that are named after splits, or of a folder with folders such as
            train and val; also a part of a folder, as in "train[:100]".
        image, caption, label: the columns; by default the first of `IMAGES` or `VIDEOS`, and of `CAPTIONS` or
            `LABELS`.
        classes: the names of the classes in the order of their ids: of the data set's own names, or in place of those.

    Raises:
        ValueError: if the data set does not exist, lacks a column, or has another layout.
    """
    if caption is not None and label is not None:
        raise ValueError("caption and label are both given, and images have captions or classes: give one of the two")
    if videos and label is not None:
        raise ValueError("label is given, and models of videos read captions: give caption")
    twice = [name for name, count in Counter(classes).items() if count > 1]
    if twice:
        raise ValueError(f"--classes names {twice[0]!r} twice: give each class once")
    given = {"videos": videos, "captions": captions, "split": split, "caption": caption, "label": label}
    found = find_data(data, videos=videos, split=split)
    if found.folder is None:
        if found.shards and split != base_of(split):
            raise ValueError(f"--split is {split}, a part, and shards are read whole: give --limit, or fewer shards")
        return open_shards(data, found.shards or [], image=image, classes=classes, left_out=found.left_out, **given)
    if image is not None:
        option = "--video" if videos else "--image"
        raise ValueError(f"{option} names a column, and {data} is a folder of files: leave it out")
    return open_folder(data, found.folder, classes=classes, **given)
