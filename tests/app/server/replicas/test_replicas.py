"""Replicas of an engine behind one server: in this process with a stand-in for Ray Serve, and in processes of Ray."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import httpx
import openai
import psutil
import pytest
from app.server.serve_kit import Handle, replica_of, replicas_of
from app.server.server_kit import free_port, picture, same, serving, wait_for
from pipelines.cosmos import tiny as tiny_cosmos
from pipelines.llamagen import tiny as tiny_llamagen
from ray.exceptions import ActorDiedError
from typer.testing import CliRunner

from arimage.app.engine.engine import Engine
from arimage.app.engine.types import Cancelled, Limits, Progress, Request, Result, Unavailable
from arimage.app.engine.videos import VideoMaker
from arimage.app.server.replicas import cluster
from arimage.app.server.replicas.cluster import application_name, deployment_of, run_replicas
from arimage.app.server.replicas.replica import Replica, ReplicaSettings
from arimage.app.server.replicas.replicas import ATTEMPTS, Replicas
from arimage.cli import main as cli


@pytest.fixture
def two():
    """A server with two replicas: its address, and the handle."""
    handle = Handle([replica_of({"text": tiny_llamagen.text_pipeline()}, Limits(gathering=0.05)) for _ in range(2)])
    with replicas_of(handle, Limits()) as replicas, serving(replicas) as address:
        yield address, handle


@pytest.fixture
def slow(held):
    """A server with one replica, whose images begin when `held.go` is set."""
    handle = Handle([replica_of({"text": held}, Limits())])
    with replicas_of(handle, Limits()) as replicas, serving(replicas) as address:
        yield address, handle
        held.go.set()


def wait_for_accepted(count: int, address: str, handle: Handle) -> None:
    """Wait until replicas have `count` requests, and none waits for a replica."""
    wait_for(lambda: len(handle.answers) == count)
    wait_for(lambda: "arimage_unassigned_requests 0.0" in httpx.get(f"{address}/metrics").text)


def client_of(address: str, **options) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{address}/v1", api_key="none", **{"max_retries": 0, **options})


def test_replicas_generate_what_an_engine_does(two):
    address, handle = two
    engine = Engine({"text": tiny_llamagen.text_pipeline()})
    [expected] = engine.submit(Request("text", prompt="a red heart", seed=3)).result(60).images
    engine.close()
    client = client_of(address)
    arguments = {"prompt": "a red heart", "extra_body": {"seed": 3}}
    urls = [client.images.generate(response_format="url", **arguments).data[0].url for _ in range(2)]
    # Every image has its url in the server, whatever replica has generated it.
    assert len(handle.answers) == 2 and all(same(picture(httpx.get(url).content), expected) for url in urls)
    *previews, last = client.images.generate(stream=True, partial_images=2, **arguments)
    assert len(previews) == 2 and same(picture(last.b64_json), expected) and last.usage.output_tokens == 16
    for arguments, error in (({"n": 99}, "ask for 1 to 8"), ({"extra_body": {"top_p": 2}}, "top_p is 2")):
        with pytest.raises(openai.BadRequestError, match=error):
            client.images.generate(prompt="a", **arguments)


def test_metrics_name_their_replica(two, monkeypatch):
    address, handle = two
    client = client_of(address)
    for count in (1, 1, 2):
        client.images.generate(prompt="a", n=count)
    names = iter(["x", "y"] * 2)
    monkeypatch.setattr("ray.serve.get_replica_context", lambda: SimpleNamespace(replica_tag=next(names)))
    text = httpx.get(f"{address}/metrics").text
    assert 'arimage_images_total{model="text",replica="x"} 3.0' in text
    assert 'arimage_images_total{model="text",replica="y"} 1.0' in text
    assert 'arimage_batch_images_bucket{le="1.0",model="text",replica="x"}' in text
    assert "\narimage_replicas 2.0\n" in text
    assert 'arimage_requests_total{model="text",status="200"} 3.0' in text
    assert text.count("# TYPE arimage_images_total counter") == 1

    # A replica that has just ended does not answer.
    async def ended():
        raise ActorDiedError

    monkeypatch.setattr(handle.replicas[1], "collect", ended)
    text = httpx.get(f"{address}/metrics").text
    assert 'replica="x"' in text and 'replica="y"' not in text and "\narimage_replicas 1.0\n" in text


def test_requests_of_a_replica_that_ends_are_generated_again(slow, held):
    address, handle = slow
    client = client_of(address)

    def stream():
        return list(client.images.generate(prompt="a", stream=True, partial_images=1))

    with ThreadPoolExecutor() as pool:
        asked = []
        for ask in (partial(client.images.generate, prompt="a"), stream):
            asked.append(pool.submit(ask))
            wait_for_accepted(len(asked), address, handle)
        for answers in list(handle.answers):
            answers.cancel(ActorDiedError())
        wait_for_accepted(4, address, handle)
        held.go.set()
        image, events = (answer.result(60) for answer in asked)
    assert image.data and [event.type for event in events] == [
        "image_generation.partial_image",
        "image_generation.completed",
    ]


def in_turn(*scripts):
    """Replicas that answer a script each, up to an error. Returns their backend."""

    class Script:
        def __init__(self, answers):
            self._answers = iter(answers)

        def __aiter__(self):
            return self

        async def __anext__(self):
            answer = next(self._answers)
            if isinstance(answer, ActorDiedError):
                raise answer
            return answer

        def cancel(self):
            """A replica that has ended does not see it."""

    remaining = iter(scripts)
    handle = SimpleNamespace(generate=SimpleNamespace(remote=lambda request: Script(next(remaining))))
    return Replicas(handle, {}, Limits(), 32)


def result_of(seed: int) -> Result:
    return Result([], [seed], 1, 1, 1, True, "ar", None, {})


def test_what_another_replica_repeats_is_not_sent_again(caplog):
    one, two, result, died = Progress(1, 4, 16), Progress(2, 8, 16), result_of(0), ActorDiedError()

    async def ask(replicas):
        seen = []
        ticket = await replicas.submit(Request("text", prompt="a"), seen.append)
        return ticket.tokens, await asyncio.wrap_future(ticket.future), seen

    # The last answer is never read: its replica may end after the result.
    scripts = [died], [16, one, died], [16, one, two, result, died]
    assert asyncio.run(ask(in_turn(*scripts))) == (16, result, [one, two])
    # One sentence for one replica.
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    # Batches differ, and with them the steps that are shown.
    assert asyncio.run(ask(in_turn([16, one, two, died], [16, one, result]))) == (16, result, [one, two])


def test_an_engine_that_fails_ends_no_request_of_the_server():
    async def ask():
        replicas = in_turn([Cancelled("the engine is closed")], [16, Cancelled("the engine has failed")], [16, result])
        ticket = await replicas.submit(Request("text", prompt="a"))
        return await asyncio.wrap_future(ticket.future)

    result = result_of(0)
    assert asyncio.run(ask()) is result


@pytest.mark.parametrize("script", [[], [16]])
def test_a_request_that_ends_three_replicas_is_given_up(script):
    async def ask():
        died = ActorDiedError()
        ticket = await in_turn([*script, died], [*script, died], [*script, died]).submit(Request("text", prompt="a"))
        await asyncio.wrap_future(ticket.future)

    with pytest.raises(Unavailable, match="3 processes"):
        asyncio.run(ask())


def test_a_client_that_leaves_a_replica_that_ends_asks_no_other():
    async def ask():
        replicas = in_turn([16, ActorDiedError()])
        ticket = await replicas.submit(Request("text", prompt="a"))
        ticket.cancel()
        with pytest.raises(Cancelled):
            await asyncio.wrap_future(ticket.future)

    asyncio.run(ask())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_replica_whose_engine_fails_ends_its_process(held, monkeypatch):
    ended = threading.Event()
    monkeypatch.setattr(os, "_exit", lambda code: ended.set())
    replica = replica_of({"text": held}, Limits())
    held.go.set()
    monkeypatch.setattr(held._pipe, "encode_prompt", lambda prompts: sys.exit("out of here"))

    async def ask():
        return [answer async for answer in replica.generate(Request("text", prompt="a"))]

    asyncio.run(ask())
    assert ended.wait(60)


def test_a_server_whose_ray_has_ended_stops(monkeypatch, caplog):
    nodes = iter([True, True, False])
    monkeypatch.setattr(cluster, "HEALTH_SECONDS", 0.001)
    monkeypatch.setattr("ray.get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "own"))
    monkeypatch.setattr(
        "ray.nodes", lambda: [{"NodeID": "own", "Alive": next(nodes)}, {"NodeID": "other", "Alive": True}]
    )
    stopped = []
    replicas = in_turn()
    replicas.on_failure = partial(stopped.append, True)
    cluster._watch(replicas, threading.Event())
    assert stopped == [True] and not replicas.alive and "Ray has ended" in str(replicas.failure)
    assert [record.levelname for record in caplog.records] == ["CRITICAL"] and next(nodes, None) is None


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_deployment_keeps_batches_full_and_its_bounds(device, monkeypatch):
    monkeypatch.setattr("torch.get_num_threads", lambda: 9)
    fixed = deployment_of(Limits(batch=6), device, 2, 2)
    assert (fixed.num_replicas, fixed.max_ongoing_requests) == (2, 12)
    wanted = {"num_gpus": 1} if device == "cuda" else {"num_cpus": 4}
    assert wanted.items() <= fixed.ray_actor_options.items()
    scaled = deployment_of(Limits(batch=6), device, 2, 4)._deployment_config.autoscaling_config
    assert (scaled.min_replicas, scaled.max_replicas, scaled.target_ongoing_requests) == (2, 4, 6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-replicas", "2"], "--max-replicas adds to --replicas: give both"),
        (["--replicas", "3", "--max-replicas", "2"], "--max-replicas is 2: give at least --replicas, 3"),
        (["--replicas", "2", "--device", "cuda:1"], "leave out --device cuda:1"),
        (["--replicas", "2", "--device", "cuda"], "asks for 2 GPUs, and this machine has 1"),
        (
            ["--replicas", "2", "--max-replicas", "5", "--device", "cpu"],
            "asks for 5 CPU cores, and this machine has 4",
        ),
    ],
)
def test_the_command_refuses_before_ray_starts(options, message, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    monkeypatch.setattr("ray.init", lambda *_, **__: pytest.fail("Ray was started"))
    result = CliRunner().invoke(cli.app, ["serve", "--model", "emoji-llamagen", *options])
    assert isinstance(result.exception, ValueError) and message in str(result.exception)


def test_without_ray_serve_replicas_are_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with (
        pytest.raises(ValueError, match=r"--replicas .*arimage\[ray-serve\]"),
        run_replicas(ReplicaSettings(None, None, "auto", None, Limits()), 2, 2, "name"),
    ):
        pass


def test_paths_are_absolute_for_other_processes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "style.safetensors").touch()
    settings = ReplicaSettings(["model", "emoji-arpg"], None, "auto", ["style.safetensors:0.5", "a/hub"], Limits())
    found = cluster._for_workers(settings, "cpu")
    assert found.models == [str(tmp_path / "model"), "emoji-arpg"]
    assert found.lora == [f"{tmp_path / 'style.safetensors'}:0.5", "a/hub"]


# Videos


class SlowVideos(VideoMaker):
    """A maker of videos that begins them when `go` is set."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.go, self.begun = threading.Event(), 0

    def run(self, request):
        self.begun += 1
        assert self.go.wait(60)
        yield from super().run(request)


