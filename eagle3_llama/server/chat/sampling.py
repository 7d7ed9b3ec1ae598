"""The fields of a body that say how tokens are sampled, as arguments of text.CompletionCall."""

from __future__ import annotations

import functools
from typing import Any

from ...llama.chat import is_end
from ..api.fields import Sampling
from ..settings import ServerSettings
from ..web.errors import wrong

NEVER = -1e9  # a bias with which a token comes only where a grammar allows no other
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

    def of(self, body: Sampling, max_tokens: int | None, default: int | None) -> dict[str, Any]:
        """max_tokens: what the body has instead of a field of this name. Raises ApiError 400."""
        out = {name: value for name in _SAME if (value := getattr(body, name)) is not None}
        if body.repetition_penalty is not None:
            if body.repeat_penalty not in (None, body.repetition_penalty):
                raise wrong("repetition_penalty", "it differs from repeat_penalty; give only one of them")
            out["repeat_penalty"] = body.repetition_penalty
        if out.get("temperature", 1) < 1e-3:
            out["temperature"] = 0.0  # logits divided by a smaller number overflow
        # an answer that is cut short by `most` ends with finish_reason "length"
        out["max_tokens"] = min(max_tokens or body.max_tokens or default or self._most, self._most)
        out["stop"] = [body.stop] if isinstance(body.stop, str) else body.stop or []
        if bias := self._bias(body):
            out["logit_bias"] = bias
        return out

    def _bias(self, body: Sampling) -> dict[int, float]:
        bias = {int(token): value for token, value in (body.logit_bias or {}).items()}
        if max(bias, default=0) >= self.n_vocab:
            message = f"it has the token id {max(bias)}; the model's token ids are 0..{self.n_vocab - 1}"
            raise wrong("logit_bias", message)
        return bias | dict.fromkeys(self._ends if body.ignore_eos else (), NEVER)

    @functools.cached_property
    def _ends(self) -> list[int]:
        return [token for token in range(self.n_vocab) if is_end(self._base, token)]
