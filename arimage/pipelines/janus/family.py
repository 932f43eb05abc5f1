"""What arimage knows of Janus before it is imported. No heavy imports."""

from ..family import Argument, Converter, Family, HubFiles, ModelType, PublishedCheckpoint, folder
from ..published_parts import PICKLES, SAFETENSORS


def _published(
    name: str, repository: str, patterns: tuple[str, ...], parameters: int, template: str | None
) -> PublishedCheckpoint:
    return PublishedCheckpoint(
        name=name,
        family="janus",
        files={"folder": HubFiles(repository, patterns)},
        image_size=384,
        parameters=parameters,
        download=2 * parameters,
        # MIT is the licence of their code alone.
        licence="DeepSeek Model License",
        licence_source="https://github.com/deepseek-ai/Janus",
        options={} if template is None else {"template": template},
    )


FAMILY = Family(
    title="Janus",
    pipelines={"JanusPipeline": "pipeline_janus"},
    exports={"accelerate": "accelerate"},
    converters=(
        Converter(
            "janus",
            "Convert a published Janus or Janus-Pro.",
            (
                folder("As published by deepseek-ai or deepseek-community."),
                Argument(
                    "template",
                    "Prompt template: janus (Janus-1.3B) or janus-pro. Default: the template in the folder.",
                    str | None,
                    None,
                ),
            ),
        ),
    ),
    checkpoints=(
        # Janus-1.3B names the speakers of a prompt in its own way, which no file says.
        _published("janus-1.3b", "deepseek-ai/Janus-1.3B", SAFETENSORS, 2_080_000_000, "janus"),
        _published("janus-pro-1b", "deepseek-ai/Janus-Pro-1B", PICKLES, 2_080_000_000, "janus-pro"),
        _published("janus-pro-7b", "deepseek-ai/Janus-Pro-7B", PICKLES, 7_410_000_000, "janus-pro"),
        *(
            _published(name, name, SAFETENSORS, parameters, None)
            for name, parameters in (
                ("deepseek-community/Janus-Pro-1B", 2_080_000_000),
                ("deepseek-community/Janus-Pro-7B", 7_410_000_000),
            )
        ),
    ),
    instead={
        "deepseek-ai/JanusFlow-1.3B": "generates images by rectified flow, not token by token: give janus-1.3b or "
        "janus-pro-1b",
    },
    model_types=(ModelType("multi_modality", "janus"), ModelType("janus", "janus")),
)
