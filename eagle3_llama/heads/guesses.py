"""A head's predictions on a text for several choices of target layers. The target reads the text once."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from ..errors import EagleError, ErrorKind
from ..llama.chat import chat_tokens
from ..llama.eagle_llama import EagleLlama
from ..runtime.binding import address, llama_cpp
from ..runtime.capture import Capture
from ..runtime.engine import Engine
from ..runtime.machine import cores
from .convert.target import read_target

LONGEST = 512  # tokens: the rest of a longer passage is not read
TEXTS = Path(__file__).parents[1] / "data" / "self_test.txt"


@dataclass(frozen=True)
class Passage:
    """Token ids of a question and its answer. The first n_prompt are the question."""

    tokens: list[int]
    n_prompt: int


def stored_texts() -> list[tuple[str, str]]:
    """(question, answer) pairs: prose, code, lists, dialogue, arithmetic, repetition."""
    parts = re.split(r"^=== (.*)\n\n", TEXTS.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    return [(question, answer.strip()) for question, answer in zip(parts[::2], parts[1::2])]


class Reader:
    """A target and a head, opened once. layers: the head's own. n_layer: the target's.

    others: further heads, which guess with these layers too; those that cannot be opened are left out.
    Raises EagleError as loading a model does.
    """

    def __init__(
        self,
        head: str | Path,
        target: str | Path,
        n_threads: int | None = None,
        others: Mapping[str, Path] = MappingProxyType({}),
    ) -> None:
        self.target, self.n_layer = Path(target), read_target(Path(target)).n_layer
        n = n_threads or cores()  # more threads help, because nothing here is decoded token by token
        self.llm = EagleLlama(
            str(target), n_ctx=LONGEST, n_batch=LONGEST, n_threads=n, n_threads_batch=n, verbose=False
        )
        try:
            self._ctx = address(self.llm._ctx.ctx)
            self.engine = Engine(self._ctx, address(self.llm._model.model), str(head))
        except EagleError:
            self.llm.close()
            raise
        self.engine.set_capture(False)  # _read captures the layers that the choices need
        info: Any = self.engine.head.info()
        self.layers: list[int] = info["layers"]
        self.d2t = self.engine.head.d2t()
        self.others: dict[str, Engine] = {}
        for name, path in others.items():
            with contextlib.suppress(EagleError):
                self.others[name] = Engine(self._ctx, address(self.llm._model.model), str(path))
                self.others[name].set_capture(False)

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: Any) -> None:
        for engine in (*self.others.values(), self.engine):
            engine.close()
        self.llm.close()

    def built_in(self) -> list[Passage]:
        """The stored texts as conversations in this target's chat format."""
        found = []
        for question, answer in stored_texts():
            prompt = chat_tokens(self.llm, question)
            found.append(Passage([*prompt, *self.llm.tokenize(answer.encode(), add_bos=False)], len(prompt)))
        return found

    def guesses(
        self, passage: Passage, choices: list[list[int]]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(answers, hits, likelihoods) at the positions that count.

        answers: the target's next token, [positions]. hits: whether it is the head's most likely token,
        [choices + others, positions]. likelihoods: the mean log-likelihood in nats that the head gives to the
        target's next token, of the same shape.

        A position counts if the token before it belongs to the answer and is the one that the target would
        have chosen, because drafts start only from such tokens. A token outside the draft vocabulary is never
        a hit and adds nothing to a likelihood, with any layers.
        """
        guessing = [(self.engine, layers) for layers in choices]
        guessing += [(engine, self.layers) for engine in self.others.values()]
        tokens, ids = passage.tokens[:LONGEST], sorted({i for _, layers in guessing for i in layers})
        if len(tokens) < 2:
            raise EagleError(ErrorKind.BAD_ARGUMENT, "a passage needs at least two tokens")
        features, logits = self._read(tokens, ids)
        best, last = logits.argmax(axis=1), np.array(tokens[1:])
        rows = np.flatnonzero(last == best[:-1])  # row p: token p + 1, inputs of p; predicts best[p + 1]
        rows = rows[rows >= passage.n_prompt - 1]
        probabilities, answers = _softmax(logits[rows + 1])[:, self.d2t], best[rows + 1]
        hits = np.empty((len(guessing), len(rows)), bool)
        likelihoods = np.empty(hits.shape)
        for i, (engine, layers) in enumerate(guessing):
            guess = engine.head.forward(last, features[:-1, [ids.index(k) for k in layers]])[2][rows]
            hits[i] = self.d2t[guess.argmax(axis=1)] == answers
            likelihoods[i] = (probabilities * _log_softmax(guess)).sum(axis=1, dtype=np.float64)
        return answers, hits, likelihoods

    def _read(self, tokens: list[int], layers: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """The layer inputs, [n, layers, n_embd], and the logits, [n, n_vocab]. Valid until the next call."""
        n = len(tokens)
        self.engine.rewind(0)
        with Capture(self._ctx, layers, self.llm.n_embd()) as capture:
            try:
                self.engine.prefill(tokens, all_logits=True)
                features = capture.read(n)
            except EagleError as e:
                if e.kind is not ErrorKind.DECODE:
                    raise
                raise EagleError(
                    ErrorKind.UNSUPPORTED,
                    f"cannot capture the inputs of layers {layers} of {self.target}, so no head can draft "
                    f"for it: {e}",
                ) from e
        if not np.isfinite(features).all():
            raise EagleError(ErrorKind.BAD_VALUE, f"{self.target} has layer inputs that are not finite")
        logits = llama_cpp.llama_get_logits(self.llm._ctx.ctx)
        return features, np.ctypeslib.as_array(logits, shape=(n, self.llm.n_vocab()))


def _log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def _softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)
