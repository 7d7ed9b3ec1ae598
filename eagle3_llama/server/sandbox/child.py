"""The child process of pool.py: renders chat templates, reads answers, converts schemas, checks grammars."""

from __future__ import annotations

import ctypes
import os
import random
import re
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from ...common.loaded_files import check_same
from ...common.sampling_budget import SamplingBudget
from ...errors import EagleError, ErrorKind
from ...runtime import library
from . import chat_library
from .answers import UNKNOWN
from .pool import RECEIVED, receive, send

MAX_PROMPT = 8_000_000  # characters of a rendered prompt
MAX_GBNF = 1_000_000  # characters of a grammar made from a schema or tools: 60 take GLM's template 204,500
MEMORY = 1 << 30  # bytes that the child may allocate after its start
STACK = 1 << 21  # bytes; a quarter of what threads usually have
CHAT_STACK = 1 << 26  # bytes, for templates and answers, which nest deeper, and are read nowhere else
SYNTAXES = 8  # forms of answers that a child keeps
STEPS = 8  # tokens of the random walk through a grammar
STUCK = "the grammar reaches a place where it allows no token of this model"


def main() -> None:
    """Answers requests from stdin until stdin ends. The first message says what to load."""
    pipe_in, pipe_out = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print must not mix with the answers
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's handler waits for the end of a native call
    setup = receive(pipe_in)
    send(pipe_out, RECEIVED)
    try:
        library.load()
        worker, stack = _worker(setup)
        handlers = worker.handlers()
        _limit(stack)
    except Exception as e:
        send(pipe_out, {"cannot": f"{type(e).__name__}: {e!s:.300}"})
        return
    send(pipe_out, {"result": "ready", "seconds": time.process_time()})
    while True:
        try:
            request = receive(pipe_in)
        except EOFError:
            return
        send(pipe_out, RECEIVED)
        signal.alarm(int(setup["seconds"]) + 2)  # ends this process even if the parent has died
        began = time.process_time()
        answer = _answer(handlers, request)
        send(pipe_out, {**answer, "seconds": time.process_time() - began})
        signal.alarm(0)


def _worker(setup: dict[str, Any]) -> tuple[Any, int]:
    """The function that answers the requests, and the bytes of stack that it may take."""
    if "templates" in setup:
        return Templates(setup["templates"]), CHAT_STACK
    if "answers" in setup:
        return Answers(), CHAT_STACK
    check_same(setup.get("files", ()))  # another model's vocabulary would allow other texts
    return Grammars(setup["model"]), STACK


def _answer(handlers: dict[str, Callable[..., Any]], request: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"result": handlers[request.pop("do")](**request)}
    except Exception as e:
        return {"error": f"{type(e).__name__ if not str(e) else str(e)!s:.300}"}


def _limit(stack: int = STACK) -> None:
    with open("/proc/self/statm" if os.path.exists("/proc/self/statm") else os.devnull) as f:
        pages = f.read().split()
    if pages:
        most = int(pages[0]) * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    # The parser of grammars recurses. What passes here has a multiple of this stack in the server's threads.
    most = resource.getrlimit(resource.RLIMIT_STACK)[1]
    stack = stack if most == resource.RLIM_INFINITY else min(stack, most)
    resource.setrlimit(resource.RLIMIT_STACK, (stack, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))


class Templates:
    """Renders the model's chat templates. setup: the texts template, tool_use (or None), bos and eos."""

    def __init__(self, setup: dict[str, Any]) -> None:
        self._setup = setup
        self._opened: dict[str, chat_library.ChatTemplate] = {}

    def handlers(self) -> dict[str, Callable[..., Any]]:
        return {"apply": self.apply}

    def apply(self, **request: Any) -> dict[str, Any]:
        """See ChatTemplate.apply. The templates are parsed with the first request: then it is what fails."""
        made = self._template(bool(request.get("tools"))).apply(request)
        if len(made["prompt"]) > MAX_PROMPT:
            raise ValueError(f"the prompt has {len(made['prompt'])} characters, more than {MAX_PROMPT}")
        _check_size(made["forced"] or made["grammar"])
        return made

    def _template(self, tools: bool) -> chat_library.ChatTemplate:
        name = "tool_use" if tools and self._setup.get("tool_use") else "template"
        if name not in self._opened:
            text, bos, eos = (self._setup[key] for key in (name, "bos", "eos"))
            self._opened[name] = chat_library.ChatTemplate(text, bos, eos)
        return self._opened[name]


