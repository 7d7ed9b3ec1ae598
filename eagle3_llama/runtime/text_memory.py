"""A memory of earlier texts, from which later ones are drafted."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from .library import checked, load

END = -1  # behind each text


class TextMemory:
    """Texts of earlier requests: at most n_bytes, about 38 bytes a token; the oldest are forgotten first.

    A session's slots draft from it after Session.use_memory(). Use it in the sessions' thread, and close it.
    prompts: whether prompts are kept, too. Raises EagleError BAD_ARGUMENT or MEMORY.
    """

    def __init__(self, n_bytes: int, prompts: bool = False) -> None:
        self.prompts = prompts
        self.ffi, self.lib = load()
        out = self.ffi.new("eagle3_text_memory **")
        checked(self.lib.eagle3_text_memory_open(n_bytes, out))
        self.handle: Any = out[0]

    def add(self, tokens: Sequence[int]) -> None:
        """Keeps a text, or its end if half of the memory does not hold it.

        If the process is out of memory, the newer texts are forgotten: no request fails for this.
        """
        if len(tokens):
            self.lib.eagle3_text_memory_add(self.handle, self.ffi.new("int32_t[]", list(tokens)), len(tokens))

    def tokens(self) -> bytes:
        """All texts, the oldest first: int32 in this machine's byte order, with an END behind each text."""
        n = checked(self.lib.eagle3_text_memory_get(self.handle, self.ffi.NULL, 0))
        out = self.ffi.new("int32_t[]", max(n, 1))
        checked(self.lib.eagle3_text_memory_get(self.handle, out, n))
        return bytes(self.ffi.buffer(out, 4 * n))

    def add_all(self, tokens: bytes) -> int:
        """Adds what tokens() returned. Returns the number of tokens, without the ENDs."""
        ids = memoryview(tokens).cast("i").tolist()
        start = 0
        for end in [i for i, token in enumerate(ids) if token == END]:
            self.add(ids[start:end])
            start = end + 1
        return len(ids) - ids.count(END)

    def close(self) -> None:
        """Frees the memory when no slot uses it any more; may be called twice."""
        with contextlib.suppress(AttributeError):  # the constructor failed
            self.lib.eagle3_text_memory_close(self.handle)
            self.handle = self.ffi.NULL
