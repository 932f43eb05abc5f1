"""The console commands `arimage serve` and `arimage app`. Heavy imports stay inside them, as in `arimage.cli.main`."""

import importlib.util
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ..cli.options import (
    BatchSize,
    CompileSteps,
    Device,
    Dtype,
    Eager,
    NoMetadata,
    check_models,
    number,
    panels,
    steps_of,
)
from .config import read_config


Models = Annotated[
    list[str] | None,
    typer.Option(
        "--model",
        callback=check_models,
        help="As in `arimage generate`; repeat for more. Default: the installed models.",
    ),
]
ServedLoras = Annotated[
    list[str] | None,
    typer.Option(
        "--lora",
        help="[NAME=]FILE[:SCALE]: a LoRA adapter, a .safetensors file, a folder or a Hub repository, at scale 1 by "
        "default; repeat for more. With a NAME clients choose it, as the model MODEL:NAME. Needs arimage[lora].",
    ),
]
Port = Annotated[int, number("Port to bind.", least=0, most=65535)]
Queue = Annotated[int, typer.Option(help="Requests that may wait. Clients share the places.")]
MaxPixels = Annotated[
    int | None, typer.Option(help="Width times height of the largest image. Default: all sizes of the models.")
]


@panels(
    access="host port uds token_file no_auth ssl_certfile ssl_keyfile allow_origin",
    behind_a_proxy="root_path base_url",
    limits="batch_size queue max_pixels requests_per_minute images_per_client drain_seconds",
    replicas="replicas max_replicas",
    adapters="lora lora_root",
    other_clients="alias lenient",
    output="no_metadata log_level",
)
def serve(
    model: Models = None,
    config: Annotated[
        Path | None,
        typer.Option(
            callback=read_config,
            is_eager=True,
            help="File of TOML or YAML with these options, as in `max-pixels = 65536`; a list for those to repeat. "
            "Options that are given replace those of the file.",
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Interface to bind. Non-loopback hosts require a token.")] = "127.0.0.1",
    port: Port = 8000,
    uds: Annotated[Path | None, typer.Option(help="Unix socket to listen on, instead of --host and --port.")] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(help="File with the tokens that clients send as their API key, one per line. Or: ARIMAGE_TOKEN."),
    ] = None,
    no_auth: Annotated[bool, typer.Option("--no-auth", help="Accept clients without a token on any --host.")] = False,
    ssl_certfile: Annotated[Path | None, typer.Option(help="TLS certificate, a PEM file, with --ssl-keyfile.")] = None,
    ssl_keyfile: Annotated[Path | None, typer.Option(help="Its key, a PEM file.")] = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(help="Site whose pages may send requests, as in https://chat.example.org; repeat for more."),
    ] = None,
    root_path: Annotated[str, typer.Option(help="Path under which a proxy shows the server, as in /images.")] = "",
    base_url: Annotated[
        str | None, typer.Option(help="Start of the URLs of images, if a proxy does not say what clients use.")
    ] = None,
    batch_size: BatchSize = 8,
    queue: Queue = 64,
    max_pixels: MaxPixels = None,
    requests_per_minute: Annotated[
        int | None, typer.Option(min=1, help="Requests per minute of a client: a token, or an address. Default: any.")
    ] = None,
    images_per_client: Annotated[
        int | None, typer.Option(min=1, help="Images of a client that wait or are being generated. Default: any.")
    ] = None,
    drain_seconds: Annotated[
        float, typer.Option(min=0, help="How long requests in progress may take after SIGTERM or Ctrl-C.")
    ] = 30,
    replicas: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Engines behind the server, each in its own process of Ray Serve, with its own GPU if there are any. "
            "Needs arimage[ray-serve].",
        ),
    ] = None,
    max_replicas: Annotated[
        int | None,
        typer.Option(min=1, help="Add replicas up to this number while requests wait. Default: --replicas."),
    ] = None,
    alias: Annotated[
        list[str] | None,
        typer.Option(
            help="ALIAS=MODEL: another name of a model, for clients that send a fixed one such as gpt-image-1; "
            "repeat for more."
        ),
    ] = None,
    lenient: Annotated[
        bool,
        typer.Option(
            "--lenient",
            help="Answer requests with an unknown model, size or field, too many images, or no mask as well as "
            "possible. The answer says what was ignored.",
        ),
    ] = False,
    lora: ServedLoras = None,
    lora_root: Annotated[
        Path | None,
        typer.Option(help="Folder of adapters that requests may load and free. Default: requests cannot load any."),
    ] = None,
    device: Device = None,
    dtype: Dtype = "auto",
    compile_steps: CompileSteps = False,
    eager: Eager = False,
    no_metadata: NoMetadata = False,
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], typer.Option(help="What is logged; info has every request.")
    ] = "info",
) -> None:
    """Serve OpenAI's APIs of images and videos."""
    _check_replicas(replicas, max_replicas, device)
    if lora_root is not None:
        _check_lora_root(lora_root, replicas)
    steps = steps_of(compile_steps, eager)
    try:
        from .server.app import build_server
        from .server.auth import check_addresses, check_tokens
        from .server.quotas import Quotas
        from .server.uvicorn_server import Server, check_certificate, check_free, check_socket, serve_until_stopped
    except ImportError as error:
        raise ValueError(f"{error.name} is not installed: pip install 'arimage[serve]'") from error

    from ..media.files import can_write_mp4
    from .engine.adapters import adapted_names
    from .engine.models import load_models, model_names, parse_aliases
    from .engine.start import start_engines
    from .engine.types import Limits

    tokens = check_tokens(host, token_file, no_auth)
    limits = Limits(metadata=not no_metadata, batch=batch_size, queue=queue, output_pixels=max_pixels)
    # Without --model, those of videos only where they can be written.
    with_videos = bool(model) or can_write_mp4()
    names = model_names(model, with_videos)
    aliases = parse_aliases(alias or [], [*names, *(one for name in names for one in adapted_names(name, lora or []))])
    # Before a model is loaded.
    check_addresses(base_url, allow_origin or [], root_path)
    certificate = check_certificate(ssl_certfile, ssl_keyfile)
    if uds is None:
        check_free(host, port)
    else:
        check_socket(uds)

    def serve_forever(engine: Any, videos: Any) -> None:
        if videos is not None and not can_write_mp4():
            raise ValueError("videos need imageio: pip install 'arimage[video]'")
        app = build_server(
            engine,
            videos=videos,
            tokens=tokens,
            base_url=base_url,
            root_path=root_path,
            host=host,
            aliases=aliases,
            lenient=lenient,
            allow_origin=allow_origin or [],
            lora_root=lora_root,
            quotas=Quotas(requests_per_minute, images_per_client),
        )
        own = {"drain_seconds": drain_seconds, "uds": uds, "certificate": certificate, "log_level": log_level}
        serve_until_stopped(Server(app, engine, host, port, state=app.state.server, **own), engine)

    if replicas is None:
        serve_forever(*start_engines(load_models(model, device, dtype, with_videos, lora, steps), limits, lora))
    else:
        from .server.replicas.cluster import application_name, run_replicas
        from .server.replicas.replica import ReplicaSettings

        typer.echo("starting the replicas", err=True)
        settings = ReplicaSettings(model, device, dtype, lora, limits, steps, with_videos)
        with run_replicas(settings, replicas, max_replicas or replicas, application_name(uds or port)) as engine:
            serve_forever(engine, engine.videos)


