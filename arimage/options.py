"""What the console commands share: their common options, and the pipeline that these name. No heavy imports."""

from typing import Annotated

import typer


DEFAULT_MODEL = "emoji-llamagen"

Model = Annotated[str, typer.Option(help="A packaged or published model's name, a folder, or a Hub repository.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 ...; a GPU where there is one.")]
Seed = Annotated[int, typer.Option(help="Same seed, same images.")]
GuidanceScale = Annotated[float | None, typer.Option(help="1 is off; the model's by default, as the next three.")]
Temperature = Annotated[float | None, typer.Option(help="Above 0.")]
TopK = Annotated[int | None, typer.Option(help="0 is off, 1 is greedy.")]
TopP = Annotated[float | None, typer.Option(help="1 is off.")]


def choose_device(name: str | None) -> str:
    """The device of that name, or a GPU where there is one.

    Raises:
        ValueError: if it cannot be used here.
    """
    import torch

    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    # torch and its backends each raise what they like for a device that is not there.
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"--device {name} cannot be used here ({str(error).splitlines()[0]}): try cpu") from error
    return name


def load_pipeline(model: str, device: str | None, dtype: str = "float32"):
    """The pipeline of `AutoPipeline.from_pretrained` on `choose_device(device)`, without progress bars of the loading."""
    device = choose_device(device)
    import torch
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    diffusers_logging.disable_progress_bar()
    transformers_logging.disable_progress_bar()
    from .auto import AutoPipeline

    return AutoPipeline.from_pretrained(model, dtype=getattr(torch, dtype)).to(device)
