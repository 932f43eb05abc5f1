"""A tiny InfinityStar under the names of published files."""

from pathlib import Path

import published_layouts as layouts
from pipelines.infinitystar import tiny


FOLDER = "infinitystar_8b_480p_weights"


def write(root: Path) -> None:
    repository = root / "FoundationVision/InfinityStar"
    for path in (tiny.FIXTURES / "weights").iterdir():
        layouts.copy(path, repository / FOLDER / path.name)
    layouts.copy(tiny.FIXTURES / "infinitystar_videovae_tiny.pth", repository / "infinitystar_videovae.pth")
    unused = "README.md", "infinitystar_8b_720p_weights/model.safetensors.index.json"
    for name in (*unused, "text_encoder/flan-t5-xl-official/config.json"):
        (repository / name).parent.mkdir(parents=True, exist_ok=True)
        (repository / name).write_bytes(layouts.UNUSED)
    for path in (tiny.FIXTURES / "text_encoder").iterdir():
        layouts.copy(path, root / "google/flan-t5-xl" / path.name)


MODELS = {
    "infinitystar-480p": (
        write,
        {"prompt": "a fox", "num_frames": 1},
        "InfinityStarPipeline",
        {
            "subfolder": FOLDER,
            "pixels": "0.06M",
            **{name: tiny.CONFIG[name] for name in tiny.TRAINED},
        },
    ),
}
