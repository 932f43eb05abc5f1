"""The table of published checkpoints. No heavy imports: the console command lists it."""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class HubFiles:
    """Files of one repository on the Hugging Face Hub.

    Attributes:
        repository (`str`): owner/name.
        patterns (`tuple[str, ...]`): the name of one file, or patterns of the names of several.
    """

    repository: str
    patterns: tuple[str, ...]

    @property
    def file(self) -> str | None:
        """The one file; `None` if there are several, which a converter takes as a folder."""
        return self.patterns[0] if len(self.patterns) == 1 and "*" not in self.patterns[0] else None


@dataclass(frozen=True)
class PublishedCheckpoint:
    """Where a checkpoint is published, and what its files do not say.

    Attributes:
        name (`str`): for `AutoPipeline.from_pretrained` and `load_published`.
        family (`str`): which converter takes it: `convert_<family>`; "" for a folder that is a pipeline already.
        files (`dict[str, HubFiles]`): what that converter takes, by the names of its arguments. `revision` is one of
            the first repository.
        image_size (`int`): longer side in pixels of the images, or of the frames, that it was trained for.
        parameters (`int`): of the network that generates, with all that is in one component with it.
        download (`int`): bytes of the files, rounded.
        licence (`str`): that the repository's page names.
        other_parameters (`int`): of an image tokenizer and a text encoder that are components of their own.
        bytes_per_parameter (`int`): in the files, and in the converted pipeline.
        options (`dict`): further arguments of the converter.
        needs_chameleon (`bool`): whether the converter also takes the image tokenizer of Chameleon, which Meta gives
            out on request.
    """

    name: str
    family: str
    files: dict[str, HubFiles]
    image_size: int
    parameters: int
    download: int
    licence: str = "MIT"
    other_parameters: int = 0
    bytes_per_parameter: int = 2
    options: dict = field(default_factory=dict)
    needs_chameleon: bool = False

    @property
    def repository(self) -> str:
        return next(iter(self.files.values())).repository

    @property
    def all_parameters(self) -> int:
        return self.parameters + self.other_parameters

    @property
    def converted(self) -> int:
        """Bytes of the converted pipeline, rounded; 0 if nothing is converted."""
        return 0 if not self.family else self.all_parameters * self.bytes_per_parameter


# In the layout of transformers.
SAFETENSORS = ("*.json", "*.jinja", "*.safetensors")
PICKLES = ("*.json", "pytorch_model*.bin")
# Of the image tokenizers of Infinity, with 16 and 8 pixels per cell of the latents.
INFINITY_VQ, INFINITY_VQ_8 = 110_000_000, 81_600_000
# Of the image tokenizers of LlamaGen and VAR, and of the encoder of flan-t5-xl.
LLAMAGEN_VQ, VAR_VQ, T5_XL_ENCODER = 71_900_000, 108_900_000, 1_223_500_000
T5_XL_FILES = 11_400_000_000
T5_XL_PATTERNS = ("*token*.json", "config.json", "model*", "spiece.model")
# Of the video tokenizer of Cosmos, and of the encoder of t5-11b.
COSMOS_VQ, T5_11B_ENCODER = 110_900_000, 4_865_000_000
T5_11B_FILES = 45_200_000_000


def _llamagen(size: str, image_size: int, num_heads: int, parameters: int) -> PublishedCheckpoint:
    repository = "FoundationVision/LlamaGen"
    return PublishedCheckpoint(
        name=f"llamagen-c2i-{size.lower()}-{image_size}",
        family="llamagen",
        files={
            "transformer": HubFiles(repository, (f"c2i_{size}_{image_size}.pt",)),
            "tokenizer": HubFiles(repository, ("vq_ds16_c2i.pt",)),
        },
        image_size=image_size,
        parameters=parameters,
        other_parameters=LLAMAGEN_VQ,
        bytes_per_parameter=4,
        download=4 * (parameters + LLAMAGEN_VQ),
        options={"image_size": image_size, "num_heads": num_heads},
    )


def _llamagen_text(stage: int, image_size: int) -> PublishedCheckpoint:
    repository, parameters = "peizesun/llamagen_t2i", 777_700_000
    return PublishedCheckpoint(
        name=f"llamagen-t2i-xl-{image_size}",
        family="llamagen",
        files={
            "transformer": HubFiles(repository, (f"t2i_XL_stage{stage}_{image_size}.pt",)),
            "tokenizer": HubFiles(repository, ("vq_ds16_t2i.pt",)),
            "text_encoder": HubFiles("google/flan-t5-xl", T5_XL_PATTERNS),
        },
        image_size=image_size,
        parameters=parameters,
        other_parameters=LLAMAGEN_VQ + T5_XL_ENCODER,
        bytes_per_parameter=4,
        download=4 * (parameters + LLAMAGEN_VQ) + T5_XL_FILES,
        licence="MIT; text encoder Apache-2.0",
        options={"image_size": image_size, "num_heads": 20},
    )


