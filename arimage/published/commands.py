"""The console commands `arimage convert ...`. Heavy imports stay inside the commands, as in `arimage.cli`."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import typer

from ..convert.paths import CheckpointError, check_file, check_folder, check_vacant
from ..pipelines.infinity.schedules import PixelClass


convert_app = typer.Typer(
    help="Convert published checkpoint files to a folder that every command loads.", rich_markup_mode="markdown"
)


def _checked(check: Callable[[Path], None]) -> Callable[[Path | None], Path | None]:
    """A callback that checks an option before the frameworks are imported."""

    def callback(path: Path | None) -> Path | None:
        if path is not None:
            check(path)
        return path

    return callback


def _check_file_or_folder(path: Path) -> None:
    if not path.is_file() and not path.is_dir():
        raise CheckpointError(f"{path} is neither a file nor a folder: give the path of what was published")


FILE, FOLDER = _checked(check_file), _checked(check_folder)
FILE_OR_FOLDER = _checked(_check_file_or_folder)
Transformer = Annotated[Path, typer.Option(callback=FILE, help="File of the transformer: .pt, .pth or .safetensors.")]
Tokenizer = Annotated[Path, typer.Option(callback=FILE, help="File of the image tokenizer.")]
ChameleonTokenizer = Annotated[
    Path | None,
    typer.Option(
        callback=FILE_OR_FOLDER,
        help="Meta's folder with vqgan.ckpt and text_tokenizer.json; for Lumina-mGPT 2.0 movqgan_270M.ckpt.",
    ),
]
DistilledFolder = Annotated[
    Path,
    typer.Argument(
        callback=FOLDER,
        help="Folder with the files of the model and its image tokenizer, and of its teacher if you have it.",
    ),
]
Ema = Annotated[
    bool,
    typer.Option(
        "--ema", help="Take the averaged weights (EMA) of the transformer, if a trainer's checkpoint has them."
    ),
]
Out = Annotated[Path, typer.Option(callback=_checked(check_vacant), help="Folder to write; new or empty.")]


@convert_app.command()
def llamagen(
    transformer: Transformer,
    tokenizer: Tokenizer,
    image_size: Annotated[int, typer.Option(help="Side in pixels of the images the transformer was trained on.")],
    out: Out,
    num_heads: Annotated[
        int | None, typer.Option(help="Attention heads, if the transformer has no published size.")
    ] = None,
    text_encoder: Annotated[
        Path | None, typer.Option(callback=FOLDER, help="Folder of the T5 encoder and its tokenizer.")
    ] = None,
    ema: Ema = False,
) -> None:
    """Convert the published files of LlamaGen."""
    from ..convert import convert_llamagen

    options = {"num_heads": num_heads, "text_encoder": text_encoder, "ema": ema}
    convert_llamagen(transformer, tokenizer, image_size, **options, out=out)
    typer.echo(out)


@convert_app.command()
def var(transformer: Transformer, tokenizer: Tokenizer, out: Out, ema: Ema = False) -> None:
    """Convert the published files of VAR, or a trainer's ar-ckpt-*.pth."""
    from ..convert import convert_var

    convert_var(transformer, tokenizer, ema=ema, out=out)
    typer.echo(out)


@convert_app.command()
def infinity(
    transformer: Annotated[
        Path,
        typer.Option(callback=FILE_OR_FOLDER, help="File of the transformer, or the folder of its safetensors."),
    ],
    vae: Annotated[
        Path, typer.Option(callback=FILE, help="File of the image tokenizer that the transformer was trained with.")
    ],
    out: Out,
    pixels: Annotated[PixelClass, typer.Option(help="Pixel class of the training images.")] = "1M",
    subfolder: Annotated[str | None, typer.Option(help="Where the weights lie in the transformer's folder.")] = None,
    text_encoder: Annotated[
        Path | None, typer.Option(callback=FOLDER, help="Folder of flan-t5-xl and its tokenizer.")
    ] = None,
    ema: Ema = False,
    dtype: Annotated[
        Literal["float32", "bfloat16"], typer.Option(help="Of the transformer's weights; bfloat16 halves the files.")
    ] = "float32",
) -> None:
    """Convert the published files of Infinity, or a trainer's ar-ckpt-*.pth."""
    import torch

    from ..convert import convert_infinity

    options = {"pixels": pixels, "subfolder": subfolder, "text_encoder": text_encoder, "ema": ema}
    convert_infinity(transformer, vae, **options, dtype=getattr(torch, dtype), out=out)
    typer.echo(out)


