"""Published checkpoints, downloaded from the Hugging Face Hub and converted once."""

import logging
import shlex
import shutil
from importlib import import_module
from pathlib import Path

from filelock import FileLock
from huggingface_hub import constants

from ..families import CONVERTERS
from ..pipelines.family import PublishedCheckpoint
from .hub import download, missing_bytes
from .registry import PUBLISHED, find_published, nearest_names, size_text


logger = logging.getLogger(__name__)


def load_published(
    name: str,
    *,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
    force_download: bool = False,
    token: str | bool | None = None,
    revision: str | None = None,
) -> Path:
    """The folder of a published checkpoint in the layout of `save_pretrained`. The first call logs what it takes of
    disk and memory, downloads the authors' files and converts them, unless they have this layout already; later calls
    return the folder. After an
    interruption, the next call downloads the files that are not complete, and converts again from the start.

    Args:
        name: of an entry of `PUBLISHED`, or the Hub repository of one.
        cache_dir: for the downloaded files and for the folder, `arimage/<name>` in it. Default: the Hub's cache for
            the files and its home (`HF_HOME`) for the folder.
        local_files_only: convert what was downloaded before, and download nothing.
        force_download: download and convert again.
        token: of the Hub, for every file.
        revision: branch, tag or commit of the checkpoint's repository, but not of its text encoder's or image
            tokenizer's. Each revision has its own folder.

    Raises:
        ValueError: if the name is unknown, or the repository holds several models.
        PermissionError: if a repository is gated.
        FileNotFoundError: if a repository, its revision or a file does not exist, or files are needed that no
            repository holds.
        ConnectionError: if a file is neither in the cache nor can be downloaded.
        OSError: if the disk is too small.
        CheckpointError: if a downloaded file is not what was published.
    """
    entry = find_published(name)
    if entry is None:
        near = nearest_names(name, (entry.name for entry in PUBLISHED))
        raise ValueError(f"unknown checkpoint {name!r}: the nearest are {near}, and `arimage models` lists all")
    folder_name = entry.name if revision is None else f"{entry.name}@{revision}"
    folder = Path(cache_dir or constants.HF_HOME) / "arimage" / folder_name.replace("/", "--")
    if (folder / "model_index.json").is_file() and not force_download:
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    given = _requested(entry, folder.parent)
    hub = {"cache_dir": cache_dir, "force_download": force_download, "token": token}
    # The processes of one machine share the folder.
    with FileLock(folder.with_name(f".{folder.name}.lock")):
        if force_download or not (folder / "model_index.json").is_file():
            revisions = {entry.repository: revision}
            if not local_files_only:
                sizes = [missing_bytes(f, revisions.get(f.repository), **hub) for f in entry.files.values()]
                told = [size for size in sizes if size is not None]
                _tell(entry, sum(told) if len(told) == len(sizes) else entry.download, folder)
                _check_disk(entry, sum(told), Path(cache_dir or constants.HF_HUB_CACHE), folder)
            try:
                paths = {
                    argument: download(
                        files, revisions.get(files.repository), local_files_only=local_files_only, **hub
                    )
                    for argument, files in entry.files.items()
                }
            except ConnectionError as error:
                remedy = f"run `{_by_hand(entry, given)}`" if entry.family else "give the folder"
                raise ConnectionError(f"{error}, or copy the files here and {remedy}") from error
            if not entry.family:
                return paths["folder"]
            # The index goes first and comes last: a folder that has one is whole. A killed process may have left a
            # part.
            (folder / "model_index.json").unlink(missing_ok=True)
            for left in (*folder.parent.glob(folder.name), *folder.parent.glob(f".{folder.name}.*.partial")):
                shutil.rmtree(left)
            # A converter imports the frameworks, and most calls find the folder.
            module, converter = CONVERTERS[entry.family]
            convert = getattr(import_module(f"..{module}", __package__), converter.function)
            convert(**paths, **given, **entry.options, out=folder)
            from huggingface_hub import metadata_load, metadata_save

            licence = {"license": "other", "license_name": entry.licence, "license_link": entry.licence_source}
            metadata_save(folder / "README.md", (metadata_load(folder / "README.md") or {}) | licence)
    return folder


def _requested(entry: PublishedCheckpoint, folder: Path) -> dict[str, Path]:
    """The files in `folder` that the authors gave to the user, by the converter's argument."""
    if (files := entry.requested) is None:
        return {}
    place = folder / files.folder
    if not all((place / name).is_file() for name in files.names):
        raise FileNotFoundError(
            f"{entry.name} needs {files.content} at {files.page}: put its {' and '.join(files.names)} into {place}; "
            f"{files.alternatives} need no request"
        )
    return {files.argument: place}


def _tell(entry: PublishedCheckpoint, size: int, folder: Path) -> None:
    weights = entry.all_parameters
    memory = (f"{weights / 1e9:.2g} billion", size_text(2 * weights), size_text(4 * weights))
    if not entry.family:
        if size:
            logger.warning(
                "%s is downloaded once: %s to download; its %s parameters take %s of memory in bfloat16 and %s in "
                "float32. Licence: %s (%s).",
                *(entry.name, size_text(size), *memory, entry.licence, entry.licence_source),
            )
        return
    logger.warning(
        "%s is downloaded and converted once: %s to download, %s more of disk for %s and about as much memory "
        "meanwhile; its %s parameters take %s of memory in bfloat16 and %s in float32. "
        "Licence: %s (%s).",
        *(entry.name, size_text(size), size_text(entry.converted), folder, *memory),
        *(entry.licence, entry.licence_source),
    )


def _check_disk(entry: PublishedCheckpoint, size: int, cache: Path, folder: Path) -> None:
    cache.mkdir(parents=True, exist_ok=True)
    needed = {cache: size, folder.parent: entry.converted}
    if cache.stat().st_dev == folder.parent.stat().st_dev:
        needed = {cache: size + entry.converted}
    for place, wanted in needed.items():
        free = shutil.disk_usage(place).free
        if free < wanted:
            raise OSError(
                f"{entry.name} needs {size_text(wanted)} of disk in {place}, where {size_text(free)} are free: make "
                "room, or give another cache_dir"
            )


def _by_hand(entry: PublishedCheckpoint, given: dict[str, Path]) -> str:
    """The command that converts files which were copied to this machine."""
    paths = {argument: files.file or files.repository.rpartition("/")[2] for argument, files in entry.files.items()}
    command = CONVERTERS[entry.family][1].command.split()
    command += [paths.pop("folder")] if "folder" in paths else []
    options = paths | given | entry.options | {"out": entry.name.replace("/", "--")}
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        command.append(option if value is True else f"{option}={value}")
    return shlex.join(command)
