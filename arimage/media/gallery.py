"""A gallery: small pictures that have names, which lie in one sheet next to a list of the names."""

from pathlib import Path

import numpy as np
import torch

from ..pipelines.saving.saved_folder import stored_elsewhere
from .files import read_image


# In pixels, and pictures per row of the sheet.
GALLERY_SIZE, GALLERY_COLUMNS = 32, 64


def gallery_folder(model: str | Path | None) -> Path | None:
    """The folder of the gallery of a model, by the folder of the model: its own, or the one that `shared.json` names.
    None if it has none."""
    if model is None:
        return None
    folder = stored_elsewhere(Path(model)).get("gallery", Path(model))
    return folder if (folder / "gallery.txt").is_file() else None


def read_gallery(folder: Path) -> tuple[torch.Tensor, list[str]]:
    """The pictures of the gallery in a folder, gallery.webp, float [K, 3, 32, 32] in [0, 1], and the name of each, the
    lines of gallery.txt."""
    names = (folder / "gallery.txt").read_text(encoding="utf-8").split("\n")[:-1]
    sheet = torch.from_numpy(np.asarray(read_image(folder / "gallery.webp")) / np.float32(255))
    tiles = sheet.unflatten(0, (-1, GALLERY_SIZE)).unflatten(2, (-1, GALLERY_SIZE)).permute(0, 2, 4, 1, 3)
    return tiles.flatten(0, 1)[: len(names)], names
