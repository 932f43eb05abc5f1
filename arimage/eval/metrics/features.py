"""Features of pictures, from networks in local files, and their cache."""

import hashlib
import importlib.util
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from tqdm import tqdm

from ...convert.checkpoint import load_original
from ..runs.files import replace
from ..runs.run_folder import MANIFEST, read_finished


IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
VIDEO_SUFFIXES = (".mp4", ".gif", ".webp", ".png")
Resize = Literal["clean", "tf1"]


@dataclass(frozen=True)
class Space:
    """Two sets of features are comparable if they share this: the network's name, the SHA-256 of its weights, the resizing."""

    name: str
    sha256: str
    resize: str


class Extractor(Protocol):
    """A network that turns a batch of B pictures of any mode and size, or B videos, into features [B, D], float32."""

    space: Space

    def __call__(self, images: list) -> torch.FloatTensor: ...


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def image_paths(folder: Path, *, videos: bool = False) -> list[Path]:
    """The images or videos of a run in the order of its manifest, or all pictures or videos below another folder, sorted.

    Raises:
        ValueError: if the run is not finished or damaged, or the folder has no pictures or no videos.
    """
    if (folder / MANIFEST).is_file():
        return [folder / row["path"] for row in read_finished(folder)[0]]
    kind, suffixes = ("videos", VIDEO_SUFFIXES) if videos else ("pictures", IMAGE_SUFFIXES)
    found = sorted(path for path in folder.rglob("*") if path.suffix.lower() in suffixes)
    if not found:
        raise ValueError(f"{folder} has no {kind}: name a folder of {', '.join(suffixes)} files")
    return found


def _open(path: Path) -> Image.Image:
    with Image.open(path) as image:
        return image.convert("RGB")


def extract(
    paths: list[Path],
    extractor: Extractor,
    *,
    cache: Path | None = None,
    batch_size: int = 32,
    size: int | None = None,
    read: Callable[[Path], object] = _open,
) -> np.ndarray:
    """Features [N, D], float32, of pictures or videos in their order.

    Args:
        paths: files of pictures, or a single .npz whose `arr_0` holds them: uint8 [N, H, W, 3], as the ADM evaluator reads.
        cache: a folder for files of features, whose names depend on the extractor's space and the pictures' names, sizes
            and modification times.
        size: before that, `resize` the pictures to this side in pixels.
        read: how a file becomes what the extractor takes, an RGB picture by default.
    """
    file = (
        None if cache is None else cache / f"{extractor.space.name}-{_fingerprint(paths, extractor.space, size)}.npz"
    )
    if file is not None and file.is_file():
        return np.load(file)["features"]
    batches = _batches(paths, batch_size, extractor.space.name, read)
    if size is not None:
        batches = ([Image.fromarray(resize(np.asarray(one), size)) for one in images] for images in batches)
    found = [extractor(images).float().cpu().numpy() for images in batches]
    features = np.concatenate(found)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)

        def write(path: Path) -> None:
            with path.open("wb") as stream:
                np.savez(stream, features=features, space=json.dumps(asdict(extractor.space)))

        replace(file, write)
    return features


def resize(pixels: np.ndarray, size: int) -> np.ndarray:
    """A picture, uint8 [H, W, 3], with sides of `size` pixels, as LlamaGen makes 256 of 384 for the evaluator of ADM: bicubic
    without antialiasing. It rounds to levels afterwards, here they are rounded before and after."""
    if pixels.shape[:2] == (size, size):
        return pixels
    image = torch.from_numpy(pixels.copy()).permute(2, 0, 1)[None].float()
    image = F.interpolate(image, size=(size, size), mode="bicubic").round().clamp(0, 255)
    return image[0].permute(1, 2, 0).byte().numpy()


def _fingerprint(paths: list[Path], space: Space, size: int | None) -> str:
    stats = [(path.name, path.stat()) for path in paths]
    files = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    sizes = [] if size is None else [size]
    return hashlib.sha256(json.dumps([asdict(space), files, *sizes]).encode()).hexdigest()[:16]


def _batches(paths: list[Path], size: int, name: str, read: Callable[[Path], object]) -> Iterator[list]:
    packed = paths[0].suffix == ".npz"
    pictures = paths
    if packed:
        pictures = np.load(paths[0])["arr_0"]
        if pictures.dtype != np.uint8 or pictures.ndim != 4 or pictures.shape[-1] != 3:
            raise ValueError(
                f"arr_0 of {paths[0]} is {pictures.dtype} {list(pictures.shape)}: pictures are uint8 [N, H, W, 3]"
            )
    with ThreadPoolExecutor() as pool, tqdm(total=len(pictures), desc=name, unit="image", leave=False) as progress:
        for start in range(0, len(pictures), size):
            batch = pictures[start : start + size]
            yield list(pool.map(Image.fromarray if packed else read, batch))
            progress.update(len(batch))


@dataclass(frozen=True)
class WeightsFile:
    """A published file of weights."""

    name: str
    url: str
    sha256: str

    def provenance(self, digest: str) -> str:
        """ "published", or a note that a file of another SHA-256 was used."""
        if digest == self.sha256:
            return "published"
        return f"unknown (sha256 {digest}), not comparable with published figures"


INCEPTION_WEIGHTS = {
    "clean": WeightsFile(
        "inception-2015-12-05.pt",
        "https://nvlabs-fi-cdn.nvidia.com/stylegan2-ada-pytorch/pretrained/metrics/inception-2015-12-05.pt",
        "f58cb9b6ec323ed63459aa4fb441fe750cfe39fafad6da5cb504a16f19e958f4",
    ),
    "tf1": WeightsFile(
        "weights-inception-2015-12-05-6726825d.pth",
        "https://github.com/toshas/torch-fidelity/releases/download/v0.2.0/weights-inception-2015-12-05-6726825d.pth",
        "6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2",
    ),
}


