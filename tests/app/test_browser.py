"""The demo with the packaged models in a browser, headless Chromium."""

import io
import json
import os
import shutil
import time
from urllib.parse import urlparse

import httpx
import numpy as np
import pytest
from PIL import Image


pytest.importorskip("gradio")

from arimage.app.demo import build_demo, launch_settings
from arimage.app.engine import Engine
from arimage.app.models import load_models


sync_api = pytest.importorskip("playwright.sync_api")
expect = sync_api.expect
expect.set_options(timeout=60_000)
CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None and not os.environ.get("ARIMAGE_REQUIRE_CHROMIUM"), reason="needs chromium on the path"
)

BRUSH = (255, 61, 127)


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    engine = Engine(load_models(None, "cpu"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRADIO_TEMP_DIR", str(tmp_path_factory.mktemp("gradio")))
        demo = build_demo(engine)
        _, url, _ = demo.launch(prevent_thread_lock=True, **launch_settings(engine))
        yield url
        demo.close()
    engine.close()


@pytest.fixture(scope="module")
def chromium():
    assert CHROMIUM is not None, "ARIMAGE_REQUIRE_CHROMIUM is set but chromium is not on the path"
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def page(url, chromium):
    """The open demo. At the end nothing was written to the console as an error and nothing was asked of another host."""
    page = chromium.new_page(viewport={"width": 1200, "height": 900})
    errors, hosts = [], set()
    page.on("console", lambda message: message.type == "error" and errors.append(message.text))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: hosts.add(urlparse(request.url).netloc))
    page.goto(url)
    yield page
    page.close()
    assert errors == []
    # Addresses of data and blobs have no host.
    assert hosts - {""} == {urlparse(url).netloc}


def tab(page, name: str):
    """Open a tab and return what it shows."""
    page.get_by_role("tab", name=name).click()
    return page.get_by_role("tabpanel").filter(visible=True)


def pixels(source: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(httpx.get(source).content)).convert("RGB"))


