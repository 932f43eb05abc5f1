"""The demo with the packaged models of images in a browser, headless Chromium."""

import contextlib
import io
import json
import os
import shutil
from collections import Counter
from urllib.parse import parse_qs, urlparse

import httpx
import numpy as np
import pytest
from app.conftest import SlowPipeline
from app.server.server_kit import wait_for
from PIL import Image
from pipelines.cosmos import tiny as tiny_cosmos


pytest.importorskip("gradio")

from app.demo.demo_kit import served

from arimage.app.engine.engine import Engine
from arimage.app.engine.models import load_models
from arimage.app.engine.videos import VideoMaker


sync_api = pytest.importorskip("playwright.sync_api")
expect = sync_api.expect
expect.set_options(timeout=120_000)
CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None and not os.environ.get("ARIMAGE_REQUIRE_CHROMIUM"), reason="needs chromium on the path"
)

BRUSH = (255, 61, 127)


@pytest.fixture(scope="module")
def models():
    return load_models(None, "cpu")


@pytest.fixture(scope="module")
def slow(models):
    """The first model, whose forward passes can be slowed down."""
    return SlowPipeline(models["emoji-arpg"])


@pytest.fixture(scope="module")
def url(models):
    videos = tiny_cosmos.pipeline("text", begins_with_text=True)
    videos.decoding = "sjd-coupled:window=32"
    with served(Engine(models), None, VideoMaker({"emoji-video-blocks": videos})) as url:
        yield url


@pytest.fixture(scope="module")
def chromium():
    assert CHROMIUM is not None, "ARIMAGE_REQUIRE_CHROMIUM is set but chromium is not on the path"
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def page(url, chromium):
    """The open demo. The console shows no error in the end, and no other host was asked for anything."""
    context = chromium.new_context(viewport={"width": 1200, "height": 900})
    context.set_default_timeout(120_000)
    page = context.new_page()
    errors, hosts = [], set()
    page.on("console", lambda message: message.type == "error" and errors.append(message.text))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: hosts.add(urlparse(request.url).netloc))
    page.goto(url)
    # The page begins with an image of its own.
    expect(page.locator("#status .badge")).to_be_visible()
    yield page
    context.close()
    assert errors == []
    # The URLs of data and blobs have no host.
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


def generated(page) -> np.ndarray:
    """The image of Generate, once it is finished."""
    expect(page.locator("#stop-generate")).to_be_hidden()
    expect(page.locator("#status .badge")).to_be_visible()
    return pixels(page.locator("#pictures img").get_attribute("src"))


# Records every picture and status of the Generate tab: an image may be faster than polling the page.
RECORD = """() => {
  window.seen = {sources: new Set(), texts: [], bar: false};
  const look = () => {
    const image = document.querySelector("#pictures img"), status = document.querySelector("#status");
    if (image) window.seen.sources.add(image.src);
    if (status) window.seen.texts.push(status.innerText);
    if (document.querySelector("#status .bar")) window.seen.bar = true;
  };
  new MutationObserver(look).observe(document.body, {subtree: true, childList: true, attributeFilter: ["src"]});
}"""


def test_a_visitor_sees_a_picture_and_what_this_is(page, url):
    expect(page.locator(".intro")).to_contain_text("watch an AI model make a picture")
    expect(page.locator(".intro")).to_contain_text("emoji-arpg knows")
    expect(page.locator("#status")).to_contain_text("seed 0")
    first = generated(page)
    assert first.std() > 30 and page.url == url
    # The next visitor gets the same one without a run.
    other = page.context.new_page()
    other.goto(url)
    assert np.array_equal(generated(other), first)
    other.close()


