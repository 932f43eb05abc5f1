"""Files that are written whole or not at all, JSON that is checked when it is read, and folders of runs that one
command at a time uses."""

import contextlib
import errno
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from uuid import uuid4

from filelock import FileLock, Timeout


LOCK = ".lock"
# What the system says where a disk or a quota is full, or a file is as large as it may be.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def write_whole(path: Path, write: Callable[[Path], object], *, before: Path | None = None) -> None:
    """Replace `path` by what `write` writes to the file that it is given: on disk and complete, or not at all. Of
    several commands that do so at the same time, the last one wins. The old file is kept as `before`."""
    temporary = path.with_name(f".{path.name}.{uuid4().hex}.tmp")
    try:
        write(temporary)
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        if before is not None and path.exists():
            os.replace(path, before)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def remove_leftovers(path: Path) -> None:
    """Remove what commands that were killed in `write_whole` left for the files of a pattern, as in folder/*.png."""
    for temporary in path.parent.glob(f".{path.name}*.tmp"):
        temporary.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Flush the names of new files to disk, which only POSIX systems support."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def append(path: Path, rows: list[dict]) -> None:
    """Append rows to a file of one JSON object per line, all of them or none."""
    with open(path, "a+b", buffering=0) as file:
        # An interruption may have cut the last line short.
        begin = max(0, file.seek(0, os.SEEK_END) - 2**16)
        file.seek(begin)
        whole = begin + file.read().rfind(b"\n") + 1
        file.truncate(whole)
        lines = to_lines(rows)
        try:
            # An unbuffered write may be partial; the next one then raises the reason.
            written = 0
            while written < len(lines):
                written += file.write(lines[written:])
        except OSError:
            file.truncate(whole)
            raise
        os.fsync(file.fileno())
    sync_folder(path.parent)


def remove_all_leftovers(folder: Path) -> None:
    """Remove what commands that were killed in `write_whole` left in a folder, which no other command may use."""
    for path in folder.iterdir():
        if re.fullmatch(r"\..+\.[0-9a-f]{32}\.tmp", path.name):
            path.unlink(missing_ok=True)


def hold(folder: Path) -> FileLock:
    """Keep other commands out of a folder, until the lock is released or this process ends."""
    lock = FileLock(folder / LOCK, blocking=False, is_singleton=True)
    try:
        lock.acquire()
    except Timeout as error:
        raise ValueError(f"another command uses {folder}: wait for it, or give another --out") from error
    return lock


class FullDisk(OSError):
    """A file could not be written since there is no room for it."""


def full_disk(error: BaseException) -> str | None:
    """The system's reason if an error, or one that it was raised in place of, says that there is no room for a file.
    safetensors gives the number of the system's error as text only, and `torch.save` hides an error behind one of its
    own."""
    number = error.errno if isinstance(error, OSError) else None
    # By its name, since `safetensors` is not imported for this.
    if type(error).__name__ == "SafetensorError" and (said := re.search(r"os error (\d+)", str(error))):
        number = int(said[1])
    if number in FULL:
        return os.strerror(number)
    cause = error.__cause__ or error.__context__
    return None if cause is None else full_disk(cause)


@contextlib.contextmanager
def space_in(folder: Path) -> Iterator[None]:
    """Say what to do where the disk of a folder is full, whatever library wrote to it."""
    try:
        yield
    except FullDisk:
        raise
    except Exception as error:
        reason = full_disk(error)
        if reason is None:
            raise
        raise FullDisk(
            f"no space is left in {folder} ({reason}): make room and repeat the command, which resumes the run"
        ) from error


def to_json(content: dict) -> str:
    """The text of a JSON file."""
    try:
        return json.dumps(content, indent=2, allow_nan=False) + "\n"
    except ValueError as error:
        raise ValueError(f"a number is not finite and cannot be written as JSON ({error})") from error


def write_json(path: Path, content: dict) -> None:
    """`write_whole` of a JSON file."""
    write_whole(path, lambda file: file.write_text(to_json(content), encoding="utf-8"))


def to_lines(rows: list[dict]) -> bytes:
    """One JSON object per line."""
    return "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows).encode()


def check_sampling(sampling: dict, name: str | Path, remedy: str) -> None:
    """Refuse sampling settings that no pipeline has."""
    check_fields(sampling, dict.fromkeys(sampling, (int, float, str, list)), f"sampling in {name}", remedy)


def sampling_text(sampling: dict) -> str:
    """Sampling settings in words."""
    numbers = {name: f"{value:g}" if isinstance(value, int | float) else value for name, value in sampling.items()}
    return ", ".join(f"{name} {value}" for name, value in numbers.items())


def check_fields(value: object, fields: Mapping[str, type | tuple], name: str | Path, remedy: str) -> dict:
    """Return `value` if it is an object that has every one of `fields` with a value of its type."""
    if not isinstance(value, dict):
        raise ValueError(f"{name} is not a JSON object: {remedy}")
    for field, kind in fields.items():
        if not isinstance(value.get(field), kind):
            state = f"a wrong {field} ({value[field]!r:.60})" if field in value else f"no {field}"
            raise ValueError(f"{name} has {state}: {remedy}")
    return value


def check_same(
    where: Path, old: dict, new: dict, path: str = "", remedy: str = "ask for the same, or give another --out"
) -> None:
    """Check that the settings in the file `where` are those of a command that resumes its run."""
    for key in dict.fromkeys([*new, *old]):
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            check_same(where, before, after, f"{path}{key}.", remedy)
        elif before != after:
            raise ValueError(f"{where} says {path}{key} = {before!r} and you ask for {after!r}: {remedy}")