def seen(locator) -> np.ndarray:
    """The pixels of the middle of an element, as int."""
    image = Image.open(io.BytesIO(locator.screenshot())).convert("RGB")
    width, height = image.size
    return np.asarray(image.crop((width // 4, height // 4, 3 * width // 4, height)), dtype=int)


def wait_for(condition) -> None:
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.2)


def test_an_image_appears_while_it_is_generated(page, tmp_path):
    panel = tab(page, "Generate")
    expect(page.locator("#status")).to_have_text("Press Generate to make the first image.")
    panel.get_by_label("Prompt").fill("pizza")
    panel.get_by_label("Prompt").press("Enter")
    expect(page.locator("#status")).to_contain_text("of 256 tokens")
    expect(page.locator("#pictures img")).to_have_count(1)
    partial = page.locator("#pictures img").get_attribute("src")
    expect(page.locator("#status .bar")).to_be_visible()
    expect(page.locator("#status .badge")).to_have_text("exact")
    source = page.locator("#pictures img").get_attribute("src")
    assert source != partial
    with page.expect_download() as download:
        page.locator("#download").click()
    download.value.save_as(tmp_path / "image.png")
    assert download.value.suggested_filename == "pizza-0.png"
    picture = Image.open(tmp_path / "image.png")
    assert json.loads(picture.info["arimage"])["prompt"] == "pizza"
    assert np.array_equal(np.asarray(picture.convert("RGB")), pixels(source))
    # Whatever the form says now, the same image comes again, bit for bit: Gradio names files by what is in them.
    panel.get_by_label("Prompt").fill("a red heart")
    panel.get_by_label("Seed").fill("7")
    page.locator("#again").click()
    expect(page.locator("#status .bar")).to_be_visible()
    expect(page.locator("#status .badge")).to_have_text("exact")
    assert page.locator("#pictures img").get_attribute("src") == source


def test_stop_stops_at_once(page):
    panel = tab(page, "Generate")
    panel.get_by_label("Decoding").click()
    page.get_by_role("option", name="ar · exact", exact=True).click()
    page.locator("#generate").click()
    expect(page.locator("#status")).to_contain_text("Forward pass 1")
    page.locator("#stop-generate").click()
    began = time.monotonic()
    expect(page.locator("#status")).to_have_text("Stopped.")
    assert time.monotonic() - began < 5
    expect(page.locator("#generate")).to_be_visible()
    expect(page.locator("#stop-generate")).to_be_hidden()
    # The engine is free: a random seed is chosen at once, and shown.
    panel.get_by_label("Model").click()
    page.get_by_role("option", name="emoji-var").click()
    expect(panel.get_by_label("Decoding")).to_have_value("next-scale · exact")
    page.locator("#random-seed").click()
    expect(page.locator("#status .badge")).to_have_text("exact")
    assert panel.get_by_label("Seed").input_value() in page.locator("#status").inner_text()


def test_errors_are_shown_in_a_toast(page):
    panel = tab(page, "Generate")
    panel.get_by_label("Prompt").fill(" ")
    page.locator("#generate").click()
    expect(page.get_by_test_id("toast-text")).to_contain_text("the prompt is empty: say what")
    page.get_by_test_id("toast-close").click()
    expect(page.locator("#generate")).to_be_visible()
    tab(page, "Edit")
    page.locator("#edit").click()
    expect(page.get_by_test_id("toast-text")).to_contain_text("there is no image")
    page.get_by_test_id("toast-close").click()


def test_decodings_stand_side_by_side(page):
    panel = tab(page, "Compare")
    # Two are enough: take out the one that needs one forward pass per token.
    panel.locator("#decodings .token", has_text="ar · exact").first.locator(".token-remove").click()
    expect(panel.locator("#decodings .token")).to_have_count(2)
    page.locator("#compare").click()
    expect(panel.locator(".card")).to_have_count(2)
    expect(panel.locator(".card img.map")).to_have_count(2)
    texts = panel.locator(".card").all_inner_texts()
    assert "sjd-coupled exact" in texts[0] and "zipar relaxed" in texts[1]
    assert all("fewer forward passes" in text and " s" in text for text in texts)
    expect(page.locator("#compare")).to_be_visible()


def test_a_narrow_screen_shows_the_controls_and_then_the_image(page):
    page.set_viewport_size({"width": 400, "height": 850})
    for name in ("Generate", "Compare", "Edit"):
        tab(page, name)
        assert page.evaluate("document.documentElement.scrollWidth") <= 400
    # The progress and the image are below the controls: the page scrolls to them.
    tab(page, "Generate").get_by_label("Prompt").fill("pizza")
    page.locator("#generate").click()
    expect(page.locator("#status")).to_be_in_viewport()
    expect(page.locator("#status .badge")).to_have_text("exact")
    page.set_viewport_size({"width": 1200, "height": 900})


def test_a_painted_part_is_generated_again(page):
    panel = tab(page, "Edit")
    page.locator("#take").click()
    canvas = page.locator("#editor canvas").first
    # The empty editor is grey.
    wait_for(lambda: np.ptp(seen(canvas), axis=-1).max() > 60)
    box = canvas.bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] * 0.7
    page.mouse.move(x - 60, y)
    page.mouse.down()
    page.mouse.move(x + 60, y, steps=2)
    page.mouse.up()
    wait_for(lambda: (np.abs(seen(canvas) - BRUSH).max(-1) < 8).sum() > 1000)
    panel.get_by_label("Model").click()
    page.get_by_role("option", name="emoji-var").click()
    expect(panel.get_by_label("Decoding")).to_have_value("next-scale · exact")
    page.locator("#edit").click()
    expect(page.locator("#edit-status .badge")).to_have_text("exact")
    before, after = (pixels(page.locator(f"#{name} img").get_attribute("src")) for name in ("before", "after"))
    changed = (before != after).any(-1)
    # Something within the stroke, nothing in the rows above it.
    assert changed.any() and not changed[:24].any()
    generated = pixels(page.locator("#pictures img").get_attribute("src"))
    assert np.array_equal(before, generated)
