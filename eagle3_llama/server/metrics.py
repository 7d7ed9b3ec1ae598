"""Prometheus metrics: HTTP's own, the engine's counters as they stand when asked, the process's; and vLLM's names for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from .generation import Job
from .metrics_vllm import VllmNames

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FIRST = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
EACH = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.25, 1)
_COUNTERS = {
    "rounds": "rounds of a slot",
    "tokens": "tokens generated",
    "prompt_tokens": "prompt tokens evaluated",
    "reused_tokens": "prompt tokens found in a slot",
    "drafts": "rounds in which a slot drafted",
    "drafted": "tokens drafted",
    "accepted": "drafted tokens accepted",
    "failures": "requests that the engine failed",
}
_GAUGES = {
    "slots_busy": "slots that a request holds",
    "waiting": "requests waiting for a slot",
    "kv_used": "cells of the KV cache in use",
    "kv_size": "cells of the KV cache",
    "rows": "rows of the last round's target batch",
}
_PLANNER = {
    "rate": "tokens/s that the planner expects of drafting",
    "plain_rate": "tokens/s that it expects without",
    "trust": "its trust in the head",
    "asleep": "rounds that it rests for",
}


class Metrics:
    """A registry of one application: several fit into a process. model: the label of all but the process's own."""

    def __init__(self, batcher: Any, model: str) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        here = {"registry": self.registry}
        self._model = model
        self._requests = Counter("eagle3_requests", "HTTP requests", ["model", "route", "status"], **here)
        self._seconds = Histogram(
            "eagle3_request_seconds",
            "from a request to the end of its answer",
            ["model", "route"],
            buckets=FIRST,
            **here,
        )
        self._vllm = VllmNames(batcher, model, self.registry, FIRST, EACH)
        both = lambda name, theirs, about, buckets: (
            Histogram(name, about, ["model"], buckets=buckets, **here).labels(model),
            theirs,
        )
        self._first = both(
            "eagle3_time_to_first_token_seconds",
            self._vllm.first,
            "from a choice's request to its first token, or to its end without any",
            FIRST,
        )
        self._each = both(
            "eagle3_time_per_token_seconds",
            self._vllm.each,
            "of the tokens after the first, mean of a choice",
            EACH,
        )
        self._queued = both(
            "eagle3_queue_seconds",
            self._vllm.queued,
            "wait for a slot, or until a choice ended without one",
            FIRST,
        )
        self.registry.register(_Engine(batcher, model))
        ProcessCollector(registry=self.registry)

    def count(self, route: str, status: int, seconds: float, job: Job | None) -> None:
        """One request that is over; its choices count however far they came, or overload would look like ease."""
        self._requests.labels(self._model, route, str(status)).inc()
        self._seconds.labels(self._model, route).observe(seconds)
        if job is None:
            return
        waits = job.waits()
        observed = [
            (self._queued, [w["queued"] for w in waits]),
            (self._first, [w["first"] for w in waits]),
            (
                self._each,
                [t["generation"] / (t["tokens"] - 1) for t in job.timings.values() if t["tokens"] > 1],
            ),
        ]
        for histograms, values in observed:
            for histogram in histograms:
                for value in values:
                    histogram.observe(value)
        self._vllm.count(status, seconds, job)

    def text(self) -> bytes:
        """The exposition format; asks the engine for its counters."""
        return generate_latest(self.registry)


class _Engine:
    """batcher.snapshot() as metrics."""

    def __init__(self, batcher: Any, model: str) -> None:
        self._batcher, self._model = batcher, model

    def describe(self) -> list[Metric]:
        return []  # nothing is asked of the engine before it is scraped

    def collect(self) -> Iterator[Metric]:
        s = self._batcher.snapshot()
        for name, about in _COUNTERS.items():
            yield self._one(CounterMetricFamily, f"eagle3_{name}", about, s.get(name, 0))
        for name, about in (("drafted_at", "tokens drafted"), ("accepted_at", "drafted tokens accepted")):
            family = CounterMetricFamily(
                f"eagle3_{name}", f"{about}, by position in the draft", labels=["model", "position"]
            )
            for i, n in enumerate(s.get(name, ()), 1):
                family.add_metric([self._model, str(i)], n)
            yield family
        for prefix, names, values in (("", _GAUGES, s), ("planner_", _PLANNER, s.get("planner") or {})):
            for name, about in names.items():
                if name in values:
                    yield self._one(GaugeMetricFamily, f"eagle3_{prefix}{name}", about, values[name])

    def _one(self, family: Any, name: str, about: str, value: float) -> Metric:
        out = family(name, about, labels=["model"])
        out.add_metric([self._model], value)
        return out
