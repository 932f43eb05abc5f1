"""The layer rule: nothing imports upward, no file outgrows its reader, and the light modules stay light."""

import ast
import graphlib
import re
import subprocess
import sys
from functools import cache
from pathlib import Path, PurePosixPath

import pytest

from arimage.families import CONVERTERS, EXPORTS, FAMILIES, PIPELINES


ROOT = Path(__file__).resolve().parents[1]
FILES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "arimage").rglob("*.py"))
MAX_LINES = 600

LAYERS = {
    "settings": 0,
    "kernels": 0,
    "decoding": 1,
    "models": 2,
    "tokenizers": 2,
    "pipelines": 3,
    "families": 3,
    "convert": 2,
    "media": 3,
    "training": 4,
    "eval": 4,
    "app": 4,
    "cli": 4,
    "auto": 4,
    "published": 4,
    "__main__": 4,
    "__init__": 4,  # the lazy exports reach into every package
}
# Sub-packages and files within a package, the lowest first; `...` stands for those that are not named.
INNER = {
    "app": ["engine", "server", "server/replicas", "server/routes", "server/app", "demo", ...],
    "cli": ["imports", "options", ..., "main"],
    "decoding": ["contract", "run", ...],
    "eval": [
        "runs/files",
        "runs/run_folder",
        "bench",
        "metrics",
        "runs",
        ...,
        "score",
        "protocol",
        "reproduce",
        "report",
        "against",
        "turns",
        "score_commands",
        "commands",
        "__init__",
    ],
    "training": [
        "processes",
        "optimizer",
        "checkpoints",
        "sharding",
        "resuming",
        "loop",
        "tokenizers/quantisers",
        "data",
        ...,
        "commands",
    ],
}
# A family's folder holds parts of two layers: what stands on pipelines, and models and tokenizers below them.
ON_PIPELINES = ("pipeline_", "base", "prompts", "convert", "family", "accelerate", "__init__")
# Sub-packages of `pipelines` that are not families.
SHARED = {path.name for path in (ROOT / "arimage" / "pipelines").iterdir() if path.is_dir()} - FAMILIES.keys()
# Where families are named by design: recipes and trainers are for particular models.
NAMES_FAMILIES = ("arimage/training/",)
# The libraries that a package may import besides the standard library; the packages not named here choose freely.
LIBRARIES = {"kernels": {"torch", "triton"}, "decoding": {"numpy", "torch"}}


@cache
def imported(source: str, file: str) -> list[str]:
    """Dotted names that a source imports anywhere in it, relative ones resolved; `from a import b` gives `a.b`."""
    package = PurePosixPath(file).parent.parts
    names = []
    for node in ast.walk(ast.parse(source, filename=file)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parents = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*parents, *filter(None, [node.module])])
            names += [f"{module}.{alias.name}" for alias in node.names]
    return names


def inner_layer(package: str, path: list[str]) -> int:
    """The layer within `package` of a path in it."""
    names = INNER.get(package, [...])
    return next(names.index(name) for name in ("/".join(path[:2]), path[0], ...) if name in names)


def layer_violations(source: str, file: str) -> list[str]:
    """What a source at `file`, arimage/<package>/..., imports against the layer rule."""
    package, *inside = PurePosixPath(file).with_suffix("").parts[1:]
    if file == "arimage/convert/__init__.py":
        return []  # exports the converters of the families lazily
    if package not in LAYERS:
        return [f"{file}: give the package {package!r} its layer"]
    found = []
    family = inside[0] if package == "pipelines" and len(inside) > 1 and inside[0] not in SHARED else None
    below = family is not None and not inside[1].startswith(ON_PIPELINES)
    for name in imported(source, file):
        top, _, rest = name.partition(".")
        if top != "arimage":
            allowed = LIBRARIES.get(package)
            if allowed is not None and top not in allowed and top not in sys.stdlib_module_names:
                found.append(f"{file}: {package} imports {name}")
            continue
        target, *within = *rest.split("."), "__init__"
        if target == "__version__":
            continue
        if target == package and inside and inner_layer(package, within) > inner_layer(package, inside):
            found.append(f"{file}: {package}/{inside[0]} imports {name}")
        # Any other name is an export of arimage/__init__.py.
        layer = LAYERS.get(target, LAYERS["__init__"])
        other = target == "pipelines" and within[0] not in SHARED and len(within) > 3
        own = other and not within[1].startswith(ON_PIPELINES)
        known = {family, *(FAMILIES[family].builds_on if family in FAMILIES else ())}
        if other and within[0] not in known and LAYERS[package] < 4:
            found.append(f"{file}: names the family {within[0]}")
        elif below and not own and (layer > 2 or target == "decoding"):
            found.append(f"{file}: a part of a model imports {name}")
        elif layer > LAYERS[package] or (target == "decoding" and LAYERS[package] == 2):
            found.append(f"{file}: {package} imports {name}")
    return found


