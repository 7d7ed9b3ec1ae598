"""The bodies of Anthropic's API, POST /v1/messages and its count_tokens, and the chats they stand for."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from ..body.chat import MAX_MESSAGES, MAX_PARTS, MAX_TOOLS, ChatBody, Name
from ..body.fields import (
    GREEDY,
    Body,
    Echo,
    Gbnf,
    Object,
    Penalty,
    Seed,
    Share,
    Speculative,
    TagList,
    Temperature,
    TopK,
    Word,
    length,
    validated,
)
from ..body.histories import READABLE
from ..errors import ApiError, wrong
from .blocks import UNREAD, Text, TextBlock, ToolUseBlock, Turn

_TEXTS = ("content", "reasoning_content")
_BILLING = "x-anthropic-billing-header:"
FAILED = "Error: "  # before the result of a call that failed: templates know no failures
# types of tools that Anthropic's service runs; most end with a date
_HOSTED = re.compile(
    r"(web_search|web_fetch|code_execution|advisor|tool_search_tool_regex|tool_search_tool_bm25)(_[0-9]{8})?"
    "|mcp_toolset"
)


def _of_the_client(kind: str | None) -> str | None:
    """The type of a tool, unless it is one that Anthropic's service would describe."""
    if kind is not None and kind != "custom" and not _HOSTED.fullmatch(kind):
        message = f"the server has no tool of type {kind!r:.60}"
        raise ValueError(f"{message}: describe yours with name, description and input_schema")
    return kind


class ClientTool(Echo):
    """A tool of the client's. One that the service would run (see `hosted`) has no schema."""

    type: Annotated[Word | None, AfterValidator(_of_the_client)] = None
    name: Name | None = None
    description: str | None = None
    input_schema: Object | None = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _whole(self) -> ClientTool:
        if not self.hosted and (self.name is None or self.input_schema is None):
            raise ValueError("a tool needs name and input_schema")
        return self

    @property
    def hosted(self) -> bool:
        return self.type not in (None, "custom")


class ClientToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = Field(None, description="with type tool")
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(Body):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = Field(
        None, ge=1, le=1 << 24, description="most tokens of thoughts, which then end; with type enabled"
    )
    display: Word | None = None


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: Object = Field(alias="schema")


class OutputConfig(Body):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None
    task_budget: Object | None = Field(None, description="no effect")


class CountBody(Body):
    """POST /v1/messages/count_tokens."""

    model: Word | None = Field(None, description="any name, because the server has only one model")
    messages: Annotated[list[Turn], length(MAX_MESSAGES, 1), READABLE]
    system: str | Annotated[list[Text], length(MAX_PARTS)] | None = None
    tools: Annotated[list[ClientTool], length(MAX_TOOLS)] | None = None
    tool_choice: ClientToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: Object | None = Field(None, description="variables of the template")
    enable_thinking: bool | None = Field(None, description="false: the same as thinking of the type disabled")
    # accepted for clients of Anthropic's service, without any effect
    cache_control: Object | None = None
    context_management: Object | None = None
    metadata: Object | None = None
    service_tier: Word | None = None
    inference_geo: Word | None = None
    speed: Word | None = None
    diagnostics: Object | None = None
    user_profile_id: Word | None = None

    @property
    def left_out(self) -> list[str]:
        """The tools of the request that nobody here runs."""
        return [tool.type or "" for tool in self.tools or () if tool.hosted]


class MessagesBody(CountBody):
    """POST /v1/messages."""

    max_tokens: int = Field(ge=1)
    stop_sequences: TagList | None = None
    stream: bool | None = None
    temperature: Temperature | None = Field(None, description=GREEDY)
    top_p: Share | None = None
    top_k: TopK | None = None
    min_p: Share | None = None
    repeat_penalty: Penalty | None = None
    seed: Seed | None = None
    grammar: Gbnf | None = Field(None, description="GBNF")
    speculative: Speculative | None = None


