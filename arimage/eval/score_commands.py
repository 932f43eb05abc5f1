"""The console commands `arimage eval score`, `make-stats` and `tokenizer`. Heavy imports stay inside them, as in
`arimage.cli.main`."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from ..cli.options import (
    DEFAULT_MODEL,
    ENCODER_HELP,
    Device,
    Dtype,
    choose_device,
    load_pipeline,
    number,
    output,
    panels,
)
from .options import (
    Clip,
    Dinov2,
    Download,
    Frames,
    HeldOut,
    I3DWeights,
    InceptionWeights,
    Read,
    Ref,
    ResizeOption,
    ScoredBatchSize,
    ScoredSize,
    Sheet,
    SkipDamaged,
    Train,
    check_extra,
    names_in,
)


Images = Annotated[Path, typer.Argument(help="A folder of images or of a run, or a .npz (arr_0) or .npy of images.")]
SkipImages = Annotated[
    bool, typer.Option("--skip-damaged", help="Leave out images that cannot be read, and list them.")
]
Out = Annotated[
    Path | None, output("Also write the figures to this .json file, which is replaced if it exists.", ".json")
]


@panels(
    metrics="metrics size frames dry_run out",
    references="ref train held_out sheet skip_damaged read resize",
    networks="download inception_weights clip dinov2 i3d_weights batch_size",
)
def score(
    run: Annotated[
        Path,
        typer.Argument(
            help="Folder of a finished `arimage eval generate`, any folder of images, or a .npz (arr_0) or .npy of "
            "images."
        ),
    ],
    metrics: Annotated[
        str,
        typer.Option(
            help="Comma-separated: fid, fid-categories (one per category of the prompts), kid, prdc (precision, "
            "recall, density, coverage), isc (Inception score), sfid, fd-dinov2, fd-wavelets (of colours, edges and "
            "texture, without a network), cmmd, clip, clip-choice (of prompts "
            "with alternatives), fvd (of videos), diversity (of several images per prompt), nearest (training "
            "example), or an installed metric, such as retrieval."
        ),
    ],
    ref: Ref = None,
    inception_weights: InceptionWeights = None,
    clip: Clip = None,
    dinov2: Dinov2 = None,
    read: Read = "shown",
    resize: ResizeOption = "clean",
    size: ScoredSize = None,
    i3d_weights: I3DWeights = None,
    frames: Frames = None,
    download: Download = False,
    train: Train = None,
    held_out: HeldOut = None,
    sheet: Sheet = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print, from two images, how long the networks would take.")
    ] = False,
    skip_damaged: SkipDamaged = False,
    batch_size: ScoredBatchSize = 32,
    device: Device = None,
    out: Out = None,
) -> None:
    """Score the images of a run, and add the figures to RUN/metrics.json; or score any other images, and write nothing
    next to them."""
    check_extra("scipy")
    names = names_in(metrics)

    from .job import Job
    from .score import INCEPTION_METRICS, estimate_score
    from .score import score as score_images

    if size is not None and not set(names) & set(INCEPTION_METRICS):
        raise ValueError(f"--size is for {', '.join(INCEPTION_METRICS)}: leave it out")
    if frames is not None and "fvd" not in names:
        raise ValueError("--frames is for fvd: leave it out")
    for option, value in (("--train", train), ("--held-out", held_out), ("--sheet", sheet)):
        if value is not None and "nearest" not in names:
            raise ValueError(f"{option} is for nearest: leave it out")
    if read == "raw" and "fvd" in names:
        raise ValueError("--read raw is for images, and fvd reads videos: leave out one of the two")
    if dry_run and download:
        raise ValueError("--dry-run downloads nothing: leave out one of the two")
    if "nearest" in names:
        check_extra("datasets", extra="train")
    job = Job(
        run,
        reference=ref,
        inception_weights=inception_weights,
        clip=clip,
        dinov2=dinov2,
        resize=resize,
        device=choose_device(device),
        batch_size=batch_size,
        size=size,
        i3d_weights=i3d_weights,
        frames=frames,
        skip_damaged=skip_damaged,
        train=train,
        held_out=held_out,
        sheet=sheet,
        raw=read == "raw",
    )
    if dry_run:
        typer.echo(estimate_score(job, names))
    else:
        _tell(score_images(job, names, download=download), out)


def make_stats(
    images: Images,
    out: Annotated[Path, output("Output file, .npz, for --ref; it must not exist.", ".npz")],
    download: Download = False,
    inception_weights: InceptionWeights = None,
    read: Read = "shown",
    resize: ResizeOption = "clean",
    skip_damaged: SkipImages = False,
    batch_size: ScoredBatchSize = 32,
    device: Device = None,
) -> None:
    """Write mean and covariance of the Inception features of images, as files of pytorch-fid and clean-fid hold them:
    the reference of a FID."""
    if out.exists():
        raise ValueError(f"--out {out} exists: name another file, or delete it")

    from .download import load_inception
    from .job import make_statistics

    extractor = load_inception(inception_weights, resize, download, choose_device(device))
    make_statistics(images, extractor, out, skip_damaged=skip_damaged, batch_size=batch_size, raw=read == "raw")
    typer.echo(out)


@panels(
    metrics="metrics size out",
    networks="download inception_weights resize batch_size",
)
def score_tokenizer(
    images: Images,
    model: Annotated[str, typer.Option(help=ENCODER_HELP)] = DEFAULT_MODEL,
    metrics: Annotated[
        str,
        typer.Option(
            help="Comma-separated: psnr, ssim, lpips (AlexNet's), rfid (the FID of the reconstructions to the images)."
        ),
    ] = "psnr,ssim",
    size: Annotated[int | None, number("Side in pixels. Default: that of the model's images.", most=2**13)] = None,
    download: Download = False,
    inception_weights: InceptionWeights = None,
    resize: ResizeOption = "clean",
    skip_damaged: SkipImages = False,
    batch_size: ScoredBatchSize = 16,
    device: Device = None,
    dtype: Dtype = "float32",
    out: Out = None,
) -> None:
    """Encode images to tokens, decode these, and compare the result with the images: how good an image tokenizer is.
    It says what is the best that a model of its tokens can do."""
    names = names_in(metrics)
    check_extra("scipy", *(["torchmetrics"] if {"ssim", "lpips"} & {*names} else []))

    from ..training.tokens.encoders import load_encoder
    from .reconstructions import check_reconstructs
    from .reconstructions import score_tokenizer as score_reconstructions

    load = partial(load_pipeline, device=choose_device(device), dtype=dtype)
    pipe = load_encoder(model, load, dtype).to(choose_device(device))
    check_reconstructs(pipe, model)
    options = {"inception_weights": inception_weights, "resize": resize, "download": download}
    given = {"size": size, "batch_size": batch_size, "skip_damaged": skip_damaged}
    _tell(score_reconstructions(pipe, images, names, **given, **options), out)


def _tell(found: dict[str, dict], out: Path | None) -> None:
    """Print figures, and write them to a file."""
    from .runs.files import write_json
    from .score import figure_text, images_text

    for name, entry in found.items():
        typer.echo(f"{name}: {figure_text(entry)} ({images_text(entry)}, {entry['reference']})")
        weights = entry.get("weights", "published")
        if weights != "published":
            typer.echo(f"{name}: weights {weights}", err=True)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_json(out, found)