class Answers:
    """Reads what models have written. It keeps the last syntaxes, which may be 450 KB each."""

    def __init__(self) -> None:
        self._known: dict[str, dict[str, Any]] = {}  # by the names that the parent gave them

    def handlers(self) -> dict[str, Callable[..., Any]]:
        return {"parse": self.parse}

    def parse(
        self, name: str, text: str, partial: bool, syntax: dict[str, Any] | None = None
    ) -> dict[str, Any] | None:
        """See chat_library.parse. None for a text that is no answer: it harms nobody.

        syntax: None if an earlier request had it under this name; if that is long ago, the answer is UNKNOWN.
        """
        syntax = syntax or self._known.pop(name, None)
        if syntax is None:
            return UNKNOWN
        self._known[name] = syntax  # the last one is the newest
        if len(self._known) > SYNTAXES:
            del self._known[next(iter(self._known))]
        try:
            return chat_library.parse(syntax, text, partial)
        except chat_library.WrongOutput:
            return None


def _check_size(grammar: str) -> None:
    if len(grammar) > MAX_GBNF:
        raise ValueError(f"its grammar has {len(grammar)} characters, more than {MAX_GBNF}")


class Grammars:
    """Converts and checks grammars for a model's vocabulary."""

    def __init__(self, model: str, now: Callable[[], float] = time.process_time) -> None:
        import llama_cpp

        self.llama, self.now = llama_cpp, now
        params = llama_cpp.llama_model_default_params()
        params.vocab_only = True
        self.model = llama_cpp.llama_model_load_from_file(model.encode(), params)
        if not self.model:
            raise EagleError(ErrorKind.BAD_FILE, f"llama.cpp cannot read the vocabulary of {model}")
        self.vocab = llama_cpp.llama_model_get_vocab(self.model)
        self.n_vocab = llama_cpp.llama_vocab_n_tokens(self.vocab)

    def handlers(self) -> dict[str, Callable[..., Any]]:
        return {"check": self.check, "read": self.read, "convert": self.convert}

    def convert(self, text: str) -> dict[str, Any]:
        """The checked grammar of a JSON schema, and what it does not enforce. Raises ValueError."""
        try:
            made = chat_library.schema(text)
        except chat_library.ChatError as e:
            raise ValueError(f"cannot convert it to a grammar: {e!s:.300}") from e
        _check_size(made["grammar"])
        self.check(made["grammar"])
        return made

    def read(self, text: str) -> None:
        """Parses a grammar that the chat library has made. Raises ValueError if llama.cpp refuses it."""
        _check_size(text)
        self.llama.llama_sampler_free(self._sampler(text))

    def _sampler(self, text: str) -> Any:
        sampler, message = self._logged(
            lambda: self.llama.llama_sampler_init_grammar(self.vocab, text.encode(), b"root")
        )
        if not sampler:
            reason = message or "it has left recursion, or no rule with the name root"
            raise ValueError(f"the grammar is invalid: {reason}")
        return sampler

    def check(self, text: str) -> None:
        """Parses a grammar and samples a few tokens of it.

        Raises ValueError if the grammar is invalid, allows no token within these few, or takes longer than
        the batcher lets it. A grammar that llama.cpp cannot process crashes or blocks this process. One that
        gets stuck or slow later fails its request.
        """
        sampler, message = self._sampler(text), ""
        rng, budget = random.Random(0), SamplingBudget(self.n_vocab)
        for _ in range(STEPS):
            began = self.now()
            allowed, message = self._logged(lambda: self._allowed(sampler))
            budget.spend(self.now() - began, 1)
            token = rng.choice(allowed) if allowed else None
            if token is None or self.llama.llama_vocab_is_eog(self.vocab, token):
                break
            self.llama.llama_sampler_accept(sampler, token)
        self.llama.llama_sampler_free(sampler)
        if token is None:
            raise ValueError(message or STUCK)

    def _allowed(self, sampler: Any) -> list[int]:
        import numpy as np

        data = (self.llama.llama_token_data * self.n_vocab)()
        array = self.llama.llama_token_data_array(data=data, size=self.n_vocab, selected=-1, sorted=False)
        view = np.frombuffer(data, dtype=np.dtype([("id", "i4"), ("logit", "f4"), ("p", "f4")]))
        view["id"], view["logit"] = np.arange(self.n_vocab), 0
        self.llama.llama_sampler_apply(sampler, ctypes.byref(array))
        return np.flatnonzero(np.isfinite(view["logit"])).tolist()

    @staticmethod
    def _logged(call: Callable[[], Any]) -> tuple[Any, str]:
        """A call's result, and the first line of what llama.cpp wrote meanwhile: its error message."""
        with tempfile.TemporaryFile() as f:
            saved = os.dup(2)
            os.dup2(f.fileno(), 2)
            try:
                result = call()
            finally:
                os.dup2(saved, 2)
                os.close(saved)
            f.seek(0)
            line = f.read(2000).decode("utf-8", "replace").partition("\n")[0]
        return result, re.sub(r"^(\w+: )?(error parsing grammar: )?", "", line)[:200]
