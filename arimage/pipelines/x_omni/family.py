"""What arimage knows of X-Omni before it is imported. No heavy imports."""

from ...settings.schema import Number, Pixels
from ..family import FOLDER, Converter, Family, ModelType, path


FAMILY = Family(
    title="X-Omni",
    pipelines={"XOmniPipeline": "pipeline_x_omni"},
    exports={"XOmniLanguageModel": "transformer_x_omni", "XOmniProjector": "projector_x_omni"},
    converters=(
        Converter(
            "x_omni",
            "Convert a published X-Omni.",
            (path("folder", "X-Omni-En, -Zh, -SFT or -PT, as published.", FOLDER, positional=True),),
        ),
    ),
    model_types=(ModelType("x-omni", "x_omni"),),
    config={"image_size": Pixels},
    defaults={"decoder_guidance_scale": Number},
)
