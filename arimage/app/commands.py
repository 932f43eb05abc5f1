"""The console commands `arimage serve` and `arimage app`. Heavy imports stay inside them, as in `arimage.cli`."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from ..options import CompileSteps, Device, Dtype, Eager, Loras, check_models, number, panels, steps_of


Models = Annotated[
    list[str] | None,
    typer.Option(
        "--model",
        callback=check_models,
        help="As in `arimage generate`; repeat for more. Default: the installed models.",
    ),
]
Port = Annotated[int, number("Port to bind.", least=0, most=65535)]


@panels(
    access="host port token_file no_auth base_url allow_origin",
    limits="batch queue images prompt_characters",
    replicas="replicas max_replicas",
    other_clients="alias any_size any_model ignore_unknown_fields maskless_edits",
)
def serve(
    model: Models = None,
    host: Annotated[str, typer.Option(help="Interface to bind. Non-loopback hosts require a token.")] = "127.0.0.1",
    port: Port = 8000,
    token_file: Annotated[
        Path | None,
        typer.Option(help="File with the token that clients send as their API key. Alternative: ARIMAGE_TOKEN."),
    ] = None,
    no_auth: Annotated[bool, typer.Option("--no-auth", help="Accept clients without a token on any --host.")] = False,
    base_url: Annotated[
        str | None, typer.Option(help="Start of the URLs of images, if the server is behind a proxy.")
    ] = None,
    alias: Annotated[
        list[str] | None,
        typer.Option(
            help="ALIAS=MODEL: another name of a model, for clients that send a fixed one such as gpt-image-1; "
            "repeat for more."
        ),
    ] = None,
    any_size: Annotated[
        bool,
        typer.Option("--any-size", help="Generate the nearest size of the model instead of refusing others."),
    ] = False,
    any_model: Annotated[
        bool, typer.Option("--any-model", help="Take the first model for an unknown one instead of refusing it.")
    ] = False,
    ignore_unknown_fields: Annotated[
        bool,
        typer.Option(
            "--ignore-unknown-fields",
            help="Ignore fields that the server or the model does not know, and generate at most --images; the answer "
            "lists them.",
        ),
    ] = False,
    maskless_edits: Annotated[
        Literal["refuse", "whole"],
        typer.Option(help="Edits with neither a mask nor transparency: refuse them, or generate the whole image."),
    ] = "refuse",
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(help="Site whose pages may send requests, as in https://chat.example.org; repeat for more."),
    ] = None,
    batch: Annotated[int, typer.Option(help="Images generated together.")] = 8,
    queue: Annotated[int, typer.Option(help="Requests that may wait.")] = 64,
    images: Annotated[int, typer.Option(help="Images per request.")] = 8,
    prompt_characters: Annotated[
        int, typer.Option(max=10_000, help="Characters of a prompt or negative prompt.")
    ] = 4000,
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
    lora: Loras = None,
    device: Device = None,
    dtype: Dtype = "auto",
    compile_steps: CompileSteps = False,
    eager: Eager = False,
) -> None:
    """Serve the OpenAI Images API."""
    _check_replicas(replicas, max_replicas, device)
    steps = steps_of(compile_steps, eager)
    try:
        from .server.auth import check_addresses, check_token
        from .server.leniency import Leniency
        from .server.serve import serve_forever
        from .server.uvicorn_server import check_free
    except ImportError as error:
        raise ValueError(f"{error.name} is not installed: pip install 'arimage[serve]'") from error

    from .engine.engine import Engine
    from .engine.models import load_models, model_names, parse_aliases
    from .engine.types import Limits

    token = check_token(host, token_file, no_auth)
    limits = Limits(batch=batch, queue=queue, images=images, prompt_characters=prompt_characters)
    aliases = parse_aliases(alias or [], model_names(model))
    leniency = Leniency(any_size, any_model, ignore_unknown_fields, maskless_edits)
    # Before a model is loaded.
    check_addresses(base_url, allow_origin or [])
    check_free(host, port)
    options = {"base_url": base_url, "aliases": aliases, "leniency": leniency, "allow_origin": allow_origin or []}
    if replicas is None:
        engine = Engine(load_models(model, device, dtype, False, lora, steps), limits)
        engine.warm_up()
        serve_forever(engine, host, port, token=token, **options)
    else:
        from .server.replicas import ReplicaSettings, application_name, run_replicas

        typer.echo("starting the replicas", err=True)
        settings = ReplicaSettings(model, device, dtype, lora, limits, steps)
        with run_replicas(settings, replicas, max_replicas or replicas, application_name(port)) as engine:
            serve_forever(engine, host, port, token=token, **options)


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
    lora: Loras = None,
    device: Device = None,
    dtype: Dtype = "auto",
    compile_steps: CompileSteps = False,
    eager: Eager = False,
) -> None:
    """Open the demo: watch images while they are decoded, let decodings race, edit images."""
    steps = steps_of(compile_steps, eager)
    try:
        from .demo.demo import open_demo
        from .server.auth import check_password
    except ImportError as error:
        raise ValueError(f"{error.name} is not installed: pip install 'arimage[app]'") from error

    password = check_password(host, auth)
    open_demo(model, host, port, password, root_path, device=device, dtype=dtype, lora=lora, steps=steps)


def _check_replicas(replicas: int | None, most: int | None, device: str | None) -> None:
    if replicas is None:
        if most is not None:
            raise ValueError("--max-replicas adds to --replicas: give both")
        return
    if most is not None and most < replicas:
        raise ValueError(f"--max-replicas is {most}: give at least --replicas, {replicas}")
    if device not in (None, "cpu", "cuda"):
        raise ValueError(f"--replicas gives each replica its own GPU: leave out --device {device}")
