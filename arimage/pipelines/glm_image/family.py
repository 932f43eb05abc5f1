"""What arimage knows of GLM-Image before it is imported. No heavy imports."""

from ..family import Family, HubFiles, PublishedCheckpoint


FAMILY = Family(
    title="GLM-Image",
    pipelines={"GlmImagePipeline": "pipeline_glm_image"},
    checkpoints=(
        PublishedCheckpoint(
            name="glm-image",
            family="",
            files={"folder": HubFiles("zai-org/GLM-Image", ("*.json", "*.jinja", "*.txt", "*.safetensors"))},
            image_size=1024,
            parameters=10_100_000_000,
            other_parameters=6_900_000_000,
            download=34_000_000_000,
            licence="Apache-2.0 (code)",
            licence_source="https://github.com/zai-org/GLM-Image",
        ),
    ),
)
