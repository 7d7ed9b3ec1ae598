"""The tools of /v1/responses: which the model gets, as what functions, and what a call of one becomes.

A namespace's tools are functions whose names begin with the namespace's. A custom tool is a function with one
argument, a text. Tools that a server would run are left out.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, model_validator

from ..body.chat import MAX_TOOLS, Name
from ..body.fields import Body, Echo, Object, Word, length
from ..errors import wrong

Hosted = Literal[
    "web_search",
    "web_search_2025_08_26",
    "web_search_preview",
    "web_search_preview_2025_03_11",
    "image_generation",
    "file_search",
    "code_interpreter",
    "computer",
    "computer_use_preview",
    "mcp",
    "shell",
    "apply_patch",
    "programmatic_tool_calling",
]
HOSTED = get_args(Hosted)
# arguments of the function that stands for a custom tool
INPUT = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
SHELL = {
    "type": "object",
    "properties": {
        "command": {"type": "array", "items": {"type": "string"}},
        "working_directory": {"type": "string"},
        "timeout_ms": {"type": "integer", "minimum": 0},
    },
    "required": ["command"],
    "additionalProperties": False,
}


def arguments_of(text: str) -> str:
    """The arguments of the function's call that stands for a call with this text."""
    return json.dumps({"input": text}, ensure_ascii=False)


def one_of(known: tuple[str, ...], what: str, shown: tuple[str, ...] | None = None) -> Any:
    """Refuses another type in words, as pydantic's own error would not. shown: of those that are known."""

    def check(value: Any) -> Any:
        if isinstance(value, str) and value not in known:
            raise ValueError(f"{what}: {value!r:.60} is not possible, expected {' or '.join(shown or known)}")
        return value

    return BeforeValidator(check)


def complete(value: Any, needed: tuple[str, ...]) -> Any:
    if missing := [name for name in needed if getattr(value, name) is None]:
        raise ValueError(f"{value.type} needs {' and '.join(missing)}")
    return value


class ToolFormat(Echo):
    type: Annotated[Literal["text", "grammar"], one_of(("text", "grammar"), "a format of this type")]
    syntax: Word | None = None
    definition: str | None = Field(
        None, description="of a grammar, which the model reads; it is not enforced"
    )


_NEEDED = {"function": ("name",), "custom": ("name",), "namespace": ("name", "tools")}


class SpaceTool(Echo):
    """A function, or a custom tool, whose input is a text."""

    type: Annotated[Literal["function", "custom"], one_of(("function", "custom"), "a tool of this type")]
    name: Name
    description: str | None = None
    parameters: Object | None = None
    strict: bool | None = None
    format: ToolFormat | None = Field(None, description="of a custom tool")


_OWN = ("function", "custom", "namespace", "local_shell", "tool_search")


class ResponseTool(Echo):
    """A tool, or a namespace of several. `type` says which of the fields must be there."""

    type: Annotated[
        Literal["function", "custom", "namespace", "local_shell", "tool_search"] | Hosted,
        one_of((*_OWN, *HOSTED), "a tool of this type", _OWN),
    ]
    name: Name | None = None
    description: str | None = None
    parameters: Object | None = None
    strict: bool | None = None
    format: ToolFormat | None = Field(None, description="of a custom tool")
    tools: Annotated[list[SpaceTool], length(MAX_TOOLS)] | None = Field(None, description="of a namespace")
    execution: Word | None = Field(None, description="of tool_search, which only a client can run: client")

    @model_validator(mode="after")
    def _whole(self) -> ResponseTool:
        return complete(self, _NEEDED.get(self.type, ()))


class NamedOne(Body):
    type: Annotated[
        Literal["function", "custom"] | Hosted, one_of((*_OWN[:2], *HOSTED), "a tool of this type")
    ]
    name: Name | None = None
    namespace: Name | None = None
    server_label: Word | None = None


