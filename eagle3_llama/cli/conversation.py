"""Answers on a terminal; `eagle3-llama chat`, a conversation that neither a full context nor Ctrl-C ends."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jinja2
from rich.console import Console

from ..errors import EagleError, ErrorKind
from ..llama.chat import chat_tokens, stream

Messages = list[dict[str, str]]
ENDED = "[ended; while an answer is written, Ctrl-C stops the answer alone]"


def answer(
    llm: Any,
    prompt: list[int],
    n_predict: int,
    console: Console,
    stop: Callable[[], bool] = lambda: False,
    **sampling: Any,
) -> str:
    """Prints an answer of at most n_predict tokens, or as many as there is room for, then its figures.

    Returns its text.
    """
    llm.stats.reset()
    tokens, _ = stream(llm, prompt, min(n_predict, llm.n_ctx() - len(prompt)), console, stop, **sampling)
    s = llm.stats
    drafts = f", {s.mean_accepted_length:.2f} tokens a round" if s.drafted else ""
    say(f"[{s.tokens} tokens, {s.tokens_per_second:.1f}/s{drafts}]")
    return llm.detokenize(tokens).decode("utf-8", "replace")


def say(line: str) -> None:
    """A line that is no part of the text."""
    Console(stderr=True, highlight=False).print(line, style="dim", markup=False, soft_wrap=True)


def converse(llm: Any, n_predict: int, system: str | None, console: Console, **sampling: Any) -> None:
    """Reads messages and answers them until there are none: an empty line, the end of input, Ctrl-C."""
    messages: Messages = [{"role": "system", "content": system}] if system else []
    while True:
        try:
            text = console.input("[bold]> [/bold]")
        except EOFError:
            return
        except KeyboardInterrupt:
            say("\n" + ENDED)
            return
        if not text.strip():
            return
        messages = _turn(llm, [*messages, {"role": "user", "content": text}], n_predict, console, **sampling)


def _turn(llm: Any, messages: Messages, n_predict: int, console: Console, **sampling: Any) -> Messages:
    """The conversation with an answer to its last message; without that message if it has none."""
    try:
        kept, prompt = fit(llm, messages, n_predict)
        if kept is not messages:
            oldest = f"the oldest {len(messages) - len(kept)} messages are left out from now on"
            say(f"[the context of {llm.n_ctx()} tokens is full: {oldest}]")
        with _ctrl_c() as pressed:
            text = answer(llm, prompt, n_predict, console, lambda: bool(pressed), **sampling)
    except (EagleError, ValueError, jinja2.TemplateError) as e:
        say(f"error: {e}; the conversation goes on without this message")
        return messages[:-1]
    except KeyboardInterrupt:  # pressed twice: between two tokens there was no time to stop
        llm.reset()
        say("\n[stopped; the conversation goes on without this message]")
        return messages[:-1]
    if pressed:
        say("[stopped]")
    return [*kept, {"role": "assistant", "content": text}]


def fit(llm: Any, messages: Messages, n_predict: int) -> tuple[Messages, list[int]]:
    """As much of the conversation's end as leaves room for an answer, and its tokens. A system message stays.

    Room is n_predict tokens, or a quarter of the context if that is less. Raises EagleError if the last
    message alone is too long.
    """
    n_ctx, kept = llm.n_ctx(), messages
    room = min(n_predict, n_ctx // 4)
    while len(prompt := chat_tokens(llm, kept)) + room > n_ctx:
        first = int(kept[0]["role"] == "system")
        if len(kept) - first < 3:
            raise EagleError(
                ErrorKind.BAD_ARGUMENT,
                f"the message makes a prompt of {len(prompt)} tokens, and the context has {n_ctx}, {room} of "
                "them for the answer: shorten it, or start with a larger --n-ctx",
            )
        kept = [*kept[:first], *kept[first + 2 :]]
    return kept, prompt


@contextlib.contextmanager
def _ctrl_c() -> Iterator[list[int]]:
    """Ctrl-C is noted in the list, for it may come in the middle of a round; the second one is raised."""
    pressed: list[int] = []

    def note(number: int, frame: Any) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(number)

    if threading.current_thread() is not threading.main_thread():  # signals are not its own
        yield pressed
        return
    before = signal.signal(signal.SIGINT, note)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)
