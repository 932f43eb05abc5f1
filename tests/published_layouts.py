"""Tiny random models under the names of published files."""

import json
import shutil
import string
from collections.abc import Callable
from pathlib import Path

import torch
from pipelines.arpg import tiny as tiny_arpg
from pipelines.chameleon import tiny as tiny_chameleon
from pipelines.cosmos import tiny as tiny_cosmos
from pipelines.emu3 import tiny as tiny_emu3
from pipelines.emu35 import tiny as tiny_emu35
from pipelines.glm_image import tiny as tiny_glm_image
from pipelines.janus import tiny as tiny_janus
from pipelines.llamagen import tiny as tiny_llamagen
from pipelines.lpd import tiny as tiny_lpd
from pipelines.mammothmoda2 import tiny as tiny_mammothmoda2
from pipelines.var import tiny as tiny_var
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, T5Config, T5EncoderModel

from arimage.convert.folder import load_original_folder


# Names of the files of repositories on the Hub, with their sizes in bytes as the pages round them, or null where they
# were not seen. The files of GAIR/Anole-7b-v0.1 in models/7b, four, are taken to be those of Meta's format; the
# weights of MammothModa2 are taken to be in two files.
LISTINGS = json.loads((Path(__file__).parent / "fixtures" / "hub_listings.json").read_text())
UNUSED = b"no converter reads this"


def is_weights(name: str) -> bool:
    return name.startswith(("model-", "model.", "pytorch_model"))


def publish(root: Path, repository: str, source: Path) -> None:
    """The files of `source` under the names that `repository` has on the Hub, the weights in as many files as there,
    and something for every other name. A file of `source` that the repository has not is an error."""
    names = LISTINGS[repository]
    files = {path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()}
    assert {name for name in files if not is_weights(name)} <= names.keys()
    parts = sorted(name for name in names if is_weights(name) and not name.endswith(".json"))
    state = load_original_folder(source) if parts else {}
    where = {key: parts[i % len(parts)] for i, key in enumerate(state)}
    for name in names:
        path = root / repository / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name in parts:
            part = {key: value.contiguous() for key, value in state.items() if where[key] == name}
            save_file(part, path, {"format": "pt"}) if path.suffix == ".safetensors" else torch.save(part, path)
        elif is_weights(name):
            path.write_text(json.dumps({"metadata": {}, "weight_map": where}))
        elif name in files:
            shutil.copy(source / name, path)
        else:
            path.write_bytes(UNUSED)


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(source, target)


def llamagen(root: Path) -> None:
    _copy(tiny_llamagen.FIXTURES / "c2i" / "c2i_tiny.pt", root / "FoundationVision/LlamaGen/c2i_B_256.pt")
    _copy(tiny_llamagen.FIXTURES / "c2i" / "vq_ds4_c2i.pt", root / "FoundationVision/LlamaGen/vq_ds16_c2i.pt")


