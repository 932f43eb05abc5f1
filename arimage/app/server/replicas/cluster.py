"""Starts and ends replicas on a cluster of Ray, or on this machine."""

import logging
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ....cli.options import parse_lora
from ....pipelines.saving.saved_folder import local_folder
from ...engine.adapters import split_adapters
from ...engine.types import Limits
from .replica import AHEAD, Replica, ReplicaSettings
from .replicas import RemoteVideos, Replicas


# How often Serve looks whether a replica is alive, in seconds. It replaces one that has ended.
HEALTH_SECONDS = 2
# How long a replica that is taken away may take to finish its images, in seconds.
FINISHING_SECONDS = 600


@contextmanager
def run_replicas(settings: ReplicaSettings, least: int, most: int, name: str) -> Iterator[Replicas]:
    """Start replicas on the cluster at RAY_ADDRESS, or on this machine, and end them afterwards. Each has its own GPU,
    or on the CPU its share of this process's threads.

    Args:
        least, most: how many there are; Serve adds replicas up to `most` while each has more requests than fit its
            batch, and takes them away again when they are idle.
        name: the name of the application in Serve. It replaces one with the same name.

    Raises:
        ValueError: if Ray Serve is not installed, this machine has too few GPUs or cores, or no replica starts.
    """
    # Ray reads these when it is imported. By default it reports its usage, and waits 0.1 seconds for the length of a
    # replica's queue; an engine on the CPU may keep its process from answering for longer.
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ.setdefault("RAY_SERVE_QUEUE_LENGTH_RESPONSE_DEADLINE_S", "1")
    try:
        import ray
        from ray import serve
    except ImportError as error:
        raise ValueError("--replicas needs Ray Serve: pip install 'arimage[ray-serve]'") from error

    # It warns of every request that waits for a replica.
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    on_cluster = "RAY_ADDRESS" in os.environ
    device = _start_ray(settings.device, most, on_cluster)
    stopped = threading.Event()
    try:
        # An error of a replica is raised below. On a cluster, the controller warns that replicas wait for machines.
        level = "WARNING" if on_cluster else "CRITICAL"
        serve.start(proxy_location="Disabled", logging_config={"log_level": level})
        application = deployment_of(settings.limits, device, least, most).bind(_for_workers(settings, device))
        try:
            handle = serve.run(application, name=name, route_prefix=None)
        except RuntimeError as error:
            *_, last = serve.status().applications[name].deployments[Replica.__name__].message.splitlines()
            raise ValueError(last.removeprefix("ValueError: ")) from error
        models, videos = handle.describe.remote().result()
        running, streams = AHEAD * settings.limits.batch * most, handle.options(stream=True)
        maker = RemoteVideos(streams, videos, settings.limits, most) if videos else None
        replicas = Replicas(streams, models, settings.limits, running, maker)
        threading.Thread(target=_watch, args=(replicas, stopped), daemon=True).start()
        yield replicas
    finally:
        stopped.set()
        if on_cluster:
            serve.delete(name)
        ray.shutdown()


def _start_ray(device: str | None, most: int, on_cluster: bool) -> str:
    """Join a cluster, or start Ray on this machine. Returns what the replicas run on, "cuda" or "cpu".

    Raises:
        ValueError: if this machine has too few GPUs or cores for `most` replicas.
    """
    import ray

    if on_cluster:
        ray.init(logging_level=logging.ERROR)
        gpus = int(ray.cluster_resources().get("GPU", 0))
    else:
        gpus = torch.cuda.device_count()
    on_gpu = device == "cuda" or (device is None and gpus > 0)
    if not on_cluster:
        found, what = (gpus, "GPUs") if on_gpu else (os.cpu_count() or 1, "CPU cores")
        if found < most:
            raise ValueError(
                f"--replicas asks for {most} {what}, and this machine has {found}: ask for fewer, or set RAY_ADDRESS "
                "to a cluster's"
            )
        ray.init("local", logging_level=logging.ERROR, include_dashboard=False)
    return "cuda" if on_gpu else "cpu"


def _watch(replicas: Replicas, stopped: threading.Event) -> None:
    """End the server when Ray's process on this machine has ended: no replica would be sent a request or started."""
    import ray

    own = ray.get_runtime_context().get_node_id()
    while not stopped.wait(HEALTH_SECONDS):
        if not any(node["NodeID"] == own and node["Alive"] for node in ray.nodes()):
            replicas.fail(RuntimeError("Ray has ended on this machine: start again"))
            return


def deployment_of(limits: Limits, device: str, least: int, most: int) -> Any:
    """Serve's deployment of `least` to `most` replicas on "cpu" or "cuda"."""
    from ray import serve

    count: dict[str, Any] = {"num_replicas": least}
    if least < most:
        bounds = {"min_replicas": least, "max_replicas": most, "target_ongoing_requests": limits.batch}
        count = {"autoscaling_config": bounds}
    threads = max(torch.get_num_threads() // most, 1)
    return serve.deployment(
        Replica,
        **count,
        ray_actor_options={"num_gpus": 1} if device == "cuda" else {"num_cpus": threads},
        max_ongoing_requests=AHEAD * limits.batch,
        # An error of the models is the same in every replica.
        max_constructor_retry_count=1,
        health_check_period_s=HEALTH_SECONDS,
        graceful_shutdown_timeout_s=FINISHING_SECONDS,
        logging_config={"log_level": "WARNING", "enable_access_log": False},
    )


def _for_workers(settings: ReplicaSettings, device: str) -> ReplicaSettings:
    """The settings with absolute paths, since other processes may have another working directory."""

    def model(name: str) -> str:
        folder = local_folder(name)
        return name if folder is None else str(folder.resolve())

    def adapter(text: str) -> str:
        source, scale = parse_lora(text)
        return f"{Path(source).resolve()}:{scale}" if Path(source).exists() else text

    always, named = split_adapters(settings.lora or [])
    lora = [*map(adapter, always), *(f"{name}={adapter(text)}" for name, text in named.items())]
    models = [model(name) for name in settings.models or []]
    return replace(settings, device=device, models=models or None, lora=lora or None)


def application_name(address: int | Path) -> str:
    """The name in Serve of the server on this machine and port, or Unix socket."""
    own = str(address) if isinstance(address, int) else "-".join(address.resolve().parts[1:])
    return f"arimage-{socket.gethostname()}-{own}"
