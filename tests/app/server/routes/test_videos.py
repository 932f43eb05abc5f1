"""The videos of a server, with OpenAI's client."""

import base64
import gc
import io
import threading
import weakref

import httpx
import openai
import pytest
from app.server.server_kit import metric, running, serving, wait_for
from PIL import Image
from pipelines.cosmos import tiny as tiny_cosmos
from pipelines.infinitystar import tiny as tiny_infinitystar
from pipelines.llamagen import tiny as tiny_llamagen

from arimage.app.engine.engine import Engine
from arimage.app.engine.types import Refused
from arimage.app.engine.videos import VideoMaker, VideoRequest
from arimage.app.server import video_jobs
from arimage.app.server.video_jobs import VideoJobs
from arimage.media.files import can_write_mp4, read_video


pytestmark = [
    pytest.mark.skipif(not can_write_mp4(), reason="the extra `video` is not installed"),
    pytest.mark.filterwarnings("ignore:The Sora API:DeprecationWarning"),
]


@pytest.fixture(scope="module")
def pipelines():
    return {"film": tiny_cosmos.pipeline("text", begins_with_text=True), "clips": tiny_infinitystar.pipeline()}


@pytest.fixture(scope="module")
def address(pipelines):
    engine = Engine({"text": tiny_llamagen.text_pipeline()})
    with serving(engine, videos=VideoMaker(pipelines), aliases={"sora-2": "film"}) as address:
        yield address


@pytest.fixture(scope="module")
def client(address):
    return openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)


def png(colour: str, size: tuple[int, int] = tiny_cosmos.SIZE[::-1]) -> bytes:
    data = io.BytesIO()
    Image.new("RGB", size, colour).save(data, "PNG")
    return data.getvalue()


