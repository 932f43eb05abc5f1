"""The metrics of the server."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from ..engine.engine import Engine


class Metrics:
    """Counters and histograms for Prometheus."""

    def __init__(self, engine: Engine):
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
        self.images = Counter("arimage_images", "Images generated.", registry=self.registry)
        self.batch = Histogram(
            "arimage_batch_images",
            "Images per forward pass.",
            buckets=range(1, engine.limits.batch + 1),
            registry=self.registry,
        )
        self.passes = Counter("arimage_forward_passes", "Forward passes.", registry=self.registry)
        self.tokens = Counter("arimage_tokens", "Tokens decided.", registry=self.registry)
        queue = Gauge("arimage_queue_length", "Waiting requests.", registry=self.registry)
        queue.set_function(lambda: engine.waiting)

    def observe_pass(self, images: int) -> None:
        self.batch.observe(images)
        self.passes.inc()

    def observe_images(self, images: int, tokens: int) -> None:
        self.images.inc(images)
        self.tokens.inc(tokens)
