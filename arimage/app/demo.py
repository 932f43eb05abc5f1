"""The Gradio demo: pictures while they are decoded, decodings side by side, and edits."""

import os
import signal
import sys
import tempfile
from pathlib import Path

import gradio as gr
from PIL import Image

from . import markup
from .compare_tab import Comparison, compare_tab
from .edit_tab import edit_tab
from .endpoints import add_endpoints
from .engine import Engine
from .generate_tab import generate_tab


# Of an upload; 4096 x 4096.
MAX_PIXELS = 2**24


def build_demo(engine: Engine) -> gr.Blocks:
    """The demo on the models of an engine, to be launched with `launch_settings`."""
    # Gradio reads an upload whole before its size can be looked at: Pillow refuses what has more than twice as many.
    Image.MAX_IMAGE_PIXELS = MAX_PIXELS
    comparison = Comparison()
    # What is older than an hour is deleted from Gradio's folder every ten minutes.
    with gr.Blocks(title="arimage", analytics_enabled=False, delete_cache=(600, 3600)) as demo:
        gr.HTML(markup.INTRO)
        with gr.Tab("Generate"):
            last = generate_tab(engine)
        with gr.Tab("Compare"):
            compare_tab(engine, comparison)
        with gr.Tab("Edit"):
            edit_tab(engine, last)
        add_endpoints(engine, comparison)
    # The engine has a queue of its own and draws together what goes together: all that fits into it may begin at once.
    demo.queue(max_size=engine.limits.queue, default_concurrency_limit=engine.limits.queue)
    return demo


def launch_settings(engine: Engine) -> dict:
    """Arguments of `demo.launch`: the looks, and nothing served but the pictures of the page."""
    return {
        "theme": gr.themes.Base(primary_hue="teal", neutral_hue="slate", font=["system-ui", "sans-serif"]),
        "css_paths": Path(__file__).parent / "style.css",
        "footer_links": ["api"],
        "share": False,
        "quiet": True,
        "allowed_paths": [],
        "max_file_size": "8mb",
        "max_threads": engine.limits.queue + 40,
        "run_history": False,
        "enable_monitoring": False,
        "ssr_mode": False,
        "pwa": False,
    }


def serve_demo(engine: Engine, host: str, port: int, auth: tuple[str, str] | None) -> None:
    """Serve the demo until SIGINT or SIGTERM. Its pictures lie in a folder of their own, which is removed then.

    Raises:
        OSError: if the port is taken.
    """
    # Ends like Ctrl-C does, so that what is below is done.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    with tempfile.TemporaryDirectory(prefix="arimage-app-") as folder:
        os.environ["GRADIO_TEMP_DIR"] = folder
        demo = build_demo(engine)
        try:
            _, url, _ = demo.launch(
                server_name=host, server_port=port, auth=auth, prevent_thread_lock=True, **launch_settings(engine)
            )
            print(f"arimage is at {url}", flush=True)
            demo.block_thread()
        finally:
            engine.close()