def test_a_video_is_created_polled_downloaded_and_deleted(client, tmp_path):
    video = client.videos.create_and_poll(prompt="a red heart", model="sora-2", extra_body={"seed": 3})
    assert (video.status, video.progress, video.model, video.object) == ("completed", 100, "film", "video")
    facts = video.model_extra["arimage"]
    height, width = tiny_cosmos.SIZE
    assert video.size == f"{width}x{height}" and facts["seed"] == 3 and facts["exact"] is True and facts["passes"] > 0
    assert float(video.seconds) == pytest.approx(facts["frames"] / facts["fps"], abs=0.001)
    assert video.expires_at > video.completed_at
    content = client.videos.download_content(video.id)
    content.write_to_file(tmp_path / "video.mp4")
    assert len(read_video("--video", tmp_path / "video.mp4")) == facts["frames"]
    thumbnail = client.videos.download_content(video.id, variant="thumbnail")
    assert Image.open(io.BytesIO(thumbnail.content)).size == (width, height)
    sheet = Image.open(io.BytesIO(client.videos.download_content(video.id, variant="spritesheet").content))
    assert sheet.format == "JPEG" and sheet.width * sheet.height == width * height * min(facts["frames"], 16)
    assert client.videos.retrieve(video.id) == video and video in list(client.videos.list(limit=1))
    assert client.videos.delete(video.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.videos.retrieve(video.id)


@pytest.mark.slow
def test_a_video_begins_with_a_picture(client, address):
    sent = client.videos.create(
        prompt="a", model="film", input_reference=("a.png", png("blue")), extra_body={"seed": 1}
    )
    url = f"data:image/png;base64,{base64.b64encode(png('blue')).decode()}"
    body = {"prompt": "a", "model": "film", "input_reference": {"image_url": url}, "seed": 1}
    written = httpx.post(f"{address}/v1/videos", json=body).raise_for_status().json()
    plain = client.videos.create(prompt="a", model="film", extra_body={"seed": 1})
    sheets = []
    for name in (sent.id, written["id"], plain.id):
        assert client.videos.poll(name, poll_interval_ms=20).status == "completed"
        sheets.append(client.videos.download_content(name, variant="spritesheet").content)
    assert sheets[0] == sheets[1] != sheets[2]
    body["input_reference"] = {"image_url": "http://127.0.0.1/a.png"}
    assert "is not a data URL" in httpx.post(f"{address}/v1/videos", json=body).json()["error"]["message"]


def test_videos_are_listed_page_by_page(client):
    names = [client.videos.create(prompt="a").id for _ in range(3)]
    assert [video.id for video in client.videos.list(limit=2)][:3] == names[::-1]
    page = client.videos.list(limit=2, order="asc")
    assert page.has_more and page.last_id == page.data[-1].id
    for name in names:
        client.videos.delete(name)


def test_models_are_listed_with_their_abilities(client):
    listed = {model.id: model.model_extra["arimage"] for model in client.models.list()}
    assert listed["film"]["routes"] == ["/v1/videos"] and listed["film"]["seconds"] == ["0.708"]
    assert "/v1/images/edits" in listed["text"]["routes"] and listed["sora-2"]["sizes"]


@pytest.mark.parametrize(
    ("arguments", "parameter", "message"),
    [
        ({"model": "none"}, "model", "unknown model 'none': choose among film, clips, sora-2"),
        ({"model": "text"}, "model", "/v1/images/generations"),
        ({"prompt": " "}, "prompt", "the prompt is empty"),
        ({"seconds": "12"}, "seconds", "choose among"),
        ({"seconds": "long"}, "seconds", "seconds is not valid"),
        ({"size": "720x1280"}, "size", "720x1280 pixels"),
        ({"input_reference": ("a.png", b"GIF89a")}, "input_reference", "cannot be read as an image"),
        ({"extra_body": {"seed": -2}}, "seed", "at least 0"),
        ({"extra_body": {"num_frames": 5000}}, "seconds", "5000 frames"),
        ({"extra_body": {"decoding": "next-scale"}}, "decoding", "cannot run"),
        ({"extra_body": {"fps": 3}}, "fps", "unknown field"),
    ],
)
def test_what_cannot_be_generated_is_refused_at_once(client, arguments, parameter, message):
    with pytest.raises(openai.APIStatusError) as refused:
        client.videos.create(**{"prompt": "a", "model": "film", **arguments})
    assert refused.value.status_code in (400, 404) and refused.value.param == parameter
    assert message in refused.value.body["message"]


def test_a_lenient_server_takes_what_is_nearest(pipelines):
    with serving(Engine({}), videos=VideoMaker(pipelines), lenient=True) as address:
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        video = client.videos.create(
            prompt="a", model="sora-2-pro", seconds="8", size="720x1280", extra_body={"fps": 30}
        )
        assert video.model == "film" and video.size == "{1}x{0}".format(*tiny_cosmos.SIZE)
        assert "film" in httpx.get(address).text


class Held:
    """A maker of videos that waits before each."""

    at_a_time = 1

    def __init__(self, maker):
        self.maker, self.go, self.entered = maker, threading.Event(), threading.Event()
        self.models, self.limits, self.check = maker.models, maker.limits, maker.check

    def run(self, request):
        self.entered.set()
        assert self.go.wait(60)
        yield from self.maker.run(request)


@pytest.fixture
def held_maker(pipelines):
    held = Held(VideoMaker(pipelines))
    yield held
    held.go.set()


def test_jobs_are_bounded_and_clients_do_not_see_those_of_others(held_maker, monkeypatch):
    monkeypatch.setattr(video_jobs, "WAITING", 3)
    monkeypatch.setattr(video_jobs, "WAITING_OF_CLIENT", 2)
    monkeypatch.setattr(video_jobs, "KEPT_JOBS", 3)
    jobs = VideoJobs(held_maker)
    own = [jobs.add(VideoRequest("film", "a"), "one") for _ in range(2)]
    with pytest.raises(Refused, match="try again later"):
        jobs.add(VideoRequest("film", "a"), "one")
    jobs.add(VideoRequest("film", "a"), "two")
    with pytest.raises(Refused, match="try again later"):
        jobs.add(VideoRequest("film", "a"), "three")
    assert jobs.of("one") == own
    jobs.delete(own[1])
    held_maker.go.set()
    wait_for(lambda: all(job.status == "completed" for job in (own[0], *jobs.of("two"))))
    assert own[1].status == "queued" and jobs.get(own[1].id) is None
    # The oldest finished one makes room, and those that are old enough go.
    for _ in range(2):
        jobs.add(VideoRequest("film", "a"), "three")
    assert jobs.get(own[0].id) is None
    wait_for(lambda: not any(job.unfinished for job in jobs.of("three")))
    monkeypatch.setattr(video_jobs, "KEPT_SECONDS", -1)
    assert jobs.of("three") == []
    jobs.close()


def test_deleted_jobs_hold_nothing_and_finished_ones_no_picture(held_maker):
    jobs = VideoJobs(held_maker)
    first = jobs.add(VideoRequest("film", "a", image=Image.new("RGB", tiny_cosmos.SIZE[::-1])), "one")
    assert held_maker.entered.wait(60)
    waiting = weakref.ref(jobs.add(VideoRequest("film", "a"), "one"))
    jobs.delete(waiting())
    gc.collect()
    assert waiting() is None
    held_maker.go.set()
    wait_for(lambda: not first.unfinished)
    assert first.status == "completed" and first.request.image is None
    jobs.close()


def test_a_job_that_fails_says_so(held_maker, monkeypatch, caplog):
    def fail(request):
        raise RuntimeError("out of memory: secret")
        yield

    held_maker.run = fail
    with serving(Engine({}), videos=held_maker) as address:
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        video = client.videos.create_and_poll(prompt="a", poll_interval_ms=10)
        assert video.status == "failed" and "see the log" in video.error.message
        assert "out of memory" in caplog.text
        with pytest.raises(openai.ConflictError, match="failed"):
            client.videos.download_content(video.id)


def test_a_draining_server_waits_until_its_videos_are_downloaded(held_maker):
    with running(Engine({}), videos=held_maker) as (server, address):
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        video = client.videos.create(prompt="a")
        assert held_maker.entered.wait(60)
        server.on_signal(15)
        wait_for(lambda: server._state.draining)
        with pytest.raises(openai.InternalServerError):
            client.videos.create(prompt="a")
        held_maker.go.set()
        assert client.videos.poll(video.id, poll_interval_ms=20).status == "completed"
        wait_for(lambda: metric(address, "arimage_videos_total", status="completed", model=video.model) == 1)
        assert metric(address, "arimage_video_seconds_count") == 1
        assert metric(address, "arimage_unfinished_videos") == 0
        assert not server.stopping
        assert client.videos.download_content(video.id).content
        wait_for(lambda: server.stopping, 10)
