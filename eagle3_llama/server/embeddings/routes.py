"""The route of OpenAI's embeddings."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import BaseModel

from ...errors import EagleError
from ..errors import ApiError, deadline_passed, from_exception, shutting_down, wrong
from ..http import openapi
from ..http.held import HeldResponse
from ..jobs.work_queue import WorkQueue
from ..sandbox.prompt_size import PromptSize
from .body import MAX_NUMBERS, EmbeddingBody, EmbeddingList, written

if TYPE_CHECKING:
    from ..http.server import Server


class Embeddings:
    """Answers the requests, one after the other."""

    def __init__(self, server: Server) -> None:
        self.server: Server = server
        self.embedder: Any = server.embedder
        self.work = WorkQueue(1, 2 * server.settings.capacity, "want embeddings")
        self._size = PromptSize(self.embedder, self.embedder.most) if self.embedder is not None else None

    async def create(self, request: Request) -> Response:
        """Raises ApiError."""
        if self.embedder is None:
            mend = "start it with --embeddings FILE, an embedding model, or with --embeddings target"
            raise ApiError(501, f"this server makes no embeddings: {mend}", code="no_embeddings")
        if self.server.gate.draining:
            raise shutting_down()
        body = await self.server.bodies.read(request, EmbeddingBody)
        end, gone = time.monotonic() + self.server.settings.timeout, threading.Event()
        watch = asyncio.create_task(_watch(request, gone))
        try:
            out = await self.work.run(self._answer, body, end, gone)
        except EagleError as e:
            raise from_exception(e, self.embedder.most, True, "input") from e
        finally:
            watch.cancel()
            gone.set()  # if this is cancelled, the thread goes on until it looks
        return HeldResponse(out, self.server.answers)

    def _answer(self, body: EmbeddingBody, end: float, gone: threading.Event) -> str:
        embedder, texts = self.embedder, _texts(body.input)
        if body.dimensions not in (None, embedder.n_embd):
            message = f"this model's embeddings have {embedder.n_embd} numbers, and cannot be shortened"
            raise wrong("dimensions", f"{message}: leave it out")
        if len(texts) * embedder.n_embd > MAX_NUMBERS:
            most = MAX_NUMBERS // embedder.n_embd
            raise wrong("input", f"it has {len(texts)} texts, at most {most} are possible with this model")
        inputs = [self._tokens(i, text) for i, text in enumerate(texts)]
        items = []
        for i, tokens in enumerate(inputs):
            if gone.is_set():
                raise ApiError(499, "the client disconnected", code="cancelled")
            if time.monotonic() > end:
                raise deadline_passed()
            vector = written(embedder.embed(tokens), body.encoding_format)
            items.append(f'{{"object":"embedding","index":{i},"embedding":{vector}}}')
        n = sum(map(len, inputs))
        more = {"model": self.server.name, "usage": {"prompt_tokens": n, "total_tokens": n}}
        return f'{{"object":"list","data":[{",".join(items)}],{json.dumps(more)[1:]}'

    def _tokens(self, i: int, text: str | list[int]) -> list[int]:
        """Raises ApiError 400 for a text of no tokens, of too many, or of unknown ones."""
        if isinstance(text, str) and self._size is not None:
            self._size.check_fits(text, "input")
        tokens: list[int] = self.embedder.tokenize(text) if isinstance(text, str) else text
        if len(tokens) > (most := self.embedder.most):
            message = f"input[{i}] has {len(tokens)} tokens, at most {most} are possible: shorten it"
            raise ApiError(400, message, "input", "context_length_exceeded")
        if not tokens:
            raise wrong("input", f"input[{i}] has no tokens")
        if max(tokens) >= self.embedder.n_vocab():
            raise wrong("input", f"the model's token ids are 0..{self.embedder.n_vocab() - 1}")
        return tokens


def add(app: FastAPI, server: Server) -> list[type[BaseModel]]:
    """Adds the route, and returns the models of its body and its answer."""
    routes = app.state.embeddings = Embeddings(server)

    @app.post("/v1/embeddings", **openapi.answer(EmbeddingList, 501, 504, body=EmbeddingBody))
    async def embeddings(request: Request) -> Response:
        """Returns a vector for each text."""
        return await routes.create(request)

    return [EmbeddingBody, EmbeddingList]


async def _watch(request: Request, gone: threading.Event) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    gone.set()


def _texts(given: Any) -> list[Any]:
    """A list of texts, from a text, token ids, or a list of either."""
    return [given] if isinstance(given, str) or isinstance(given[0], int) else given
