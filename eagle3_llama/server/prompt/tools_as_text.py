"""Tools for a template that knows none: they are described in the system message, and a call is JSON.

The form is an object with `name` and `arguments`, alone in the answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any

from ...common.guarded_json import read_json

_BLANKS = r"(?: |\n{1,2}[ \t]{0,20})?"
_BEGUN = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*')
_MAYBE = re.compile(r'\s*(\{\s*("(n(a(m(e("(\s*(:.*)?)?)?)?)?)?)?)?)?', re.DOTALL)
_INTRODUCTION = """You can call these functions:
{}
To call one, answer with nothing but this JSON: {{"name": the function's name, "arguments": its arguments}}"""


def trigger(functions: list[dict[str, Any]]) -> str:
    """The beginning of a call of one of these functions, as a regular expression: at the answer's beginning.

    JSON with another name, or with a name alone, is an answer. The blanks are those that the grammar knows,
    which reads it again.
    """
    names = "|".join(re.escape(json.dumps(f["name"], ensure_ascii=False)) for f in functions)
    parts = (r"\{", '"name"', ":", f"(?:{names}),")
    return rf"^\s*({_BLANKS.join(parts)})"


def messages(given: list[dict[str, Any]], functions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation in words that any template knows: calls as text, results as the user's messages."""
    system = _INTRODUCTION.format("\n".join(json.dumps(f, ensure_ascii=False) for f in functions))
    out: list[dict[str, Any]] = [{"role": "system", "content": [system]}]
    for m in given:
        content, role = m.get("content") or "", m["role"]
        if role == "system" and len(out) == 1:
            out[0] = {"role": "system", "content": [f"{content}\n\n{system}"]}
            continue
        if role in ("tool", "function"):
            role, content = "user", f"The result of the call: {content}"
        calls = [_text(call["function"]) for call in m.get("tool_calls") or ()]
        content = "\n".join([*([content] if content else []), *calls])
        if role == out[-1]["role"]:  # some templates want the roles to alternate
            out[-1]["content"].append(content)
        else:
            out.append({"role": role, "content": [content]})
    return [{**m, "content": "\n".join(m["content"])} for m in out]


def _text(function: dict[str, Any]) -> str:
    try:
        arguments = read_json(function["arguments"])
    except ValueError:
        arguments = function["arguments"]
    return json.dumps({"name": function["name"], "arguments": arguments}, ensure_ascii=False)


def schema(functions: list[dict[str, Any]], beside: Any = None) -> dict[str, Any]:
    """The schema of a call of one of these functions. beside: another schema that the answer may follow."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": f["name"]}, "arguments": f["parameters"]},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for f in functions
    ]
    roots = [*(f["parameters"] for f in functions), beside or {}]  # plain ones: their names differ
    named = [root.get("$defs") for root in roots]
    defs = {key: value for of in named if isinstance(of, dict) for key, value in of.items()}
    return {"anyOf": calls + ([beside] if beside is not None else []), **({"$defs": defs} if defs else {})}


def split(message: dict[str, Any], partial: bool, names: Collection[str]) -> dict[str, Any]:
    """The message with its content as a call, where it is one, or may become one if it is partial.

    names: the functions that may be called.
    """
    content = message["content"]
    begun = _BEGUN.match(content)
    name = None if begun is None else _name(begun[1])
    if begun is None or name not in names:
        held = begun is None and partial and _MAYBE.fullmatch(content)
        return {**message, "content": "" if held else content}
    rest = content[begun.end() :].rstrip()
    if partial or not rest.endswith("}"):
        arguments = rest.rstrip("} \t\n")  # what closes the call is not known yet
    else:
        arguments = rest[:-1].rstrip()
    call = {"name": name, "arguments": arguments, "id": ""}
    return {**message, "content": "", "tool_calls": [call]}


def _name(text: str) -> Any:
    try:
        return read_json(text)
    except ValueError:  # an escape that JSON does not have
        return None
