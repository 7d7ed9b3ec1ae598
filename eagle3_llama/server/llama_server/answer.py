"""Answers of POST /completion, in the form of llama.cpp's server, whole or in a stream."""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import BaseModel

from ..body.fields import NEVER
from ..body.samplers import LAST_N
from ..http.shapes import event, finite
from ..http.stream import EventStream
from ..jobs.job import Event
from .body import LlamaBody

# llama.cpp's names of what this server does not have, with the values that turn it off
_OFF: dict[str, Any] = {
    "dynatemp_range": 0.0,
    "dynatemp_exponent": 1.0,
    "top_n_sigma": -1.0,
    "xtc_probability": 0.0,
    "xtc_threshold": 0.1,
    "dry_multiplier": 0.0,
    "dry_base": 1.75,
    "dry_allowed_length": 2,
    "dry_penalty_last_n": -1,
    "dry_sequence_breakers": [],
    "adaptive_target": -1.0,
    "adaptive_decay": 0.9,
    "min_keep": 0,
    "n_keep": 0,
    "n_discard": 0,
    "grammar_lazy": False,
    "grammar_triggers": [],
    "preserved_tokens": [],
    "backend_sampling": False,
    "lora": [],
}
_DEFAULTS = {
    "temperature": 0.8,
    "top_k": 40,
    "top_p": 0.95,
    "min_p": 0.05,
    "typical_p": 1.0,
    "repeat_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "mirostat_tau": 5.0,
    "mirostat_eta": 0.1,
}


class LlamaCompletion(BaseModel):
    """Its `response_fields` choose among them. Several answers are a list."""

    index: int = 0
    content: str = ""
    tokens: list[int] = []
    id_slot: int = 0
    stop: bool = True
    model: str = ""
    tokens_predicted: int = 0
    tokens_evaluated: int = 0
    generation_settings: dict[str, Any] = {}
    prompt: str = ""
    has_new_line: bool = False
    truncated: bool = False
    stop_type: Literal["eos", "limit", "word"] = "limit"
    stopping_word: str = ""
    tokens_cached: int = 0
    timings: dict[str, float] = {}
    completion_probabilities: list[dict[str, Any]] = []


class LlamaShape:
    """The form of one answer, which may be several: a list, if the request asks for more than one.

    name: of the model.
    """

    def __init__(self, body: LlamaBody, name: str) -> None:
        self.head: dict[str, Any] = {}
        self._body, self._name = body, name

    def whole(self, parts: list[tuple[int, dict[str, Any]]], usage: dict[str, Any]) -> Any:
        """parts: (choice's index, completion)."""
        made = []
        for index, part in sorted(parts, key=lambda p: p[0]):
            choice, about = part["choices"][0], part["details"]
            answer = self._ended(
                index, part, choice["text"], about["tokens"] if self._body.return_tokens else []
            )
            made.append(self._chosen(answer | self._probabilities(choice)))
        return made[0] if len(made) == 1 else made

    def chunk(self, index: int, chunk: dict[str, Any]) -> dict[str, Any]:
        """A chunk of choice `index` for a stream. The last one of each choice has `stop: true`."""
        choice, about = chunk["choices"][0], chunk["details"]
        if choice["finish_reason"] is not None:
            return self._chosen(self._ended(index, chunk, "", about["tokens"]))
        out = {
            "index": index,
            "content": choice["text"],
            "tokens": about["tokens"],
            "stop": False,
            "id_slot": about["slot"],
            "tokens_predicted": about["n_told"],
            "tokens_evaluated": about["n_prompt"],
            **({"timings": chunk["timings"]} if "timings" in chunk else {}),
        }
        return out | self._probabilities(choice)

    def _ended(self, index: int, part: dict[str, Any], content: str, tokens: list[int]) -> dict[str, Any]:
        about = part["details"]
        return {
            "index": index,
            "content": content,
            "tokens": tokens,
            "id_slot": about["slot"],
            "stop": True,
            "model": self._name,
            "tokens_predicted": about["n_made"],
            "tokens_evaluated": about["n_prompt"],
            "generation_settings": self._settings(about["settings"], about["bias"]),
            "prompt": about["prompt"],
            **{name: about[name] for name in ("has_new_line", "truncated", "stop_type", "stopping_word")},
            "tokens_cached": about["n_prompt"] + max(about["n_made"] - 1, 0),
            "timings": part["timings"],
        }

    def _settings(self, used: dict[str, Any], biases: dict[int, float]) -> dict[str, Any]:
        """used: the seed, and arguments of Llama.generate(). biases: of tokens; null: it never comes."""
        body = self._body
        given = {("temperature" if name == "temp" else name): value for name, value in used.items()}
        stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
        bias = [{"token": token, "bias": value if value > NEVER else None} for token, value in biases.items()]
        return {
            **_OFF,
            **{name: given.get(name, value) for name, value in _DEFAULTS.items()},
            "seed": given["seed"],
            "n_predict": given["max_tokens"],
            "max_tokens": given["max_tokens"],
            "mirostat": given.get("mirostat_mode", 0),
            "repeat_last_n": LAST_N,
            "stop": stops,
            "ignore_eos": bool(body.ignore_eos),
            "stream": bool(body.stream),
            "logit_bias": bias,
            "n_probs": body.n_probs or 0,
            "grammar": body.grammar or "",
            "samplers": body.used(),
            "timings_per_token": bool(body.timings_per_token),
            "post_sampling_probs": bool(body.post_sampling_probs),
        }

    def _chosen(self, answer: dict[str, Any]) -> dict[str, Any]:
        """The fields that the request asks for, if it names any."""
        names = self._body.response_fields
        if not names:
            return answer
        found = ((name, _at(answer, name.split("/"))) for name in names)
        return {name: value for name, value in found if value is not None}

    def _probabilities(self, choice: dict[str, Any]) -> dict[str, Any]:
        if choice["logprobs"] is None:
            return {}
        after = bool(self._body.post_sampling_probs)
        own, n = choice["logprobs"], self._body.logprobs or 0
        pairs = zip(own["tokens"], own["token_logprobs"])
        made = [
            _probability(t.id, str(t), t.raw, p, after) | {_TOPS[after]: _tops(t, n, after)} for t, p in pairs
        ]
        return {"completion_probabilities": made}


_TOPS = {False: "top_logprobs", True: "top_probs"}


def _tops(token: Any, n: int, after: bool) -> list[dict[str, Any]]:
    return [_probability(i, text, raw, value, after) for i, text, raw, value in token.top()[:n]]


def _probability(token: int, text: str, raw: bytes, value: float | None, after: bool) -> dict[str, Any]:
    """after: as a probability, not as its logarithm. Without one, the first token of an echoed prompt."""
    number = value
    if value is not None:
        number = math.exp(value) if after else finite(value)
    return {"id": token, "token": text, "bytes": list(raw), "prob" if after else "logprob": number}


def _at(value: Any, path: list[str]) -> Any:
    for name in path:
        if not isinstance(value, dict) or name not in value:
            return None
        value = value[name]
    return value


class LlamaStream(EventStream):
    """The events of an answer. There is no [DONE]: the last event of each choice has `stop: true`."""

    def _frame(self, e: Event) -> bytes:
        out = self.shape.chunk(e.choice.index, e.chunk)
        if self.report:
            out["eagle"] = {"positions": e.positions, "sources": e.sources}
        return event(out)

    async def _end(self) -> bytes:
        return event(self._last()) if self.report else b""
