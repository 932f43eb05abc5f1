"""Files of the Hugging Face Hub, and one sentence for whatever keeps them from being downloaded."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import HfApi, constants, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HTTPError,  # pyright: ignore[reportPrivateImportUsage] of httpx or httpx2, depending on the version
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import filter_repo_objects

from ..pipelines.family import HubFiles


LOG_IN = "log in with `hf auth login`, or pass token="


@contextmanager
def hub_errors(repository: str, revision: str | None = None) -> Iterator[None]:
    """Say in one sentence why `repository` cannot be read.

    Raises:
        PermissionError: if it is gated, or the token may not read it.
        FileNotFoundError: if it, the revision or a file does not exist.
        ConnectionError: if the Hub cannot be reached, and the files are not in the cache; or if the connection breaks.
    """
    page = f"{constants.ENDPOINT}/{repository}"
    try:
        yield
    except GatedRepoError as error:
        raise PermissionError(f"{repository} is gated: ask for access at {page}, then {LOG_IN}") from error
    except RepositoryNotFoundError as error:
        raise FileNotFoundError(
            f"{repository} does not exist on the Hugging Face Hub, or is private: check the name, or {LOG_IN}"
        ) from error
    except RevisionNotFoundError as error:
        raise FileNotFoundError(
            f"{repository} has no revision {revision!r}: give a branch, tag or commit of {page}"
        ) from error
    except RemoteEntryNotFoundError as error:
        raise FileNotFoundError(f"{error.response.url} does not exist: compare with {page}/tree/main") from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise ConnectionError(
            f"files of {repository} are not in the cache, and the Hugging Face Hub cannot be reached: connect once"
        ) from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            raise PermissionError(
                f"the Hub refuses {repository} ({status}): {LOG_IN} with access to {page}"
            ) from error
        raise ConnectionError(f"the Hub fails with {status} for {repository}: try again later") from error
    except HTTPError as error:
        raise ConnectionError(
            f"the connection broke while {repository} was downloaded ({type(error).__name__}): run it again, which "
            "keeps the files that are complete"
        ) from error


def missing_bytes(
    files: HubFiles,
    revision: str | None,
    *,
    cache_dir: str | Path | None = None,
    force_download: bool = False,
    token: str | bool | None = None,
) -> int | None:
    """Bytes of `files` that are not in the cache, or of all with `force_download`; None if the Hub does not answer."""
    with hub_errors(files.repository, revision):
        try:
            info = HfApi().model_info(files.repository, revision=revision or "main", files_metadata=True, token=token)
        except (RepositoryNotFoundError, RevisionNotFoundError):
            raise
        # The cache may hold the files.
        except (HTTPError, OfflineModeIsEnabled):
            return None
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or []}
    return sum(
        sizes[name]
        for name in filter_repo_objects(sizes, allow_patterns=list(files.patterns))
        if force_download
        or not isinstance(try_to_load_from_cache(files.repository, name, cache_dir, info.sha), (str, Path))
    )


def download(files: HubFiles, revision: str | None, **hub) -> Path:
    """The path of one file in the Hub's cache, or of the folder with several. What is complete is not downloaded
    again."""
    with hub_errors(files.repository, revision):
        folder = Path(
            snapshot_download(files.repository, allow_patterns=list(files.patterns), revision=revision, **hub)
        )
    path = folder / (files.file or "")
    if not any(folder.glob(files.patterns[0])):
        raise FileNotFoundError(
            f"{files.repository} has no {files.patterns[0]}: compare with {constants.ENDPOINT}/"
            f"{files.repository}/tree/{revision or 'main'}"
        )
    return path
