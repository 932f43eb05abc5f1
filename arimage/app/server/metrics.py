"""The metrics of the server: those of the requests, which it counts itself, and those of the engines behind it."""

from collections.abc import Iterable
from types import SimpleNamespace

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest

from ..engine.engine import Engine


class RequestMetrics:
    """Counts requests for images, as the gate of the server sees them."""

    def __init__(self):
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "arimage_requests", "Requests for images, by status.", ["status"], registry=self.registry
        )
        self.seconds = Histogram(
            "arimage_request_seconds",
            "From a request's head to the end of its answer.",
            buckets=(0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300),
            registry=self.registry,
        )


class EngineMetrics:
    """Counters and histograms of an engine."""

    def __init__(self, engine: Engine):
        self._registry = CollectorRegistry()
        self._images = Counter("arimage_images", "Images generated.", registry=self._registry)
        self._batch = Histogram(
            "arimage_batch_images",
            "Images per forward pass.",
            buckets=range(1, engine.limits.batch + 1),
            registry=self._registry,
        )
        self._passes = Counter("arimage_forward_passes", "Forward passes.", registry=self._registry)
        self._tokens = Counter("arimage_tokens", "Tokens decided.", registry=self._registry)
        queue = Gauge("arimage_queue_length", "Waiting requests.", registry=self._registry)
        queue.set_function(lambda: engine.waiting)
        engine.on_pass, engine.on_images = self._observe_pass, self._observe_images

    def collect(self) -> list[Metric]:
        """The metrics at this moment."""
        return list(self._registry.collect())

    def _observe_pass(self, images: int) -> None:
        self._batch.observe(images)
        self._passes.inc()

    def _observe_images(self, images: int, tokens: int) -> None:
        self._images.inc(images)
        self._tokens.inc(tokens)


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
