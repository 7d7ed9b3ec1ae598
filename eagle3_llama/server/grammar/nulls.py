"""Null between tags: a text has no quotes there, and most of llama.cpp's parsers read the word as a text."""

from __future__ import annotations

import re
from collections.abc import Collection

from ...common.guarded_json import read_json

_TOKEN = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?|[{}\[\]:,]', re.DOTALL)


def with_nulls(arguments: str, names: Collection[str]) -> str:
    """A call's arguments, which may be cut, with null where one of `names` is the text `null`.

    Its last text is left out as long as it may become that.
    """
    out, at, depth, key, before = list[str](), 0, 0, "", ""
    for found in _TOKEN.finditer(arguments):
        token = found[0]
        depth += (token in "{[") - (token in "}]")
        if depth == 1 and before == ":" and token[0] == '"' and key in names:
            if token == '"null"':
                out += [arguments[at : found.start()], "null"]
                at = found.end()
            elif found.end() == len(arguments) and '"null"'.startswith(token):
                return "".join([*out, arguments[at : found.start()]])
        if depth == 1 and token == ":" and len(before) > 1 and before[-1] == '"':
            key = _text(before)
        before = token
    return "".join([*out, arguments[at:]])


def _text(written: str) -> str:
    try:
        return read_json(written)
    except ValueError:  # an escape that JSON does not have: it is the name of no argument
        return ""
