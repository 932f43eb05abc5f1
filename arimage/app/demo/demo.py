"""The Gradio demo: images while they are generated, what the models know, races of decodings, and edits."""

import os
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
from ..engine.videos import VideoMaker
from ..server.auth import local_only
from ..server.uvicorn_server import Server, serve_until_stopped
from . import markup
from .api import add_endpoints
from .controls import AT_ONCE, GENERATES
from .edit_tab import edit_tab
from .gallery_tab import gallery_tab
from .gate import Gate
from .generate_tab import GenerateTab
from .inputs import Demo
from .race_tab import Comparison, race_tab
from .video_tab import video_tab


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
                    prompts.append((tab, race_tab(engine, comparison).prompt))
            if any(info.edits for info in engine.models.values()):
                with gr.Tab("Edit") as tab:
                    prompts.append((tab, edit_tab(engine, generate.last).prompt))
            if videos is not None:
                with gr.Tab("Video") as tab:
                    video_tab(videos, tab)
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
    engine: Engine, host: str, port: int, auth: tuple[str, str] | None, videos: VideoMaker | None = None
) -> FastAPI:
    """The demo as an application for `host`. Pages of other sites cannot read its answers, and without a password they
    cannot send it requests."""
    demo = build_demo(engine, videos)
    # Each waiting request occupies a thread.
    demo.max_threads = engine.limits.queue + 40
    demo.state_session_capacity = SESSIONS
    # Gradio lets pages of any site read its answers unless the application around it has CORS rules. These allow
    # nobody.
    middleware = [
        *([] if auth else local_only(host)),
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
        theme=gr.themes.Base(primary_hue="teal", neutral_hue="slate", font=["system-ui", "sans-serif"]),
        css_paths=Path(__file__).parent / "style.css",
        js=markup.SUGGEST,
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


def serve_demo(
    engine: Engine, host: str, port: int, auth: tuple[str, str] | None, videos: VideoMaker | None = None
) -> None:
    """Serve the demo until SIGINT or SIGTERM. Its images are in a temporary folder, which is removed at the end.

    Raises:
        RuntimeError: if the engine failed.
    """
    with tempfile.TemporaryDirectory(prefix="arimage-app-") as folder:
        os.environ["GRADIO_TEMP_DIR"] = folder
        server = Server(demo_app(engine, host, port, auth, videos), engine, host, port, log_level="warning")
        server.on_start = lambda: print(f"arimage is at http://{host}:{port}/", flush=True)
        serve_until_stopped(server, engine)
