"""The tools of a request: which are shown, which may be called, and whether one must be."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..body.chat import AllowedTools, ChatBody, NamedTool
from ..errors import wrong


@dataclasses.dataclass(frozen=True)
class Tools:
    """shown: as in OpenAI's API, () if none is to be called. choice: auto or required.

    called: the names of those that may be called, None for all of them. parallel: several calls at once.
    strict: the names of tools that are.
    """

    shown: tuple[dict[str, Any], ...] = ()
    choice: str = "auto"
    called: tuple[str, ...] | None = None
    parallel: bool = True
    strict: frozenset[str] = frozenset()

    @property
    def callable(self) -> list[dict[str, Any]]:
        """The functions that may be called: name, description, parameters."""
        all_of, called = [tool["function"] for tool in self.shown], frozenset(self.called or ())
        return [f for f in all_of if self.called is None or f["name"] in called]


def tools_of(body: ChatBody) -> Tools:
    """The tools of a request. Raises ApiError 400 for a choice of a tool that is not there."""
    functions, choice = [t.function for t in body.tools or ()], body.tool_choice
    called, mode = _chosen(choice)
    names = {f.name for f in functions}
    for name in called or ():
        if name not in names:
            raise wrong("tool_choice", f"there is no tool {name!r:.80}")
    if choice == "required" and not functions:
        raise wrong("tool_choice", "`required` needs tools to choose from")
    if mode == "none" or not functions:
        return Tools()
    # A choice that names a tool is for one call, as with OpenAI, unless the request says otherwise.
    one = isinstance(choice, NamedTool) and body.parallel_tool_calls is None
    parallel = body.parallel_tool_calls is not False and not one
    return Tools(
        tuple({"type": "function", "function": _function(f)} for f in functions),
        mode,
        called,
        parallel,
        frozenset(f.name for f in functions if f.strict),
    )


def _chosen(choice: Any) -> tuple[tuple[str, ...] | None, str]:
    """(names of the tools that may be called, or None; auto, required or none)."""
    if choice is None or isinstance(choice, str):
        return None, choice or "auto"
    if isinstance(choice, AllowedTools):
        return tuple(t.function.name for t in choice.allowed_tools.tools), choice.allowed_tools.mode
    return (choice.function.name,), "required"


def _function(function: Any) -> dict[str, Any]:
    given = function.model_dump(exclude_none=True, exclude={"strict"})
    return {"description": "", "parameters": {"type": "object", "properties": {}}, **given}
