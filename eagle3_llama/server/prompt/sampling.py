"""The fields of a body that say how tokens are sampled, as arguments of text.CompletionCall."""

from __future__ import annotations

import collections
import functools
import itertools
import secrets
from typing import Any

from ...llama.chat import is_end
from ..body.fields import NEVER, Sampling
from ..errors import wrong
from ..settings import ServerSettings

_SAME = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "typical_p",
    "repeat_penalty",
    "presence_penalty",
    "frequency_penalty",
    "mirostat_mode",
    "mirostat_tau",
    "mirostat_eta",
)


class SamplingFields:
    """Reads these fields, for one model. base: a Llama with its vocabulary."""

    def __init__(self, settings: ServerSettings, base: Any) -> None:
        self._base, self._most, self.n_vocab = base, settings.most_tokens, base.n_vocab()
        self._settings = settings

    def seed(self, body: Sampling) -> int:
        """The request's seed, the server's, or a random one. Choice i is generated with seed + i."""
        given = self._settings.seed if body.seed is None else body.seed
        random = body.seed in body.random_seeds or (body.seed is None and given == -1)
        return secrets.randbits(31) if random else given

    def slot(self, body: Sampling) -> int | None:
        """The slot that the request waits for. Raises ApiError 400 for one that is not there."""
        most = self._settings.n_parallel - 1
        if body.id_slot in (None, -1):
            return None
        if body.id_slot > most:
            raise wrong("id_slot", f"it is {body.id_slot}; this server has the slots 0..{most}, -1 is any")
        return body.id_slot

    def of(self, body: Sampling, max_tokens: int | None, default: int | None) -> dict[str, Any]:
        """max_tokens: what the body has instead of a field of this name. Raises ApiError 400."""
        if body.n_predict == -1:
            default = None
        elif self._settings.n_predict != -1:
            default = self._settings.n_predict
        out = {name: value for name in _SAME if (value := getattr(body, name)) is not None}
        if body.repetition_penalty is not None:
            if body.repeat_penalty not in (None, body.repetition_penalty):
                raise wrong("repetition_penalty", "it differs from repeat_penalty; give only one of them")
            out["repeat_penalty"] = body.repetition_penalty
        if self._settings.temp is not None:
            out.setdefault("temperature", self._settings.temp)
        if out.get("temperature", 1) < 1e-3:
            out["temperature"] = 0.0  # logits divided by a smaller number overflow
        # an answer that is cut short by `most` ends with finish_reason "length"
        out["max_tokens"] = min(max_tokens or body.max_tokens or default or self._most, self._most)
        out["stop"] = [body.stop] if isinstance(body.stop, str) else body.stop or []
        if bias := self._bias(body):
            out["logit_bias"] = bias
        return out

    def _bias(self, body: Sampling) -> dict[int, float]:
        bias: dict[int, float] = collections.defaultdict(float)  # llama.cpp adds up several of a token
        for key, value in body.biases():
            for token in [key] if isinstance(key, int) else self._tokens(key):
                bias[token] += NEVER if value is False else value
        if max(bias, default=0) >= self.n_vocab:
            message = f"it has the token id {max(bias)}; the model's token ids are 0..{self.n_vocab - 1}"
            raise wrong("logit_bias", message)
        return dict(bias) | dict.fromkeys(self._ends if body.ignore_eos else (), NEVER)

    def ids(self, pieces: list[Any]) -> list[int]:
        """A prompt of token ids, or of ids and texts, as ids. A text at its beginning may get a BOS token."""
        texts = (i for i, piece in enumerate(pieces) if isinstance(piece, str))
        made = {i: self._tokens(pieces[i], i == 0, True) for i in texts}
        return (
            list(itertools.chain.from_iterable(made.get(i, [p]) for i, p in enumerate(pieces)))
            if made
            else pieces
        )

    def _tokens(self, text: str, begins: bool = False, special: bool = False) -> list[int]:
        with self._base.tokenizing:
            return self._base.tokenize(text.encode(), add_bos=begins, special=special)

    @functools.cached_property
    def _ends(self) -> list[int]:
        return [token for token in range(self.n_vocab) if is_end(self._base, token)]
