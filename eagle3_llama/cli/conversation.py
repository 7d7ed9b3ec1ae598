"""Answers in the terminal, and `eagle3-llama chat`, where neither a full context nor Ctrl-C ends the chat."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jinja2
from rich.console import Console
from rich.text import Text

from ..errors import EagleError, ErrorKind
from ..llama.chat import chat_tokens, stream, styled_counts

Messages = list[dict[str, str]]
ENDED = "[ended; during an answer, Ctrl-C stops only the answer]"


def answer(
    llm: Any,
    prompt: list[int],
    n_predict: int,
    console: Console,
    stop: Callable[[], bool] = lambda: False,
    **sampling: Any,
) -> str:
    """Prints an answer and then its statistics. Returns the text of the answer.

    The answer has at most n_predict tokens, or fewer if the context has no room for them.
    """
    llm.stats.reset()
    tokens, _ = stream(llm, prompt, min(n_predict, llm.n_ctx() - len(prompt)), console, stop, **sampling)
    s, out = llm.stats, Console(stderr=True, highlight=False)
    line = Text(f"[{s.tokens} tokens, {s.tokens_per_second:.1f}/s")
    if s.drafted:
        line += Text(f", {s.mean_accepted_length:.2f} tokens per round, accepted: ") + styled_counts(s, out)
    out.print(line + Text("]"), style="dim", soft_wrap=True)
    return llm.detokenize(tokens).decode("utf-8", "replace")


def say(line: str) -> None:
    """Prints a line to stderr, because it is not part of the answer."""
    Console(stderr=True, highlight=False).print(line, style="dim", markup=False, soft_wrap=True)


def converse(llm: Any, n_predict: int, system: str | None, console: Console, **sampling: Any) -> None:
    """Reads messages and answers them until an empty line, the end of the input, or Ctrl-C."""
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
    """Answers the last message. Returns the messages with the answer, or without the last one on failure."""
    try:
        kept, prompt = fit(llm, messages, n_predict)
        if kept is not messages:
            oldest = f"the oldest {len(messages) - len(kept)} messages are left out from now on"
            say(f"[the context of {llm.n_ctx()} tokens is full: {oldest}]")
        with _ctrl_c() as pressed:
            text = answer(llm, prompt, n_predict, console, lambda: bool(pressed), **sampling)
    except (EagleError, ValueError, jinja2.TemplateError) as e:
        say(f"error: {e}; the conversation continues without this message")
        return messages[:-1]
    except KeyboardInterrupt:  # Ctrl-C twice, before the next token gave a chance to stop
        llm.reset()
        say("\n[stopped; the conversation continues without this message]")
        return messages[:-1]
    if pressed:
        say("[stopped]")
    return [*kept, {"role": "assistant", "content": text}]


def fit(llm: Any, messages: Messages, n_predict: int) -> tuple[Messages, list[int]]:
    """(messages, their tokens), without the oldest messages if an answer would not fit into the context.

    The room for an answer is n_predict tokens, or a quarter of the context if that is less. A system message
    is always kept. Raises EagleError BAD_ARGUMENT if the last message alone is too long.
    """
    n_ctx, kept = llm.n_ctx(), messages
    room = min(n_predict, n_ctx // 4)
    while len(prompt := chat_tokens(llm, kept)) + room > n_ctx:
        first = int(kept[0]["role"] == "system")
        if len(kept) - first < 3:
            raise EagleError(
                ErrorKind.BAD_ARGUMENT,
                f"the prompt of this message has {len(prompt)} tokens, but the context has {n_ctx}, "
                f"{room} of them for the answer: shorten it, or start with a larger --n-ctx",
            )
        kept = [*kept[:first], *kept[first + 2 :]]
    return kept, prompt


@contextlib.contextmanager
def _ctrl_c() -> Iterator[list[int]]:
    """Records the first Ctrl-C in the list, because a round may be running. The second one raises."""
    pressed: list[int] = []

    def note(number: int, frame: Any) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(number)

    if threading.current_thread() is not threading.main_thread():  # only it can handle signals
        yield pressed
        return
    before = signal.signal(signal.SIGINT, note)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)
