"""Files as repositories on the Hub have them, for the `published.py` of the families' folders."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from arimage.convert.folder import load_original_folder


# Names of the files of repositories on the Hub, with their sizes in bytes as the pages round them, or null where they
# were not seen. The files of GAIR/Anole-7b-v0.1 in models/7b, four, are taken to be those of Meta's format; the
# weights of MammothModa2 are taken to be in two files.
LISTINGS = json.loads((Path(__file__).parent / "fixtures" / "hub_listings.json").read_text())
UNUSED = b"no converter reads this"


def is_weights(name: str) -> bool:
    return name.startswith(("model-", "model.", "pytorch_model"))


def publish(root: Path, repository: str, source: Path) -> None:
    """The files of `source` under the names that `repository` has on the Hub, the weights in as many files as there,
    and something for every other name. A file of `source` that the repository has not is an error."""
    names = LISTINGS[repository]
    files = {path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()}
    assert {name for name in files if not is_weights(name)} <= names.keys()
    parts = sorted(name for name in names if is_weights(name) and not name.endswith(".json"))
    state = load_original_folder(source) if parts else {}
    where = {key: parts[i % len(parts)] for i, key in enumerate(state)}
    for name in names:
        path = root / repository / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name in parts:
            part = {key: value.contiguous() for key, value in state.items() if where[key] == name}
            save_file(part, path, {"format": "pt"}) if path.suffix == ".safetensors" else torch.save(part, path)
        elif is_weights(name):
            path.write_text(json.dumps({"metadata": {}, "weight_map": where}))
        elif name in files:
            shutil.copy(source / name, path)
        else:
            path.write_bytes(UNUSED)


def copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(source, target)
