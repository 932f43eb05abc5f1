"""What arimage knows of LPD before it is imported. No heavy imports."""

from ..family import EMA, Converter, Family, PublishedCheckpoint
from ..kinds.family_any_order import FOLDER, HEADS, TOKENIZER, published


def _published(size: str, image_size: int, parameters: int) -> PublishedCheckpoint:
    repository = f"mit-han-lab/lpd_{size}_{image_size}"
    return published("lpd", f"lpd-{size}-{image_size}", repository, "*.pth", parameters, "mit-han-lab/lpd", image_size)


FAMILY = Family(
    title="LPD",
    pipelines={"LPDPipeline": "pipeline_lpd"},
    exports={"LPDTransformer": "transformer_lpd"},
    converters=(Converter("lpd", "Convert a published LPD.", (FOLDER, TOKENIZER, HEADS, EMA)),),
    checkpoints=(
        _published("l", 256, 337_200_000),
        _published("xl", 256, 751_900_000),
        _published("xxl", 256, 1_412_200_000),
        _published("l", 512, 337_900_000),
        _published("xl", 512, 752_900_000),
    ),
)
