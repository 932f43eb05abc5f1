"""The Gradio demo: images while they are generated, what the models know, races of decodings, and edits."""

import os
import re
import tempfile
from pathlib import Path

import gradio as gr
from fastapi import FastAPI
from fastapi import Request as HTTPRequest
from gradio.route_utils import FnIndexInferError
from gradio.utils import get_upload_folder
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount

from ..engine.engine import Engine
from ..engine.models import load_models
from ..engine.start import start_engines
from ..engine.types import Limits
from ..engine.videos import VideoMaker
from ..server.auth import local_only
from ..server.uvicorn_server import Server, check_free, serve_until_stopped
from . import markup
from .api import add_endpoints
from .controls import AT_ONCE, GENERATES
from .edit_tab import EditTab
from .gallery_tab import gallery_tab
from .gate import Gate
from .generate_tab import GenerateTab
from .inputs import Demo
from .race_tab import Comparison, RaceTab
from .video_tab import VideoTab


# Pages whose last results are kept for *Same seed again*, *Film* and *Take the last image*.
SESSIONS = 128
# The prompt of the tab that was left. Videos have prompts of their own, which name a movement.
FOLLOW = """(...prompts) => {{
    const left = window.arimageTab ?? 0;
    window.arimageTab = {number};
    return prompts[left];
}}"""


def build_demo(engine: Engine, videos: VideoMaker | None = None) -> Demo:
    """The page for image models (`engine`) and video models (`videos`), for `demo_app`."""
    comparison = Comparison(engine)
    # Every ten minutes, files older than an hour are deleted from Gradio's folder.
    with Demo(engine.limits, title="arimage", analytics_enabled=False, delete_cache=(600, 3600)) as demo:
        gr.HTML(markup.intro(engine))
        gr.HTML(markup.suggestions(engine))
        with gr.Tabs() as tabs:
            with gr.Tab("Generate", id="generate") as tab:
                generate = GenerateTab(engine)
            prompts = [(tab, generate.subject.prompt)]
            if any(info.names for info in engine.models.values()):
                with gr.Tab("Gallery") as tab:
                    gallery_tab(engine, tab, tabs, generate)
                prompts.append((tab, generate.subject.prompt))
            if any(len(info.decodings) > 1 for info in engine.models.values()):
                with gr.Tab("Race") as tab:
                    prompts.append((tab, RaceTab(engine, comparison).subject.prompt))
            if any(info.edits for info in engine.models.values()):
                with gr.Tab("Edit") as tab:
                    prompts.append((tab, EditTab(engine, generate.last).subject.prompt))
            if videos is not None:
                with gr.Tab("Video") as tab:
                    VideoTab(videos, tab)
        for number, (tab, prompt) in enumerate(prompts):
            every = [one for _, one in prompts]
            tab.select(None, every, prompt, js=FOLLOW.format(number=number), **AT_ONCE)
        demo.load(generate.open_page, None, generate.outputs, **GENERATES)
        # The page calls its functions by number. Without names, none can take the name of an endpoint.
        for function in demo.fns.values():
            function.api_name, function.api_visibility = None, "private"
        add_endpoints(engine, comparison)
    # The engine queues and batches requests itself: as many as fit into its queue may start at once.
    demo.queue(max_size=engine.limits.queue, default_concurrency_limit=engine.limits.queue)
    return demo


