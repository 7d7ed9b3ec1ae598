"""The client of the children that hold libe3chat: messages to a prompt, a text to a message."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Collection, Mapping
from typing import Any

from ...batching.samplers import Thoughts
from ..errors import ApiError, internal, wrong
from ..grammar.call_forms import Form, form_of, probe
from ..grammar.marks import Marks
from ..grammar.nulls import with_nulls
from ..grammar.plain_schemas import shown as shown_schema
from ..grammar.schema_room import SchemaRoom
from ..grammar.tool_schemas import Enforced
from ..jobs.work_queue import busy
from ..sandbox.answers import AnswerReaders, Syntax
from ..sandbox.pool import Sandbox, SandboxBroken, SandboxBusy, SandboxError
from . import later_system, tools_as_text
from .thoughts import thoughts_of
from .tools import Tools

NO_NULLS: Mapping[str, Collection[str]] = {}


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A request as the model gets it. grammar: GBNF or "", which begins at the start of the answer, or where
    one of `patterns` matches. preserved: special tokens that its text needs. read: None if all is content."""

    prompt: str
    grammar: str
    patterns: tuple[str, ...]
    stops: tuple[str, ...]
    preserved: tuple[str, ...]
    read: Callable[[str, bool], dict[str, Any] | None] | None
    incomplete: tuple[str, ...] = ()
    thoughts: Thoughts | None = None  # where the model's are, if it has any
    generation_prompt: str = ""  # the end of the prompt, with which the template begins an answer


