"""The blocks of messages in Anthropic's API."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field

from ..body.chat import MAX_PARTS, Name
from ..body.fields import Echo, Object, Word, length, text_alone


class TextBlock(Echo):
    type: Literal["text"]
    text: str


class ToolUseBlock(Echo):
    type: Literal["tool_use"]
    id: Word
    name: Name
    input: Object


class ThinkingBlock(Echo):
    type: Literal["thinking"]
    thinking: str


class UnreadBlock(Echo):
    """A block that Anthropic's service left for itself in an answer: the model does not see it."""

    type: Literal[
        "redacted_thinking",
        "server_tool_use",
        "web_search_tool_result",
        "web_fetch_tool_result",
        "code_execution_tool_result",
        "bash_code_execution_tool_result",
        "text_editor_code_execution_tool_result",
        "tool_search_tool_result",
        "mcp_tool_use",
        "mcp_tool_result",
        "container_upload",
        "advisor_tool_result",
        "fallback",
    ]


UNREAD = get_args(UnreadBlock.model_fields["type"].annotation)
_KINDS = ("text", "tool_use", "tool_result", "thinking", *UNREAD)
Text = Annotated[TextBlock, text_alone(*_KINDS)]


class ToolResultBlock(Echo):
    type: Literal["tool_result"]
    tool_use_id: Word
    content: str | Annotated[list[Text], length(MAX_PARTS)] | None = None
    is_error: bool | None = None


Block = Annotated[
    Annotated[
        TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | UnreadBlock, Field(discriminator="type")
    ],
    text_alone(*_KINDS),
]


class Turn(Echo):
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], length(MAX_PARTS)]
