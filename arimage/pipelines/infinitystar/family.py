"""What arimage knows of InfinityStar before it is imported. No heavy imports."""

from typing import Annotated

from pydantic import Field

from ..family import FOLDER, Argument, Converter, Family, HubFiles, PublishedCheckpoint, path
from ..published_parts import DTYPE, SUBFOLDER, T5_XL, T5_XL_ENCODER, T5_XL_FILES, T5_XL_PATTERNS
from .schedules import PixelClass


# Parameters of the transformer and of the video tokenizer, whose file holds float32.
TRANSFORMER, VQ = 8_768_382_112, 184_659_383


def _published(name: str, pixels: str, image_size: int) -> PublishedCheckpoint:
    repository, folder = "FoundationVision/InfinityStar", f"infinitystar_8b_{name}_weights"
    return PublishedCheckpoint(
        name=f"infinitystar-{name}",
        family="infinitystar",
        files={
            "transformer": HubFiles(repository, (f"{folder}/*",)),
            "vae": HubFiles(repository, ("infinitystar_videovae.pth",)),
            "text_encoder": HubFiles("google/flan-t5-xl", T5_XL_PATTERNS),
        },
        image_size=image_size,
        parameters=TRANSFORMER,
        other_parameters=VQ + T5_XL_ENCODER,
        bytes_per_parameter=4,
        download=4 * (TRANSFORMER + VQ) + T5_XL_FILES,
        licence="MIT; text encoder Apache-2.0",
        licence_source="https://github.com/FoundationVision/InfinityStar",
        options={"pixels": pixels, "subfolder": folder},
    )


FAMILY = Family(
    title="InfinityStar",
    pipelines={"InfinityStarPipeline": "pipeline_infinitystar"},
    exports={
        "InfinityStarTransformer": "transformer_infinitystar",
        "InfinityStarVideoTokenizer": "vq_infinitystar",
    },
    videos=True,
    converters=(
        Converter(
            "infinitystar",
            "Convert the published files of InfinityStar, which makes videos from a text, an image or a video.",
            (
                path("transformer", "Folder of the transformer's safetensors.", FOLDER),
                path("vae", "File of the video tokenizer."),
                Argument("pixels", "Pixel class of the training videos.", PixelClass, "0.40M"),
                SUBFOLDER,
                T5_XL,
                DTYPE,
            ),
        ),
    ),
    checkpoints=(_published("480p", "0.40M", 848), _published("720p", "0.90M", 1280)),
    config={"fps": Annotated[int, Field(strict=True, ge=1, le=1000)]},
)
