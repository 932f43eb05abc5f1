"""The demo as a Hugging Face Space. ARIMAGE_MODELS names models, separated by spaces, instead of the packaged ones."""

import os

from arimage.app.demo.demo import open_demo


if __name__ == "__main__":
    # The address at which a Space is reached; everybody may use it. It takes a GPU if the Space has one.
    open_demo(os.environ.get("ARIMAGE_MODELS", "").split(), "0.0.0.0", 7860, None)
