"""What the families of any-order models declare alike: arguments of their converters, and published files."""

from ..family import FILE_OR_FOLDER, Argument, HubFiles, PublishedCheckpoint, path
from ..published_parts import LLAMAGEN_VQ


FOLDER = path("folder", "File of the transformer, or a folder with one transformer.", FILE_OR_FOLDER, positional=True)
TOKENIZER = path("tokenizer", "LlamaGen's vq_ds16_c2i.pt; without it images are tokens.", default=None)
PIXELS = Argument("image_size", "Side in pixels of the training images. Default: 256.", int | None, None)
HEADS = Argument("num_heads", "Attention heads. Default: one per 64 channels, as published.", int | None, None)


def published(
    family: str, name: str, repository: str, pattern: str, parameters: int, code: str, image_size: int = 256
) -> PublishedCheckpoint:
    """A checkpoint that uses LlamaGen's image tokenizer. All have the MIT licence in their repository of `code`."""
    return PublishedCheckpoint(
        name=name,
        family=family,
        files={
            "folder": HubFiles(repository, (pattern,)),
            "tokenizer": HubFiles("FoundationVision/LlamaGen", ("vq_ds16_c2i.pt",)),
        },
        image_size=image_size,
        parameters=parameters,
        other_parameters=LLAMAGEN_VQ,
        bytes_per_parameter=4,
        download=4 * (parameters + LLAMAGEN_VQ),
        licence="MIT (code)",
        licence_source=f"https://github.com/{code}",
    )
