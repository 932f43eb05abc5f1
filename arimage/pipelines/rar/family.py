"""What arimage knows of RAR before it is imported. No heavy imports."""

from ...settings.schema import Number
from ..family import Converter, Family, HubFiles, PublishedCheckpoint, path


VQ_PARAMETERS = 54_515_587


def _published(size: str, parameters: int) -> PublishedCheckpoint:
    return PublishedCheckpoint(
        name=f"rar-{size}-256",
        family="rar",
        files={
            "checkpoint": HubFiles("yucornetto/RAR", (f"rar_{size}.bin",)),
            "vq": HubFiles("fun-research/TiTok", ("maskgit-vqgan-imagenet-f16-256.bin",)),
        },
        image_size=256,
        parameters=parameters,
        other_parameters=VQ_PARAMETERS,
        bytes_per_parameter=4,
        download=4 * (parameters + VQ_PARAMETERS),
        licence="Apache-2.0",
        licence_source="https://huggingface.co/yucornetto/RAR",
    )


FAMILY = Family(
    title="RAR",
    pipelines={"RARPipeline": "pipeline_rar"},
    exports={"MaskGITVQModel": "vq_maskgit", "RARTransformer": "transformer_rar"},
    converters=(
        Converter(
            "rar",
            "Convert the published files of RAR.",
            (
                path("checkpoint", "File of the transformer, such as rar_b.bin."),
                path("vq", "File of MaskGIT's image tokenizer, maskgit-vqgan-imagenet-f16-256.bin."),
            ),
        ),
    ),
    checkpoints=(
        _published("b", 260_923_648),
        _published("l", 461_668_352),
        _published("xl", 955_425_024),
        _published("xxl", 1_498_520_704),
    ),
    defaults={"guidance_scale_pow": Number},
)
