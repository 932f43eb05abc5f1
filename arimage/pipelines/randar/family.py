"""What arimage knows of RandAR before it is imported. No heavy imports."""

from ..family import EMA, Converter, Family, PublishedCheckpoint
from ..kinds.family_any_order import FOLDER, HEADS, PIXELS, TOKENIZER, published


def _published(size: str, parameters: int) -> PublishedCheckpoint:
    file = f"randar_{size}_llamagen_360k_bs_1024_lr_0.0004.safetensors"
    return published("randar", f"randar-{size}-256", "ziqipang/RandAR", file, parameters, "ziqipang/RandAR")


FAMILY = Family(
    title="RandAR",
    pipelines={"RandARPipeline": "pipeline_randar"},
    exports={"RandARTransformer": "transformer_randar"},
    converters=(Converter("randar", "Convert a published RandAR.", (FOLDER, TOKENIZER, PIXELS, HEADS, EMA)),),
    checkpoints=(_published("0.3b", 342_900_000), _published("0.7b", 774_700_000)),
)
