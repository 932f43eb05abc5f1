"""Uploading of what was trained to the Hugging Face Hub, which is met before the training."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    HTTPError,  # pyright: ignore[reportPrivateImportUsage] of httpx or httpx2, depending on the version
    OfflineModeIsEnabled,
)
from huggingface_hub.utils import validate_repo_id

from ..published.hub import LOG_IN


def check_repository(name: str) -> None:
    """Refuse what cannot be the name of a repository."""
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ValueError(f"--push-to-hub is {name!r}, which no repository can be called: give owner/name") from error


def make_repository(name: str, token: str | None = None, private: bool = False) -> None:
    """Make the repository of a name, unless it exists, which asks the Hub before a training whether it may.

    Raises:
        ConnectionError: if the Hub refuses, or cannot be reached.
    """
    with _told(name):
        HfApi(token=token).create_repo(name, private=private, exist_ok=True)


def upload(name: str, folder: Path, token: str | None = None) -> None:
    """Upload what is in a folder.

    Raises:
        ConnectionError: if the Hub refuses, or cannot be reached.
    """
    with _told(name):
        HfApi(token=token).upload_folder(repo_id=name, folder_path=folder)


@contextmanager
def _told(name: str) -> Iterator[None]:
    try:
        yield
    except OfflineModeIsEnabled as error:
        raise ConnectionError(f"--push-to-hub is {name}, and HF_HUB_OFFLINE is set: unset it") from error
    except HfHubHTTPError as error:
        reason = f"the Hub refuses --push-to-hub {name} ({error.response.status_code})"
        raise ConnectionError(f"{reason}: {LOG_IN} with the right to write there") from error
    except (HTTPError, ConnectionError) as error:
        raise ConnectionError(
            f"the Hub cannot be reached for --push-to-hub {name}: connect, or leave it out"
        ) from error