def _var(size: str, image_size: int, parameters: int) -> PublishedCheckpoint:
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
        other_parameters=VAR_VQ,
        bytes_per_parameter=4,
        download=4 * (parameters + VAR_VQ),
    )


def _infinity(
    name: str, transformer: str, vae: str, pixels: str, image_size: int, parameters: int
) -> PublishedCheckpoint:
    repository, folder = "FoundationVision/Infinity", None if transformer.endswith(".pth") else transformer
    return PublishedCheckpoint(
        name=f"infinity-{name}",
        family="infinity",
        files={
            "transformer": HubFiles(repository, (transformer if folder is None else f"{transformer}/*",)),
            # Each transformer goes with the tokenizer that it was trained with, though others have the same shape.
            "vae": HubFiles(repository, (f"infinity_vae_{vae}.pth",)),
            "text_encoder": HubFiles("google/flan-t5-xl", T5_XL_PATTERNS),
        },
        image_size=image_size,
        parameters=parameters,
        other_parameters=(INFINITY_VQ if folder is None else INFINITY_VQ_8) + T5_XL_ENCODER,
        bytes_per_parameter=4,
        # The tokenizers' files hold more than the tokenizers.
        download=4 * parameters + 1_560_000_000 + T5_XL_FILES,
        licence="MIT; text encoder Apache-2.0",
        options={"pixels": pixels} | ({} if folder is None else {"subfolder": folder}),
    )


def _any_order(
    family: str, name: str, repository: str, pattern: str, parameters: int, image_size: int = 256
) -> PublishedCheckpoint:
    """Of ARPG, LPD and RandAR, which use the image tokenizer of LlamaGen."""
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
    )


def _arpg(size: str, parameters: int) -> PublishedCheckpoint:
    return _any_order("arpg", f"arpg-{size}-256", "hp-l33/ARPG", f"arpg_{size}.pt", parameters)


def _lpd(size: str, image_size: int, parameters: int) -> PublishedCheckpoint:
    repository = f"mit-han-lab/lpd_{size}_{image_size}"
    entry = _any_order("lpd", f"lpd-{size}-{image_size}", repository, "*.pth", parameters, image_size)
    return replace(entry, licence="MIT (code)")


def _randar(size: str, parameters: int) -> PublishedCheckpoint:
    file = f"randar_{size}_llamagen_360k_bs_1024_lr_0.0004.safetensors"
    return _any_order("randar", f"randar-{size}-256", "ziqipang/RandAR", file, parameters)


def _janus(
    name: str, repository: str, patterns: tuple[str, ...], parameters: int, template: str | None
) -> PublishedCheckpoint:
    return PublishedCheckpoint(
        name=name,
        family="janus",
        files={"folder": HubFiles(repository, patterns)},
        image_size=384,
        parameters=parameters,
        download=2 * parameters,
        options={} if template is None else {"template": template},
    )


def _emu3(name: str, repository: str, image_size: int) -> PublishedCheckpoint:
    parameters = 8_760_000_000
    return PublishedCheckpoint(
        name=name,
        family="emu3",
        files={
            "folder": HubFiles(repository, ("*.json", "*.safetensors", "emu3.tiktoken", "emu3_vision_tokens.txt")),
            "vision_tokenizer": HubFiles("BAAI/Emu3-VisionTokenizer", ("*.json", "*.safetensors")),
        },
        image_size=image_size,
        parameters=parameters,
        bytes_per_parameter=4,
        download=4 * parameters,
        licence="Apache-2.0",
    )


def _emu3_transformers(repository: str) -> PublishedCheckpoint:
    return replace(
        _emu3(repository, repository, 720),
        files={"folder": HubFiles(repository, SAFETENSORS)},
        bytes_per_parameter=2,
        download=2 * 8_760_000_000,
    )


def _emu35(name: str, repository: str, base: bool) -> PublishedCheckpoint:
    return PublishedCheckpoint(
        name=name,
        family="emu35",
        files={
            "folder": HubFiles(repository, ("*.json", "*.safetensors", "emu3.tiktoken", "emu3_vision_tokens.txt")),
            # The repository has the same tensors as a pickle, too.
            "vision_tokenizer": HubFiles("BAAI/Emu3.5-VisionTokenizer", ("config.json", "model.safetensors")),
        },
        image_size=1024,
        parameters=34_103_000_000,
        other_parameters=455_300_000,
        download=70_000_000_000,
        licence="Apache-2.0",
        options={"base": True} if base else {},
    )


