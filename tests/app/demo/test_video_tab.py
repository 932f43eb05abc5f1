"""The demo's videos: frames appear when their tokens are decided, one video at a time."""

import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import gradio as gr
import numpy as np
import pytest
import torch
from gradio.data_classes import ImageData
from PIL import Image, ImageSequence
from pipelines.cosmos import tiny as tiny_cosmos
from pipelines.infinitystar import tiny as tiny_infinitystar
from pipelines.llamagen import tiny as tiny_llamagen

from arimage.app.demo.demo import build_demo
from arimage.app.demo.video_tab import enlarged, status_of
from arimage.app.engine import videos
from arimage.app.engine.engine import Engine
from arimage.app.engine.models import load_models
from arimage.app.engine.types import Limits, Refused
from arimage.app.engine.videos import VideoMaker, VideoRequest
from arimage.media.files import read_metadata


FRAMES, SIZE = tiny_cosmos.FRAMES, tiny_cosmos.SIZE


@pytest.fixture(scope="module")
def pipe():
    return tiny_cosmos.pipeline("text", begins_with_text=True)


@pytest.fixture(scope="module")
def maker(pipe):
    return VideoMaker({"video": pipe}, Limits(prompt_characters=40, pixels=64 * 64))


def arrays(frames):
    return np.stack([np.asarray(frame) for frame in frames]).astype(int)


@pytest.mark.every(2)
@pytest.mark.parametrize("decoding", ["ar", "sjd-coupled"])
def test_frames_appear_one_map_after_another(pipe, maker, decoding):
    seen = list(maker.run(VideoRequest("video", "a red heart", seed=3, decoding=decoding)))
    *progress, last = seen
    counts = [len(now.frames) for now in progress]
    assert counts == sorted(counts) and {1, 9} <= set(counts) and counts[0] == 0
    assert [now.finished for now in progress] == [None] * len(progress) and last.finished == (decoding, True)
    whole = pipe("a red heart", decoding=decoding, generator=torch.Generator().manual_seed(3))
    assert last.passes == whole.stats.forward_passes and last.decided == last.tokens == 36
    assert np.abs(arrays(last.frames) - arrays(whole.frames[0])).max() == 0
    for now in progress:
        if now.frames:
            assert np.abs(arrays(now.frames) - arrays(whole.frames[0][: len(now.frames)])).max() <= 1
    if decoding == "ar":
        assert last.appeared == [12, 24, 36]
        said = status_of(last)
        assert "36 forward passes" in said and "after forward pass 12, 24, 36" in said and "exact" in said


def test_a_first_frame_is_shown_first(pipe, maker):
    image = Image.new("RGB", SIZE[::-1], (30, 200, 90))
    seen = list(maker.run(VideoRequest("video", "a red heart", image=image)))
    assert len(seen[0].frames) == 1 and seen[-1].appeared[0] == 0 and seen[-1].tokens == 36
    whole = pipe("a red heart", image=image, generator=torch.Generator().manual_seed(0))
    assert np.abs(arrays(seen[-1].frames) - arrays(whole.frames[0])).max() == 0


def test_a_first_frame_is_what_viewers_show(pipe, maker, engine, tmp_path):
    shown = np.full((*SIZE, 3), 255, np.uint8)
    shown[:20] = 90
    image = Image.new("RGBA", SIZE[::-1])
    image.paste((90, 90, 90, 255), (0, 0, SIZE[1], 20))
    image.save(tmp_path / "a.png")
    # As the tab hands it over.
    [tab] = [one for one in build_demo(engine, maker).blocks.values() if getattr(one, "elem_id", "") == "first-frame"]
    given = tab.preprocess(ImageData(path=str(tmp_path / "a.png"), orig_name="a.png"))
    *_, last = maker.run(VideoRequest("video", "a red heart", image=given))
    whole = pipe("a red heart", image=Image.fromarray(shown), generator=torch.Generator().manual_seed(0))
    assert np.abs(arrays(last.frames) - arrays(whole.frames[0])).max() == 0


def test_a_closed_run_stops_and_makes_room(pipe, maker):
    before = threading.active_count()
    run = maker.run(VideoRequest("video", "a red heart", decoding="ar"))
    next(run)
    run.close()
    assert threading.active_count() == before
    assert list(maker.run(VideoRequest("video", "a blue book")))[-1].finished


def test_a_video_waits_for_another_one_and_says_so(maker, monkeypatch):
    monkeypatch.setattr(videos, "PAUSE", 0.01)
    with closing(maker.run(VideoRequest("video", "a red heart"))) as first:
        next(first)
        waiting = maker.run(VideoRequest("video", "a blue book"))
        assert next(waiting) is next(waiting) is videos.WAITING
        assert "waits for it" in status_of(videos.WAITING)
    assert next(waiting) is not videos.WAITING and list(waiting)[-1].finished


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (VideoRequest("other", "a"), "unknown model 'other': choose among video"),
        (VideoRequest("video", "a" * 41), "at most 40"),
        (VideoRequest("video", "a", image=Image.new("RGB", (80, 80))), "at most 4096 pixels"),
        (VideoRequest("video", ""), "prompt"),
        (VideoRequest("video", "a", image=Image.new("F", (8, 8), 7)), "image has levels from 7 to 7"),
        (VideoRequest("video", "a", decoding="nothing"), "nothing"),
    ],
)
def test_what_cannot_be_made_is_refused(maker, request_, message):
    with pytest.raises(Refused, match=message):
        list(maker.run(request_))


