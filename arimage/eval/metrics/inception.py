"""The Inception network. Its features are those of FID, sFID, KID, precision, recall, density and coverage, and its
class probabilities those of the Inception score."""

import importlib.util
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from ...convert.checkpoint import load_original
from ...convert.folder import damaged_files
from ...media.files import to_rgb
from .features import Resize, Space, WeightsFile, file_sha256


INCEPTION_WEIGHTS = {
    "clean": WeightsFile(
        "inception-2015-12-05.pt",
        "https://nvlabs-fi-cdn.nvidia.com/stylegan2-ada-pytorch/pretrained/metrics/inception-2015-12-05.pt",
        "f58cb9b6ec323ed63459aa4fb441fe750cfe39fafad6da5cb504a16f19e958f4",
        "--inception-weights",
        "ARIMAGE_INCEPTION_WEIGHTS",
    ),
    "tf1": WeightsFile(
        "weights-inception-2015-12-05-6726825d.pth",
        "https://github.com/toshas/torch-fidelity/releases/download/v0.2.0/weights-inception-2015-12-05-6726825d.pth",
        "6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2",
        "--inception-weights",
        "ARIMAGE_INCEPTION_WEIGHTS",
    ),
}
SPATIAL_CHANNELS = 7


class InceptionExtractor:
    """Features of images for FID (https://arxiv.org/abs/1706.08500): the 2,048 of the last pooling of Inception-v3.

    `resize="clean"` follows clean-fid (https://arxiv.org/abs/2104.11222): images are resized by an antialiased
    bicubic filter without rounding, and the network is the TorchScript file of StyleGAN2-ADA. "tf1" is
    torch-fidelity's port of the original TensorFlow graph, which resizes bilinearly inside without antialiasing, as
    the ADM evaluator does; all images of a batch must then have one size.

    Attributes:
        weights: "published", or a note that another file is used, with which no published figure is comparable.

    Raises:
        ValueError: if the weights or the package that runs them are missing.
    """

    # The output of torch-fidelity's network, which computes nothing beyond it.
    layer = "2048"

    def __init__(self, weights: Path | None, resize: Resize = "clean", device: str = "cpu"):
        published = INCEPTION_WEIGHTS[resize]
        path = published.check(weights, f"the Inception network (--resize {resize})")
        if resize == "clean" and path.name != published.name:
            # clean-fid expects this name.
            raise ValueError(f"{path} is not named {published.name}: rename it, or {published.where}")
        package, extra = ("cleanfid", "arimage[eval]") if resize == "clean" else ("torch_fidelity", "torch-fidelity")
        if importlib.util.find_spec(package) is None:
            raise ValueError(f"--resize {resize} needs {package}: pip install '{extra}'")
        digest = file_sha256(path)
        self.weights = published.provenance(digest)
        self.space = Space("inception-v3-2048", digest, resize)
        self.device, self._resize = device, resize
        # Another network shows only when it is used.
        with damaged_files(path, f"download {published.url} again"):
            self._network = self._load(path, resize).to(device)
            InceptionExtractor.__call__(self, [Image.new("RGB", (8, 8))])

    def _load(self, path: Path, resize: Resize) -> torch.nn.Module:
        if resize == "clean":
            from cleanfid.inception_torchscript import InceptionV3W

            return InceptionV3W(str(path.parent), download=False)
        from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3

        # torch-fidelity unpickles any file: refuse one that holds more than tensors.
        load_original(path, ())
        return FeatureExtractorInceptionV3(
            "inception-v3-compat", [self.layer], feature_extractor_weights_path=str(path)
        )

    @torch.inference_mode()
    def __call__(self, images: list[Image.Image]) -> torch.FloatTensor:
        arrays = [np.asarray(to_rgb("an image", image)) for image in images]
        if self._resize == "clean":
            from cleanfid.resize import build_resizer

            with ThreadPoolExecutor() as pool:
                arrays = list(pool.map(build_resizer("clean"), arrays))
        elif len({array.shape for array in arrays}) > 1:
            raise ValueError(
                "--resize tf1 takes images of one size, and these differ: crop them, or use --resize clean"
            )
        batch = torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2).contiguous().to(self.device)
        return self._network(batch) if self._resize == "clean" else self._network(batch)[0]

    def logits(self, features: np.ndarray) -> np.ndarray:
        """The logits [N, 1008] of features [N, 2048] of "tf1", float32, without the bias, which the original Inception
        score and the evaluator of ADM leave out."""
        return features @ self._network.fc.weight.T.float().cpu().numpy()


class SpatialInceptionExtractor(InceptionExtractor):
    """Features of images for the sFID (https://arxiv.org/abs/2103.03841) as in the evaluator of ADM: the first 7
    channels of its layer `mixed_6/conv`, which is `Mixed_6d.branch1x1` of torch-fidelity's port. They are 17 rows of
    17 places of 7 numbers, in this order, so that `mu_s` and `sigma_s` in ADM's files are their statistics."""

    # The first output after the layer.
    layer = "768"

    def __init__(self, weights: Path | None, device: str = "cpu"):
        super().__init__(weights, "tf1", device)
        self.space = replace(self.space, name="inception-v3-spatial-2023")
        self._network.Mixed_6d.branch1x1.register_forward_hook(self._keep)

    def _keep(self, module: torch.nn.Module, inputs: tuple, output: torch.FloatTensor) -> None:
        self._kept = output[:, :SPATIAL_CHANNELS]

    @torch.inference_mode()
    def __call__(self, images: list[Image.Image]) -> torch.FloatTensor:
        super().__call__(images)
        return self._kept.permute(0, 2, 3, 1).flatten(1)
