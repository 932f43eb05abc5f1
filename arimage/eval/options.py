"""Options and checks that the commands `arimage eval ...` share. No heavy imports."""

import importlib.util
import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from ..cli.options import number, output
from ..settings.schema import LARGEST


# The environment variables of networks, by the fields of `Job`.
NETWORKS = {
    "inception_weights": "ARIMAGE_INCEPTION_WEIGHTS",
    "i3d_weights": "ARIMAGE_I3D_WEIGHTS",
    "clip": "ARIMAGE_CLIP",
    "dinov2": "ARIMAGE_DINOV2",
}

Prompts = Annotated[
    str | None,
    typer.Option(
        help="A .tsv file with a column prompt or Prompt, a .jsonl file of objects with a prompt, meta_data.json of "
        "MJHQ-30K, a .json file of WISE, a folder of .txt files (DPG-Bench), a .txt file "
        "with one prompt per line, or the name of installed prompts."
    ),
]
PER_PROMPT = ("--per-prompt", "-n")
PerPrompt = Annotated[int, number("Images per prompt or class.", most=LARGEST, names=PER_PROMPT)]
Classes = Annotated[int | None, number("Generate the classes 0 to N - 1 instead of prompts.", most=LARGEST)]
PerClass = Annotated[int, number("Images per class.", most=LARGEST)]
Ref = Annotated[
    Path | None,
    typer.Option(
        help="A folder of images, a .npz of statistics (mu, sigma), or a .npz (arr_0) or .npy of images. For "
        "fvd, a folder of videos or another run."
    ),
]
InceptionWeights = Annotated[
    Path | None,
    typer.Option(
        envvar=NETWORKS["inception_weights"], help="Weights of the Inception network for fid, kid, prdc, isc and sfid."
    ),
]
I3DWeights = Annotated[
    Path | None,
    typer.Option(envvar=NETWORKS["i3d_weights"], help="Weights of the I3D network for fvd: rgb_imagenet.pt."),
]
Clip = Annotated[
    Path | None,
    typer.Option(
        envvar=NETWORKS["clip"], help="A folder with a CLIP model, for cmmd and metrics that begin with clip."
    ),
]
Dinov2 = Annotated[
    str | None,
    typer.Option(
        envvar=NETWORKS["dinov2"],
        help="For fd-dinov2: a folder with a DINOv2 model of transformers, or the id of one on the Hugging Face Hub, "
        "such as facebook/dinov2-large, to download it.",
    ),
]
ScoredSize = Annotated[
    int | None,
    number(
        "For fid, fid-categories, kid, prdc, isc and sfid: resize the images, not the reference, to this side in "
        "pixels, as LlamaGen does from 384 to 256.",
        most=2**13,
    ),
]
Frames = Annotated[
    int | None,
    number(
        "For fvd: how many frames of each video to compare, at least 9. Default: all of the run's videos.",
        most=10**4,
    ),
]
Train = Annotated[
    str | None,
    typer.Option(
        help="For nearest: the training set, a folder of images, a folder or pattern of .parquet, .arrow or "
        "webdataset .tar files, or a data set of the Hub."
    ),
]
HeldOut = Annotated[
    str | None, typer.Option(help="For nearest: real images that training did not see, in one of these forms.")
]
Sheet = Annotated[
    Path | None,
    output(
        "For nearest: a .png file to write, of the first twelve prompts, with the nearest training example under each "
        "image.",
        ".png",
    ),
]
ScoredBatchSize = Annotated[int, number("Images, or frames of videos, per call of the networks.", most=10**4)]
Download = Annotated[
    bool,
    typer.Option(
        "--download",
        help="Download the published networks of the metrics that no option names, once, and check their hashes.",
    ),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run", help="Print what would be generated and, from a few forward passes, how long it would take."
    ),
]
Read = Annotated[
    Literal["shown", "raw"],
    typer.Option(
        help="shown: files as viewers show them. raw: without orientation, colour profile and transparency, as most "
        "programs of published figures read them."
    ),
]
SkipDamaged = Annotated[
    bool, typer.Option("--skip-damaged", help="Leave out images of --ref that cannot be read, and list them.")
]
ResizeOption = Annotated[
    Literal["clean", "tf1"],
    typer.Option(
        help="clean: resize as clean-fid. tf1: as the original FID and ADM's evaluator, which isc and sfid need. Each "
        "has its own weights."
    ),
]


def networks() -> dict[str, Path | str | None]:
    """What the environment variables of `NETWORKS` name."""
    found = {field: os.environ.get(variable) for field, variable in NETWORKS.items()}
    return {field: Path(text) if text and field != "dinov2" else text for field, text in found.items()}


def check_extra(*packages: str, extra: str = "eval") -> None:
    for name in packages:
        if importlib.util.find_spec(name) is None:
            raise ValueError(f"this command needs {name}: pip install 'arimage[{extra}]'")


def names_in(metrics: str) -> list[str]:
    """The names in the value of an option --metrics."""
    names = [name.strip() for name in metrics.split(",") if name.strip()]
    if not names:
        raise ValueError(f"--metrics is {metrics!r}: name one, or several separated by commas")
    return names