AnyOrder = Annotated[
    Path,
    typer.Argument(callback=FILE_OR_FOLDER, help="File of the transformer, or a folder with one transformer."),
]
AnyOrderTokenizer = Annotated[
    Path | None, typer.Option(callback=FILE, help="LlamaGen's vq_ds16_c2i.pt; without it images are tokens.")
]
Heads = Annotated[int | None, typer.Option(help="Attention heads. Default: one per 64 channels, as published.")]
Pixels = Annotated[int | None, typer.Option(help="Side in pixels of the training images. Default: 256.")]


@convert_app.command()
def arpg(
    folder: AnyOrder,
    out: Out,
    tokenizer: AnyOrderTokenizer = None,
    image_size: Pixels = None,
    num_heads: Heads = None,
    ema: Ema = False,
) -> None:
    """Convert a published ARPG."""
    from ..convert import convert_arpg

    convert_arpg(folder, tokenizer=tokenizer, image_size=image_size, num_heads=num_heads, ema=ema, out=out)
    typer.echo(out)


@convert_app.command()
def lpd(
    folder: AnyOrder,
    out: Out,
    tokenizer: AnyOrderTokenizer = None,
    num_heads: Heads = None,
    ema: Ema = False,
) -> None:
    """Convert a published LPD."""
    from ..convert import convert_lpd

    convert_lpd(folder, tokenizer=tokenizer, num_heads=num_heads, ema=ema, out=out)
    typer.echo(out)


@convert_app.command()
def randar(
    folder: AnyOrder,
    out: Out,
    tokenizer: AnyOrderTokenizer = None,
    image_size: Pixels = None,
    num_heads: Heads = None,
    ema: Ema = False,
) -> None:
    """Convert a published RandAR."""
    from ..convert import convert_randar

    convert_randar(folder, tokenizer=tokenizer, image_size=image_size, num_heads=num_heads, ema=ema, out=out)
    typer.echo(out)


@convert_app.command()
def llamagen_dd(
    folder: DistilledFolder,
    out: Out,
    image_size: Annotated[int, typer.Option(help="Side in pixels of the images the model was trained on.")] = 256,
    num_heads: Annotated[int | None, typer.Option(help="Attention heads, if it has no published size.")] = None,
) -> None:
    """Convert the published files of a LlamaGen-DD (Distilled Decoding)."""
    from ..convert import convert_llamagen_dd

    convert_llamagen_dd(folder, image_size=image_size, num_heads=num_heads, out=out)
    typer.echo(out)


@convert_app.command()
def var_dd(folder: DistilledFolder, out: Out) -> None:
    """Convert the published files of a VAR-DD (Distilled Decoding)."""
    from ..convert import convert_var_dd

    convert_var_dd(folder, out=out)
    typer.echo(out)


@convert_app.command()
def mar(
    checkpoint: Annotated[Path, typer.Option(callback=FILE, help="A trainer's checkpoint-last.pth, or .safetensors.")],
    vae: Annotated[Path, typer.Option(callback=FILE, help="File of the image tokenizer, kl16.ckpt.")],
    out: Out,
    num_heads: Annotated[
        int | None, typer.Option(help="Attention heads, if the transformer has no published size.")
    ] = None,
) -> None:
    """Convert the published files of MAR."""
    from ..convert import convert_mar

    convert_mar(checkpoint, vae, num_heads=num_heads, out=out)
    typer.echo(out)


@convert_app.command()
def janus(
    folder: Annotated[
        Path, typer.Argument(callback=FOLDER, help="As published by deepseek-ai or deepseek-community.")
    ],
    out: Out,
    template: Annotated[
        str | None,
        typer.Option(help="Prompt template: janus (Janus-1.3B) or janus-pro. Default: the template in the folder."),
    ] = None,
) -> None:
    """Convert a published Janus or Janus-Pro."""
    from ..convert import convert_janus

    convert_janus(folder, template=template, out=out)
    typer.echo(out)


