"""What arimage knows of Halton-MaskGIT before it is imported. No heavy imports."""

from ..family import NUM_HEADS, Converter, Family, HubFiles, PublishedCheckpoint, path
from ..published_parts import LLAMAGEN_VQ


def _published(size: str, image_size: int, parameters: int) -> PublishedCheckpoint:
    return PublishedCheckpoint(
        name=f"halton-maskgit-{size}-{image_size}",
        family="halton_maskgit",
        files={
            "checkpoint": HubFiles("llvictorll/Halton-Maskgit", (f"ImageNet_{image_size}_{size}.pth",)),
            "vq": HubFiles("FoundationVision/LlamaGen", ("vq_ds16_c2i.pt",)),
        },
        image_size=image_size,
        parameters=parameters,
        other_parameters=LLAMAGEN_VQ,
        bytes_per_parameter=4,
        # The state of the optimizer is in the file, too.
        download=12 * parameters + 4 * LLAMAGEN_VQ,
        licence="MIT (code)",
        licence_source="https://github.com/valeoai/Halton-MaskGIT",
    )


FAMILY = Family(
    title="Halton-MaskGIT",
    pipelines={"HaltonMaskGITPipeline": "pipeline_halton_maskgit"},
    exports={"HaltonMaskGITTransformer": "transformer_halton_maskgit"},
    converters=(
        Converter(
            "halton_maskgit",
            "Convert the published files of Halton-MaskGIT.",
            (
                path("checkpoint", "File of the transformer, such as ImageNet_384_large.pth."),
                path("vq", "File of LlamaGen's image tokenizer, vq_ds16_c2i.pt."),
                NUM_HEADS,
            ),
        ),
    ),
    checkpoints=(
        _published("tiny", 256, 23_031_425),
        _published("small", 256, 69_344_769),
        _published("small", 384, 69_508_609),
        _published("base", 256, 142_224_641),
        _published("base", 384, 142_470_401),
        _published("large", 384, 479_984_641),
    ),
)
