"""The routes of OpenAI's Responses API."""

from __future__ import annotations

import secrets
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query, Request
from fastapi.responses import Response
from pydantic import BaseModel

from ..body.fields import bounded
from ..errors import ApiError, wrong
from ..http import openapi
from ..http.held import HeldResponse
from ..http.left_out import tell
from ..http.openapi import InputTokens
from ..http.shapes import dumps
from ..jobs.work_queue import WorkQueue
from .answer import ResponseShape, ResponseStream
from .body import ResponseBody
from .store import MAX_PAGE, Deleted, ItemList, ResponseObject, ResponseStore, page
from .to_chat import chat_of, items_of, renamed
from .tools import ToolSet


class Responses:
    """State that the routes share. server: the Server whose chats answer."""

    def __init__(self, server: Any) -> None:
        self.server, self.settings = server, server.settings
        self.store = ResponseStore(self.settings.responses_of_client)
        self.body = bounded(ResponseBody, self.settings)
        self.reading = WorkQueue(1, 2 * self.settings.capacity, "read stored answers")

    async def create(self, request: Request) -> Response:
        """Answers one request. Raises ApiError with the names of this API's fields."""
        body = await self.server.bodies.read(request, self.body)
        client = request.scope["record"].client
        # in a thread: a conversation may be long
        work = self.server.preparing
        chat, shape, tools = await work.run(self._shaped, body, client, request.scope["record"])
        try:
            answer = await self.server.generate(request, chat, True, shape, ResponseStream)
        except ApiError as e:
            raise renamed(e) from None
        return tell(answer, tools.left_out)

    async def input_tokens(self, request: Request) -> Response:
        """Counts the tokens of one request's prompt. Raises ApiError with the names of this API's fields."""
        body = await self.server.bodies.read(request, self.body)
        client = request.scope["record"].client
        counted = lambda: self.server.count(self._asked(body, client)[0])
        try:
            return await self.server.ask(self.server.counting, counted)
        except ApiError as e:
            raise renamed(e) from None

    def _shaped(self, body: ResponseBody, client: str, record: Any) -> tuple[Any, ResponseShape, ToolSet]:
        chat, items, tools = self._asked(body, client)
        shape = ResponseShape(
            body,
            self.server.shape(chat, True, record),
            f"resp_{secrets.token_hex(24)}",
            items,
            tools,
            self._count,
            None if body.store is False or not self.store.most else self.store,
            client,
        )
        return chat, shape, tools

    async def inputs(self, client: str, response_id: str, *which: Any) -> Response:
        """A page of the items that a stored answer answers. Raises ApiError 400, 404 or 503."""
        made = lambda: page(response_id, self.store.inputs(client, response_id), *which)
        return await self.server.ask(self.reading, made)

    def _asked(self, body: ResponseBody, client: str) -> tuple[Any, list[dict[str, Any]], ToolSet]:
        before = body.previous_response_id
        items = (self.store.items(client, before) if before is not None else []) + items_of(body)
        chat, tools = chat_of(body, items)
        return chat, items, tools

    def _count(self, text: str) -> int:
        return len(self.server.batcher.base.tokenize(text.encode(), False, False))


def add(app: FastAPI, server: Any) -> list[type[BaseModel]]:
    """Adds the routes, and returns the models of their bodies and answers."""
    routes = Responses(server)

    @app.post("/v1/responses", **openapi.streamed(routes.body, ResponseObject, 404))
    async def create_response(request: Request) -> Response:
        """Answers a conversation of items, or goes on from a stored answer."""
        return await routes.create(request)

    @app.get("/v1/responses/{response_id}", **openapi.answer(ResponseObject, 400, 404, 503))
    async def get_response(request: Request, response_id: str) -> Response:
        """Returns a stored answer."""
        if request.query_params.get("stream") in ("true", "True", "1"):
            raise wrong("stream", "a stored answer is not streamed again: leave it out")
        found = routes.store.response(request.scope["record"].client, response_id)
        return HeldResponse(found, server.answers)

    @app.delete("/v1/responses/{response_id}", **openapi.answer(Deleted, 404))
    async def delete_response(request: Request, response_id: str) -> Response:
        """Deletes a stored answer. Later answers that went on from it keep its text."""
        routes.store.delete(request.scope["record"].client, response_id)
        gone = {"id": response_id, "object": "response", "deleted": True}
        return Response(dumps(gone), media_type="application/json")

    @app.post("/v1/responses/{response_id}/cancel", **openapi.answer(ResponseObject, 400, 404))
    async def cancel_response(request: Request, response_id: str) -> Response:
        """Refuses: only answers in the background can be cancelled, and there are none."""
        routes.store.response(request.scope["record"].client, response_id)
        message = "this response has ended, as all do that are stored: close the connection of one that runs"
        raise wrong("response_id", message)

    @app.get("/v1/responses/{response_id}/input_items", **openapi.answer(ItemList, 400, 404, 503))
    async def input_items(
        request: Request,
        response_id: str,
        limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> Response:
        """Lists the items that a stored answer answers, the newest first."""
        return await routes.inputs(request.scope["record"].client, response_id, limit, order, after)

    @app.post("/v1/responses/input_tokens", **openapi.answer(InputTokens, 404, body=routes.body))
    async def input_tokens(request: Request) -> Response:
        """Counts the tokens of a conversation's prompt, without an answer."""
        return await routes.input_tokens(request)

    return [routes.body, ItemList, ResponseObject, Deleted, InputTokens]
