"""What arimage knows of Lumina-mGPT and Anole, models of Chameleon's kind, before they are imported. No heavy
imports."""

from ...settings.schema import Pixels
from ..family import (
    FILE_OR_FOLDER,
    Argument,
    Converter,
    Family,
    HubFiles,
    ModelType,
    PublishedCheckpoint,
    RequestedFiles,
    folder,
    path,
)
from ..published_parts import SAFETENSORS


META_TOKENIZER = RequestedFiles(
    argument="tokenizer",
    folder="chameleon-tokenizer",
    names=("vqgan.ckpt", "text_tokenizer.json"),
    content="the image tokenizer of Chameleon, which Meta gives out on request",
    page="https://ai.meta.com/resources/models-and-libraries/chameleon-downloads/",
    alternatives="lumina-mgpt-2 and anole-7b",
    note="a tokenizer from Meta",
)
TOKENIZER = path(
    "tokenizer",
    "Meta's folder with vqgan.ckpt and text_tokenizer.json; for Lumina-mGPT 2.0 movqgan_270M.ckpt.",
    FILE_OR_FOLDER,
    default=None,
)


def _lumina_mgpt(size: str, image_size: int, parameters: int, suffix: str = "") -> PublishedCheckpoint:
    repository = f"Alpha-VLLM/Lumina-mGPT-{size}-{image_size}{suffix}"
    return PublishedCheckpoint(
        name=repository.rpartition("/")[2].lower(),
        family="lumina_mgpt",
        files={"folder": HubFiles(repository, SAFETENSORS)},
        image_size=image_size,
        parameters=parameters,
        download=2 * parameters,
        licence="not named on its page",
        licence_source=f"https://huggingface.co/{repository}",
        options={"image_size": image_size},
        requested=META_TOKENIZER,
    )


def _anole(name: str, repository: str, patterns: tuple[str, ...]) -> PublishedCheckpoint:
    return PublishedCheckpoint(
        name=name,
        family="anole",
        files={"folder": HubFiles(repository, patterns)},
        image_size=512,
        parameters=7_110_000_000,
        download=14_300_000_000,
        # Which its authors name for all its weights, whatever pages of others say.
        licence="Chameleon Research License",
        licence_source="https://github.com/GAIR-NLP/anole",
    )


_DISABLED = (
    "was published with image generation disabled: give anole-7b or lumina-mgpt-7b-768, which were trained for it"
)
FAMILY = Family(
    title="Lumina-mGPT and Anole",
    pipelines={"LuminaMGPTPipeline": "pipeline_lumina_mgpt", "AnolePipeline": "pipeline_anole"},
    converters=(
        Converter(
            "lumina_mgpt",
            "Convert a published Lumina-mGPT.",
            (
                folder("Lumina-mGPT or Lumina-mGPT 2.0, as published by Alpha-VLLM."),
                TOKENIZER,
                Argument("image_size", "Side in pixels the weights were trained for: 512, 768 or 1024.", int, 768),
            ),
        ),
        Converter(
            "anole",
            "Convert a published Anole.",
            (folder("Anole or another Chameleon, in Meta's or transformers' format."), TOKENIZER),
        ),
    ),
    checkpoints=(
        _lumina_mgpt("7B", 512, 7_110_000_000),
        _lumina_mgpt("7B", 768, 7_110_000_000),
        _lumina_mgpt("7B", 768, 7_110_000_000, "-Omni"),
        _lumina_mgpt("7B", 1024, 7_110_000_000),
        _lumina_mgpt("34B", 512, 34_400_000_000),
        PublishedCheckpoint(
            name="lumina-mgpt-2",
            family="lumina_mgpt",
            files={
                "folder": HubFiles("Alpha-VLLM/Lumina-mGPT-2.0", SAFETENSORS),
                "tokenizer": HubFiles("ai-forever/MoVQGAN", ("movqgan_270M.ckpt",)),
            },
            image_size=768,
            parameters=8_180_000_000,
            download=16_900_000_000,
            licence="Apache-2.0; image tokenizer not named",
            licence_source="https://github.com/Alpha-VLLM/Lumina-mGPT-2.0",
        ),
        _anole("anole-7b", "GAIR/Anole-7b-v0.1", ("models/7b/*", "tokenizer/*")),
        _anole("leloy/Anole-7b-v0.1-hf", "leloy/Anole-7b-v0.1-hf", SAFETENSORS),
    ),
    instead={
        "facebook/chameleon-7b": _DISABLED,
        "facebook/chameleon-30b": _DISABLED,
        "ai-forever/MoVQGAN": "is an image tokenizer, which lumina-mgpt-2 downloads: give lumina-mgpt-2",
    },
    model_types=(ModelType("chameleon", "lumina_mgpt"), ModelType("chameleon", "anole")),
    config={"image_size": Pixels},
)