def test_an_image_appears_while_it_is_generated(page, url, slow, tmp_path, monkeypatch):
    # So that several partial images are seen.
    monkeypatch.setattr(slow, "pace", 0.2)
    page = page.context.new_page()
    page.goto(url)
    generated(page)
    panel = tab(page, "Generate")
    before = page.locator("#pictures img").get_attribute("src")
    page.evaluate(RECORD)
    panel.get_by_label("Prompt").fill("pizza")
    panel.get_by_label("Prompt").press("Enter")
    page.wait_for_function("window.seen.texts.some(text => text.includes('of 256 tokens'))")
    generated(page)
    assert page.evaluate("window.seen.bar")
    expect(page.locator("#status .badge")).to_have_text("exact")
    source = page.locator("#pictures img").get_attribute("src")
    assert len(set(page.evaluate("[...window.seen.sources]")) - {before, source}) > 0
    with page.expect_download() as download:
        page.locator("#download").click()
    download.value.save_as(tmp_path / "image.png")
    assert download.value.suggested_filename == "pizza-0.png"
    picture = Image.open(tmp_path / "image.png")
    assert json.loads(picture.info["arimage"])["prompt"] == "pizza"
    assert np.array_equal(np.asarray(picture.convert("RGB")), pixels(source))
    # The form has changed, but the same image comes again, bit for bit: Gradio names files by their content.
    panel.get_by_label("Prompt").fill("a red heart")
    panel.get_by_label("Seed").fill("7")
    page.evaluate("window.seen.texts = []")
    page.locator("#again").click()
    page.wait_for_function("window.seen.texts.some(text => text.includes('of 256 tokens'))")
    generated(page)
    assert page.locator("#pictures img").get_attribute("src") == source
    page.close()


@pytest.mark.slow
def test_a_link_generates_its_image(page):
    panel = tab(page, "Generate")
    panel.get_by_label("Prompt").fill("taco")
    panel.get_by_label("Seed").fill("11")
    page.locator("#generate").click()
    page.wait_for_url("**prompt=taco**")
    image = generated(page)
    settings = {name: value for name, (value,) in parse_qs(urlparse(page.url).query).items()}
    assert settings == {"model": "emoji-arpg", "prompt": "taco", "seed": "11", "decoding": "sjd-coupled:window=64"}
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.locator("#copy-link").click()
    expect(page.locator("#copy-link")).to_have_text("Link copied")
    assert page.evaluate("navigator.clipboard.readText()") == page.url
    other = page.context.new_page()
    other.goto(page.url)
    assert np.array_equal(generated(other), image)
    # A link may have a decoding with settings, which the form then offers.
    other.goto(page.url.replace("sjd-coupled%3Awindow%3D64", "sjd%3Awindow%3D32"))
    expect(other.locator("#status")).to_contain_text("sjd:window=32")
    panel = other.get_by_role("tabpanel").filter(visible=True)
    expect(panel.get_by_label("Decoding")).to_have_value("sjd:window=32")
    expect(panel.get_by_label("Prompt")).to_have_value("taco")
    expect(panel.get_by_label("Seed")).to_have_value("11")
    other.goto(page.url.replace("seed=11", "seed=many"))
    expect(other.get_by_test_id("toast-text")).to_contain_text("seed=many")
    other.close()


@pytest.mark.slow
def test_the_browser_remembers_what_it_made(page, url, chromium):
    context = chromium.new_context(viewport={"width": 1200, "height": 900})
    context.set_default_timeout(120_000)
    page = context.new_page()
    page.goto(url)
    generated(page)
    made = page.locator("#history a")
    expect(made).to_have_count(0)
    panel = tab(page, "Generate")
    images = {}
    for prompt in ("pizza", "taco", "pizza"):
        panel.get_by_label("Prompt").fill(prompt)
        page.locator("#generate").click()
        page.wait_for_url(f"**prompt={prompt}**")
        images[prompt] = generated(page)
    # The last one is first, and equal settings are there once.
    expect(made).to_have_count(2)
    assert [made.nth(i).get_attribute("title") for i in range(2)] == ["pizza", "taco"]
    panel.get_by_label("Seed").fill("7")
    made.nth(1).click()
    page.wait_for_url("**prompt=taco**")
    assert np.array_equal(generated(page), images["taco"])
    expect(panel.get_by_label("Prompt")).to_have_value("taco")
    expect(panel.get_by_label("Seed")).to_have_value("0")
    # Another window has the same history.
    other = context.new_page()
    other.goto(url)
    expect(other.locator("#history img")).to_have_count(2)
    assert other.locator("#history img").first.evaluate("(image) => image.naturalWidth") == 96
    other.evaluate("localStorage.setItem('arimage-history', '[{\"link\": 5}]')")
    expect(made).to_have_count(0)
    page.locator("#generate").click()
    expect(made).to_have_count(1)
    page.locator("#history button").click()
    expect(made).to_have_count(0)
    context.close()


