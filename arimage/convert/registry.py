"""The table of published checkpoints. No heavy imports: the console command lists it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PublishedCheckpoint:
    """Where a checkpoint is published, and what its files do not say.

    Attributes:
        name (`str`): for `AutoPipeline.from_pretrained` and `load_published`.
        family (`str`): "llamagen" or "var", which names the converter.
        repository, transformer_file (`str`): on the Hub.
        tokenizer_repository, tokenizer_file (`str`): on the Hub; the image tokenizer it was trained with.
        image_size (`int`): side of the images in pixels.
        parameters (`int`): of the transformer, rounded.
        num_heads (`int`, *optional*): attention heads, if the files do not say.
        text_encoder_repository (`str`, *optional*): on the Hub; of text models.
        code_licence (`str`): of the authors' code.
        weights_licence (`str`, *optional*): of the weights; `None` if only the repository's page says.
    """

    name: str
    family: str
    repository: str
    transformer_file: str
    tokenizer_repository: str
    tokenizer_file: str
    image_size: int
    parameters: int
    num_heads: int | None = None
    text_encoder_repository: str | None = None
    code_licence: str = "MIT"
    weights_licence: str | None = None


def _class_model(size: str, image_size: int, num_heads: int, parameters: int) -> PublishedCheckpoint:
    return PublishedCheckpoint(
        name=f"llamagen-c2i-{size.lower()}-{image_size}",
        family="llamagen",
        repository="FoundationVision/LlamaGen",
        transformer_file=f"c2i_{size}_{image_size}.pt",
        tokenizer_repository="FoundationVision/LlamaGen",
        tokenizer_file="vq_ds16_c2i.pt",
        image_size=image_size,
        num_heads=num_heads,
        parameters=parameters,
    )


def _text_model(stage: int, image_size: int) -> PublishedCheckpoint:
    return PublishedCheckpoint(
        name=f"llamagen-t2i-xl-{image_size}",
        family="llamagen",
        repository="peizesun/llamagen_t2i",
        transformer_file=f"t2i_XL_stage{stage}_{image_size}.pt",
        tokenizer_repository="peizesun/llamagen_t2i",
        tokenizer_file="vq_ds16_t2i.pt",
        image_size=image_size,
        num_heads=20,
        parameters=777_700_000,
        text_encoder_repository="google/flan-t5-xl",
    )


def _next_scale_model(size: str, image_size: int, parameters: int) -> PublishedCheckpoint:
    return PublishedCheckpoint(
        name=f"var-{size}-{image_size}",
        family="var",
        repository="FoundationVision/var",
        transformer_file=f"var_{size}.pth",
        tokenizer_repository="FoundationVision/var",
        tokenizer_file="vae_ch160v4096z32.pth",
        image_size=image_size,
        parameters=parameters,
    )


PUBLISHED = [
    _class_model("B", 256, 12, 110_900_000),
    _class_model("B", 384, 12, 110_900_000),
    _class_model("L", 256, 16, 342_900_000),
    _class_model("L", 384, 16, 342_900_000),
    _class_model("XL", 384, 20, 774_700_000),
    _class_model("XXL", 384, 24, 1_411_000_000),
    _class_model("3B", 384, 32, 3_097_000_000),
    _text_model(1, 256),
    _text_model(2, 512),
    _next_scale_model("d16", 256, 310_300_000),
    _next_scale_model("d20", 256, 600_900_000),
    _next_scale_model("d24", 256, 1_033_000_000),
    _next_scale_model("d30", 256, 2_010_000_000),
    _next_scale_model("d36", 512, 2_354_000_000),
]
