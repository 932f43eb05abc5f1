"""What arimage knows of VAR before it is imported. No heavy imports."""

from ..family import EMA, TOKENIZER, TRANSFORMER, Converter, Family, HubFiles, PublishedCheckpoint


# Parameters of the image tokenizer.
VQ = 108_900_000


def _published(size: str, image_size: int, parameters: int) -> PublishedCheckpoint:
    repository = "FoundationVision/var"
    return PublishedCheckpoint(
        name=f"var-{size}-{image_size}",
        family="var",
        files={
            "transformer": HubFiles(repository, (f"var_{size}.pth",)),
            "tokenizer": HubFiles(repository, ("vae_ch160v4096z32.pth",)),
        },
        image_size=image_size,
        parameters=parameters,
        other_parameters=VQ,
        bytes_per_parameter=4,
        download=4 * (parameters + VQ),
        licence="MIT",
        licence_source="https://github.com/FoundationVision/VAR",
    )


FAMILY = Family(
    title="VAR",
    pipelines={"VARPipeline": "pipeline_var"},
    exports={"VARTransformer": "transformer_var"},
    converters=(
        Converter(
            "var",
            "Convert the published files of VAR, or a trainer's ar-ckpt-*.pth.",
            (TRANSFORMER, TOKENIZER, EMA),
        ),
    ),
    checkpoints=(
        _published("d16", 256, 310_300_000),
        _published("d20", 256, 600_900_000),
        _published("d24", 256, 1_033_000_000),
        _published("d30", 256, 2_010_000_000),
        _published("d36", 512, 2_354_000_000),
    ),
)