def demo_app(
    engine: Engine,
    host: str,
    port: int,
    auth: tuple[str, str] | None,
    videos: VideoMaker | None = None,
    root_path: str | None = None,
) -> FastAPI:
    """The demo as an application for `host`. Pages of other sites cannot read its answers, and without a password they
    cannot send it requests.

    Args:
        root_path: the path, or the whole address, at which a proxy shows it.
    """
    demo = build_demo(engine, videos)
    # Each waiting request occupies a thread.
    demo.max_threads = engine.limits.queue + 40
    demo.state_session_capacity = SESSIONS
    # Gradio lets pages of any site read its answers unless the application around it has CORS rules. These allow
    # nobody.
    middleware = [
        *([] if auth else local_only(host, root_path if root_path and "://" in root_path else None)),
        Middleware(CORSMiddleware),
        Middleware(Gate, folder=Path(get_upload_folder())),
    ]
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, middleware=middleware)
    gr.mount_gradio_app(
        app,
        demo,
        "/",
        server_name=host,
        server_port=port,
        auth=auth,
        root_path=root_path,
        theme=gr.themes.Base(primary_hue="teal", neutral_hue="slate", font=["system-ui", "sans-serif"]),
        css_paths=Path(__file__).parent / "style.css",
        js=Path(__file__).with_name("page.js").read_text(encoding="utf-8"),
        footer_links=["api"],
        allowed_paths=[],
        max_file_size=engine.limits.upload_bytes,
        show_error=False,
        run_history=False,
        enable_monitoring=False,
        mcp_server=False,
        ssr_mode=False,
        pwa=False,
    )
    [mounted] = [route.app for route in app.routes if isinstance(route, Mount)]
    assert isinstance(mounted, FastAPI)
    # Gradio looks up what a request names: endpoints, functions and parameters.
    for error in (KeyError, TypeError, FnIndexInferError):
        mounted.add_exception_handler(error, _unknown)
    return app


async def _unknown(http: HTTPRequest, error: Exception) -> Response:
    message = "the demo has no such endpoint, function or parameter: open Use via API at the foot of the page"
    return JSONResponse({"detail": message}, 400)


def check_root_path(root_path: str | None) -> None:
    """Refuse a path or address of another form.

    Raises:
        ValueError: with the option.
    """
    if root_path is not None and not re.fullmatch(r"(https?://[^/\s?#]+)?(/[^/\s?#]+)*", root_path):
        raise ValueError(
            f"--root-path is {root_path}: give the address behind which the demo is, as in https://example.org/demo, "
            "or its path, as in /demo"
        )


def open_demo(
    models: list[str] | None,
    host: str,
    port: int,
    auth: tuple[str, str] | None,
    root_path: str | None = None,
    limits: Limits = Limits(),  # noqa: B008
    device: str | None = None,
    **loading,
) -> None:
    """Load models and serve the demo, as `arimage app` does.

    Args:
        models: names, folders or Hub repositories; None for those that are installed.
        auth: user and password of the page; None lets everybody in.
        root_path: as in `demo_app`.
        device, loading: dtype, lora and steps, as in `load_models`.

    Raises:
        ValueError: if the address cannot be used, or no model generates images.
        RuntimeError: if the engine failed.
    """
    check_root_path(root_path)
    check_free(host, port)
    pipelines = load_models(models, device, videos=True, **loading)
    if all(pipe.abilities.generates_video for pipe in pipelines.values()):
        raise ValueError("the models generate videos only: add one of images, as in --model icons-arpg")
    engine, maker = start_engines(pipelines, limits, loading.get("lora"))
    serve_demo(engine, host, port, auth, maker, root_path)


def serve_demo(
    engine: Engine,
    host: str,
    port: int,
    auth: tuple[str, str] | None,
    videos: VideoMaker | None = None,
    root_path: str | None = None,
) -> None:
    """Serve the demo until SIGINT or SIGTERM. Its images are in a temporary folder, which is removed at the end.

    Raises:
        RuntimeError: if the engine failed.
    """
    with tempfile.TemporaryDirectory(prefix="arimage-app-") as folder:
        os.environ["GRADIO_TEMP_DIR"] = folder
        app = demo_app(engine, host, port, auth, videos, root_path)
        server = Server(app, engine, host, port, log_level="warning")
        server.on_start = lambda: print(f"arimage is at http://{host}:{port}/", flush=True)
        serve_until_stopped(server, engine)
