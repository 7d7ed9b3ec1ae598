"""The way of a token: prompt, round after round, and from each round token by token to the caller."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol

from ..errors import EagleError, ErrorKind
from ..runtime.round_tokens import RoundTokens
from .text import Logits, Text

Sent = Sequence[int] | None


@dataclasses.dataclass(frozen=True)
class Output:
    """The tokens of one round, or of several without a draft, with what their reader may see of the logits.

    logits: returns the row, float32 [n_vocab], that the i-th token was sampled from; None if it is not kept.
    """

    round: RoundTokens
    logits: Logits | None = None


class TokenSource(Protocol):
    """The source of a generation's tokens: LocalTokens, or a batcher's BatchTokens."""

    def prompt(self) -> Output | None:
        """Decodes the prompt and samples the first token. The text is the prompt afterwards."""

    def round(self) -> Output | None:
        """The tokens of the next round, or rounds; None at the end. The text is as it was before."""

    def go_on(self, tokens: Sequence[int]) -> Output:
        """In place of the rest of a round: decodes tokens after the text, and samples the next one."""

    def end(self) -> None:
        """Called once, wherever the generation stopped."""


def generate(
    begin: Callable[[], TokenSource], text: Text, stopping: Any, count: Callable[[Output, int], None]
) -> Generator[int, Sent, None]:
    """Yields the tokens of a generation. text always holds what precedes the token that is yielded.

    First the target decodes the prompt, and the sampler gives a token. Each round then drafts what may
    follow, decodes the last token with the drafts, verifies them in order, and commits what was accepted:
    Engine.round() does it, for this text or for those of a whole batch. It brings one token or more. Several
    rounds without a draft may come together, from Engine.run().

    stopping: Llama's stopping criteria, asked before each token. count(output, i) is called before the i-th
    token of an output is yielded. A caller may send tokens; the generation continues after them.
    """
    source = begin()
    try:
        output = source.prompt()
        last = None
        while output is not None:
            sent: Sent = None
            out = output.round
            for i, token in enumerate(out.tokens):
                if last is not None:
                    text.append(last)
                n = text.n_tokens
                text.draft_position = out.positions[i]
                text.draft_source = out.sources[i]
                scores = text.keep_row(n - 1, output.logits, i)
                if stopping is not None and stopping(text.ids, scores):
                    return
                count(output, i)
                last = token
                sent = yield token
                if text.n_tokens != n:
                    raise EagleError(
                        ErrorKind.CONTEXT_TAKEN,
                        f"this generation cannot continue: n_tokens was {n} at its last token and is"
                        f" {text.n_tokens} now",
                    )
                if sent:
                    break
            if sent and last is not None:
                output, last = source.go_on([last, *sent]), None
            else:
                output = source.round()
    finally:
        source.end()
