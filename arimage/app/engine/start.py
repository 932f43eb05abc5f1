"""Starts what generates the images and videos of the server and the demo."""

from collections.abc import Mapping
from typing import Any

from ...pipelines.base import ARPipeline
from .adapters import active_adapters, split_adapters
from .engine import Engine
from .types import Limits
from .videos import VideoMaker


def start_engines(
    pipelines: Mapping[str, ARPipeline], limits: Limits, lora: list[str] | None
) -> tuple[Engine, VideoMaker | None]:
    """What generates the images, and the videos if there are models of them, both warmed up.

    Args:
        pipelines: by name, at least one of images.
        lora: adapters, as in `load_models`.

    Raises:
        ValueError: if an adapter of videos has a name.
    """
    videos = {name: pipe for name, pipe in pipelines.items() if pipe.abilities.generates_video}
    if videos and split_adapters(lora or [])[1]:
        raise ValueError("--lora NAME=FILE is for models of images: leave out the name")
    images: dict[str, Any] = {name: pipe for name, pipe in pipelines.items() if name not in videos}
    # Adapters are those of one model, the first name.
    engine = Engine(images, limits, active_adapters(next(iter(pipelines)), lora or []))
    maker = VideoMaker(videos, limits, lora or []) if videos else None
    if maker is not None:
        # Both use the same device.
        maker.on_device_error = engine.fail
        maker.warm_up()
    engine.warm_up()
    return engine, maker