@convert_app.command()
def emu3(
    folder: Annotated[
        Path,
        typer.Argument(callback=FOLDER, help="Emu3-Gen or Emu3-Stage1, as published by BAAI or for transformers."),
    ],
    out: Out,
    vision_tokenizer: Annotated[
        Path | None,
        typer.Option(callback=FOLDER, help="BAAI's folder Emu3-VisionTokenizer; needed for BAAI's other folders."),
    ] = None,
    image_area: Annotated[
        int | None,
        typer.Option(help="Pixels of a training image, if the folder does not say: 262144 for Stage1."),
    ] = None,
) -> None:
    """Convert a published Emu3-Gen or Emu3-Stage1."""
    from ..convert import convert_emu3

    convert_emu3(folder, vision_tokenizer=vision_tokenizer, image_area=image_area, out=out)
    typer.echo(out)


@convert_app.command()
def emu35(
    folder: Annotated[Path, typer.Argument(callback=FOLDER, help="Emu3.5-Image or Emu3.5, as published by BAAI.")],
    vision_tokenizer: Annotated[Path, typer.Option(callback=FOLDER, help="BAAI's folder Emu3.5-VisionTokenizer.")],
    out: Out,
    image_area: Annotated[int, typer.Option(help="Pixels of a training image.")] = 1024 * 1024,
    base: Annotated[bool, typer.Option("--base", help="The folder is Emu3.5, not Emu3.5-Image.")] = False,
) -> None:
    """Convert a published Emu3.5-Image or Emu3.5."""
    from ..convert import convert_emu35

    convert_emu35(folder, vision_tokenizer=vision_tokenizer, image_area=image_area, base=base, out=out)
    typer.echo(out)


@convert_app.command()
def mammothmoda2(
    folder: Annotated[
        Path, typer.Argument(callback=FOLDER, help="MammothModa2-Preview or -Dev, as published by ByteDance.")
    ],
    out: Out,
) -> None:
    """Convert a published MammothModa2."""
    from ..convert import convert_mammothmoda2

    convert_mammothmoda2(folder, out=out)
    typer.echo(out)


@convert_app.command()
def lumina_mgpt(
    folder: Annotated[
        Path, typer.Argument(callback=FOLDER, help="Lumina-mGPT or Lumina-mGPT 2.0, as published by Alpha-VLLM.")
    ],
    out: Out,
    tokenizer: ChameleonTokenizer = None,
    image_size: Annotated[
        int, typer.Option(help="Side in pixels the weights were trained for: 512, 768 or 1024.")
    ] = 768,
) -> None:
    """Convert a published Lumina-mGPT."""
    from ..convert import convert_lumina_mgpt

    convert_lumina_mgpt(folder, tokenizer=tokenizer, image_size=image_size, out=out)
    typer.echo(out)


@convert_app.command()
def anole(
    folder: Annotated[
        Path, typer.Argument(callback=FOLDER, help="Anole or another Chameleon, in Meta's or transformers' format.")
    ],
    out: Out,
    tokenizer: ChameleonTokenizer = None,
) -> None:
    """Convert a published Anole."""
    from ..convert import convert_anole

    convert_anole(folder, tokenizer=tokenizer, out=out)
    typer.echo(out)


@convert_app.command()
def cosmos(
    model_file: Annotated[Path, typer.Option(callback=FILE, help="model.pt of an autoregressive Cosmos-Predict1.")],
    tokenizer: Annotated[Path, typer.Option(callback=FOLDER, help="Folder of Cosmos-Tokenize1-DV8x16x16-720p.")],
    out: Out,
    text_encoder: Annotated[
        Path | None,
        typer.Option(callback=FOLDER, help="Folder of t5-11b and its tokenizer, for the models named Video2World."),
    ] = None,
) -> None:
    """Convert a published autoregressive Cosmos-Predict1, which continues images and videos."""
    from ..convert import convert_cosmos

    convert_cosmos(model_file, tokenizer=tokenizer, text_encoder=text_encoder, out=out)
    typer.echo(out)