_SAME = (
    "max_tokens",
    "stream",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repeat_penalty",
    "seed",
    "grammar",
)


def chat_of(body: CountBody) -> ChatBody:
    """The chat request that says the same. Raises ApiError 400 for messages and tools that do not fit."""
    if isinstance(body, MessagesBody) and body.speculative is not None and body.speculative.report:
        raise wrong("speculative", "this API's events have no place for a report: leave `report` out")
    given = {name: value for name in _SAME if (value := getattr(body, name, None)) is not None}
    given |= _tools(body) | _thinking(body)
    messages = _Chat().of(body)
    if len(messages) > MAX_MESSAGES:
        raise wrong(
            "messages", f"with its results it has {len(messages)}, at most {MAX_MESSAGES} are allowed"
        )
    if is_continued(body):
        given["continue_final_message"] = True
    if sequences := getattr(body, "stop_sequences", None):
        given["stop"] = sequences
    if (asked := getattr(body, "speculative", None)) is not None:
        given["speculative"] = asked.model_dump()
    try:
        return validated(ChatBody, {**given, "messages": messages})
    except ApiError as e:  # with this API's names
        where = e.param or ""
        message = str(e).removeprefix(f"{where}: ")
        if where.startswith("messages["):  # they are counted otherwise here
            raise wrong("messages", f"calls and texts of one turn: {message}") from None
        raise wrong(where.replace(".function.parameters", ".input_schema"), message) from None


def is_continued(body: CountBody) -> bool:
    """True if the answer goes on with the last message, because that is the assistant's."""
    return body.messages[-1].role == "assistant"


def _thinking(body: CountBody) -> dict[str, Any]:
    """The variables of the template, and the form of the answer."""
    variables, out = dict(body.chat_template_kwargs or {}), dict[str, Any]()
    if body.thinking is not None:
        variables["enable_thinking"] = body.thinking.type != "disabled"
        if body.thinking.type == "enabled" and body.thinking.budget_tokens is not None:
            out["thinking_budget_tokens"] = body.thinking.budget_tokens
    if body.enable_thinking is not None:
        out["enable_thinking"] = body.enable_thinking
    if variables:
        out["chat_template_kwargs"] = variables
    if (wanted := body.output_config) is not None:
        if wanted.effort is not None:
            out["reasoning_effort"] = wanted.effort
        if wanted.format is not None:
            form: dict[str, Any] = {"name": "answer", "schema": wanted.format.schema_}
            out["response_format"] = {"type": "json_schema", "json_schema": form}
    return out


def _tools(body: CountBody) -> dict[str, Any]:
    choice = body.tool_choice
    tools = [_tool(i, tool) for i, tool in enumerate(body.tools or ()) if not tool.hosted]
    out: dict[str, Any] = {"tools": tools} if tools else {}
    if choice is None:
        return out
    if choice.name is not None and choice.name in [t.name for t in body.tools or () if t.hosted]:
        raise wrong("tool_choice", f"this server runs no tools, so it has no {choice.name!r:.80} to call")
    if (choice.type == "tool") != (choice.name is not None):
        raise wrong("tool_choice", "`name` belongs to the type `tool`, which needs it")
    if choice.type in ("any", "tool") and not out:
        raise wrong("tool_choice", f"`{choice.type}` needs tools to choose from")
    if choice.disable_parallel_tool_use is not None:
        out["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    named = {"type": "function", "function": {"name": choice.name}}
    return {**out, "tool_choice": {"any": "required", "tool": named}.get(choice.type, choice.type)}


def _tool(i: int, tool: ClientTool) -> dict[str, Any]:
    schema = {"type": "object", **(tool.input_schema or {})}
    if schema["type"] != "object":
        raise wrong("tools", f"the input_schema of tools[{i}] has another `type` than object")
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": schema,
        "strict": tool.strict,
    }
    return {"type": "function", "function": function}


