"""Refuses texts that are too large for the tokenizer or for the context, before they are tokenized.

llama.cpp's tokenizer takes seconds for a megabyte. For n special tokens in a text it takes n * n steps: a
minute for 40,000 of them.
"""

from __future__ import annotations

from typing import Any

from ..errors import too_long, wrong

MAX_SPECIAL = 10_000  # special tokens in one text; 2,000 messages have 6,000


class PromptSize:
    """Checks texts against a model's context, its longest token and its special tokens."""

    def __init__(self, base: Any, n_ctx: int) -> None:
        import llama_cpp

        special = (
            llama_cpp.LLAMA_TOKEN_ATTR_CONTROL
            | llama_cpp.LLAMA_TOKEN_ATTR_USER_DEFINED
            | llama_cpp.LLAMA_TOKEN_ATTR_UNKNOWN
        )
        vocab, ids = base._model.vocab, range(base.n_vocab())
        marked = (i for i in ids if llama_cpp.llama_vocab_get_attr(vocab, i) & special)
        names = [llama_cpp.llama_vocab_get_text(vocab, i).decode("utf-8", "replace") for i in marked]
        self.n_ctx = n_ctx
        self._longest = max(len(base.detokenize([i], special=True)) for i in ids)  # bytes of a token
        self.most_bytes = n_ctx * self._longest
        self.special = [name for name in names if len(name) > 1]
        self._first = {name[0] for name in self.special}

    def check_fits(self, text: str, param: str) -> None:
        """Raises ApiError 400 if no tokenization of the text fits the context, or as check_special() does."""
        size = len(text.encode())
        if size > self.most_bytes:
            room = f"the context's {self.n_ctx} tokens hold at most {self.most_bytes}"
            least = -(-size // self._longest)
            raise too_long(f"the prompt has {size} bytes, {room}", param, least, self.n_ctx)
        self.check_special(text, param)

    def check_count(self, n: int, param: str) -> None:
        """Raises ApiError 400 for a prompt of n tokens, or more, if that is too many."""
        if n >= self.n_ctx:
            message = f"the prompt has {n} tokens, the context has room for {self.n_ctx}"
            raise too_long(message, param, n, self.n_ctx)

    def check_special(self, text: str, param: str) -> None:
        """Raises ApiError 400 for a text with too many special tokens."""
        if sum(text.count(c) for c in self._first) <= MAX_SPECIAL:
            return
        found = 0
        for name in self.special:
            found += text.count(name)
            if found > MAX_SPECIAL:
                raise wrong(param, f"it has more than {MAX_SPECIAL} special tokens")
