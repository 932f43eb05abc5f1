"""The demo as a Hugging Face Space. ARIMAGE_MODELS names models, separated by spaces, instead of the packaged ones."""

import os

from arimage.app.demo.demo import build_demo, launch_settings
from arimage.app.engine.engine import Engine
from arimage.app.engine.models import load_models


# None: a GPU if the Space has one.
engine = Engine(load_models(os.environ.get("ARIMAGE_MODELS", "").split(), None))
demo = build_demo(engine)

if __name__ == "__main__":
    demo.launch(**launch_settings(engine))