def test_models_of_videos_are_loaded_where_they_are_taken(pipe, tmp_path):
    pipe.save_pretrained(tmp_path / "video")
    [loaded] = load_models([str(tmp_path / "video")], "cpu", "float32", videos=True).values()
    assert loaded.abilities.generates_video
    with pytest.raises(ValueError, match="generates videos"):
        load_models([str(tmp_path / "video")], "cpu")
    with pytest.raises(ValueError, match="continues an image or a video"):
        VideoMaker({"video": tiny_cosmos.pipeline("video")})


@pytest.fixture(scope="module")
def engine():
    engine = Engine({"text": tiny_llamagen.text_pipeline()})
    yield engine
    engine.close()


def function(demo: gr.Blocks, name: str):
    """The page's function for a method of the tab."""
    return next(one for one in demo.fns.values() if getattr(one.fn, "__qualname__", "") == f"VideoTab.{name}")


def test_the_tab_begins_with_a_video(engine, maker, tmp_path, monkeypatch):
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path))
    calls, run = [], maker.run
    monkeypatch.setattr(maker, "run", lambda request: calls.append(request) or run(request))
    assert enlarged(Image.new("RGB", (64, 64))).size == (320, 320)
    assert enlarged(Image.new("RGB", (640, 400))).size == (640, 400)
    assert "Video" not in [block.label for block in build_demo(engine).blocks.values() if isinstance(block, gr.Tab)]
    demo = build_demo(engine, maker)
    assert "Video" in [block.label for block in demo.blocks.values() if isinstance(block, gr.Tab)]
    # A component that is made for an update while the page is built would be on the page.
    assert [block.value for block in demo.blocks.values() if isinstance(block, gr.Button)].count("Run") == 1
    opening = function(demo, "_open")
    named = {block.elem_id: block for block in opening.outputs}
    first = list(opening.fn(False))
    assert len(first) > 2 and len(first[-1][named["frames"]]) == FRAMES and first[-1][named["video"]].visible
    path = first[-1][named["video"]].value["path"]
    assert read_metadata("the film", Path(path)).prompt == "a red heart, moving right"
    monkeypatch.setattr(maker, "limits", replace(maker.limits, metadata=False))
    # The next visitor gets the same one without a run, and nobody gets it twice.
    [second] = opening.fn(False)
    with pytest.raises(ValueError, match="the film"):
        read_metadata("the film", Path(second[named["video"]].value["path"]))
    assert second[named["frames"]] == first[-1][named["frames"]]
    with Image.open(second[named["video"]].value["path"]) as film:
        assert sum(1 for _ in ImageSequence.Iterator(film)) == FRAMES
    assert [len(update) for update in opening.fn(True)] == [1]
    assert calls == [VideoRequest("video", "a red heart, moving right")]


@pytest.mark.slow
def test_a_film_of_several_clips_is_shown_pass_by_pass(tmp_path, monkeypatch, engine):
    pipe = tiny_infinitystar.pipeline()
    maker = VideoMaker({"film": pipe})
    assert maker.models["film"].frame_counts == [81, 1, 17, 33, 49, 65, 161] and maker.fps["film"] == 16
    monkeypatch.setattr(videos, "PREVIEWS", 1.0)
    *progress, last = maker.run(VideoRequest("film", "a fox", num_frames=17))
    assert [now.passes for now in progress] == list(range(1, 23)) and last.appeared == [11, 22]
    work = [now.work for now in progress]
    assert work == sorted(work) and work[-1] == last.work == 1 and work[10] < 0.1
    shown = [now.frames for now in progress if now.frames]
    # The second frame in place of the first, and one per second.
    assert len(shown) == 22 and all(len(frames) == 2 and max(frames[0].size) <= 256 for frames in shown)
    whole = pipe("a fox", num_frames=17, generator=torch.Generator().manual_seed(0))
    assert len(last.frames) == 17 and np.abs(arrays(last.frames) - arrays(whole.frames[0])).max() == 0
    call = pipe.prepare("a fox", num_frames=17)
    small = pipe.preview(call, torch.cat([part.flatten(1) for part in whole.tokens], dim=1))
    expected = pipe.shown_frames(call, pipe.to_images(call, small)[0])
    assert np.abs(arrays(expected) - arrays(shown[-1])).max() == 0
    # In the tab.
    monkeypatch.setattr(maker, "run", lambda request: (now for now in [*progress, last]))
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path))
    demo = build_demo(engine, maker)
    run = function(demo, "_generate")
    named = {block.elem_id: block for block in run.outputs}
    updates = list(run.fn("film", "a fox", "next-scale", 0, None, "17"))
    with Image.open(updates[-1][named["video"]].value["path"]) as film:
        # The first two frames are equal, and one in the file.
        assert film.size == tiny_infinitystar.SIZE[::-1] and sum(1 for _ in ImageSequence.Iterator(film)) == 16
    assert len(updates[-1][named["frames"]]) == 17
    assert "100% of the work" in updates[-1][named["video-status"]]


@pytest.mark.slow
def test_a_film_that_nobody_waits_for_ends_without_being_decoded(monkeypatch):
    pipe = tiny_infinitystar.pipeline()
    maker, decoded = VideoMaker({"film": pipe}), []
    result = pipe.decode_result
    monkeypatch.setattr(pipe, "decode_result", lambda *call: decoded.append(1) or result(*call))
    events = maker.run(VideoRequest("film", "a fox"))
    assert next(events).passes == 1
    events.close()
    assert decoded == []
    *_, last = maker.run(VideoRequest("film", "a fox", num_frames=17))
    assert last.finished == ("next-scale", True) and decoded == [1]
