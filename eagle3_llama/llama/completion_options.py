"""A completion's settings of its generation, besides the arguments of generate()."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(eq=False)
class CompletionOptions:
    """One for each completion. Its generation takes it with its first step.

    max_tokens: tokens that its caller takes, None if not known; it may take more, which are not drafted.
    ahead: it takes them all, up to one that ends generation, so that rounds may run before it has read those
    of the rounds before. ends: a full context ends the generation, and is no error. record: the logits that
    the generation keeps: none, last (the row that a token was sampled from), all (of the generated tokens),
    prompt (of the prompt too). over: the generation has ended.

    The rest is of a Batcher's requests. bias: by token id. n_top: how many of the most likely tokens it keeps
    of each row, None: no logprobs. echo: of the prompt's rows too. before (TopRow), writer (Logprobs): where
    it puts them. post_sampling: they are those that the samplers leave, see Candidates. thoughts (Thoughts):
    those that end, or that a lazy grammar waits for.
    """

    max_tokens: int | None = None
    ahead: bool = False
    ends: bool = False
    record: str = "none"
    over: bool = False
    bias: dict[int, float] = dataclasses.field(default_factory=dict)
    n_top: int | None = None
    echo: bool = False
    writer: Any = None
    before: list[Any] = dataclasses.field(default_factory=list)
    thoughts: Any = None
    post_sampling: bool = False
