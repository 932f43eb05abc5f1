"""What arimage knows of Cosmos before it is imported. No heavy imports."""

from typing import Annotated

from pydantic import Field

from ...settings.schema import Flag
from ..family import FOLDER, Converter, Family, HubFiles, PublishedCheckpoint, path


# Parameters of the video tokenizer and of the encoder of t5-11b, and bytes of the encoder's files.
VQ, T5_ENCODER, T5_FILES = 110_900_000, 4_865_000_000, 45_200_000_000


def _published(size: str, parameters: int, repository: str | None = None) -> PublishedCheckpoint:
    text = size.endswith("Video2World")
    files = {
        "model_file": HubFiles(repository or f"nvidia/Cosmos-Predict1-{size}", ("model.pt",)),
        "tokenizer": HubFiles("nvidia/Cosmos-Tokenize1-DV8x16x16-720p", ("encoder.jit", "decoder.jit")),
    }
    if text:
        t5 = ("config.json", "pytorch_model.bin", "spiece.model", "tokenizer.json")
        files["text_encoder"] = HubFiles("google-t5/t5-11b", t5)
    return PublishedCheckpoint(
        name=repository or f"cosmos-{size.lower()}",
        family="cosmos",
        files=files,
        image_size=1024,
        parameters=parameters,
        other_parameters=VQ + text * T5_ENCODER,
        download=2 * (parameters + VQ) + text * T5_FILES,
        licence="NVIDIA Open Model License" + text * "; text encoder Apache-2.0",
        licence_source="https://github.com/nvidia-cosmos/cosmos-predict1",
    )


def _both(size: str, parameters: int) -> list[PublishedCheckpoint]:
    """The entry of a model, and that of its first repository, which holds the same files."""
    return [_published(size, parameters), _published(size, parameters, f"nvidia/Cosmos-1.0-Autoregressive-{size}")]


FAMILY = Family(
    title="Cosmos",
    pipelines={"CosmosPipeline": "pipeline_cosmos"},
    exports={"CosmosTransformer": "transformer_cosmos", "CosmosVideoTokenizer": "fsq_cosmos"},
    videos=True,
    converters=(
        Converter(
            "cosmos",
            "Convert a published autoregressive Cosmos-Predict1, which continues images and videos.",
            (
                path("model_file", "model.pt of an autoregressive Cosmos-Predict1."),
                path("tokenizer", "Folder of Cosmos-Tokenize1-DV8x16x16-720p.", FOLDER),
                path(
                    "text_encoder",
                    "Folder of t5-11b and its tokenizer, for the models named Video2World.",
                    FOLDER,
                    default=None,
                ),
            ),
        ),
        Converter("cosmos_tokenizer", module="convert_tokenizer"),
    ),
    checkpoints=(
        *_both("4B", 4_014_000_000),
        *_both("5B-Video2World", 4_585_000_000),
        *_both("12B", 11_561_000_000),
        *_both("13B-Video2World", 13_323_000_000),
    ),
    config={"fps": Annotated[int, Field(strict=True, ge=1, le=1000)], "begins_with_text": Flag},
)