@pytest.mark.slow
def test_the_prompt_follows_from_tab_to_tab(page):
    tab(page, "Generate").get_by_label("Prompt").fill("pizza")
    race = tab(page, "Race")
    expect(race.get_by_label("Prompt")).to_have_value("pizza")
    race.get_by_label("Prompt").fill("taco")
    expect(tab(page, "Edit").get_by_label("Prompt")).to_have_value("taco")
    # Videos have prompts of their own.
    expect(tab(page, "Video").get_by_label("Prompt")).to_have_value("a red heart, moving right")
    expect(tab(page, "Race").get_by_label("Prompt")).to_have_value("taco")
    tab(page, "Gallery")
    page.locator("#gallery [data-name='hot dog']").click()
    page.wait_for_url("**prompt=hot+dog**")
    expect(tab(page, "Generate").get_by_label("Prompt")).to_have_value("hot dog")
    expect(tab(page, "Edit").get_by_label("Prompt")).to_have_value("hot dog")


@pytest.mark.slow
def test_stop_stops_at_once(page):
    panel = tab(page, "Generate")
    panel.get_by_label("Decoding").click()
    page.get_by_role("option", name="ar · exact", exact=True).click()
    # On a busy machine, the page may see the run only when it is over.
    for _ in range(5):
        page.locator("#generate").click()
        # In one step: between two, a fast machine could finish the image.
        with contextlib.suppress(sync_api.TimeoutError, AssertionError):
            page.wait_for_function(
                """() => {
                  const stop = document.querySelector("#stop-generate");
                  const status = document.querySelector("#status").innerText;
                  const running = stop !== null && status.includes("Forward pass");
                  if (running) stop.click();
                  return running;
                }""",
                timeout=20_000,
            )
            expect(page.locator("#status")).to_have_text("Stopped.", timeout=10_000)
            break
    expect(page.locator("#status")).to_have_text("Stopped.")
    expect(page.locator("#generate")).to_be_visible()
    expect(page.locator("#stop-generate")).to_be_hidden()
    # The engine is free: the next run starts at once, and shows its random seed.
    panel.get_by_label("Model").click()
    page.get_by_role("option", name="emoji-var").click()
    expect(panel.get_by_label("Decoding")).to_have_value("next-scale · exact")
    page.locator("#random-seed").click()
    expect(page.locator("#status .badge")).to_have_text("exact")
    assert panel.get_by_label("Seed").input_value() in page.locator("#status").inner_text()


