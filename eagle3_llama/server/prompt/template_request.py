"""A chat request's wishes beside tools: the schema of its answer, and what the template is given."""

from __future__ import annotations

from typing import Any

from ..body.chat import ChatBody
from ..errors import wrong
from ..grammar.marks import Marks
from ..grammar.schema_room import SchemaRoom
from ..grammar.schemas import enforceable
from ..settings import ServerSettings
from .named_formats import plain_messages
from .thoughts import wants_thoughts


def marks_of(body: ChatBody) -> Marks:
    """Marks for all schemas of a request."""
    return Marks(body.model_dump(include={"tools", "response_format", "json_schema"}))


def json_wanted(body: ChatBody, marks: Marks) -> dict[str, Any] | None:
    """The schema that the answer must follow: of any object, if the request names none."""
    wanted = body.response_format
    if body.json_schema is not None:
        if wanted is not None and wanted.type != "text":
            raise wrong("json_schema", "response_format has a schema too; give only one of them")
        return enforceable(body.json_schema, SchemaRoom(marks, "json_schema"))
    if wanted is None or wanted.type == "text":
        return None
    schema = wanted.schema_ if wanted.type == "json_object" else wanted.json_schema.schema_
    return enforceable(schema or {"type": "object"}, SchemaRoom(marks))


def schema_field(body: ChatBody) -> str:
    """The field that the schema came with."""
    return "response_format" if body.json_schema is None else "json_schema"


def strict_of(body: ChatBody) -> bool:
    """True if all of the schema must be enforced: unless the request says that it need not be."""
    wanted = body.response_format
    return wanted is None or wanted.type != "json_schema" or wanted.json_schema.strict is not False


def template_request(body: ChatBody, settings: ServerSettings) -> dict[str, Any]:
    """The template's variables, besides tools."""
    variables = {**settings.template_kwargs, **(body.chat_template_kwargs or {})}
    variables.pop("enable_thinking", None)
    thinking = wants_thoughts(body, settings)
    if body.reasoning_effort not in (None, "none"):
        variables["reasoning_effort"] = body.reasoning_effort
    messages = plain_messages(body.messages)
    if [m["role"] for m in messages[-2:]] == ["assistant", "assistant"]:
        raise wrong("messages", "the last two are both the assistant's: join them, or let another follow")
    kept: dict[str, Any] = {"messages": messages, "enable_thinking": thinking}
    if body.continue_final_message:
        if messages[-1]["role"] != "assistant":
            raise wrong("continue_final_message", "the last message is not the assistant's")
        kept["continue_final_message"] = True
    return {**kept, "chat_template_kwargs": variables}


def as_meant(body: ChatBody) -> ChatBody:
    """The same request, whose answer goes on with the assistant's message if it is to begin with no other."""
    begun = body.add_generation_prompt is False and body.messages[-1].role == "assistant"
    if begun and body.continue_final_message is None:
        return body.model_copy(update={"continue_final_message": True})
    return body
