"""`arimage env`: what a report of a bug should say about the machine."""

import os
import platform
import shutil
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import typer

from .. import __version__


PACKAGES = (
    *("torch", "torchvision", "triton", "diffusers", "transformers", "accelerate", "safetensors", "huggingface-hub"),
    *("peft", "torchao", "gradio", "fastapi", "ray", "imageio-ffmpeg"),
)
# Settings that change what runs. None holds a secret.
VARIABLES = (
    *("CUDA_VISIBLE_DEVICES", "HF_HUB_OFFLINE", "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "PYTORCH_ALLOC_CONF"),
    *(
        "ARIMAGE_CHECK_GRAPHS",
        "ARIMAGE_EAGER",
        "ARIMAGE_STEP_KERNELS",
        "PYTORCH_ENABLE_MPS_FALLBACK",
        "TRITON_INTERPRET",
    ),
)


def env() -> None:
    """Print versions, devices and caches, for a report of a bug."""
    import torch
    from huggingface_hub import constants

    from ..kernels.linear import int8
    from .options import choose_device, fast_dtype

    def installed(package: str) -> str:
        try:
            return version(package)
        except PackageNotFoundError:
            return "not installed"

    def cache(folder: Path) -> str:
        existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
        free = shutil.disk_usage(existing).free
        home = Path.home()
        shown = Path("~", folder.relative_to(home)) if folder.is_relative_to(home) else folder
        return f"{shown}{'' if folder.exists() else ' (empty)'}, {free / 1e9:.1f} GB free"

    device = choose_device(None)
    lines = {
        "arimage": __version__,
        "Python": f"{platform.python_version()} ({sys.implementation.name})",
        "system": platform.platform(),
        "CPU": f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads",
        "int8 weights on the CPU": int8.describe(),
    }
    for i in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(i)
        lines[f"cuda:{i}"] = (
            f"{card.name}, {card.total_memory / 2**30:.0f} GiB, capability {card.major}.{card.minor}, "
            f"CUDA {torch.version.cuda or torch.version.hip}"
        )
    if torch.backends.mps.is_available():
        lines["mps"] = "available"
    lines["default"] = f"device {device}, dtype {str(fast_dtype(device)).removeprefix('torch.')}"
    lines |= {package: installed(package) for package in PACKAGES}
    # With the accelerator that it was built for, which the metadata may lack.
    lines["torch"] = torch.__version__
    lines["downloads"] = cache(Path(constants.HF_HUB_CACHE))
    lines["converted models"] = cache(Path(constants.HF_HOME) / "arimage")
    lines |= {name: os.environ[name] for name in VARIABLES if name in os.environ}
    for name, value in lines.items():
        typer.echo(f"- {name}: {value}")
