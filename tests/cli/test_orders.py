"""The order of the tokens as an option of the commands and as a field of the demo's and the server's requests."""

import json

import numpy as np
import pytest
import tiny
import torch
from PIL import Image
from pipelines.arpg import tiny as tiny_arpg
from pipelines.llamagen import tiny as tiny_llamagen

from arimage.app.engine.engine import Engine
from arimage.app.engine.types import Refused, Request
from arimage.decoding import GroupDecoding
from arimage.eval.runs.run_folder import read_config


SIZE = 4 * tiny.SCALE_FACTOR


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_arpg.pipeline("text").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def raster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("raster")
    tiny_llamagen.text_pipeline().save_pretrained(folder)
    return folder


def image_of(order, **arguments):
    pipe = tiny_arpg.pipeline("text")
    seed = torch.Generator().manual_seed(0)
    return np.asarray(pipe("tree", order=order, generator=seed, **arguments).images[0])


def test_generate_takes_an_order(run, model, tmp_path):
    assert run("generate", "tree", "--model", model, "--dtype", "float32", "--order", "raster", "--out", "one.png",
               "--trace", "map.png", "--decoding", "ar")[0] == 0  # fmt: skip
    assert np.array_equal(np.asarray(Image.open("one.png")), image_of("raster", decoding="ar"))
    assert Image.open("map.png").width > SIZE


@pytest.mark.parametrize(
    "command", ["generate tree", "bench --prompt tree", "eval generate --prompts emoji --out run"]
)
def test_a_model_in_raster_order_takes_none(refused, raster, command):
    assert "leave out --order" in refused(*command.split(), "--model", raster, "--order", "farthest")


@pytest.mark.slow
def test_bench_measures_every_order(run, model, tmp_path):
    (tmp_path / "prompts.txt").write_text("tree\na red heart\n")
    asked = ("--model", model, "--prompts", "prompts.txt", "--dtype", "float32")
    options = ("--decoding", "ar", "--decoding", "sjd-coupled", "--order", "raster", "--order", "farthest")
    code, out, said = run("bench", *asked, *options, "--batch-size", 16, "--metrics", "deviation", "--out", "both")
    assert code == 0, said
    names = [row["name"] for row in json.loads((tmp_path / "both" / "report.json").read_text())["rows"]]
    assert names == ["ar-raster", "sjd-coupled-raster", "ar-farthest", "sjd-coupled-farthest"]
    assert all(f"| {name} | exact (0." in out for name in names)
    assert all(read_config(tmp_path / "both" / f"ar-{order}")["order"] == order for order in ("raster", "farthest"))
    # A run without --order is of the model's own.
    assert run("eval", "generate", *asked, "--batch-size", 2, "--decoding", "ar", "--out", "own")[0] == 0
    assert read_config(tmp_path / "own")["order"] == "farthest"
    for name in ("000000", "000001"):
        pictures = [
            np.asarray(Image.open(tmp_path / folder / "images" / f"{name}.png"))
            for folder in ("own", "both/ar-farthest")
        ]
        assert np.array_equal(*pictures)


def test_requests_have_an_order(model):
    pipelines = {"any": tiny_arpg.pipeline("text"), "raster": tiny_llamagen.text_pipeline()}
    engine = Engine(pipelines)
    try:
        assert engine.models["any"].order == "farthest" and engine.models["raster"].order is None
        for order in ("raster", "random", None):
            result = engine.submit(Request("any", "tree", order=order)).result(60)
            assert np.array_equal(np.asarray(result.images[0]), image_of(order or "farthest"))
            assert result.settings["order"] == (order or "farthest")
        with pytest.raises(Refused, match="order"):
            engine.submit(Request("any", "tree", order="spiral"))
        with pytest.raises(Refused, match="does not accept order"):
            engine.submit(Request("raster", "tree", order="raster"))
        # Requests of different orders, edits among them, run next to each other.
        image, mask = Image.effect_noise((SIZE, SIZE), 80).convert("RGB"), Image.new("L", (SIZE, SIZE))
        mask.paste(255, (0, 0, SIZE, SIZE // 2))
        edits = {"image": image, "mask_image": mask}
        asked = [
            {"order": "raster"},
            {"order": "raster", **edits},
            {"order": "farthest"},
            {"order": "locality", **edits},
        ]
        tickets = [engine.submit(Request("any", "tree", **one)) for one in asked]
        for ticket, one in zip(tickets, asked, strict=True):
            assert np.array_equal(np.asarray(ticket.result(60).images[0]), image_of(**one))
        groups = engine.submit(Request("any", "tree", order="locality", decoding="groups:groups=3", **edits)).result(
            60
        )
        assert groups.passes == 4
        assert np.array_equal(np.asarray(groups.images[0]), image_of("locality", decoding=GroupDecoding(3), **edits))
    finally:
        engine.close()
