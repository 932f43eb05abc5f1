"""The DINOv2 network (https://arxiv.org/abs/2304.07193), in whose space FD-DINOv2 is measured."""

import math
import re
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

from ...convert.folder import damaged_files
from ...media.files import to_rgb
from ...pipelines.family import HubFiles
from ...published.hub import download
from .features import OTHER_NETWORK, Space, weights_sha256
from .networks import load_network


SIDE = 224
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
PUBLISHED = "facebook/dinov2-large"
# Width, number of layers and patch size of ViT-L/14.
VIT_L = (1024, 24, 14)
# What the original code adds to the number of patches when it resizes the embeddings of positions.
OFFSET = 0.1


class Dinov2Extractor:
    """Features [B, D] of images for FD-DINOv2 (https://arxiv.org/abs/2306.04675): the class token after the last norm,
    1,024 numbers of ViT-L/14.

    As in the code of that paper, images are resized to 224x224 whatever their aspect ratio, by Pillow's bicubic
    filter, and the embeddings of positions as the authors of DINOv2 resize them. torch-fidelity resizes images in
    another way.

    Args:
        source: a folder with a `Dinov2Model` of transformers, or the id owner/name of one on the Hugging Face Hub,
            which is downloaded.

    Attributes:
        weights: a note that the network is not ViT-L/14, with which no published figure is comparable; else None.

    Raises:
        ValueError: if there is no folder, or it does not hold a complete, undamaged model.
        PermissionError, FileNotFoundError, ConnectionError: if it cannot be downloaded.
    """

    def __init__(self, source: str | Path | None, device: str = "cpu"):
        get = f"hf download {PUBLISHED} --local-dir"
        if source is None:
            raise ValueError(
                f"--dinov2 is missing: give --download or {PUBLISHED} to download it, or {get} DIR and name the folder"
            )
        folder = Path(source)
        if not folder.is_dir() and re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", str(source)):
            folder = download(HubFiles(str(source), ("*.safetensors", "config.json")), None)
        weights = sorted(folder.glob("*.safetensors"))
        if not weights or not (folder / "config.json").is_file():
            raise ValueError(f"--dinov2 is {source}, without config.json or *.safetensors of DINOv2: {get} {source}")
        from transformers import Dinov2Model

        again = f"{get} {folder}"
        self._model = load_network(Dinov2Model, folder, again)
        config = self._model.config
        found = (config.hidden_size, config.num_hidden_layers, config.patch_size)
        self.weights = None if found == VIT_L else OTHER_NETWORK.format("ViT-L/14 of DINOv2")
        self.space = Space("dinov2", weights_sha256(weights), f"{SIDE}x{SIDE} bicubic")
        self.device = device
        # Wrong settings show only when they are used.
        with damaged_files(folder / "config.json", again):
            _resize_positions(self._model, SIDE // config.patch_size)
            self._model.to(device)
            self([Image.new("RGB", (8, 8))])

    @torch.inference_mode()
    def __call__(self, images: list[Image.Image]) -> torch.FloatTensor:
        resized = [to_rgb("an image", one).resize((SIDE, SIDE), Image.Resampling.BICUBIC) for one in images]
        pixels = torch.from_numpy(np.stack([np.asarray(one) for one in resized])).to(self.device).float() / 255
        pixels = (pixels - pixels.new_tensor(MEAN)) / pixels.new_tensor(DEVIATION)
        return self._model(pixel_values=pixels.permute(0, 3, 1, 2)).pooler_output


def _resize_positions(model, grid: int) -> None:
    """Resize the embeddings of positions to `grid` x `grid` patches. transformers would do it without the offset."""
    embeddings = model.embeddings
    positions = embeddings.position_embeddings.data
    side = math.isqrt(positions.shape[1] - 1)
    if side == grid:
        return
    patches = positions[:, 1:].unflatten(1, (side, side)).permute(0, 3, 1, 2)
    patches = F.interpolate(patches, scale_factor=(grid + OFFSET) / side, mode="bicubic")
    patches = patches.permute(0, 2, 3, 1).flatten(1, 2)
    embeddings.position_embeddings = torch.nn.Parameter(torch.cat([positions[:, :1], patches], dim=1))