def _mammothmoda2(variant: str, parameters: int, download: int, licence: str) -> PublishedCheckpoint:
    """The number of parameters is computed from the published shapes. Their pages were not seen: the bytes to download
    are those of bfloat16."""
    patterns = (*SAFETENSORS, "mammothu.tiktoken", "mammothu_vision_tokens.txt")
    return PublishedCheckpoint(
        name=f"mammothmoda2-{variant.lower()}",
        family="mammothmoda2",
        files={"folder": HubFiles(f"bytedance-research/MammothModa2-{variant}", patterns)},
        image_size=1024,
        parameters=parameters,
        other_parameters=2_100_000_000,
        download=download,
        licence=licence,
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
        options={"image_size": image_size},
        needs_chameleon=True,
    )


def _anole(name: str, repository: str, patterns: tuple[str, ...], licence: str) -> PublishedCheckpoint:
    return PublishedCheckpoint(
        name=name,
        family="anole",
        files={"folder": HubFiles(repository, patterns)},
        image_size=512,
        parameters=7_110_000_000,
        download=14_300_000_000,
        licence=licence,
    )


def _cosmos(size: str, parameters: int, repository: str | None = None) -> PublishedCheckpoint:
    text = size.endswith("Video2World")
    files = {
        "model_file": HubFiles(repository or f"nvidia/Cosmos-Predict1-{size}", ("model.pt",)),
        "tokenizer": HubFiles("nvidia/Cosmos-Tokenize1-DV8x16x16-720p", ("encoder.jit", "decoder.jit")),
    }
    if text:
        t5 = ("config.json", "pytorch_model.bin", "spiece.model", "tokenizer.json")
        files["text_encoder"] = HubFiles("google-t5/t5-11b", t5)
    return PublishedCheckpoint(
        name=repository or f"cosmos-{size.lower()}",
        family="cosmos",
        files=files,
        image_size=1024,
        parameters=parameters,
        other_parameters=COSMOS_VQ + text * T5_11B_ENCODER,
        download=2 * (parameters + COSMOS_VQ) + text * T5_11B_FILES,
        licence="NVIDIA Open Model License" + text * "; text encoder Apache-2.0",
    )


def _cosmos_both(size: str, parameters: int) -> list[PublishedCheckpoint]:
    """The entry of a model, and that of its first repository, which holds the same files."""
    return [_cosmos(size, parameters), _cosmos(size, parameters, f"nvidia/Cosmos-1.0-Autoregressive-{size}")]


