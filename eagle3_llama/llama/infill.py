"""Fill in the middle: the prompt for the text between a prompt and a `suffix`.

llama-cpp-python puts token 0 where the vocabulary's tokens for it belong. The order of the parts is that of
llama.cpp's server (format_prompt_infill in tools/server).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..errors import EagleError, ErrorKind
from ..runtime.binding import llama_cpp

if TYPE_CHECKING:
    from llama_cpp import Llama

_MARK = "☺"  # before a suffix, so that SentencePiece's blank stands before it


def infill_tokens(llm: Llama) -> list[int]:
    """The vocabulary's tokens before the prefix, the suffix and the middle; -1 for one that it lacks."""
    tokens = (llama_cpp.llama_vocab_fim_pre, llama_cpp.llama_vocab_fim_suf, llama_cpp.llama_vocab_fim_mid)
    return [of(llm._model.vocab) for of in tokens]


def can_infill(llm: Llama) -> bool:
    """True if the vocabulary has these tokens."""
    return min(infill_tokens(llm)) >= 0


def infill_prompt(llm: Llama, prompt: str | list[int], suffix: str) -> list[int]:
    """The token ids that ask for the text between prompt and suffix.

    Raises EagleError UNSUPPORTED if the vocabulary has no tokens for that.
    """
    pre, suf, mid = infill_tokens(llm)
    if not can_infill(llm):
        message = (
            "this model cannot fill in the middle (its vocabulary has no tokens for it): leave suffix out"
        )
        raise EagleError(ErrorKind.UNSUPPORTED, message)

    def plain(text: str) -> list[int]:
        return llm.tokenize(text.encode(), add_bos=False, special=False) if text else []

    before = [pre, *(plain(prompt) if isinstance(prompt, str) else prompt)]
    mark = plain(_MARK)
    marked = plain(_MARK + suffix)
    joins = marked[: len(mark)] != mark  # then a token has the mark's end and the suffix's beginning
    after = [suf, *(plain(suffix) if joins else marked[len(mark) :])]
    begin = [llm.token_bos()] if llm._model.add_bos_token() and llm.token_bos() >= 0 else []
    return begin + (after + before if llm.spm_infill else before + after) + [mid]


def echoed_logprobs() -> EagleError:
    """The error of a completion that wants both, beside a suffix."""
    message = "echo with logprobs and a suffix is not possible: leave one of them out"
    return EagleError(ErrorKind.BAD_ARGUMENT, message)


class Infill:
    """A completion with `suffix`. arguments: those of _create_completion; here those without the suffix.

    Where the model has no tokens for it, an empty suffix changes nothing.
    """

    def __init__(self, llm: Llama, arguments: dict[str, Any]) -> None:
        prompt = arguments["prompt"]
        suffix = arguments["suffix"]
        echo = arguments.get("echo")
        if echo and arguments.get("logprobs") is not None:
            raise echoed_logprobs()
        self.arguments = {**arguments, "suffix": None}
        self._echoed = ""
        self._shift = 0
        if not suffix and not can_infill(llm):
            return
        tokens = infill_prompt(llm, prompt, suffix)
        self.arguments |= {"prompt": tokens, "echo": False}
        self._echoed = prompt if echo and not arguments.get("stream") else ""
        self._shift = len(prompt) - len(tokens)  # llama-cpp-python's offsets begin at the prompt's length

    def items(self, steps: Iterator[Any]) -> Iterator[Any]:
        """The items of the completion with these arguments, as they would be with a suffix."""
        for item in steps:
            choice = item["choices"][0]
            choice["text"] = self._echoed + choice["text"]
            if logprobs := choice.get("logprobs"):
                logprobs["text_offset"] = [at + self._shift for at in logprobs["text_offset"]]
            yield item
