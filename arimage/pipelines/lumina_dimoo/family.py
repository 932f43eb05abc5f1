"""What arimage knows of Lumina-DiMOO before it is imported. No heavy imports."""

from ...settings.schema import Number, Pixels
from ..family import Converter, Family, HubFiles, ModelType, PublishedCheckpoint, folder


FAMILY = Family(
    title="Lumina-DiMOO",
    pipelines={"LuminaDiMOOPipeline": "pipeline_lumina_dimoo"},
    exports={"LuminaDiMOOTransformer": "transformer_lumina_dimoo"},
    converters=(
        Converter(
            "lumina_dimoo",
            "Convert a published Lumina-DiMOO.",
            (folder("Lumina-DiMOO, as published by Alpha-VLLM."),),
        ),
    ),
    checkpoints=(
        PublishedCheckpoint(
            name="lumina-dimoo",
            family="lumina_dimoo",
            files={"folder": HubFiles("Alpha-VLLM/Lumina-DiMOO", ("*.json", "*.jinja", "*.txt", "*.safetensors"))},
            image_size=1024,
            parameters=7_600_000_000,
            other_parameters=150_000_000,
            download=16_800_000_000,
            licence="Apache-2.0 (code)",
            licence_source="https://github.com/Alpha-VLLM/Lumina-DiMOO",
        ),
    ),
    model_types=(ModelType("llada", "lumina_dimoo"),),
    config={"image_size": Pixels},
    defaults={"image_guidance_scale": Number},
)