@pytest.mark.slow
def test_decodings_race_side_by_side(page, slow, tmp_path, monkeypatch):
    # So that a race lasts seconds.
    monkeypatch.setattr(slow, "pace", 0.2)
    panel = tab(page, "Race")
    runs = ["ar · exact", "sjd-coupled:window=64 · exact", "emoji-llamagen-dd · few-step · lossy"]
    tokens = panel.locator("#decodings .token")
    expect(tokens).to_have_text(runs)
    # Its 256 forward passes would show no more than those of another one.
    tokens.filter(has_text=runs[0]).locator(".token-remove").click()
    expect(tokens).to_have_text(runs[1:])
    panel.get_by_label("Prompt").fill("a red heart")
    # Not that of the image which the page began with: the browser would not ask for it again.
    panel.get_by_label("Seed").fill("5")
    sent = Counter()
    page.on("request", lambda request: sent.update([request.url] if "/file=" in request.url else []))
    page.locator("#race").click()
    expect(panel.locator(".card")).to_have_count(2)
    expect(page.locator("#card-0")).to_contain_text("of 256 tokens")
    # They may take long on a busy machine.
    expect(page.locator("#film img")).to_be_visible(timeout=240_000)
    expect(panel.locator(".card img.map")).to_have_count(2)
    # Two pictures of each, and the film.
    assert len(sent) == 5 and {*sent.values()} == {1}
    texts = panel.locator(".card").all_inner_texts()
    assert "sjd-coupled:window=64 exact" in texts[0] and "forward passes ·" in texts[0]
    assert "emoji-llamagen-dd few-step lossy" in texts[1] and "1 forward pass ·" in texts[1]
    expect(page.locator("#race")).to_be_visible()
    with page.expect_download() as download:
        page.locator("#download-race").click()
    download.value.save_as(tmp_path / "race.webp")
    with Image.open(tmp_path / "race.webp") as film:
        assert film.width > 2 * 384 and film.n_frames > 2
    boxes = [card.bounding_box() for card in panel.locator(".card").all()]
    assert len({box["x"] for box in boxes}) == 2
    page.set_viewport_size({"width": 390, "height": 844})
    boxes = [card.bounding_box() for card in panel.locator(".card").all()]
    assert all(box["width"] > 300 for box in boxes) and len({box["x"] for box in boxes}) == 1
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.set_viewport_size({"width": 1200, "height": 900})


def test_a_phone_shows_the_image_after_a_tap(page, slow, monkeypatch):
    monkeypatch.setattr(slow, "pace", 0.1)
    page.set_viewport_size({"width": 390, "height": 844})
    for name in ("Gallery", "Race", "Edit", "Video", "Generate"):
        tab(page, name)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
    prompt = tab(page, "Generate").get_by_label("Prompt")
    assert prompt.evaluate("(field) => field.offsetWidth") > 200
    prompt.fill("pizza")
    # The page scrolls by itself, down and up.
    for top in (0, 10_000):
        page.evaluate("(top) => scrollTo(0, top)", top)
        button = page.locator("#generate" if not top else "#again")
        expect(button).to_be_enabled()
        button.dispatch_event("click")
        expect(page.locator("#stop-generate")).to_be_visible()
        expect(page.locator("#status")).to_be_in_viewport()
        expect(page.locator("#pictures img")).to_be_in_viewport(ratio=0.95)
        expect(page.locator("#status .badge")).to_have_text("exact")
        # Also once the image is among those made before.
        expect(page.locator("#history img").first).to_be_visible()
        expect(page.locator("#pictures img")).to_be_in_viewport(ratio=0.95)
    page.set_viewport_size({"width": 1200, "height": 900})


@pytest.mark.slow
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
    # The stroke changed, the rows above it did not.
    assert changed.any() and not changed[:24].any()
    generated = pixels(page.locator("#pictures img").get_attribute("src"))
    assert np.array_equal(before, generated)


