"""The metrics of the server: those of the requests, which it counts itself, and those of the engines behind it."""

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest

from ..engine.engine import Engine


# Bounds of histograms, in seconds.
SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class RequestMetrics:
    """Counts requests for images and videos, as the server sees them. The label `model` is empty for requests that
    were refused before it was known."""

    def __init__(self):
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "arimage_requests", "Requests for images, by status.", ["status", "model"], registry=self.registry
        )
        self.seconds = self._histogram("arimage_request_seconds", "From a request's head to the end of its answer.")
        self.first_partial = self._histogram(
            "arimage_first_partial_image_seconds", "From a request's body to its first partial image."
        )
        self.videos = Counter("arimage_videos", "Videos, by status.", ["status", "model"], registry=self.registry)
        self.video_seconds = self._histogram(
            "arimage_video_seconds", "From a request for a video to the end of its generation."
        )

    def count_video(self, status: str, model: str, seconds: float) -> None:
        """Count a video that has ended."""
        self.videos.labels(status, model).inc()
        self.video_seconds.labels(model).observe(seconds)

    def watch_videos(self, waiting: Callable[[], int]) -> None:
        """Show the number of videos that wait or are being generated."""
        gauge = Gauge("arimage_unfinished_videos", "Videos that wait or are being generated.", registry=self.registry)
        gauge.set_function(waiting)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(name, text, ["model"], buckets=SECONDS, registry=self.registry)


class EngineMetrics:
    """Counters and histograms of an engine."""

    def __init__(self, engine: Engine):
        self._registry = CollectorRegistry()
        labels: Any = {"labelnames": ["model"], "registry": self._registry}
        self._images = Counter("arimage_images", "Images generated.", **labels)
        self._batch = Histogram(
            "arimage_batch_images", "Images per forward pass.", buckets=range(1, engine.limits.batch + 1), **labels
        )
        self._passes = Counter("arimage_forward_passes", "Forward passes.", **labels)
        self._tokens = Counter("arimage_tokens", "Tokens decided.", **labels)
        self._queue = Histogram("arimage_queue_seconds", "How long requests waited.", buckets=SECONDS, **labels)
        queue = Gauge("arimage_queue_length", "Waiting requests.", registry=self._registry)
        queue.set_function(lambda: engine.waiting)
        # They begin at zero.
        for metric in (self._images, self._batch, self._passes, self._tokens, self._queue):
            for model in engine.models:
                metric.labels(model)
        engine.on_begin, engine.on_pass = self._observe_begin, self._observe_pass
        engine.on_images = self._observe_images

    def collect(self) -> list[Metric]:
        """The metrics at this moment."""
        return list(self._registry.collect())

    def _observe_begin(self, model: str, seconds: float) -> None:
        self._queue.labels(model).observe(seconds)

    def _observe_pass(self, model: str, images: int) -> None:
        self._batch.labels(model).observe(images)
        self._passes.labels(model).inc()

    def _observe_images(self, model: str, images: int, tokens: int) -> None:
        self._images.labels(model).inc(images)
        self._tokens.labels(model).inc(tokens)


def exposition(metrics: Iterable[Metric]) -> bytes:
    """The text that Prometheus reads."""
    return generate_latest(SimpleNamespace(collect=lambda: metrics))  # pyright: ignore[reportArgumentType]


def merge(metrics_by_replica: dict[str, list[Metric]]) -> list[Metric]:
    """The metrics of several engines, told apart by the label `replica`."""
    merged: dict[str, Metric] = {}
    for replica, metrics in metrics_by_replica.items():
        for metric in metrics:
            family = merged.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
            for sample in metric.samples:
                family.samples.append(sample._replace(labels={**sample.labels, "replica": replica}))
    return list(merged.values())