class _Chat:
    """The messages of a chat, from turns whose blocks hold calls, results and thoughts.

    Neighbouring turns of one role are one message: many templates want roles to alternate.
    """

    def __init__(self) -> None:
        self._out: list[dict[str, Any]] = []
        self._called: dict[str, str] = {}  # the calls so far: id -> name

    def of(self, body: CountBody) -> list[dict[str, Any]]:
        if system := _system(body.system):
            self._out.append({"role": "system", "content": [system]})
        for i, turn in enumerate(body.messages):
            allowed = _BLOCKS[turn.role]
            content = turn.content
            blocks = [TextBlock(type="text", text=content)] if isinstance(content, str) else content
            for j, block in enumerate(blocks):
                if block.type not in allowed:
                    message = f"a {turn.role}'s message has no block of type {block.type}"
                    raise wrong(f"messages[{i}].content[{j}]", message)
            if turn.role == "user":
                self._user(i, blocks)
            elif turn.role == "system":  # Claude Code says there what has changed
                self._say(blocks, "system")
            else:
                self._assistant(blocks)
        if not self._out:
            raise wrong("messages", "there is nothing in them for the model to read")
        if self._out[-1].get("tool_calls"):
            raise wrong("messages", "the last one calls a tool: the result of the call must follow")
        for said in self._out:  # once: to add one text after the other would copy all before them
            between = "\n" if said["role"] in ("user", "system") else ""
            said |= {name: between.join(said[name]) for name in _TEXTS if name in said}
        return self._out

    def _user(self, i: int, blocks: list[Any]) -> None:
        """The results of calls are messages of their own, in the order of the blocks."""
        texts: list[Any] = []
        for j, block in enumerate(blocks):
            if block.type == "text":
                texts.append(block)
            if block.type != "tool_result":
                continue
            if texts:
                self._say(texts)
                texts = []
            if (name := self._called.get(block.tool_use_id)) is None:
                message = f"no earlier message has a tool_use with the id {block.tool_use_id!r:.80}"
                raise wrong(f"messages[{i}].content[{j}]", message)
            content = [FAILED if block.is_error else "", _joined(block.content)]
            result = {"role": "tool", "tool_call_id": block.tool_use_id, "name": name, "content": content}
            self._out.append(result)
        if texts or not blocks:
            self._say(texts)

    def _say(self, texts: list[Any], role: str = "user") -> None:
        if self._out and self._out[-1]["role"] == role:
            self._out[-1]["content"].append(_joined(texts))
        else:
            self._out.append({"role": role, "content": [_joined(texts)]})

    def _assistant(self, blocks: list[Any]) -> None:
        """Texts are joined as they were written, so that an answer that comes back is what it was."""
        if not self._out or self._out[-1]["role"] != "assistant":
            self._out.append({"role": "assistant", "content": []})
        message = self._out[-1]
        for block in blocks:
            if block.type == "text":
                message["content"].append(block.text)
            elif block.type == "thinking":
                message.setdefault("reasoning_content", []).append(block.thinking)
            elif block.type == "tool_use":
                message.setdefault("tool_calls", []).append(_call(block))
                self._called[block.id] = block.name


_BLOCKS = {
    "user": ("text", "tool_result", *UNREAD),
    "assistant": ("text", "tool_use", "thinking", *UNREAD),
    "system": ("text",),
}


def _call(block: ToolUseBlock) -> dict[str, Any]:
    arguments = json.dumps(block.input, ensure_ascii=False)
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments}}


def _system(content: str | list[Any] | None) -> str:
    """The text of `system`, without what Claude Code says in it to the service that bills it: that differs
    from one conversation to the next, and a prompt that begins otherwise is found in no slot."""
    blocks = content if isinstance(content, list) else []
    read = [block for block in blocks if not block.text.startswith(_BILLING)]
    return content if isinstance(content, str) else _joined(read)


def _joined(content: str | list[Any] | None) -> str:
    """The text of blocks, each of which begins a line."""
    return content if isinstance(content, str) else "\n".join(block.text for block in content or ())
