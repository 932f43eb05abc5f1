"""A tiny NextStep-1.1 under the names of published files."""

from pathlib import Path

import published_layouts as layouts
from pipelines.nextstep import tiny


def write(root: Path) -> None:
    folder, repository = tiny.FIXTURES / "v1.1", root / "stepfun-ai/NextStep-1.1"
    for path in folder.rglob("*"):
        if path.is_file():
            layouts.copy(path, repository / path.relative_to(folder))
    for name in ("README.md", "models/nextstep_model.py"):
        (repository / name).parent.mkdir(parents=True, exist_ok=True)
        (repository / name).write_bytes(layouts.UNUSED)


MODELS = {
    "nextstep-1.1": (
        write,
        {"prompt": "a red heart", "height": 32, "width": 32, "num_diffusion_steps": 4},
        "NextStepPipeline",
        {},
    ),
}
