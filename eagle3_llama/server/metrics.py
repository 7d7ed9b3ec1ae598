"""Prometheus metrics: HTTP's own, and the engine's counters as they stand when asked."""

from __future__ import annotations

from typing import Any, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from .generation import Job

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_FIRST = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_EACH = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.25, 1)
_COUNTERS = {"rounds": "rounds of the engine", "tokens": "tokens generated", "prompt_tokens": "prompt tokens evaluated",
             "reused_tokens": "prompt tokens found in a slot", "drafted": "tokens drafted", "accepted": "drafted tokens accepted",
             "failures": "requests that the engine failed"}  # fmt: skip
_GAUGES = {"slots_busy": "slots that a request holds", "waiting": "requests waiting for a slot", "kv_used": "cells of the KV cache in use",
           "kv_size": "cells of the KV cache", "rows": "rows of the last round's target batch"}  # fmt: skip
_PLANNER = {"rate": "tokens/s that the planner expects of drafting", "plain_rate": "tokens/s that it expects without",
            "trust": "its trust in the head", "asleep": "rounds that it rests for"}  # fmt: skip


class Metrics:
    """A registry of one application: several fit into a process."""

    def __init__(self, batcher: Any) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        here = {"registry": self.registry}
        self._requests = Counter("eagle3_requests", "HTTP requests", ["route", "status"], **here)
        self._seconds = Histogram("eagle3_request_seconds", "from a request to the end of its answer", ["route"], buckets=_FIRST, **here)
        self._first = Histogram("eagle3_time_to_first_token_seconds", "from a choice's request to its first token", buckets=_FIRST, **here)
        self._each = Histogram("eagle3_time_per_token_seconds", "of the tokens after the first, mean of a choice", buckets=_EACH, **here)
        self._queued = Histogram("eagle3_queue_seconds", "wait for a slot", buckets=_FIRST, **here)
        self.registry.register(_Engine(batcher))

    def count(self, route: str, status: int, seconds: float, job: Job | None) -> None:
        """One request that is over."""
        self._requests.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)
        for t in () if job is None else job.timings.values():
            self._queued.observe(t["queued"])
            self._first.observe(t["queued"] + t["prompt"])
            if t["tokens"] > 1:
                self._each.observe(t["generation"] / (t["tokens"] - 1))

    def text(self) -> bytes:
        """The exposition format; asks the engine for its counters."""
        return generate_latest(self.registry)


class _Engine:
    """batcher.snapshot() as metrics."""

    def __init__(self, batcher: Any) -> None:
        self._batcher = batcher

    def describe(self) -> list[Metric]:
        return []  # nothing is asked of the engine before it is scraped

    def collect(self) -> Iterator[Metric]:
        s = self._batcher.snapshot()
        for name, about in _COUNTERS.items():
            yield CounterMetricFamily(f"eagle3_{name}", about, value=s.get(name, 0))
        for name, about in (("drafted_at", "tokens drafted"), ("accepted_at", "drafted tokens accepted")):
            family = CounterMetricFamily(f"eagle3_{name}", f"{about}, by position in the draft", labels=["position"])
            for i, n in enumerate(s.get(name, ()), 1):
                family.add_metric([str(i)], n)
            yield family
        for prefix, names, values in (("", _GAUGES, s), ("planner_", _PLANNER, s.get("planner") or {})):
            for name, about in names.items():
                if name in values:
                    yield GaugeMetricFamily(f"eagle3_{prefix}{name}", about, value=values[name])
