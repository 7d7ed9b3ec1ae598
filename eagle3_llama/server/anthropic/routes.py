"""The routes of Anthropic's Messages API."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import BaseModel

from .. import errors
from ..http import openapi
from ..http.access import Record
from ..http.left_out import tell
from ..http.stream import respond
from .answer import MessageShape, MessageStream, Stopped, error_body
from .answers import AnthropicCount, AnthropicError, AnthropicMessage
from .body import CountBody, MessagesBody, chat_of, is_continued

if TYPE_CHECKING:
    from ..http.server import Server


EVENTS = "one of Anthropic's events as JSON; its `type` is also the event's name"


def add(app: FastAPI, server: Server) -> list[type[BaseModel]]:
    """Adds the routes, and returns the models of their bodies and answers."""
    create = openapi.streamed(MessagesBody, AnthropicMessage, about=EVENTS, error=AnthropicError)
    count = openapi.answer(AnthropicCount, body=CountBody, error=AnthropicError)
    for path in ("/messages", "/messages/count_tokens"):
        errors.FORMS[path] = errors.FORMS[f"/v1{path}"] = error_body

    @app.post("/v1/messages", **create)
    async def messages(request: Request) -> Response:
        """Answers a conversation, as Anthropic's API does."""
        return await _answer(server, request, await server.bodies.read(request, MessagesBody))

    @app.post("/v1/messages/count_tokens", **count)
    async def count_tokens(request: Request) -> Response:
        """Counts the tokens of a conversation's prompt, without an answer."""
        body = await server.bodies.read(request, CountBody)
        return await server.ask(server.counting, _count, server, body)

    return [MessagesBody, CountBody, AnthropicMessage, AnthropicCount, AnthropicError]


async def _answer(server: Server, request: Request, body: MessagesBody) -> Response:
    record: Record = request.scope["record"]
    record.stream = bool(body.stream)
    if server.settings.log_prompts:
        record.prompt = body.model_dump(include={"system", "messages"})
    stopped = Stopped(body.stop_sequences)
    prepare = lambda: [stopped.watch(choice) for choice in server.choices.chat(chat_of(body))]
    job = server.job(record, await server.preparing.run(prepare), body, "messages")
    shape = MessageShape(
        answer_id=f"msg_{record.request_id}",
        model=server.name,
        job=job,
        stopped=stopped,
        continued=is_continued(body),
    )
    answer = await respond(request, job, shape, stream=record.stream, stream_class=MessageStream)
    return tell(answer, body.left_out)


def _count(server: Server, body: CountBody) -> dict[str, int]:
    return {"input_tokens": server.choices.count(chat_of(body), server.batcher.base)}
