"""Tables of times measured on this machine, stored in the Hugging Face cache."""

import json
import logging
import os
import platform
from pathlib import Path

import torch


logger = logging.getLogger(__name__)


def table_path(name: str) -> Path:
    """`arimage/<name>.json` in the Hugging Face cache (`HF_HOME`)."""
    cache = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    return Path(os.environ.get("HF_HOME", f"{cache}/huggingface")).expanduser() / "arimage" / f"{name}.json"


def read_table(name: str) -> dict:
    try:
        return json.loads(table_path(name).read_text())
    # A file that cannot be read is replaced; `write_table` warns if that fails too.
    except (OSError, ValueError):
        return {}


def write_table(name: str, table: dict) -> None:
    path = table_path(name)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(table, indent=1))
        part.replace(path)
    except OSError as error:
        logger.warning("%s cannot be written (%s): its times are measured again next time", path, error)


def device_name(device: torch.device) -> str:
    """The product name of the GPU or CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        fields = (line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines())
        name = next((value.strip() for key, _, value in fields if key.strip() == "model name"), name)
    return name


def describe_device(device: torch.device) -> str:
    """Everything but the work itself that its time depends on, as a key of a table."""
    return f"{device_name(device)}, {torch.get_num_threads()} threads, torch {torch.__version__}"
