"""What arimage knows of ARPG before it is imported. No heavy imports."""

from ..family import EMA, Converter, Family, PublishedCheckpoint
from ..kinds.family_any_order import FOLDER, HEADS, PIXELS, TOKENIZER, published


def _published(size: str, parameters: int) -> PublishedCheckpoint:
    return published("arpg", f"arpg-{size}-256", "hp-l33/ARPG", f"arpg_{size}.pt", parameters, "hp-l33/ARPG")


FAMILY = Family(
    title="ARPG",
    pipelines={"ARPGPipeline": "pipeline_arpg"},
    exports={"ARPGTransformer": "transformer_arpg"},
    converters=(Converter("arpg", "Convert a published ARPG.", (FOLDER, TOKENIZER, PIXELS, HEADS, EMA)),),
    checkpoints=(_published("300m", 319_800_000), _published("700m", 719_000_000), _published("1b", 1_302_400_000)),
)
