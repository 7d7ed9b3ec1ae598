"""The process of stock.py: llama-cpp-python as its users have it. It imports nothing of this package.

    stock_child.py SETTINGS    path, n_threads, n_ctx, flash_attn, lookup: whether it drafts by prompt lookup

It says {"library": PATH}, then reads requests and answers each, a line of JSON each. A request has prompt,
n_predict, sampling, seed, num_pred_tokens, and again: whether the KV cache of the same prompt may be used.
An answer has tokens without the end of generation, seconds from the first token to the last, and the index
of each round's first token with the draft tokens until then. What fails is answered with {"error": ...}.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, TextIO


class Counting:
    """The same as in eagle3_llama/bench/turns.py."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.rounds, self.drafted = inner, 0, 0

    def __call__(self, ids: Any, **kwargs: Any) -> Any:
        draft = self.inner(ids, **kwargs)
        self.rounds += 1
        self.drafted += len(draft)
        return draft


def load(settings: dict[str, Any]) -> Any:
    """A llama_cpp.Llama. flash_attn None is llama.cpp's choice, which Llama itself cannot leave to it."""
    import llama_cpp

    class Auto(llama_cpp.Llama):
        @property
        def context_params(self) -> Any:
            self._params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_AUTO
            return self._params

        @context_params.setter
        def context_params(self, params: Any) -> None:
            self._params = params

    flash, n_threads = settings["flash_attn"], settings["n_threads"]
    kind = Auto if flash is None else llama_cpp.Llama
    return kind(
        settings["path"],
        n_ctx=settings["n_ctx"],
        n_threads=n_threads,
        n_threads_batch=n_threads,
        flash_attn=bool(flash),
        # without it, llama-cpp-python keeps too few rows for a prompt of several batches and raises
        logits_all=settings["lookup"],
        verbose=False,
    )


def answer(llm: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Generates one answer with llama-cpp-python's own loop."""
    import llama_cpp
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    n_draft, counts = request["num_pred_tokens"], Counting(None)
    if n_draft is not None:
        counts.inner = LlamaPromptLookupDecoding(num_pred_tokens=n_draft)
        llm.draft_model = counts
    llm.set_seed(request["seed"])
    if not request["again"]:
        llm.reset()
    tokens, starts, start = list[int](), list[tuple[int, int]](), 0.0
    with contextlib.closing(llm.generate(request["prompt"], **request["sampling"])) as generated:
        for token in generated:
            start = start or time.perf_counter()
            if llama_cpp.llama_vocab_is_eog(llm._model.vocab, token):
                break
            if counts.rounds > len(starts):
                starts.append((len(tokens), counts.drafted))
            tokens.append(token)
            if len(tokens) >= request["n_predict"]:
                break
    return {"tokens": tokens, "seconds": time.perf_counter() - start, "starts": starts}


def say(out: TextIO, what: dict[str, Any]) -> None:
    out.write(json.dumps(what) + "\n")
    out.flush()


def main() -> None:
    # what the library or Python prints goes to the log, not between the answers
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    here = Path(__file__).resolve().parent  # its files have names that other modules may have
    sys.path[:] = [path for path in sys.path if not path or Path(path).resolve() != here]
    try:
        llm = load(json.loads(sys.argv[1]))
        from llama_cpp import llama_cpp

        say(out, {"library": llama_cpp._lib._name})
        for line in sys.stdin:
            say(out, answer(llm, json.loads(line)))
    except Exception as e:
        say(out, {"error": f"{type(e).__name__}: {e}"})


if __name__ == "__main__":
    main()
