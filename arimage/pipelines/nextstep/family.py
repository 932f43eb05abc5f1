"""What arimage knows of NextStep before it is imported. No heavy imports."""

from typing import Literal

from ...settings.schema import Count, Flag, Number, Pixels, Positive
from ..family import FOLDER, Argument, Converter, Family, HubFiles, PublishedCheckpoint, folder, path


# Parameters of the language model with projector and head, and of the autoencoder.
MODEL, VAE = 14_950_000_000, 83_700_000
TEXT_FILES = ("*.json", "*.safetensors", "merges.txt")


def _published(name: str, repository: str, image_size: int = 512, options: dict | None = None) -> PublishedCheckpoint:
    files = {"folder": HubFiles(repository, (*TEXT_FILES, "vae/checkpoint.pt"))}
    if "1.1" not in name:
        autoencoder = HubFiles("stepfun-ai/NextStep-1-f8ch16-Tokenizer", ("checkpoint.pt", "config.json"))
        files = {"folder": HubFiles(repository, TEXT_FILES), "vae": autoencoder}
    return PublishedCheckpoint(
        name=name,
        family="nextstep",
        files=files,
        image_size=image_size,
        parameters=MODEL,
        other_parameters=VAE,
        download=30_300_000_000,
        licence="Apache-2.0",
        licence_source="https://github.com/stepfun-ai/NextStep-1",
        options=options or {},
    )


FAMILY = Family(
    title="NextStep",
    pipelines={"NextStepPipeline": "pipeline_nextstep"},
    exports={"NextStepProjector": "projector"},
    converters=(
        Converter(
            "nextstep",
            "Convert a published NextStep-1.1 or NextStep-1.",
            (
                folder("NextStep-1.1 or NextStep-1, as published by StepFun."),
                path("vae", "Folder of the autoencoder; by default vae in the folder.", FOLDER, default=None),
                Argument("editing", "Set the defaults of NextStep-1-Large-Edit.", bool, False),
            ),
        ),
    ),
    checkpoints=(
        _published("nextstep-1.1", "stepfun-ai/NextStep-1.1"),
        _published("nextstep-1.1-pretrain", "stepfun-ai/NextStep-1.1-Pretrain"),
        _published("nextstep-1.1-pretrain-256", "stepfun-ai/NextStep-1.1-Pretrain-256px", 256),
        _published("nextstep-1-large", "stepfun-ai/NextStep-1-Large"),
        _published("nextstep-1-large-pretrain", "stepfun-ai/NextStep-1-Large-Pretrain"),
        _published("nextstep-1-large-edit", "stepfun-ai/NextStep-1-Large-Edit", options={"editing": True}),
    ),
    instead={
        "stepfun-ai/NextStep-1-f8ch16-Tokenizer": "is an autoencoder, which nextstep-1-large downloads: give "
        "nextstep-1-large",
    },
    config={
        "patch_size": Count,
        "image_size": Pixels,
        "normalises_tokens": Flag,
        "repeats_bos": Flag,
        "reference_norm_size": Count | None,
    },
    defaults={"sampler": Literal["em", "sde", "em-1.0"], "timesteps_shift": Positive, "image_guidance_scale": Number},
)
