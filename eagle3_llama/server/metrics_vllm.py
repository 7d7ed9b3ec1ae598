"""The same numbers under vLLM's names, so that its dashboards work: https://docs.vllm.ai/en/stable/usage/metrics.html"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from .generation import Job

_LABELS = ("model_name", "engine")
_COUNTERS = {
    "prompt_tokens": "prompt tokens",
    "generation_tokens": "tokens generated",
    "prefix_cache_queries": "prompt tokens looked for in slots",
    "prefix_cache_hits": "prompt tokens found there",
    "spec_decode_num_drafts": "drafts",
    "spec_decode_num_draft_tokens": "tokens drafted",
    "spec_decode_num_accepted_tokens": "drafted tokens accepted",
}
_GAUGES = {
    "num_requests_running": "requests that hold a slot",
    "num_requests_waiting": "requests that wait for one",
    "kv_cache_usage_perc": "share of the KV cache in use, 0..1",
}


class VllmNames:
    """A collector of the engine's counters, and histograms of choices: first, queued and each, which are filled with ours. Positions
    count from 0, as vLLM's do."""

    def __init__(
        self,
        batcher: Any,
        model: str,
        registry: CollectorRegistry,
        seconds: Sequence[float],
        of_a_token: Sequence[float],
    ) -> None:
        self._batcher, self._values = batcher, (model, "0")
        make = lambda name, about, buckets: Histogram(
            f"vllm:{name}", about, _LABELS, buckets=buckets, registry=registry
        ).labels(*self._values)
        self.first = make(
            "time_to_first_token_seconds",
            "from a request to its first token, or to its end without any",
            seconds,
        )
        self.queued = make(
            "request_queue_time_seconds", "wait for a slot, or until the request ended without one", seconds
        )
        self._whole = make("e2e_request_latency_seconds", "from a request to the end of its answer", seconds)
        self.each = make(
            "request_time_per_output_token_seconds",
            "of the tokens after the first, mean of a request",
            of_a_token,
        )
        self._ended = Counter(
            "vllm:request_success",
            "requests that were answered",
            [*_LABELS, "finished_reason"],
            registry=registry,
        )
        registry.register(self)

    def count(self, status: int, seconds: float, job: Job) -> None:
        """One request that is over."""
        self._whole.observe(seconds)
        for reason in job.reasons.values() if status == 200 else ():
            self._ended.labels(*self._values, reason).inc()

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        s = self._batcher.snapshot()
        prompt = s["prompt_tokens"] + s["reused_tokens"]
        values = {
            "prompt_tokens": prompt,
            "generation_tokens": s["tokens"],
            "prefix_cache_queries": prompt,
            "prefix_cache_hits": s["reused_tokens"],
            "spec_decode_num_drafts": s["drafts"],
            "spec_decode_num_draft_tokens": s["drafted"],
            "spec_decode_num_accepted_tokens": s["accepted"],
            "num_requests_running": s["slots_busy"],
            "num_requests_waiting": s["waiting"],
            "kv_cache_usage_perc": s["kv_used"] / s["kv_size"],
        }
        for kind, names in ((CounterMetricFamily, _COUNTERS), (GaugeMetricFamily, _GAUGES)):
            for name, about in names.items():
                family = kind(f"vllm:{name}", about, labels=_LABELS)
                family.add_metric(self._values, values[name])
                yield family
        at = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "drafted tokens accepted, by position",
            labels=[*_LABELS, "position"],
        )
        for i, n in enumerate(s["accepted_at"]):
            at.add_metric([*self._values, str(i)], n)
        yield at
