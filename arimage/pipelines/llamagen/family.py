"""What arimage knows of LlamaGen before it is imported. No heavy imports."""

from ..family import (
    EMA,
    FOLDER,
    NUM_HEADS,
    TOKENIZER,
    TRANSFORMER,
    Argument,
    Converter,
    Family,
    HubFiles,
    PublishedCheckpoint,
    path,
)
from ..published_parts import LLAMAGEN_VQ, T5_XL_ENCODER, T5_XL_FILES, T5_XL_PATTERNS


# Where the licence is.
SOURCE = "https://github.com/FoundationVision/LlamaGen"


def _of_classes(size: str, image_size: int, num_heads: int, parameters: int) -> PublishedCheckpoint:
    repository = "FoundationVision/LlamaGen"
    return PublishedCheckpoint(
        name=f"llamagen-c2i-{size.lower()}-{image_size}",
        family="llamagen",
        files={
            "transformer": HubFiles(repository, (f"c2i_{size}_{image_size}.pt",)),
            "tokenizer": HubFiles(repository, ("vq_ds16_c2i.pt",)),
        },
        image_size=image_size,
        parameters=parameters,
        other_parameters=LLAMAGEN_VQ,
        bytes_per_parameter=4,
        download=4 * (parameters + LLAMAGEN_VQ),
        licence="MIT",
        licence_source=SOURCE,
        options={"image_size": image_size, "num_heads": num_heads},
    )


def _of_texts(stage: int, image_size: int) -> PublishedCheckpoint:
    repository, parameters = "peizesun/llamagen_t2i", 777_700_000
    return PublishedCheckpoint(
        name=f"llamagen-t2i-xl-{image_size}",
        family="llamagen",
        files={
            "transformer": HubFiles(repository, (f"t2i_XL_stage{stage}_{image_size}.pt",)),
            "tokenizer": HubFiles(repository, ("vq_ds16_t2i.pt",)),
            "text_encoder": HubFiles("google/flan-t5-xl", T5_XL_PATTERNS),
        },
        image_size=image_size,
        parameters=parameters,
        other_parameters=LLAMAGEN_VQ + T5_XL_ENCODER,
        bytes_per_parameter=4,
        download=4 * (parameters + LLAMAGEN_VQ) + T5_XL_FILES,
        licence="MIT; text encoder Apache-2.0",
        licence_source=SOURCE,
        options={"image_size": image_size, "num_heads": 20},
    )


FAMILY = Family(
    title="LlamaGen",
    pipelines={"LlamaGenPipeline": "pipeline_llamagen"},
    exports={
        "LlamaGenDenoiser": "denoiser_llamagen",
        "LlamaGenDrafter": "drafter_llamagen",
        "LlamaGenTransformer": "transformer_llamagen",
    },
    converters=(
        Converter(
            "llamagen",
            "Convert the published files of LlamaGen.",
            (
                TRANSFORMER,
                TOKENIZER,
                Argument("image_size", "Side in pixels of the images the transformer was trained on.", int),
                NUM_HEADS,
                path("text_encoder", "Folder of the T5 encoder and its tokenizer.", FOLDER, default=None),
                EMA,
            ),
        ),
    ),
    checkpoints=(
        _of_classes("B", 256, 12, 110_900_000),
        _of_classes("B", 384, 12, 110_900_000),
        _of_classes("L", 256, 16, 342_900_000),
        _of_classes("L", 384, 16, 342_900_000),
        _of_classes("XL", 384, 20, 774_700_000),
        _of_classes("XXL", 384, 24, 1_411_000_000),
        _of_classes("3B", 384, 32, 3_097_000_000),
        _of_texts(1, 256),
        _of_texts(2, 512),
    ),
)
