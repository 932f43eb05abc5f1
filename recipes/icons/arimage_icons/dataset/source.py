"""The npm package @iconify/json, as `npm pack` wrote it or unpacked."""

import json
import tarfile
import zlib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any


WANTED = "@iconify/json@2.2.535"
REMEDY = f"give the file that `npm pack {WANTED}` writes, or the folder `package` that is in it"


def read_files(package: Path, pattern: str) -> Iterator[Any]:
    """What the JSON files of a package hold whose paths in it match `pattern`, in no certain order.

    Raises:
        ValueError: if they cannot be read, as those of a download that was cut off.
    """
    try:
        if package.is_dir():
            for path in package.glob(pattern):
                yield json.loads(path.read_bytes())
            return
        with tarfile.open(package, "r:gz") as archive:
            for member in archive:
                file = archive.extractfile(member)
                if file is not None and fnmatch(member.name, f"package/{pattern}"):
                    yield json.load(file)
    except (OSError, EOFError, ValueError, tarfile.TarError, zlib.error) as error:
        raise ValueError(f"{package} cannot be read as a package of icons ({error}): {REMEDY}") from error


def read_collections(package: Path) -> dict[str, dict]:
    """What a package says about each of its sets: author, licence, whether it has colours.

    Raises:
        ValueError: if it is not a package of icons.
    """
    for collections in read_files(package, "collections.json"):
        return collections
    raise ValueError(f"{package} has no collections.json, so it is not a package of icons: {REMEDY}")


def read_sets(package: Path) -> Iterator[tuple[str, dict]]:
    """Each set of a package with its icons."""
    for data in read_files(package, "json/*.json"):
        yield data["prefix"], data
