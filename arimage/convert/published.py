"""The checkpoints that the authors published, fetched from the Hugging Face Hub and converted once."""

import shlex
from dataclasses import dataclass
from pathlib import Path


LLAMAGEN_SAMPLING = {
    "class": {"guidance_scale": 4.0, "temperature": 1.0, "top_k": 2000, "top_p": 1.0},
    "text": {"guidance_scale": 7.5, "temperature": 1.0, "top_k": 1000, "top_p": 1.0},
}
# The published cfg is what the scale adds to 1.
VAR_SAMPLING = {"guidance_scale": 2.5, "temperature": 1.0, "top_k": 900, "top_p": 0.96}


@dataclass(frozen=True)
class PublishedCheckpoint:
    """Where a checkpoint lies and what its files do not tell.

    Attributes:
        name (`str`): what `load_published` calls it.
        family (`str`): which converter takes it.
        repository, transformer_file (`str`): on the Hub.
        tokenizer_repository, tokenizer_file (`str`): on the Hub; the visual tokenizer it was trained with.
        image_size (`int`): pixels along each side.
        parameters (`int`): of the transformer, rounded.
        sampling (`dict`): `guidance_scale`, `temperature`, `top_k` and `top_p` as published.
        num_heads (`int`, *optional*): attention heads, where the files do not tell.
        text_encoder_repository (`str`, *optional*): on the Hub; of text models.
        code_licence (`str`): of the authors' code.
        weights_licence (`str`, *optional*): of the weights; `None` where only the repository's page can tell.
    """

    name: str
    family: str
    repository: str
    transformer_file: str
    tokenizer_repository: str
    tokenizer_file: str
    image_size: int
    parameters: int
    sampling: dict
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
        sampling=LLAMAGEN_SAMPLING["class"],
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
        sampling=LLAMAGEN_SAMPLING["text"],
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
        sampling=VAR_SAMPLING,
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


def load_published(name: str, *, cache_dir: str | Path | None = None, local_files_only: bool = False) -> Path:
    """The folder of a published checkpoint in the layout of `save_pretrained`. The first call fetches the authors'
    files and converts them; later calls only return the folder.

    Args:
        name: of an entry of `PUBLISHED`.
        cache_dir: where both the fetched files and the folder (as `arimage/<name>`) lie, instead of the Hub's cache
            and its home (`HF_HOME`).
        local_files_only: convert what was fetched before, fetch nothing.

    Raises:
        ValueError: if there is no such name.
        ConnectionError: if a file is neither in the cache nor can be fetched.
        CheckpointError: if a fetched file is not what was published.
    """
    entry = next((entry for entry in PUBLISHED if entry.name == name), None)
    if entry is None:
        raise ValueError(f"no checkpoint {name!r} was published: give one of {', '.join(e.name for e in PUBLISHED)}")

    import huggingface_hub
    from filelock import FileLock

    folder = Path(cache_dir or huggingface_hub.constants.HF_HOME) / "arimage" / name
    if (folder / "model_index.json").is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    # The processes of one machine share the folder.
    with FileLock(folder.with_name(f".{name}.lock")):
        if not (folder / "model_index.json").is_file():
            _convert(entry, folder, cache_dir=cache_dir, local_files_only=local_files_only)
    return folder


def _convert(entry: PublishedCheckpoint, folder: Path, **hub) -> None:
    transformer, tokenizer, text_encoder = _fetch(entry, **hub)
    if entry.family == "var":
        from .var import convert_var

        convert_var(transformer, tokenizer, out=folder)
        return
    from .llamagen import convert_llamagen

    convert_llamagen(
        transformer,
        tokenizer,
        entry.image_size,
        num_heads=entry.num_heads,
        text_encoder=text_encoder,
        out=folder,
    )


def _fetch(entry: PublishedCheckpoint, **hub) -> tuple[str, str, str | None]:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        transformer = huggingface_hub.hf_hub_download(entry.repository, entry.transformer_file, **hub)
        tokenizer = huggingface_hub.hf_hub_download(entry.tokenizer_repository, entry.tokenizer_file, **hub)
        text_encoder = entry.text_encoder_repository and huggingface_hub.snapshot_download(
            entry.text_encoder_repository,
            allow_patterns=["config.json", "*.safetensors", "*.safetensors.index.json", "*token*", "spiece.model"],
            **hub,
        )
    except (LocalEntryNotFoundError, ConnectionError) as error:
        raise ConnectionError(_by_hand(entry)) from error
    return transformer, tokenizer, text_encoder


def _by_hand(entry: PublishedCheckpoint) -> str:
    files = f"{entry.transformer_file} of {entry.repository}, {entry.tokenizer_file} of {entry.tokenizer_repository}"
    command = [
        "arimage",
        "convert",
        entry.family,
        "--transformer",
        entry.transformer_file,
        "--tokenizer",
        entry.tokenizer_file,
    ]
    if entry.family == "llamagen":
        command += ["--image-size", str(entry.image_size)]
    if entry.text_encoder_repository:
        files += f", the text encoder {entry.text_encoder_repository}"
        command += ["--text-encoder", Path(entry.text_encoder_repository).name]
    command += ["--out", entry.name]
    return (
        f"{entry.name} needs {files} from the Hugging Face Hub, which is not reachable from here and has not been "
        f"fetched before: connect once, or bring the files here and run `{shlex.join(command)}`"
    )