@pytest.mark.slow
def test_frames_of_a_video_appear_and_then_play(page):
    panel = tab(page, "Video")
    # The tab begins with a video.
    expect(panel.locator("#video-status .badge")).to_have_text("exact")
    expect(panel.locator("#stop-video")).to_be_hidden()
    before = panel.locator("#video img").get_attribute("src")
    panel.get_by_label("Seed").fill("1")
    panel.locator("#make-video").click()
    frames = panel.locator("#frames img")
    expect(panel.locator("#video img")).not_to_have_attribute("src", before)
    expect(frames.first).to_be_visible()
    expect(panel.locator("#video img")).to_be_visible()
    expect(frames).to_have_count(tiny_cosmos.FRAMES)
    expect(panel.locator("#video-status")).to_contain_text("36 of 36")
    expect(panel.locator("#stop-video")).to_be_hidden()
    after = panel.locator("#video img").get_attribute("src")
    # It stays when the tab is opened again.
    tab(page, "Generate")
    tab(page, "Video")
    expect(panel.locator("#video img")).to_have_attribute("src", after)
    with page.expect_download() as download:
        panel.locator("#download-video").click()
    with Image.open(download.value.path()) as film:
        assert film.n_frames == tiny_cosmos.FRAMES
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.set_viewport_size({"width": 1200, "height": 900})
    # After a refusal another video can be made.
    panel.get_by_label("Prompt").fill("")
    panel.locator("#make-video").click()
    page.get_by_test_id("toast-close").click()
    expect(panel.locator("#make-video")).to_be_visible()
    # An example is a video.
    panel.get_by_text("a cat, growing", exact=True).click()
    expect(panel.locator("#video img")).not_to_have_attribute("src", after)
    expect(panel.locator("#video-status")).to_contain_text("36 of 36")
    expect(panel.get_by_label("Prompt")).to_have_value("a cat, growing")


@pytest.mark.parametrize("width", [1280, pytest.param(390, marks=pytest.mark.slow)])
def test_everything_works_by_keys_alone(url, chromium, width):
    context = chromium.new_context(viewport={"width": width, "height": 900})
    context.set_default_timeout(120_000)
    page = context.new_page()
    page.goto(url)
    expect(page.locator("#status .badge")).to_be_visible()
    focused = page.locator(":focus")

    def press(key: str, until) -> None:
        """Press a key until the focus is on `until`. No list of a field that was left stays open."""
        for _ in range(60):
            page.keyboard.press(key)
            # Gradio would open the list that was left after a turn of the page's loop.
            page.wait_for_timeout(50)
            left = "input[role=combobox][aria-expanded=true]:not(:focus)"
            expect(page.locator(left).filter(visible=True)).to_have_count(0, timeout=5_000)
            if until.evaluate("(element) => element === document.activeElement"):
                return
        raise AssertionError(f"{key} does not lead to {until}")

    def visible(locator):
        return locator.filter(visible=True).first

    # One stop of the tab key for all tabs.
    press("Tab", page.get_by_role("tab", name="Generate"))
    press("Tab", visible(page.get_by_label("Prompt")))
    press("Shift+Tab", page.get_by_role("tab", name="Generate"))
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("tab", name="Gallery")).to_have_attribute("aria-selected", "true")
    press("Tab", page.locator("#search input, #search textarea"))
    page.keyboard.type("owl")
    expect(page.locator("#found")).to_have_text("1 found")
    press("Tab", page.locator("#gallery button[data-name=owl]"))
    page.keyboard.press("Enter")
    expect(visible(page.get_by_label("Prompt"))).to_have_value("owl")
    expect(page.locator("#stop-generate")).to_be_hidden()
    expect(page.locator("#status .badge")).to_be_visible()

    press("Tab", page.get_by_role("tab", name="Generate"))
    press("ArrowRight", page.get_by_role("tab", name="Edit"))
    part = page.locator("#part input")
    press("Tab", part)
    for key in ("ArrowDown", "ArrowDown", "Enter"):
        page.keyboard.press(key)
        page.wait_for_timeout(50)
    expect(part).to_have_value("the lower half")
    press("Tab", page.locator("#take"))
    page.keyboard.press("Enter")
    press("Tab", page.locator("#edit"))
    page.keyboard.press("Enter")
    expect(page.locator("#edit-status .badge")).to_be_visible()
    before, after = (pixels(page.locator(f"#{name} img").get_attribute("src")) for name in ("before", "after"))
    changed = (before != after).any(-1)
    assert changed[64:].any() and not changed[:60].any()

    press("Shift+Tab", page.get_by_role("tab", name="Edit"))
    page.keyboard.press("Home")
    expect(page.get_by_role("tab", name="Generate")).to_be_focused()
    expect(focused).to_have_attribute("tabindex", "0")
    context.close()
