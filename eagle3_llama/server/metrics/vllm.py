"""The metrics under vLLM's names, for vLLM's dashboards: https://docs.vllm.ai/en/stable/usage/metrics.html"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ..jobs.job import RequestJob

_LABELS = ("model_name", "engine")
_COUNTERS = {
    "prompt_tokens": "prompt tokens",
    "generation_tokens": "generated tokens",
    "prefix_cache_queries": "prompt tokens looked up in the slots' KV cache",
    "prefix_cache_hits": "prompt tokens found in the slots' KV cache",
    "spec_decode_num_drafts": "drafts",
    "spec_decode_num_draft_tokens": "draft tokens",
    "spec_decode_num_accepted_tokens": "accepted draft tokens",
}
_GAUGES = {
    "num_requests_running": "requests in a slot",
    "num_requests_waiting": "requests that wait for a slot",
    "kv_cache_usage_perc": "used part of the KV cache, 0..1",
}


class VllmNames:
    """Collects the engine's counters. Metrics fills the histograms `first`, `queued` and `each`.

    Positions count from 0, as in vLLM.
    """

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
        about = "from the request to its first token, or to its end if it has no token"
        self.first = make("time_to_first_token_seconds", about, seconds)
        about = "wait for a slot, or until the request ended without a slot"
        self.queued = make("request_queue_time_seconds", about, seconds)
        self._whole = make(
            "e2e_request_latency_seconds", "from the request to the end of the answer", seconds
        )
        about = "mean time per token of a request, without its first token"
        self.each = make("request_time_per_output_token_seconds", about, of_a_token)
        labels = [*_LABELS, "finished_reason"]
        self._ended = Counter("vllm:request_success", "answered requests", labels, registry=registry)
        registry.register(self)

    def count(self, status: int, seconds: float, job: RequestJob) -> None:
        """Counts a finished request."""
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
            "accepted draft tokens, by position in the draft",
            labels=[*_LABELS, "position"],
        )
        for i, n in enumerate(s["accepted_at"]):
            at.add_metric([*self._values, str(i)], n)
        yield at
