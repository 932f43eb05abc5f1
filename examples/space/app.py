"""The demo as a Hugging Face Space. ARIMAGE_MODELS names models, separated by spaces, instead of the packaged ones."""

import os

from arimage.app.demo.demo import serve_demo
from arimage.app.engine.engine import Engine
from arimage.app.engine.models import load_models


if __name__ == "__main__":
    # None: a GPU if the Space has one.
    engine = Engine(load_models(os.environ.get("ARIMAGE_MODELS", "").split(), None))
    # The address at which a Space is reached; everybody may use it.
    serve_demo(engine, "0.0.0.0", 7860, None)
