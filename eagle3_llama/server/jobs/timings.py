"""The times of a choice, under our names and under those of llama.cpp's server."""

from __future__ import annotations

from typing import Any


def timings_of(llm: Any) -> dict[str, float]:
    """The times of a request's generation, which may go on. llm: a RequestLlama."""
    times, used = llm.timings(), llm.used()
    own = {name: times[name] for name in ("queued", "prompt", "generation", "tokens")}
    out = {
        "cache_n": times["cached"],
        **_of("prompt", times["prompt_tokens"] - times["cached"], 1e3 * times["prompt"]),
        **_of("predicted", times["tokens"], 1e3 * times["generation"]),
    }
    drafts = {"draft_n": used.drafted, "draft_n_accepted": used.accepted} if used.drafted else {}
    return {**own, **out, **drafts}


def _of(name: str, n: float, ms: float) -> dict[str, float]:
    """A number of tokens, and the milliseconds that they took."""
    each = {f"{name}_per_token_ms": ms / n if n else 0.0, f"{name}_per_second": 1e3 * n / ms if ms else 0.0}
    return {f"{name}_n": n, f"{name}_ms": ms, **each}