def llamagen_text(root: Path) -> None:
    _copy(tiny_llamagen.FIXTURES / "t2i" / "t2i_tiny.pt", root / "peizesun/llamagen_t2i/t2i_XL_stage1_256.pt")
    _copy(tiny_llamagen.FIXTURES / "t2i" / "vq_ds4_t2i.pt", root / "peizesun/llamagen_t2i/vq_ds16_t2i.pt")
    folder = root / "google/flan-t5-xl"
    T5EncoderModel(T5Config(vocab_size=8, d_model=32, d_kv=4, d_ff=8, num_layers=1, num_heads=2)).save_pretrained(
        folder
    )
    words = Tokenizer(models.WordLevel({"<pad>": 0, "</s>": 1, "<unk>": 2, "heart": 3}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="</s>").save_pretrained(folder)
    for name in ("README.md", "flax_model-00001-of-00002.msgpack", "pytorch_model-00001-of-00002.bin"):
        (folder / name).write_bytes(UNUSED)


def var(root: Path) -> None:
    _copy(tiny_var.FOLDER / "var_d2.pth", root / "FoundationVision/var/var_d16.pth")
    _copy(tiny_var.FOLDER / "vae_ch32v64z8.pth", root / "FoundationVision/var/vae_ch160v4096z32.pth")


def arpg(root: Path) -> None:
    _copy(tiny_arpg.FOLDER / "arpg_tiny.pt", root / "hp-l33/ARPG/arpg_300m.pt")
    _copy(tiny_llamagen.FIXTURES / "c2i" / "vq_ds4_c2i.pt", root / "FoundationVision/LlamaGen/vq_ds16_c2i.pt")


def lpd(root: Path) -> None:
    _copy(tiny_lpd.FOLDER / "lpd_tiny.pth", root / "mit-han-lab/lpd_l_256/lpd_l_256.pth")
    _copy(tiny_llamagen.FIXTURES / "c2i" / "vq_ds4_c2i.pt", root / "FoundationVision/LlamaGen/vq_ds16_c2i.pt")


def randar_state(classes: int = 10, codes: int = 128, width: int = 32, layers: int = 2) -> dict[str, torch.Tensor]:
    """Random tensors of a RandAR by their original names."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) / shape[-1] ** 0.5

    state = {
        "cls_embedding.embedding_table.weight": random(classes + 1, width) * 6,
        "tok_embeddings.weight": random(codes, width) * 6,
        "pos_instruct_embeddings": random(1, width) * 6,
        "norm.weight": torch.ones(width),
        "output.weight": random(codes, width) * 3,
    }
    for layer in range(layers):
        shapes = {
            "attention.wqkv": (3 * width, width),
            "attention.wo": (width, width),
            "feed_forward.w1": (64, width),
            "feed_forward.w2": (width, 64),
            "feed_forward.w3": (64, width),
        }
        state |= {f"layers.{layer}.{name}.weight": random(*shape) for name, shape in shapes.items()}
        state |= {f"layers.{layer}.{name}.weight": torch.ones(width) for name in ("attention_norm", "ffn_norm")}
    return state


def randar(root: Path) -> None:
    file = root / "ziqipang/RandAR/randar_0.3b_llamagen_360k_bs_1024_lr_0.0004.safetensors"
    file.parent.mkdir(parents=True)
    save_file(randar_state(), file)
    _copy(tiny_llamagen.FIXTURES / "c2i" / "vq_ds4_c2i.pt", root / "FoundationVision/LlamaGen/vq_ds16_c2i.pt")


def janus(repository: str) -> Callable[[Path], None]:
    return lambda root: publish(root, repository, tiny_janus.write_original(root / "source"))


def janus_of_transformers(root: Path) -> None:
    folder = shutil.copytree(tiny_janus.FOLDER, root / "deepseek-community/Janus-Pro-1B")
    (folder / "expected.safetensors").unlink()
    tiny_janus.processor().save_pretrained(folder)


def glm_image(root: Path) -> None:
    shutil.copytree(tiny_glm_image.FOLDER, root / "zai-org/GLM-Image")
    (root / "zai-org/GLM-Image/expected.safetensors").unlink()


def emu3(root: Path) -> None:
    publish(root, "BAAI/Emu3-Gen", tiny_emu3.write_original(root / "source"))
    publish(root, "BAAI/Emu3-VisionTokenizer", tiny_emu3.write_vision_tokenizer(root / "vision"))


def mammothmoda2(root: Path) -> None:
    source = tiny_mammothmoda2.write_published(root / "source")
    # What the repository has, no template of another model.
    (source / "chat_template.jinja").write_text(tiny_mammothmoda2.CHAT_TEMPLATE)
    publish(root, "bytedance-research/MammothModa2-Preview", source)


def emu3_of_transformers(root: Path) -> None:
    folder = root / "BAAI/Emu3-Gen-hf"
    tiny_emu3.character_tokenizer().save_pretrained(folder)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(tiny_emu3.FIXTURES / name, folder)


def emu35(root: Path) -> None:
    publish(root, "BAAI/Emu3.5-Image", tiny_emu35.write_original(root / "source"))
    folder = root / "BAAI/Emu3.5-VisionTokenizer"
    shutil.copytree(tiny_emu35.VISION_TOKENIZER, folder)
    (folder / "model.ckpt").write_bytes(UNUSED)


def chameleon_tokenizer(folder: Path) -> None:
    """Meta's image tokenizer, and a text tokenizer with a token per character."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(tiny_chameleon.FIXTURE / "tokenizer" / "vqgan.ckpt", folder)
    names = json.loads((tiny_chameleon.FIXTURE / "tokenizer" / "text_tokenizer.json").read_text())["model"]["vocab"]
    ids = {token: name for name, token in names.items()}
    # The names of these ids serve nothing here.
    characters = dict(enumerate([*string.printable, "ab"], start=8300))
    vocabulary = {name: token for token, name in (ids | characters).items()}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("a", "b")]))
    tokenizer.save(str(folder / "text_tokenizer.json"))


def lumina(repository: str) -> Callable[[Path], None]:
    def write(root: Path) -> None:
        source = root / "source"
        source.mkdir()
        for name in ("config.json", "model.safetensors"):
            shutil.copy(tiny_chameleon.FIXTURE / name, source)
        if "tokenizer.json" in LISTINGS[repository]:
            chameleon_tokenizer(source)
            (source / "vqgan.ckpt").unlink()
            _name_as_transformers(source)
        publish(root, repository, source)

    return write


def _name_as_transformers(folder: Path) -> None:
    (folder / "text_tokenizer.json").rename(folder / "tokenizer.json")
    specials = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(specials))


def lumina_2(root: Path) -> None:
    source = tiny_chameleon.write_version_2(root / "source")
    (source / "tokenizer_config.json").write_text(json.dumps({"bos_token": None, "eos_token": "</s>"}))
    publish(root, "Alpha-VLLM/Lumina-mGPT-2.0", source)
    _copy(tiny_chameleon.MOVQGAN, root / "ai-forever/MoVQGAN/movqgan_270M.ckpt")


def anole(root: Path) -> None:
    source = tiny_chameleon.write_meta(root / "source")
    chameleon_tokenizer(source / "tokenizer")
    publish(root, "GAIR/Anole-7b-v0.1", source)


def anole_of_transformers(root: Path) -> None:
    source = root / "source"
    chameleon_tokenizer(source)
    vqgan = torch.load(source / "vqgan.ckpt", weights_only=True)
    vqgan = {f"model.vqmodel.{key}": value for key, value in vqgan.get("state_dict", vqgan).items()}
    (source / "vqgan.ckpt").unlink()
    _name_as_transformers(source)
    shutil.copy(tiny_chameleon.FIXTURE / "config.json", source)
    save_file(load_original_folder(tiny_chameleon.FIXTURE) | vqgan, source / "model.safetensors")
    publish(root, "leloy/Anole-7b-v0.1-hf", source)


def cosmos(root: Path) -> None:
    _copy(tiny_cosmos.FOLDER / "base.pt", root / "nvidia/Cosmos-Predict1-4B/model.pt")
    for name in ("encoder.jit", "decoder.jit"):
        _copy(tiny_cosmos.TOKENIZER / name, root / "nvidia/Cosmos-Tokenize1-DV8x16x16-720p" / name)
    for name in ("config.json", "README.md"):
        (root / "nvidia/Cosmos-Predict1-4B" / name).write_bytes(UNUSED)
