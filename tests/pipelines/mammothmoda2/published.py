"""A tiny MammothModa2 under the names of published files."""

from pathlib import Path

import published_layouts as layouts
from pipelines.mammothmoda2 import tiny


def write(root: Path) -> None:
    source = tiny.write_published(root / "source")
    # What the repository has, no template of another model.
    (source / "chat_template.jinja").write_text(tiny.CHAT_TEMPLATE)
    layouts.publish(root, "bytedance-research/MammothModa2-Preview", source)


MODELS = {
    "mammothmoda2-preview": (
        write,
        {"prompt": "a cat", "token_grid": (10, 10), "num_inference_steps": 1, "height": 64, "width": 64},
        "MammothModa2Pipeline",
        {},
    ),
}
