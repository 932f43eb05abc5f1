"""Every family's command in bfloat16, which `--dtype auto` takes on many CPUs; the other tests run in float32."""

import numpy as np
import pytest
import torch
from families import EVERY, one_of_each_kind
from PIL import Image

from arimage.cli import generate as generating


@pytest.mark.every(4)
@pytest.mark.parametrize("family", one_of_each_kind(EVERY))
def test_every_command_of_a_family_runs(family, run, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    load, loaded = generating.load_pipeline, []

    def load_pipeline(*arguments, **options):
        loaded.append(load(*arguments, **options))
        return loaded[-1]

    monkeypatch.setattr(generating, "load_pipeline", load_pipeline)
    pipe = EVERY[family]()
    pipe.save_pretrained("model")
    height, width = pipe.image_sizes[0]
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)).save("image.png")
    Image.new("L", (width, height), 255).save("mask.png")
    subject, ways = ["a red heart"] if pipe.num_classes is None else ["--class-label", "1"], [[]]
    if pipe.abilities.generates_video and pipe.begins_with_text:
        ways = [["--num-frames", "17"], ["--num-frames", "17", "--image", "image.png"]]
    elif pipe.abilities.generates_video:
        subject = subject if pipe.transformer.reads_text else []
        ways = [["--image", "image.png"], ["--video", "out.webp"]]
    elif pipe.abilities.accepts("mask_image"):
        ways.append(["--image", "image.png", "--mask-image", "mask.png"])
    for way in ways:
        words = ["generate", *subject, *way, "--model", "./model", "--device", "cpu", "--out", "out.webp"]
        # Its default is large, and its decoder takes 50 steps.
        words += ["--height", "64", "--width", "32", "--num-inference-steps", "1"] * (family == "glm-image")
        code, _, err = run(*words)
        assert code == 0, err
        with Image.open("out.webp") as written:
            assert written.size == (width, height) and np.asarray(written.convert("RGB")).std() > 0
    for pipe in loaded:
        assert torch.bfloat16 in {part.dtype for part in pipe.components.values() if isinstance(part, torch.nn.Module)}