class ToolChoice(Body):
    """A named tool, or those that are allowed."""

    type: Annotated[
        Literal["function", "custom", "allowed_tools"],
        one_of(("function", "custom", "allowed_tools"), "this server runs no tools, clients run them"),
    ]
    name: Name | None = None
    namespace: Name | None = None
    mode: Literal["auto", "required"] | None = None
    tools: Annotated[list[NamedOne], length(MAX_TOOLS, 1)] | None = None

    @model_validator(mode="after")
    def _whole(self) -> ToolChoice:
        return complete(self, ("mode", "tools") if self.type == "allowed_tools" else ("name",))


@dataclasses.dataclass(frozen=True)
class Called:
    """A call of a function in this API: the type of its item, without `_call`, and its name there."""

    kind: str
    name: str
    namespace: str | None = None


def flat(namespace: str | None, name: str) -> str:
    """The name of a function that stands for a tool, which may be in a namespace."""
    return name if namespace is None else f"{namespace.rstrip('_')}__{name}"


class ToolSet:
    """The tools of a request. found: those that the conversation names beside them, as JSON.

    functions: as a chat has them. calls: what a call of each is, by the function's name. left_out: in words,
    what of the request has no effect. Raises ApiError 400 for two different tools of one name.
    """

    def __init__(self, tools: Iterable[ResponseTool], found: Iterable[ResponseTool] = ()) -> None:
        self.functions: list[dict[str, Any]] = []
        self.calls: dict[str, Called] = {}
        self.left_out: list[str] = []
        self._named: dict[str, list[str]] = {}  # by a tool's own name: its functions
        for tool in tools:
            self._add(tool, again=False)
        for tool in found:
            self._add(tool, again=True)

    def chosen(self, name: str, namespace: str | None) -> str:
        """The function that a choice names, which may leave out the namespace."""
        if namespace is not None or name in self.calls:
            return flat(namespace, name)
        own = self._named.get(name, [])
        return own[0] if len(own) == 1 else name

    def _add(self, tool: ResponseTool, again: bool) -> None:
        """again: whether it may be one that is there: a conversation names tools more than once."""
        name = tool.name or ""
        if tool.type == "namespace":
            for i, one in enumerate(tool.tools or ()):
                about = tool.description if i == 0 else None  # once is enough for the model
                self._function(one, Called(one.type, one.name, name), again, about)
        elif tool.type in ("function", "custom"):
            self._function(tool, Called(tool.type, name), again)
        elif tool.type == "local_shell":
            shell = tool.model_copy(update={"parameters": SHELL, "description": "Runs a command."})
            self._function(shell, Called(tool.type, tool.type), again)
        elif tool.type == "tool_search" and tool.execution == "client":
            self._function(tool, Called(tool.type, tool.type), again)
        else:
            self.left_out.append(tool.type)

    def _function(self, tool: Any, called: Called, again: bool, about: str | None = None) -> None:
        name = flat(called.namespace, called.name)
        if (before := self.calls.get(name)) is not None:
            if again:
                return
            if before != called:
                kinds = " and a ".join(sorted((before.kind, called.kind), reverse=True))
                raise wrong("tools", f"{name!r:.80} is a {kinds} tool, or in two namespaces: name them apart")
        self.calls[name] = called
        self._named.setdefault(called.name, []).append(name)
        lines = [about, tool.description]
        if called.kind == "custom" and tool.format is not None and tool.format.type == "grammar":
            syntax = tool.format.syntax or "grammar"
            lines.append(f"The input follows this {syntax[:40]}:\n{tool.format.definition or ''}")
            self.left_out.append(f"grammar of {name!a:.80}")
        function = {
            "name": name,
            "description": "\n\n".join(line for line in lines if line) or None,
            "parameters": INPUT if called.kind == "custom" else tool.parameters,
            "strict": tool.strict,
        }
        made = {key: value for key, value in function.items() if value is not None}
        self.functions.append({"type": "function", "function": made})