class ChatLibrary:
    """Two kinds of children: those that render templates, and those that read answers.

    So no template that hangs stops a stream. setup: see Templates in sandbox/child.py.
    """

    def __init__(self, seconds: float, setup: dict[str, Any], convert: Callable[[Any, str], Any]) -> None:
        """convert: (JSON schema, the field it came with) -> `grammar`, and what it leaves `incomplete`."""
        self._templates = Sandbox(seconds, templates=setup)
        self._answers = AnswerReaders(seconds)
        self._convert = convert
        self._eos, self._reads = setup["eos"], False
        self._form: tuple[Form | None] | None = None  # once it is found
        self._later: bool | None = None  # whether the template shows later system messages, once it is known

    def start(self) -> None:
        """Starts the children for templates in the background. Those for answers start when first needed."""
        threading.Thread(target=self._templates.start, daemon=True).start()

    def close(self) -> None:
        self._templates.close()
        self._answers.close()

    def prepare(
        self, request: dict[str, Any], tools: Tools, schema: dict[str, Any] | None, marks: Marks
    ) -> Prepared:
        """Renders `request`: messages, enable_thinking, chat_template_kwargs. Raises ApiError 400 or 503.

        schema: what the answer must follow, where no call is required. marks: those that the schema has.
        """
        shown: dict[str, Any] = {"tools": _shown(tools, marks), "tool_choice": tools.choice}
        shown["parallel_tool_calls"] = tools.parallel
        if tools.called is not None:
            shown["called"] = list(tools.called)
        request = {**request, "messages": self._readable(request["messages"])}
        form = self.form() if tools.shown else Form()
        if form is None:
            return self._without_tools(request, tools, schema, marks)
        enforced = Enforced(tools.callable, form, marks)
        if enforced.functions != tools.callable:
            shown["enforced"] = [{"type": "function", "function": f} for f in enforced.functions]
        wanted = {"json_schema": schema} if schema is not None else {}
        made = self._apply({**request, **(shown if tools.shown else {}), **wanted})
        required = tools.shown and tools.choice == "required"
        if tools.shown and (not made["tools"] or (required and not made["forced"])):
            return self._without_tools(request, tools, schema, marks)
        if schema is not None and not tools.shown and made["thinking"] is None:
            made["forced"] = self._convert(schema, "response_format")["grammar"]
        grammar = enforced.put(made["forced"] or (made["grammar"] if made["lazy"] else ""))
        made["incomplete"] = enforced.unmet(tools.strict, made["incomplete"])
        if tools.strict and not grammar:
            made["incomplete"].append("calls of this model where none is required")
        patterns = () if made["forced"] else tuple(t["pattern"] for t in made["triggers"])
        simple = not tools.shown and made["thinking"] is None and not made["preserved"]
        return self._prepared(
            made, grammar, patterns, None if simple else self._reader(made, request, enforced.nulls)
        )

    def form(self) -> Form | None:
        """The form of the template's calls, found once; None if it has none, or does not show tools.

        The usual one if the template refuses the probe.
        """
        if self._form is None:
            asked: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello."}]}
            asked |= {"tools": [probe()], "tool_choice": "required", "enable_thinking": False}
            try:
                made = self._apply(asked)
                self._form = (form_of(made["forced"]) if made["forced"] and made["tools"] else None,)
            except ApiError as e:
                if e.status != 400:
                    raise
                self._form = (Form(),)
        return self._form[0]

    def _readable(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages with system messages only where the template shows them: see later_system.py."""
        if not later_system.has_later(messages):
            return messages
        if self._later is None:
            try:
                made = self._apply({"messages": later_system.PROBE, "enable_thinking": False})
                self._later = later_system.are_shown(made["prompt"])
            except ApiError as e:
                if e.status != 400:
                    raise
                self._later = False
        return messages if self._later else later_system.as_users(messages)

    def _without_tools(
        self, request: dict[str, Any], tools: Tools, schema: dict[str, Any] | None, marks: Marks
    ) -> Prepared:
        """The same for a template that knows no tools: see tools_as_text.py."""
        messages = tools_as_text.messages(request["messages"], [t["function"] for t in tools.shown])
        given: dict[str, Any] = {**request, "messages": messages}
        required, enforced = tools.choice == "required", Enforced(tools.callable, Form(), marks)
        call = tools_as_text.schema(enforced.functions, None if required else schema)
        if required or schema is not None:
            given["json_schema"] = call
        made = self._apply(given, "tools")
        patterns = () if made["forced"] else (tools_as_text.trigger(enforced.functions),)
        converted = made if made["forced"] else self._convert(call, "tools")
        grammar = made["forced"] or converted["grammar"]
        made["incomplete"] = enforced.unmet(tools.strict, converted["incomplete"])
        read, names = self._reader(made, request), [f["name"] for f in tools.callable]

        def split(text: str, partial: bool) -> dict[str, Any] | None:
            message = read(text, partial)
            return message and tools_as_text.split(message, partial, names)

        return self._prepared(made, grammar, patterns, split)

    def _prepared(self, made: dict[str, Any], grammar: str, patterns: tuple[str, ...], read: Any) -> Prepared:
        stops = (*made["stops"], *([self._eos] if self._eos else []))
        preserved, unenforced = tuple(made["preserved"]), tuple(made["incomplete"])
        begins, thoughts = made["generation_prompt"], thoughts_of(made)
        return Prepared(
            made["prompt"], grammar, patterns, stops, preserved, read, unenforced, thoughts, begins
        )

    def _apply(self, request: dict[str, Any], field: str = "messages") -> dict[str, Any]:
        field = "tools" if request.get("tools") else field
        return ask(self._templates, field, "the chat template refused them", do="apply", **request)

    def _reader(
        self, made: dict[str, Any], request: dict[str, Any], nulls: Mapping[str, Collection[str]] = NO_NULLS
    ) -> Callable[[str, bool], Any]:
        syntax = Syntax({name: made[name] for name in ("format", "generation_prompt", "parser")})
        if not self._reads:  # they start while the model begins its answer
            self._reads = True
            with contextlib.suppress(RuntimeError):  # no more threads: the first reading starts them
                threading.Thread(target=self._answers.start, daemon=True).start()
        begun = request["messages"][-1] if request.get("continue_final_message") else {}

        def read(text: str, partial: bool) -> dict[str, Any] | None:
            message = self._answers.parse(syntax, text, partial)
            if message is None:  # it is none of the forms that the parser knows
                return None
            for call in message["tool_calls"]:
                call["arguments"] = with_nulls(call["arguments"], nulls.get(call["name"], ()))
            was = {field: begun.get(field) or "" for field in ("content", "reasoning_content")}
            return {**message, **{field: message[field].removeprefix(was[field]) for field in was}}

        return read


def _shown(tools: Tools, marks: Marks) -> list[dict[str, Any]]:
    """The tools as a template shows them."""
    room, out = SchemaRoom(marks, "tools"), list[dict[str, Any]]()
    for tool in tools.shown:
        function = tool["function"]
        schema = shown_schema(function["parameters"], room)
        same = schema is function["parameters"]
        out.append(tool if same else {**tool, "function": {**function, "parameters": schema}})
    return out


def ask(sandbox: Sandbox, param: str, what: str, **request: Any) -> Any:
    """The sandbox's answer. Raises ApiError 400 about `param`, 503 if too many requests wait for it, and 500
    if it cannot start.

    what: the start of the error message.
    """
    try:
        return sandbox.call(**request)
    except SandboxError as e:
        raise ApiError(400, f"{what}: {e}", param, "refused") from None
    except SandboxBroken:
        raise internal() from None
    except SandboxBusy:
        raise busy("with chat templates or grammars") from None


def refuse_incomplete(lines: list[str] | tuple[str, ...], param: str) -> None:
    """Raises ApiError 400 for a strict schema of which a grammar does not enforce all."""
    if lines:
        raise wrong(param, f"strict, but no grammar enforces all of it: {'; '.join(lines)!s:.300}")