@pytest.fixture
def filming(monkeypatch):
    """A server with two replicas that also generate videos: its address, the handle, and their makers."""
    pytest.importorskip("imageio", reason="the extra `video` is not installed")
    monkeypatch.setattr("arimage.app.engine.start.VideoMaker", SlowVideos)
    pipelines = {"text": tiny_llamagen.text_pipeline(), "film": tiny_cosmos.pipeline("text", begins_with_text=True)}
    handle = Handle([replica_of(pipelines, Limits()) for _ in range(2)])
    with replicas_of(handle, Limits()) as replicas, serving(replicas, videos=replicas.videos) as address:
        makers = [replica._maker for replica in handle.replicas]
        yield address, handle, makers
        for maker in makers:
            maker.go.set()


@pytest.mark.filterwarnings("ignore:The Sora API:DeprecationWarning")
def test_replicas_generate_videos_at_a_time(filming):
    address, _, makers = filming
    client = client_of(address)
    begun = [client.videos.create(prompt="a red heart", extra_body={"seed": 3}) for _ in range(3)]
    wait_for(lambda: [maker.begun for maker in makers] == [1, 1])
    with pytest.raises(openai.BadRequestError, match="film does not generate"):
        client.videos.create(prompt="a", size="9x9")
    for maker in makers:
        maker.go.set()
    ended = [client.videos.poll(video.id, poll_interval_ms=20) for video in begun]
    assert [video.status for video in ended] == ["completed"] * 3
    contents = [client.videos.download_content(video.id).content for video in ended]
    assert len({*contents}) == 1 and sum(maker.begun for maker in makers) == 3