def open_app(
    model: Models = None,
    host: Annotated[
        str, typer.Option(help="Interface to bind. Non-loopback hosts, such as 0.0.0.0, require --auth.")
    ] = "127.0.0.1",
    port: Port = 7860,
    auth: Annotated[str | None, typer.Option(envvar="ARIMAGE_APP_AUTH", help="user:password of the page.")] = None,
    root_path: Annotated[
        str | None,
        typer.Option(help="Address of the page, if a proxy shows it, as in https://example.org/demo, or its path."),
    ] = None,
    batch_size: BatchSize = 8,
    queue: Queue = 64,
    max_pixels: MaxPixels = None,
    lora: ServedLoras = None,
    device: Device = None,
    dtype: Dtype = "auto",
    compile_steps: CompileSteps = False,
    eager: Eager = False,
    no_metadata: NoMetadata = False,
) -> None:
    """Open the demo: watch images while they are decoded, let decodings race, edit images."""
    steps = steps_of(compile_steps, eager)
    try:
        from .demo.demo import open_demo
        from .server.auth import check_password
    except ImportError as error:
        raise ValueError(f"{error.name} is not installed: pip install 'arimage[app]'") from error

    from .engine.types import Limits

    password = check_password(host, auth)
    limits = Limits(metadata=not no_metadata, batch=batch_size, queue=queue, output_pixels=max_pixels)
    open_demo(model, host, port, password, root_path, limits, device=device, dtype=dtype, lora=lora, steps=steps)


def _check_lora_root(folder: Path, replicas: int | None) -> None:
    if replicas is not None:
        raise ValueError("--lora-root loads adapters into one engine: leave out --replicas")
    if not folder.is_dir():
        raise ValueError(f"--lora-root is {folder}: give a folder")
    if importlib.util.find_spec("peft") is None:
        raise ValueError("--lora-root needs peft: pip install 'arimage[lora]'")


def _check_replicas(replicas: int | None, most: int | None, device: str | None) -> None:
    if replicas is None:
        if most is not None:
            raise ValueError("--max-replicas adds to --replicas: give both")
        return
    if most is not None and most < replicas:
        raise ValueError(f"--max-replicas is {most}: give at least --replicas, {replicas}")
    if device not in (None, "cpu", "cuda"):
        raise ValueError(f"--replicas gives each replica its own GPU: leave out --device {device}")