class InceptionExtractor:
    """The 2,048 features of the Inception-v3 that FID is defined by (https://arxiv.org/abs/1706.08500).

    With `resize="clean"` it is clean-fid's: pictures are resized by an antialiased bicubic filter without rounding
    (https://arxiv.org/abs/2104.11222), and the network is the TorchScript file of StyleGAN2-ADA. With "tf1" it is
    torch-fidelity's port of the original TensorFlow graph, which resizes bilinearly inside and does not antialias, as the
    ADM evaluator does; all pictures of a batch must then be of one size.

    Attributes:
        weights: "published", or a note that the file is another one, whose figures are not comparable with published ones.

    Raises:
        ValueError: if the weights or the package that runs them are missing.
    """

    def __init__(self, weights: Path | None, resize: Resize = "clean", device: str = "cpu"):
        path, published = _find_inception(weights, resize), INCEPTION_WEIGHTS[resize]
        package, extra = ("cleanfid", "arimage[eval]") if resize == "clean" else ("torch_fidelity", "torch-fidelity")
        if importlib.util.find_spec(package) is None:
            raise ValueError(f"--resize {resize} needs {package}: pip install '{extra}'")
        digest = file_sha256(path)
        self.weights = published.provenance(digest)
        self.space = Space("inception-v3-2048", digest, resize)
        self.device = device
        try:
            self._network = _load_clean(path) if resize == "clean" else _load_tf1(path)
        except RuntimeError as error:
            raise ValueError(f"{path} is incomplete or another network: download {published.url} again") from error
        self._network.to(device)

    @torch.inference_mode()
    def __call__(self, images: list[Image.Image]) -> torch.FloatTensor:
        pictures = [np.asarray(image.convert("RGB")) for image in images]
        if self.space.resize == "clean":
            from cleanfid.resize import build_resizer

            with ThreadPoolExecutor() as pool:
                pictures = list(pool.map(build_resizer("clean"), pictures))
        elif len({picture.shape for picture in pictures}) > 1:
            raise ValueError(
                "--resize tf1 takes pictures of one size, and these differ: crop them, or use --resize clean"
            )
        batch = torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).contiguous().to(self.device)
        return self._network(batch) if self.space.resize == "clean" else self._network(batch)[0]


def _load_clean(path: Path) -> torch.nn.Module:
    from cleanfid.inception_torchscript import InceptionV3W

    return InceptionV3W(str(path.parent), download=False)


def _load_tf1(path: Path) -> torch.nn.Module:
    from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3

    # torch-fidelity unpickles any file: refuse one that holds more than tensors.
    load_original(path, ())
    return FeatureExtractorInceptionV3("inception-v3-compat", ["2048"], feature_extractor_weights_path=str(path))


def _find_inception(weights: Path | None, resize: Resize) -> Path:
    published = INCEPTION_WEIGHTS[resize]
    where = f"download {published.url}, and name the file with --inception-weights or ARIMAGE_INCEPTION_WEIGHTS"
    if weights is None:
        raise ValueError(f"--resize {resize} needs {published.name}: {where}")
    if not weights.is_file():
        raise ValueError(f"--inception-weights is {weights}, which is not a file: {where}")
    if resize == "clean" and weights.name != published.name:
        # clean-fid expects this name.
        raise ValueError(f"{weights} is not named {published.name}: rename it, or {where}")
    return weights


class ClipExtractor:
    """Image features [B, D] of a CLIP model in a local folder (https://arxiv.org/abs/2103.00020), not normalised.

    Raises:
        ValueError: if the folder does not hold a complete CLIP model.
    """

    def __init__(self, folder: Path, device: str = "cpu"):
        from transformers import AutoTokenizer, CLIPImageProcessor, CLIPModel

        needed = ("config.json", "preprocessor_config.json", "tokenizer_config.json")
        weights = sorted(folder.glob("*.safetensors"))
        missing = [name for name in needed if not (folder / name).is_file()] + ([] if weights else ["*.safetensors"])
        if missing:
            raise ValueError(
                f"{folder} lacks {', '.join(missing)} of a CLIP model: "
                f"hf download openai/clip-vit-large-patch14 --local-dir {folder}"
            )
        self._model, loading = CLIPModel.from_pretrained(
            folder, local_files_only=True, use_safetensors=True, output_loading_info=True
        )
        if loading["missing_keys"]:
            raise ValueError(f"{folder} has no weights for {sorted(loading['missing_keys'])[0]}: download it again")
        self._model.to(device).eval()
        self._processor = CLIPImageProcessor.from_pretrained(folder, local_files_only=True)
        self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        digests = [file_sha256(path) for path in weights]
        digest = digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()
        self.space = Space("clip", digest, "clip-processor")
        self.device = device

    @torch.inference_mode()
    def __call__(self, images: list[Image.Image]) -> torch.FloatTensor:
        pixels = self._processor(images, return_tensors="pt").pixel_values
        return self._model.get_image_features(pixels.to(self.device)).pooler_output

    @torch.inference_mode()
    def of_texts(self, texts: list[str]) -> torch.FloatTensor:
        """Text features [B, D], not normalised; texts are truncated to the length of the model."""
        tokens = self._tokenizer(
            texts,
            padding=True,
            truncation=True,
            max_length=self._model.config.text_config.max_position_embeddings,
            return_tensors="pt",
        )
        return self._model.get_text_features(**tokens.to(self.device)).pooler_output
