"""CLIP score: the cosine between an image and its prompt (https://arxiv.org/abs/2104.08718)."""

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

from ...convert.folder import damaged_files
from .features import OTHER_NETWORK, Space, weights_sha256
from .networks import load_network


PREFIX = "A photo depicts "
PREPROCESSOR = "preprocessor_config.json"
PUBLISHED, PUBLISHED_336 = "openai/clip-vit-large-patch14", "openai/clip-vit-large-patch14-336"
DOWNLOAD = f"hf download {PUBLISHED} --local-dir"
# Width, number of layers, patch size and image size of ViT-L/14@336.
VIT_L_336 = (1024, 24, 14, 336)


class ClipExtractor:
    """Image features [B, D] of a CLIP model in a local folder (https://arxiv.org/abs/2103.00020), in float32, not
    normalised.

    Attributes:
        cmmd_weights: a note that the network is not ViT-L/14@336, with which no published CMMD is comparable; else
            None.

    Raises:
        ValueError: if there is no folder, or it does not hold a complete, undamaged CLIP model.
    """

    def __init__(self, folder: Path | None, device: str = "cpu"):
        if folder is None:
            raise ValueError(f"--clip is missing: give --download, or {DOWNLOAD} DIR and name the folder")
        from transformers import AutoTokenizer, CLIPImageProcessor, CLIPModel

        needed = ("config.json", PREPROCESSOR, "tokenizer_config.json")
        weights = sorted(folder.glob("*.safetensors"))
        missing = [name for name in needed if not (folder / name).is_file()]
        # Without either, transformers makes up a tokenizer without words.
        if not any((folder / name).is_file() for name in ("tokenizer.json", "vocab.json")):
            missing.append("tokenizer.json")
        missing += [] if weights else ["*.safetensors"]
        again = f"{DOWNLOAD} {folder}"
        if missing:
            raise ValueError(f"{folder} lacks {', '.join(missing)} of a CLIP model: {again}")
        self.device = device
        self._model = load_network(CLIPModel, folder, again).to(device)
        # Wrong settings show only when they are used.
        with damaged_files(folder / PREPROCESSOR, again):
            self._processor = CLIPImageProcessor.from_pretrained(folder, local_files_only=True)
            self([Image.new("RGB", (8, 8))])
        with damaged_files(f"the tokenizer in {folder}", again):
            self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            self.of_texts(["a"])
        vision = self._model.config.vision_config
        found = (vision.hidden_size, vision.num_hidden_layers, vision.patch_size, vision.image_size)
        self.cmmd_weights = None if found == VIT_L_336 else OTHER_NETWORK.format("ViT-L/14@336 of CLIP")
        self.space = Space("clip", weights_sha256(weights), "clip-processor")

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


def clip_scores(
    features: np.ndarray, prompts: list[str], extractor: ClipExtractor, batch_size: int = 32
) -> np.ndarray:
    """Cosines [N] between image features [N, D] and the features of `PREFIX` + prompt, neither scaled nor cut at 0."""
    theirs = text_features([PREFIX + prompt for prompt in prompts], extractor, batch_size)
    return F.cosine_similarity(torch.from_numpy(features), theirs).numpy()


def text_features(texts: list[str], extractor: ClipExtractor, batch_size: int) -> torch.Tensor:
    """The features [N, D] of texts, float32 on the CPU, not normalised."""
    batches = [extractor.of_texts(texts[i : i + batch_size]) for i in range(0, len(texts), batch_size)]
    return torch.cat(batches).float().cpu()
