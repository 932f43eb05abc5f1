"""What arimage knows of MammothModa2 before it is imported. No heavy imports."""

from typing import Annotated

from pydantic import Field

from ...settings.schema import Count, Flag, Number, Pixels, Side
from ..family import Converter, Family, HubFiles, ModelType, PublishedCheckpoint, folder
from ..published_parts import SAFETENSORS


def _published(variant: str, parameters: int, download: int) -> PublishedCheckpoint:
    """The number of parameters is computed from the published shapes. Their pages were not seen: the bytes to download
    are those of bfloat16."""
    patterns = (*SAFETENSORS, "mammothu.tiktoken", "mammothu_vision_tokens.txt")
    return PublishedCheckpoint(
        name=f"mammothmoda2-{variant.lower()}",
        family="mammothmoda2",
        files={"folder": HubFiles(f"bytedance-research/MammothModa2-{variant}", patterns)},
        image_size=1024,
        parameters=parameters,
        other_parameters=2_100_000_000,
        download=download,
        licence="Apache-2.0 (code)",
        licence_source="https://github.com/bytedance/mammothmoda",
    )


FAMILY = Family(
    title="MammothModa2",
    pipelines={"MammothModa2Pipeline": "pipeline_mammothmoda2"},
    exports={
        "MammothModa2LanguageModel": "transformer_mammothmoda2",
        "MammothModa2Transformer2DModel": "decoder_mammothmoda2",
    },
    converters=(
        Converter(
            "mammothmoda2",
            "Convert a published MammothModa2.",
            (folder("MammothModa2-Preview or -Dev, as published by ByteDance."),),
        ),
    ),
    checkpoints=(
        _published("Preview", 10_160_000_000, 27_000_000_000),
        _published("Dev", 10_560_000_000, 28_500_000_000),
    ),
    model_types=(ModelType("mammothmoda2", "mammothmoda2"),),
    config={
        "image_size": Pixels,
        "token_grid": Annotated[list[Side], Field(min_length=2, max_length=2)],
        "num_codes": Count | None,
        "reads_answer_text": Flag,
        "reads_last_tokens": Flag,
    },
    defaults={"decoder_guidance_scale": Number},
)
