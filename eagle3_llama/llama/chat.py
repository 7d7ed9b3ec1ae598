"""Prompts in a model's own chat template, and answers in a terminal with coloured draft tokens."""

from __future__ import annotations

import codecs
import contextlib
import time
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from ..runtime.stats import EagleStats

if TYPE_CHECKING:
    from llama_cpp import Llama

# Who drafted a token -> how a terminal shows it. Not by colour alone, which not everybody can tell apart.
STYLES = {
    "target": "",
    "head": "green bold",
    "text": "cyan underline",
    "grammar": "blue italic underline",
    "both": "magenta bold underline",
}
OTHER_STYLE = "yellow italic"  # for sources that have no style of their own


def chat_tokens(llm: Llama, messages: list[dict[str, str]] | str) -> list[int]:
    """Token ids of a conversation (or of one user message) in the chat template of the target's GGUF.

    Without a template, the text of the messages is used as it is.
    """
    from llama_cpp.llama_chat_format import Jinja2ChatFormatter

    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    template = llm.metadata.get("tokenizer.chat_template")
    if template is None:
        return llm.tokenize("\n".join(m["content"] for m in messages).encode())

    def text(token: int) -> str:
        return llm._model.token_get_text(token) if token != -1 else ""

    bos = text(llm.token_bos())
    prompt = Jinja2ChatFormatter(template, eos_token=text(llm.token_eos()), bos_token=bos)(
        messages=messages  # type: ignore[arg-type]  # plain dicts
    ).prompt
    return llm.tokenize(
        prompt.encode(),
        add_bos=not (bos and prompt.startswith(bos)) and bool(llm._model.add_bos_token()),
        special=True,
    )


def has_template(llm: Llama) -> bool:
    """True if the GGUF has a chat template. Base models have none."""
    return "tokenizer.chat_template" in llm.metadata


def is_end(llm: Llama, token: int) -> bool:
    """True if a token ends generation."""
    import llama_cpp

    return bool(llama_cpp.llama_vocab_is_eog(llm._model.vocab, token))


def generate(llm: Llama, prompt: list[int], n_predict: int, **sampling: Any) -> Generator[int, None, None]:
    """At most n_predict tokens of an answer, without the end-of-generation token."""
    from .generation import GeneratingLlama

    if isinstance(llm, GeneratingLlama):
        sampling["max_tokens"] = n_predict
    with contextlib.closing(llm.generate(prompt, **sampling)) as tokens:
        for n, token in enumerate(tokens, 1):
            if is_end(llm, token):
                return
            yield token
            if n >= n_predict:
                return


def style_of(source: str, console: Console) -> str:
    """The style of a source, none on a terminal without colours, where text stays as it is."""
    return "" if console.no_color else STYLES.get(source, OTHER_STYLE)


def styled_counts(stats: EagleStats, console: Console) -> Text:
    """How many draft tokens of each source were accepted, each source in its style: a legend too."""
    parts = [
        Text.assemble((name, style_of(name, console)), f" {stats.accepted_from.get(name, 0)} of {n}")
        for name, n in stats.drafted_from.items()
        if n
    ]
    return Text(", ").join(parts)


class Printer:
    """Prints tokens as they come. The bytes of one character may be split over several tokens."""

    def __init__(self, console: Console, llm: Llama) -> None:
        self.console = console
        self.llm = llm
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._before: list[int] = []

    def write(self, token: int, source: str = "target") -> str:
        """Prints a token in the style of who drafted it, and returns its text."""
        text = self._decoder.decode(self.llm.detokenize([token], prev_tokens=self._before or None))
        self._before = [*self._before[-8:], token]
        self.console.print(Text(text, style=style_of(source, self.console)), end="", soft_wrap=True)
        return text


def stream(
    llm: Llama,
    prompt: list[int],
    n_predict: int,
    console: Console,
    stop: Callable[[], bool] = lambda: False,
    **sampling: Any,
) -> tuple[list[int], float]:
    """Generates and prints until stop(). Returns the tokens, and the seconds from the first to the last."""
    printer = Printer(console, llm)
    tokens = []
    start = 0.0
    with contextlib.closing(generate(llm, prompt, n_predict, **sampling)) as answer:
        for token in answer:
            start = start or time.perf_counter()
            tokens.append(token)
            printer.write(token, getattr(llm, "draft_source", "target"))
            if stop():
                break
    console.print()
    return tokens, time.perf_counter() - start