@pytest.mark.filterwarnings("ignore:The Sora API:DeprecationWarning")
def test_a_video_goes_to_another_replica_when_one_ends(filming, monkeypatch):
    address, handle, makers = filming
    client, generate = client_of(address), Replica.generate_video
    ends = [ActorDiedError] * 2

    async def ending(self, request):
        if ends:
            raise ends.pop()
        async for one in generate(self, request):
            yield one

    monkeypatch.setattr(Replica, "generate_video", ending)
    for maker in makers:
        maker.go.set()
    assert client.videos.create_and_poll(prompt="a", poll_interval_ms=20).status == "completed" and not ends
    ends += [ActorDiedError] * ATTEMPTS
    video = client.videos.create_and_poll(prompt="a", poll_interval_ms=20)
    assert video.status == "failed" and "try again later" in video.error.message


def processes(name: str) -> list[psutil.Process]:
    """The processes of the replicas of an application."""
    found = [process for process in psutil.process_iter(["cmdline"]) if process.info["cmdline"]]
    lines = [(process, " ".join(process.info["cmdline"])) for process in found]
    return [process for process, line in lines if line.startswith("ray::") and "Replica" in line and name in line]


@pytest.mark.slow
def test_two_replicas_answer_all_of_fifty_requests_although_one_is_killed(tmp_path):
    tiny_llamagen.text_pipeline().save_pretrained(tmp_path / "text")
    port = free_port()
    command = [sys.executable, "-m", "arimage", "serve", "--model", "emoji-arpg", "--model", str(tmp_path / "text")]
    command += ["--replicas", "2", "--device", "cpu", "--port", str(port)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "RAY_worker_niceness": "0"}
    environment.pop("RAY_ADDRESS", None)
    with open(tmp_path / "log", "w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
    address = f"http://127.0.0.1:{port}"

    def healthy() -> bool:
        assert server.poll() is None, (tmp_path / "log").read_text()
        try:
            return httpx.get(f"{address}/health").status_code == 200
        except httpx.ConnectError:
            return False

    def images() -> dict[str, float]:
        """The number of images of each replica."""
        text = httpx.get(f"{address}/metrics", timeout=60).text
        found = re.findall(r'^arimage_images_total\{model="[^"]*",replica="(\w+)"\} (\S+)$', text, re.MULTILINE)
        return {name: sum(float(count) for other, count in found if other == name) for name, _ in found}

    def ask(number: int) -> httpx.Response:
        """One of fifty requests, of which every tenth is a stream."""
        body = {"model": "emoji-arpg", "prompt": "a red heart", "seed": number % 2}
        more = {"stream": True, "partial_images": 1} if number % 10 == 9 else {"response_format": "url"}
        return httpx.post(f"{address}/v1/images/generations", json={**body, **more}, timeout=600)

    wait_for(healthy, 600, 0.5)
    before = images()
    assert len(before) == 2
    with ThreadPoolExecutor(50) as pool:
        asked = [pool.submit(ask, number) for number in range(50)]
        wait_for(lambda: sum(answer.done() for answer in asked) >= 4, 600)
        processes(application_name(port))[0].kill()
        # None hangs.
        answers = [answer.result(600) for answer in asked]
    urls = []
    for number, answer in enumerate(answers):
        assert answer.status_code == 200
        if number % 10 == 9:
            assert "event: image_generation.completed" in answer.text and "event: error" not in answer.text
        else:
            urls.append((number % 2, answer.json()["data"][0]["url"]))
    assert len(urls) == 45
    # A seed gives the same image on both, and every url holds.
    by_seed = {}
    for seed, url in urls:
        by_seed.setdefault(seed, []).append(picture(httpx.get(url).raise_for_status().content))
    assert all(same(image, found[0]) for found in by_seed.values() for image in found)
    text = (tmp_path / "log").read_text()
    assert text.count("a replica has ended: others generate its requests") == 1 and "Traceback" not in text
    # Another replica has begun.
    wait_for(lambda: len(images()) == 2 and not images().keys() <= before.keys(), 600, 0.5)
    with ThreadPoolExecutor(50) as pool:
        again = list(pool.map(lambda _: client_of(address).images.generate(model="text", prompt="a"), range(50)))
    assert all(answer.data for answer in again) and all(count > 0 for count in images().values())
    server.send_signal(signal.SIGINT)
    assert server.wait(120) == 0, (tmp_path / "log").read_text()
    wait_for(lambda: processes(application_name(port)) == [])
