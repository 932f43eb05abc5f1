"""What arimage knows of Infinity before it is imported. No heavy imports."""

from ..family import EMA, FILE_OR_FOLDER, Argument, Converter, Family, HubFiles, PublishedCheckpoint, path
from ..published_parts import DTYPE, SUBFOLDER, T5_XL, T5_XL_ENCODER, T5_XL_FILES, T5_XL_PATTERNS
from .schedules import PixelClass


def _published(name: str, file: str, vae: str, pixels: str, image_size: int, parameters: int) -> PublishedCheckpoint:
    repository, folder = "FoundationVision/Infinity", None if file.endswith(".pth") else file
    return PublishedCheckpoint(
        name=f"infinity-{name}",
        family="infinity",
        files={
            "transformer": HubFiles(repository, (file if folder is None else f"{file}/*",)),
            # Each transformer goes with the tokenizer that it was trained with, though others have the same shape.
            "vae": HubFiles(repository, (f"infinity_vae_{vae}.pth",)),
            "text_encoder": HubFiles("google/flan-t5-xl", T5_XL_PATTERNS),
        },
        image_size=image_size,
        parameters=parameters,
        # The image tokenizers have 16 and 8 pixels per cell of the latents.
        other_parameters=(110_000_000 if folder is None else 81_600_000) + T5_XL_ENCODER,
        bytes_per_parameter=4,
        # The tokenizers' files hold more than the tokenizers.
        download=4 * parameters + 1_560_000_000 + T5_XL_FILES,
        licence="MIT; text encoder Apache-2.0",
        licence_source="https://github.com/FoundationVision/Infinity",
        options={"pixels": pixels} | ({} if folder is None else {"subfolder": folder}),
    )


FAMILY = Family(
    title="Infinity",
    pipelines={"InfinityPipeline": "pipeline_infinity"},
    exports={"InfinityTransformer": "transformer_infinity", "InfinityVQModel": "bsq_infinity"},
    converters=(
        Converter(
            "infinity",
            "Convert the published files of Infinity, or a trainer's ar-ckpt-*.pth.",
            (
                path("transformer", "File of the transformer, or the folder of its safetensors.", FILE_OR_FOLDER),
                path("vae", "File of the image tokenizer that the transformer was trained with."),
                Argument("pixels", "Pixel class of the training images.", PixelClass, "1M"),
                SUBFOLDER,
                T5_XL,
                EMA,
                DTYPE,
            ),
        ),
    ),
    checkpoints=(
        _published("125m", "infinity_125M_256x256.pth", "d16", "0.06M", 256, 125_100_000),
        _published("2b", "infinity_2b_reg.pth", "d32reg", "1M", 1024, 2_204_600_000),
        _published("8b", "infinity_8b_weights", "d56_f8_14_patchify", "1M", 1024, 8_375_800_000),
        _published("8b-512", "infinity_8b_512x512_weights", "d56_f8_14_patchify", "0.25M", 512, 8_375_800_000),
    ),
)
