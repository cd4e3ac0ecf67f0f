"""Counts and times for Prometheus.

Owns the names of the metrics. Those of a model are in a registry of their own, so that several
models or servers in a process do not meet. Does not know what is counted when.
"""

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from depthmix.infer.depth import Depth
from depthmix.infer.results import Stats

FIRST_TOKEN_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1.0)
REQUEST_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Metrics:
    """Everything that is counted for a model, from any thread."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()

        def count(name: str, help_text: str, *labels: str) -> Counter:
            return Counter(f"depthmix_{name}", help_text, labels, registry=registry)

        def gauge(name: str, help_text: str) -> Gauge:
            return Gauge(f"depthmix_{name}", help_text, registry=registry)

        def time(name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(
                f"depthmix_{name}_seconds", help_text, registry=registry, buckets=buckets
            )

        self.requests = count("requests", "Requests by how they ended.", "endpoint", "outcome")
        self.first_token = time(
            "time_to_first_token", "From a request to a sample's first token.", FIRST_TOKEN_SECONDS
        )
        self.per_token = time(
            "time_per_output_token", "Mean of a sample, after its first token.", TOKEN_SECONDS
        )
        self.sample_time = time(
            "sample_duration", "From a request to a sample's end.", REQUEST_SECONDS
        )
        self.running = gauge("samples_running", "Samples that have a row.")
        self.waiting = gauge("samples_waiting", "Samples that wait for a row.")
        self.preempted = count("preemptions", "Samples that gave up their pages for an older one.")
        self.pages_used = gauge("cache_pages_used", "Pages of the cache in use.")
        self.pages = gauge("cache_pages", "All pages of the cache.")
        self.bytes_used = gauge("cache_bytes_used", "Bytes of the pages in use.")
        self.bytes = gauge("cache_bytes", "Bytes of all pages.")
        self.tokens_in = count("prompt_tokens", "Tokens of prompts.")
        self.tokens_out = count("generated_tokens", "Tokens that were generated.")
        self.executed = count("blocks_executed", "Blocks that were run, once for each token.")
        self.skipped = count("blocks_skipped", "Blocks that tokens skipped.")
        self.flops = count("flops", "FLOPs spent.")
        self.flops_saved = count("flops_saved", "FLOPs that a dense model would have spent.")
        self.failed_steps = count("failed_steps", "Steps of the engine that raised.")
        self._num_preempted = 0

    def show(self, stats: Stats, pages_used: int, num_pages: int) -> None:
        """Where the engine stands now."""
        self.running.set(stats.num_running)
        self.waiting.set(stats.num_waiting)
        self.preempted.inc(stats.num_preempted - self._num_preempted)
        self._num_preempted = stats.num_preempted
        self.pages_used.set(pages_used)
        self.pages.set(num_pages)
        self.bytes_used.set(stats.cache_bytes)
        self.bytes.set(stats.cache_bytes_total)

    def add_depth(self, depth: Depth) -> None:
        """What a sample used, now that it is done."""
        self.executed.inc(depth.num_visits)
        self.skipped.inc(depth.num_visits_dense - depth.num_visits)
        self.flops.inc(depth.flops)
        # routers cost something, so a model that skips nothing saves less than nothing
        self.flops_saved.inc(max(0, depth.dense_flops - depth.flops))


class _Joined(Collector):
    """The metrics of several models, each with its model's name as a label."""

    def __init__(self, named: Mapping[str, Metrics]) -> None:
        self.named = named

    def collect(self) -> Iterator[Metric]:
        joined: dict[str, Metric] = {}
        for name, metrics in self.named.items():
            for family in metrics.registry.collect():
                about = (family.name, family.documentation, family.type)
                whole = joined.setdefault(family.name, Metric(*about))
                whole.samples += [
                    sample._replace(labels={"model": name, **sample.labels})
                    for sample in family.samples
                ]
        yield from joined.values()


def write_metrics(named: Mapping[str, Metrics]) -> bytes:
    """The metrics of all models, by their names, in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(_Joined(named))
    return generate_latest(registry)
