"""What arimage knows of Emu3 before it is imported. No heavy imports."""

from dataclasses import replace

from ...settings.schema import Area
from ..family import FOLDER, Argument, Converter, Family, HubFiles, ModelType, PublishedCheckpoint, folder, path
from ..published_parts import EMU_FILES, SAFETENSORS


PARAMETERS = 8_760_000_000


def _published(name: str, repository: str, image_size: int) -> PublishedCheckpoint:
    return PublishedCheckpoint(
        name=name,
        family="emu3",
        files={
            "folder": HubFiles(repository, EMU_FILES),
            "vision_tokenizer": HubFiles("BAAI/Emu3-VisionTokenizer", ("*.json", "*.safetensors")),
        },
        image_size=image_size,
        parameters=PARAMETERS,
        bytes_per_parameter=4,
        download=4 * PARAMETERS,
        licence="Apache-2.0",
        licence_source="https://huggingface.co/BAAI/Emu3-Gen",
    )


def _of_transformers(repository: str) -> PublishedCheckpoint:
    return replace(
        _published(repository, repository, 720),
        files={"folder": HubFiles(repository, SAFETENSORS)},
        bytes_per_parameter=2,
        download=2 * PARAMETERS,
    )


_CHAT = "answers questions about images and was not trained to generate them: give emu3-gen"
FAMILY = Family(
    title="Emu3",
    pipelines={"Emu3Pipeline": "pipeline_emu3"},
    converters=(
        Converter(
            "emu3",
            "Convert a published Emu3-Gen or Emu3-Stage1.",
            (
                folder("Emu3-Gen or Emu3-Stage1, as published by BAAI or for transformers."),
                path(
                    "vision_tokenizer",
                    "BAAI's folder Emu3-VisionTokenizer; needed for BAAI's other folders.",
                    FOLDER,
                    default=None,
                ),
                Argument(
                    "image_area",
                    "Pixels of a training image, if the folder does not say: 262144 for Stage1.",
                    int | None,
                    None,
                ),
            ),
        ),
    ),
    checkpoints=(
        _published("emu3-gen", "BAAI/Emu3-Gen", 720),
        _published("emu3-stage1", "BAAI/Emu3-Stage1", 512),
        _of_transformers("BAAI/Emu3-Gen-hf"),
        _of_transformers("Emu3-community/Emu3-Gen-hf"),
    ),
    instead={
        "BAAI/Emu3-Chat": _CHAT,
        "BAAI/Emu3-Chat-hf": _CHAT,
        "Emu3-community/Emu3-Chat-hf": _CHAT,
        "BAAI/Emu3-VisionTokenizer": "is an image tokenizer, which emu3-gen downloads: give emu3-gen",
    },
    model_types=(ModelType("Emu3", "emu3"), ModelType("emu3", "emu3")),
    config={"image_area": Area},
)
