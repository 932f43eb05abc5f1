"""Networks of transformers that metrics ask, from folders that users download: whole, or refused in one sentence."""

from pathlib import Path
from typing import TypeVar

import torch
from safetensors import safe_open
from transformers import PreTrainedModel

from ...convert.folder import damaged_files
from ...models.weight_files import Depth, quiet
from ...settings.schema import check, check_regular, read_object


Network = TypeVar("Network", bound=PreTrainedModel)
PROBLEMS = {"missing_keys": "is missing", "mismatched_keys": "has another shape than config.json says"}


def load_network(kind: type[Network], folder: Path, remedy: str) -> Network:
    """The model of a class in a folder, in float32 whatever its files hold, and in evaluation mode.

    Args:
        kind: its class.
        folder: with config.json and .safetensors files.
        remedy: what the user can do, for errors.
    """
    config = folder / "config.json"
    settings = read_object(config)
    for part in (settings, *filter(lambda value: isinstance(value, dict), settings.values())):
        check(Depth, part, config)
    names: dict[str, Path] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with damaged_files(file, remedy):
            check_regular(str(file), file, None)
            with safe_open(file, "pt") as weights:
                names |= dict.fromkeys(weights.keys(), file)
    with damaged_files(config, remedy), quiet():
        model, found = kind.from_pretrained(
            folder,
            local_files_only=True,
            use_safetensors=True,
            dtype=torch.float32,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    for problem, words in PROBLEMS.items():
        for key in sorted(entry[0] if isinstance(entry, tuple) else entry for entry in found[problem]):
            raise ValueError(f"{names.get(key, folder)}: the weight {key!r} {words}: {remedy}")
    return model.eval()