# The names of classes, converters and modules of families.
NAMES = {name for name in EXPORTS if not name.islower()} | {converter.function for _, converter in CONVERTERS.values()}
NAMED = re.compile(rf"\b({'|'.join(sorted(NAMES))})\b|\bpipelines[./]({'|'.join(FAMILIES)})\b")


def named_families(source: str, file: str) -> list[str]:
    """What a source outside of the families' folders imports or names of a family."""
    if file.startswith((*NAMES_FAMILIES, *(f"arimage/pipelines/{folder}/" for folder in FAMILIES))):
        return []
    found = {match[0] for match in NAMED.finditer(source)}
    found |= {match[0] for name in imported(source, file) if (match := NAMED.search(name))}
    return [f"{file}: names {name}" for name in sorted(found)]


# Functions that open or decode an image or a video; `media` does it for all, and decides what the colours are.
OPENERS = {"open", "load_image", "load_video", "imread", "imdecode", "read_image", "read_video", "decode_image"}
OPENING_PACKAGES = {"PIL", "diffusers", "torchvision", "imageio", "cv2", "av", "skimage", "matplotlib", "transformers"}


def opened_elsewhere(source: str, file: str) -> list[str]:
    """Where a source outside of arimage/media opens an image or a video itself."""
    if file.startswith("arimage/media/"):
        return []
    called = {f"PIL.{name}" for name in re.findall(r"\bImage\.open\b", source)}
    names = {name for name in imported(source, file) if name.split(".")[-1] in OPENERS} | called
    return [f"{file}: opens images by {name}" for name in names if name.split(".")[0] in OPENING_PACKAGES]


def module_name(file: str) -> str:
    """`a/b.py` is `a.b`; a package's `__init__.py` is the package."""
    return ".".join(PurePosixPath(file).with_suffix("").parts).removesuffix(".__init__")


def circle(sources: dict[str, str]) -> list[str]:
    """Modules among `sources` (file: source) that import each other in a circle, late imports and those for type
    checkers included. The exports of arimage/__init__.py reach into every package by design: they are left out.
    """
    modules = {module_name(file) for file in sources if file != "arimage/__init__.py"}
    graph = {}
    for file, source in sources.items():
        # `from a import b` is the module `a.b` where there is one, else something that the module `a` defines.
        names = {name if name in modules else name.rpartition(".")[0] for name in imported(source, file)}
        graph[module_name(file)] = names & modules
    graph.pop("arimage", None)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def too_long(source: str, file: str) -> list[str]:
    count = len(source.splitlines())
    return [f"{file}: {count} lines, more than {MAX_LINES}"] if count > MAX_LINES else []


def heavy_modules(code: str, heavy: set[str]) -> set[str]:
    """Which packages of `heavy` a fresh interpreter has imported after running `code`."""
    script = f"{code}\nimport sys\nprint('\\nimported:', *({heavy!r} & sys.modules.keys()))"
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return set(result.stdout.splitlines()[-1].split()[1:])


def test_files_keep_the_rules():
    sources = {file: (ROOT / file).read_text(encoding="utf-8") for file in FILES}
    assert [
        f for file, source in sources.items() for f in layer_violations(source, file) + too_long(source, file)
    ] == []
    assert circle(sources) == []


def test_only_its_own_folder_names_a_family():
    found = [f for file in FILES for f in named_families((ROOT / file).read_text(encoding="utf-8"), file)]
    assert found == []
    assert all((ROOT / path).exists() for path in NAMES_FAMILIES)


def test_only_media_opens_images_and_videos():
    folders = ("arimage", "benchmarks", "examples", "integrations")
    files = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    assert len(files) > len(FILES)
    assert [
        f
        for path in files
        for f in opened_elsewhere(path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix())
    ] == []


def test_light_modules_stay_light():
    modules = "import arimage, arimage.kernels, arimage.decoding"
    assert heavy_modules(modules, {"diffusers", "transformers", "accelerate"}) == set()
    assert heavy_modules("import arimage.decoding.names", {"torch"}) == set()


def command(code: int, *arguments: str) -> str:
    """A script that runs `arimage` and expects that exit code."""
    return f"""
import sys
from arimage.cli.main import main
sys.argv = {["arimage", *arguments]}
try:
    main()
except SystemExit as end:
    assert end.code == {code}, end.code
"""


