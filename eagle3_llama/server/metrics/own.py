"""Prometheus metrics of HTTP requests, of the engine (read at each scrape) and of the process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ..jobs.job import RequestJob
from .vllm import VllmNames

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FIRST = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
EACH = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.25, 1)
_COUNTERS = {
    "rounds": "rounds, counted for each slot",
    "tokens": "generated tokens",
    "prompt_tokens": "prompt tokens that the target decoded",
    "reused_tokens": "prompt tokens that were not decoded again, of all kinds",
    "copied_tokens": "those of them that were copied from another slot",
    "restored_tokens": "those of them that came from the prompt cache",
    "saved_texts": "texts of slots that the prompt cache took",
    "drafts": "drafts: rounds of a slot with draft tokens",
    "drafted": "draft tokens",
    "accepted": "accepted draft tokens",
    "failures": "requests that failed in the engine",
}
_GAUGES = {
    "slots_busy": "slots in use",
    "waiting": "requests that wait for a slot",
    "kv_used": "used cells of the KV cache",
    "kv_size": "cells of the KV cache",
    "rows": "rows of the target's last batch",
    "prompt_cache_bytes": "bytes of the texts in the prompt cache",
    "prompt_cache_texts": "texts in the prompt cache",
}
_PLANNER = {
    "rate": "tokens/s that the planner expects with drafting",
    "plain_rate": "tokens/s that the planner expects from plain decoding",
    "trust": "factor on the expected acceptance rate, from the last tokens of slot 0",
    "asleep": "rounds of plain decoding until the planner tries a draft again",
}


class Metrics:
    """The metrics of one application, in their own registry. model: a label of all except process metrics."""

    def __init__(self, batcher: Any, model: str) -> None:
        self._model, self.registry = model, CollectorRegistry(auto_describe=False)
        made = lambda kind, name, about, labels, **more: kind(
            f"eagle3_{name}", about, ["model", *labels], registry=self.registry, **more
        )
        timed = lambda name, about, buckets: made(Histogram, name, about, [], buckets=buckets).labels(model)
        self._requests = made(Counter, "requests", "HTTP requests", ["route", "status"])
        about = "tokens of each API key's requests: prompt, completion"
        self._clients = made(Counter, "client_tokens", about, ["client", "kind"])
        about = "from the request to the end of the answer"
        self._seconds = made(Histogram, "request_seconds", about, ["route"], buckets=FIRST)
        theirs = self._vllm = VllmNames(batcher, model, self.registry, FIRST, EACH)
        about = "from the request to a choice's first token, or to the choice's end if it has no token"
        self._first = timed("time_to_first_token_seconds", about, FIRST), theirs.first
        about = "mean time per token of a choice, without its first token"
        self._each = timed("time_per_token_seconds", about, EACH), theirs.each
        about = "wait for a slot, or until a choice ended without a slot"
        self._queued = timed("queue_seconds", about, FIRST), theirs.queued
        self.registry.register(_Engine(batcher, model))
        ProcessCollector(registry=self.registry)

    def count(self, route: str, status: int, seconds: float, job: RequestJob | None) -> None:
        """Counts a finished request. Cancelled choices count too, so that overload is visible."""
        self._requests.labels(self._model, route, str(status)).inc()
        self._seconds.labels(self._model, route).observe(seconds)
        if job is None:
            return
        if job.client:
            self._count_client(job)
        waits, timings = job.waits(), [t for t in job.timings.values() if t["tokens"] > 1]
        observed = [
            (self._queued, [w["queued"] for w in waits]),
            (self._first, [w["first"] for w in waits]),
            (self._each, [t["generation"] / (t["tokens"] - 1) for t in timings]),
        ]
        for histograms, values in observed:
            for histogram in histograms:
                for value in values:
                    histogram.observe(value)
        self._vllm.count(status, seconds, job)

    def _count_client(self, job: RequestJob) -> None:
        spent = job.spent()
        n = job.prompt_tokens(), sum(used.completion for used in spent)
        for kind, tokens in zip(("prompt", "completion"), n):
            self._clients.labels(self._model, job.client, kind).inc(tokens)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format. Reads the engine's counters."""
        return generate_latest(self.registry)


class _Engine:
    """batcher.snapshot() as metrics."""

    def __init__(self, batcher: Any, model: str) -> None:
        self._batcher, self._model = batcher, model

    def describe(self) -> list[Metric]:
        return []  # registering must not read the engine's counters

    def collect(self) -> Iterator[Metric]:
        s = self._batcher.snapshot()
        for name, about in _COUNTERS.items():
            yield self._one(CounterMetricFamily, f"eagle3_{name}", about, s.get(name, 0))
        for name, about in (("drafted_at", "drafts that reach it"), ("accepted_at", "accepted draft tokens")):
            family = CounterMetricFamily(
                f"eagle3_{name}", f"{about}, by position in the draft", labels=["model", "position"]
            )
            for i, n in enumerate(s.get(name, ()), 1):
                family.add_metric([self._model, str(i)], n)
            yield family
        for name, about in (("drafted_from", "draft tokens"), ("accepted_from", "accepted draft tokens")):
            about += ", by who offered them: one source alone, such as head or text, or both"
            family = CounterMetricFamily(f"eagle3_{name}", about, labels=["model", "source"])
            for source, n in s.get(name, {}).items():
                family.add_metric([self._model, source], n)
            yield family
        for prefix, names, values in (("", _GAUGES, s), ("planner_", _PLANNER, s.get("planner") or {})):
            for name, about in names.items():
                if name in values:
                    yield self._one(GaugeMetricFamily, f"eagle3_{prefix}{name}", about, values[name])

    def _one(self, family: Any, name: str, about: str, value: float) -> Metric:
        out = family(name, about, labels=["model"])
        out.add_metric([self._model], value)
        return out
