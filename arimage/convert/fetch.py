"""Published checkpoints, downloaded from the Hugging Face Hub and converted once."""

import shlex
import shutil
from pathlib import Path

import huggingface_hub
from filelock import FileLock
from huggingface_hub.errors import LocalEntryNotFoundError

from .registry import PUBLISHED, PublishedCheckpoint


def load_published(
    name: str,
    *,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
    force_download: bool = False,
    token: str | bool | None = None,
    revision: str | None = None,
) -> Path:
    """The folder of a published checkpoint in the layout of `save_pretrained`. The first call downloads the authors'
    files and converts them; later calls return the folder.

    Args:
        name: of an entry of `PUBLISHED`.
        cache_dir: for the downloaded files and for the folder, `arimage/<name>` in it. Default: the Hub's cache for the
            files and its home (`HF_HOME`) for the folder.
        local_files_only: convert what was downloaded before, and download nothing.
        force_download: download and convert again.
        token: of the Hub, for every file.
        revision: branch, tag or commit of the checkpoint's repository, but not of its text encoder's. Each revision has
            its own folder.

    Raises:
        ValueError: if the name is unknown.
        ConnectionError: if a file is neither in the cache nor can be downloaded.
        CheckpointError: if a downloaded file is not what was published.
    """
    entry = next((entry for entry in PUBLISHED if entry.name == name), None)
    if entry is None:
        raise ValueError(f"unknown checkpoint {name!r}; available: {', '.join(entry.name for entry in PUBLISHED)}")
    folder_name = name if revision is None else f"{name}@{revision.replace('/', '--')}"
    folder = Path(cache_dir or huggingface_hub.constants.HF_HOME) / "arimage" / folder_name
    if (folder / "model_index.json").is_file() and not force_download:
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    hub = {
        "cache_dir": cache_dir,
        "local_files_only": local_files_only,
        "force_download": force_download,
        "token": token,
    }
    # The processes of one machine share the folder.
    with FileLock(folder.with_name(f".{folder_name}.lock")):
        if force_download or not (folder / "model_index.json").is_file():
            files = _fetch(entry, revision, **hub)
            if folder.exists():
                shutil.rmtree(folder)
            _convert(entry, *files, folder)
    return folder


def _convert(
    entry: PublishedCheckpoint, transformer: str, tokenizer: str, text_encoder: str | None, folder: Path
) -> None:
    # Here, because a converter imports the frameworks, and most calls find the folder.
    if entry.family == "var":
        from .var import convert_var

        convert_var(transformer, tokenizer, out=folder)
    else:
        from .llamagen import convert_llamagen

        convert_llamagen(
            transformer,
            tokenizer,
            entry.image_size,
            num_heads=entry.num_heads,
            text_encoder=text_encoder,
            out=folder,
        )


def _fetch(entry: PublishedCheckpoint, revision: str | None, **hub) -> tuple[str, str, str | None]:
    revisions = {entry.repository: revision}
    try:
        transformer, tokenizer = (
            huggingface_hub.hf_hub_download(repository, file, revision=revisions.get(repository), **hub)
            for repository, file in (
                (entry.repository, entry.transformer_file),
                (entry.tokenizer_repository, entry.tokenizer_file),
            )
        )
        text_encoder = entry.text_encoder_repository and huggingface_hub.snapshot_download(
            entry.text_encoder_repository,
            allow_patterns=["config.json", "*.safetensors", "*.safetensors.index.json", "*token*", "spiece.model"],
            **hub,
        )
    except (LocalEntryNotFoundError, ConnectionError) as error:
        raise ConnectionError(_by_hand(entry)) from error
    return transformer, tokenizer, text_encoder


def _by_hand(entry: PublishedCheckpoint) -> str:
    files = f"{entry.transformer_file} of {entry.repository}, {entry.tokenizer_file} of {entry.tokenizer_repository}"
    command = [
        "arimage",
        "convert",
        entry.family,
        "--transformer",
        entry.transformer_file,
        "--tokenizer",
        entry.tokenizer_file,
    ]
    if entry.family == "llamagen":
        command += ["--image-size", str(entry.image_size)]
    if entry.text_encoder_repository:
        files += f", the text encoder {entry.text_encoder_repository}"
        command += ["--text-encoder", Path(entry.text_encoder_repository).name]
    command += ["--out", entry.name]
    return (
        f"{entry.name} needs {files} from the Hugging Face Hub, which cannot be reached, and they are not in the cache: "
        f"connect once, or copy the files here and run `{shlex.join(command)}`"
    )