COMMANDS = [
    (0, ["--help"]),
    (0, ["models"]),
    (0, ["decodings"]),
    (2, ["generate", "a red heart", "--nonesuch"]),
    (2, ["generate", "a red heart", "--model", "nonesuch"]),
    (2, ["generate", "--prompts", "nonesuch.txt"]),
    (2, ["generate", "a red heart", "--decoding", "nonesuch"]),
    (2, ["generate", "a red heart", "--decoding", "sjd:nonesuch=3"]),
    (2, ["bench", "--decoding", "ar", "--decoding", "nonesuch", "--out", "nonesuch"]),
    (2, ["convert", "var", "--transformer", "nonesuch.pth", "--tokenizer", "nonesuch.pth", "--out", "nonesuch"]),
    (2, ["convert", "janus", "tests", "--out", "tests"]),
    (2, ["bench", "--model", "nonesuch"]),
    (2, ["bench", "--decoding", "nonesuch"]),
    (2, ["serve", "--model", "nonesuch"]),
]


def test_help_and_mistakes_import_no_framework():
    heavy = {"torch", "diffusers", "transformers", "huggingface_hub"}
    # In one interpreter, since to start one takes longer than a command.
    script = "".join(
        f"{command(code, *arguments)}assert not {heavy} & sys.modules.keys(), {arguments}\n"
        for code, arguments in COMMANDS
    )
    assert heavy_modules(script, heavy) == set()


@pytest.mark.slow
def test_a_picture_imports_only_the_family_of_its_model(tmp_path):
    families = {f"arimage.{module}" for module in PIPELINES.values()}
    others = {"arimage.convert.checkpoint", "transformers.models.janus", "transformers.models.chameleon"}
    extras = {"gradio", "matplotlib", "pandas", "pyarrow", "sklearn", "torchao"}
    script = command(0, "generate", "a red heart", "--out", str(tmp_path / "heart.png"))
    assert heavy_modules(script, families | others | extras) == {"arimage.pipelines.arpg.pipeline_arpg"}


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("arimage/kernels/coupling/__init__.py", "from ...decoding import law"),
        ("arimage/kernels/coupling/triton.py", "import numpy"),
        ("arimage/decoding/contract/x.py", "def f():\n    from transformers.cache_utils import Cache"),
        ("arimage/decoding/contract/x.py", "from ... import AutoPipeline"),
        ("arimage/decoding/contract/x.py", "from ..run.watch import Watch"),
        (
            "arimage/decoding/run/x.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..group import X",
        ),
        ("arimage/app/engine/engine.py", "from ..server.routes.schemas import Fields"),
        ("arimage/app/server/state.py", "from .routes.schemas import Fields"),
        ("arimage/eval/runs/files.py", "from .manifest import make_manifest"),
        ("arimage/models/transformer_x.py", "from ..decoding.contract.models import TokenModel"),
        ("arimage/tokenizers/vq_x.py", "import arimage.decoding"),
        ("arimage/cellar/x.py", ""),
        ("arimage/pipelines/a/transformer_a.py", "from ...decoding import Sampling"),
        ("arimage/pipelines/a/transformer_a.py", "from .pipeline_a import f"),
        ("arimage/pipelines/a/pipeline_a.py", "from ..b.prompts import f"),
        ("arimage/pipelines/base.py", "from .a.family import FAMILY"),
    ],
)
def test_layer_check_finds_violations(file, source):
    assert len(layer_violations(source, file)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "from .pipelines.var import pipeline_var",
        "def f():\n    from arimage import JanusPipeline",
        "KINDS = {'CosmosPipeline'}",
        "from .convert import convert_mar",
    ],
)
def test_family_check_finds_names(source):
    assert len(named_families(source, "arimage/x.py")) == 1
    assert named_families(source, "arimage/training/x.py") == []


@pytest.mark.parametrize(
    "source",
    [
        "from PIL import Image\nImage.open(path)",
        "def f():\n    from diffusers.utils import load_image",
        "from torchvision.io import decode_image",
    ],
)
def test_opening_check_finds_violations(source):
    assert len(opened_elsewhere(source, "arimage/eval/x.py")) == 1
    assert opened_elsewhere(source, "arimage/media/x.py") == []


@pytest.mark.parametrize(
    "sources",
    [
        {"arimage/decoding/a.py": "from .b import f", "arimage/decoding/b.py": "def f():\n    from . import a"},
        {
            "arimage/decoding/a.py": "from .b import f",
            "arimage/decoding/b.py": "if TYPE_CHECKING:\n    from .a import g",
        },
        {
            "arimage/decoding/__init__.py": "from .a import f",
            "arimage/decoding/a.py": "import arimage.app.b",
            "arimage/app/b.py": "from ..decoding import f",
        },
    ],
)
def test_circle_check_finds_circles(sources):
    assert set(circle(sources)) == {module_name(file) for file in sources}


def test_checks_find_long_files_and_heavy_modules():
    assert too_long("pass\n" * MAX_LINES, "arimage/x.py") == []
    assert len(too_long("pass\n" * (MAX_LINES + 1), "arimage/x.py")) == 1
    assert heavy_modules("import sqlite3", {"sqlite3", "diffusers"}) == {"sqlite3"}