PUBLISHED = [
    _llamagen("B", 256, 12, 110_900_000),
    _llamagen("B", 384, 12, 110_900_000),
    _llamagen("L", 256, 16, 342_900_000),
    _llamagen("L", 384, 16, 342_900_000),
    _llamagen("XL", 384, 20, 774_700_000),
    _llamagen("XXL", 384, 24, 1_411_000_000),
    _llamagen("3B", 384, 32, 3_097_000_000),
    _llamagen_text(1, 256),
    _llamagen_text(2, 512),
    _var("d16", 256, 310_300_000),
    _var("d20", 256, 600_900_000),
    _var("d24", 256, 1_033_000_000),
    _var("d30", 256, 2_010_000_000),
    _var("d36", 512, 2_354_000_000),
    _infinity("125m", "infinity_125M_256x256.pth", "d16", "0.06M", 256, 125_100_000),
    _infinity("2b", "infinity_2b_reg.pth", "d32reg", "1M", 1024, 2_204_600_000),
    _infinity("8b", "infinity_8b_weights", "d56_f8_14_patchify", "1M", 1024, 8_375_800_000),
    _infinity("8b-512", "infinity_8b_512x512_weights", "d56_f8_14_patchify", "0.25M", 512, 8_375_800_000),
    _arpg("300m", 319_800_000),
    _arpg("700m", 719_000_000),
    _arpg("1b", 1_302_400_000),
    _lpd("l", 256, 337_200_000),
    _lpd("xl", 256, 751_900_000),
    _lpd("xxl", 256, 1_412_200_000),
    _lpd("l", 512, 337_900_000),
    _lpd("xl", 512, 752_900_000),
    _randar("0.3b", 342_900_000),
    _randar("0.7b", 774_700_000),
    # Janus-1.3B names the speakers of a prompt in its own way, which no file says.
    _janus("janus-1.3b", "deepseek-ai/Janus-1.3B", SAFETENSORS, 2_080_000_000, "janus"),
    _janus("janus-pro-1b", "deepseek-ai/Janus-Pro-1B", PICKLES, 2_080_000_000, "janus-pro"),
    _janus("janus-pro-7b", "deepseek-ai/Janus-Pro-7B", PICKLES, 7_410_000_000, "janus-pro"),
    _janus("deepseek-community/Janus-Pro-1B", "deepseek-community/Janus-Pro-1B", SAFETENSORS, 2_080_000_000, None),
    _janus("deepseek-community/Janus-Pro-7B", "deepseek-community/Janus-Pro-7B", SAFETENSORS, 7_410_000_000, None),
    _emu3("emu3-gen", "BAAI/Emu3-Gen", 720),
    _emu3("emu3-stage1", "BAAI/Emu3-Stage1", 512),
    _emu3_transformers("BAAI/Emu3-Gen-hf"),
    _emu3_transformers("Emu3-community/Emu3-Gen-hf"),
    _emu35("emu3.5-image", "BAAI/Emu3.5-Image", base=False),
    _emu35("emu3.5", "BAAI/Emu3.5", base=True),
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
        licence="Apache-2.0",
    ),
    _anole("anole-7b", "GAIR/Anole-7b-v0.1", ("models/7b/*", "tokenizer/*"), "see LICENSE.txt there"),
    _anole("leloy/Anole-7b-v0.1-hf", "leloy/Anole-7b-v0.1-hf", SAFETENSORS, "Apache-2.0"),
    PublishedCheckpoint(
        name="glm-image",
        family="",
        files={"folder": HubFiles("zai-org/GLM-Image", ("*.json", "*.jinja", "*.txt", "*.safetensors"))},
        image_size=1024,
        parameters=10_100_000_000,
        other_parameters=6_900_000_000,
        download=34_000_000_000,
    ),
    _mammothmoda2("Preview", 10_160_000_000, 27_000_000_000, "Apache-2.0"),
    _mammothmoda2("Dev", 10_560_000_000, 28_500_000_000, "Apache-2.0 (code)"),
    *_cosmos_both("4B", 4_014_000_000),
    *_cosmos_both("5B-Video2World", 4_585_000_000),
    *_cosmos_both("12B", 11_561_000_000),
    *_cosmos_both("13B-Video2World", 13_323_000_000),
]
# Repositories of the same authors that cannot generate images here, and what can.
_CHAT = "answers questions about images and was not trained to generate them: give emu3-gen"
_CHAMELEON = (
    "was published with image generation disabled: give anole-7b or lumina-mgpt-7b-768, which were trained for it"
)
_FLOW = "generates images by rectified flow, not token by token: give janus-1.3b or janus-pro-1b"
INSTEAD = {
    "BAAI/Emu3-Chat": _CHAT,
    "BAAI/Emu3-Chat-hf": _CHAT,
    "Emu3-community/Emu3-Chat-hf": _CHAT,
    "BAAI/Emu3-VisionTokenizer": "is an image tokenizer, which emu3-gen downloads: give emu3-gen",
    "BAAI/Emu3.5-VisionTokenizer": "is an image tokenizer, which emu3.5-image downloads: give emu3.5-image",
    "facebook/chameleon-7b": _CHAMELEON,
    "facebook/chameleon-30b": _CHAMELEON,
    "deepseek-ai/JanusFlow-1.3B": _FLOW,
    "jadechoghari/mar": "holds the weights of MAR without averaging: give the authors' checkpoint-last.pth to "
    "`arimage convert mar`",
    "ai-forever/MoVQGAN": "is an image tokenizer, which lumina-mgpt-2 downloads: give lumina-mgpt-2",
}
# The model_type of a published config.json, and the command that converts its folder.
CONVERT_COMMANDS = {
    "multi_modality": "arimage convert janus",
    "janus": "arimage convert janus",
    "Emu3": "arimage convert emu3",
    "emu3": "arimage convert emu3",
    # Its config.json says "Emu3".
    "Emu3.5": "arimage convert emu35",
    "mammothmoda2": "arimage convert mammothmoda2",
    "chameleon": "arimage convert lumina-mgpt (or anole)",
}


def nearest_names(name: str, names: Iterable[str]) -> str:
    """The three of these names that are most like a wrong one, as a list in a sentence."""
    *most, last = difflib.get_close_matches(name.lower(), list(names), 3, cutoff=0)
    return f"{', '.join(most)} and {last}"


def find_published(name: str) -> PublishedCheckpoint | None:
    """The entry of a name, or of a Hub repository that holds one checkpoint; `None` if there is none.

    Raises:
        ValueError: if the repository holds several, or is known to generate no images here.
    """
    if name in INSTEAD:
        raise ValueError(f"{name} {INSTEAD[name]}")
    found = [entry for entry in PUBLISHED if name in (entry.name, entry.repository)]
    if len(found) > 1:
        raise ValueError(f"{name} holds several models: give one of {', '.join(entry.name for entry in found)}")
    return found[0] if found else None


def size_text(size: float) -> str:
    """A size in bytes in GB of 10^9 bytes, or in MB below 0.1 GB."""
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"
