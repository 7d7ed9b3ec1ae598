"""Which earlier texts a request may be drafted from: those of its own client, in a memory of their own."""

from __future__ import annotations

import logging

from ..runtime.engine import Engine
from ..runtime.text_memory import TextMemory
from .job import Job

log = logging.getLogger("eagle3_llama.batching")


class Memories:
    """The text memories of a batcher's clients, made when they are first used. For the batcher's thread.

    n_bytes: of each, 0 for none. prompts: whether prompts are kept beside the answers.
    """

    def __init__(self, engine: Engine, n_bytes: int, prompts: bool) -> None:
        if n_bytes and not engine.drafts_from_text:
            log.warning("the text memory has no effect: this target cannot take back drafts")
            n_bytes = 0
        self._engine = engine
        self._n_bytes = n_bytes
        self._prompts = prompts
        self._of: dict[str, TextMemory] = {}

    def use(self, slot: int, client: str) -> None:
        """From the next draft on, the slot drafts from the texts of this client, beside its own."""
        if self._n_bytes:
            self._engine.use_memory(self._memory(client), slot)

    def add(self, job: Job, tokens: list[int]) -> None:
        """Keeps what a request was answered. tokens: what its slot held at the end."""
        if self._n_bytes and job.n_tokens > 0:
            start = job.reused if self._prompts else len(job.prompt)
            self._memory(job.client).add([*tokens[start:], job.token])

    def tokens(self, client: str) -> bytes:
        """TextMemory.tokens() of a client."""
        return self._of[client].tokens() if client in self._of else b""

    def restore(self, client: str, tokens: bytes) -> None:
        """Adds tokens() to a client's texts, if this batcher keeps any."""
        if self._n_bytes and tokens:
            self._memory(client).add_all(tokens)

    def _memory(self, client: str) -> TextMemory:
        if client not in self._of:
            self._of[client] = TextMemory(self._n_bytes)
        return self._of[client]

    def close(self) -> None:
        """Frees all of them. The slots that use one keep it until their session is closed."""
        for memory in self._of.values():
            memory.close()
        self._of.clear()
