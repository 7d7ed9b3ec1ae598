"""libe3chat: llama.cpp's chat templates, their parsers and its schema converter.

For the child processes alone: a template, a schema or a model's text may end the process that it works in.
"""

from __future__ import annotations

import functools
import json
from typing import Any

from ...errors import EagleError, ErrorKind
from ...runtime import hook, library

_NAME = f"libe3chat{hook.SUFFIX}"


class ChatError(ValueError):
    """The library's refusal, in its words."""


class WrongOutput(ChatError):
    """A text that is no answer in the form of its parser."""


@functools.lru_cache(maxsize=1)
def load() -> tuple[Any, Any]:
    """(ffi, lib) of libe3chat. Raises EagleError LIBRARY."""
    library.load()  # the libllama that it needs
    folder = library.find_lib_dir()
    if folder is None or not (folder / "e3chat.h").is_file():
        raise EagleError(ErrorKind.LIBRARY, f"e3chat.h is missing from {folder}: reinstall eagle3-llama")
    return library.open_library(folder / _NAME, folder / "e3chat.h", "E3CHAT", "e3chat_abi_version")


class ChatTemplate:
    """A parsed template. bos, eos: the texts of these tokens. Raises ChatError."""

    def __init__(self, text: str, bos: str, eos: str) -> None:
        ffi, lib = load()
        out = ffi.new("e3chat_template **")
        _check(lib.e3chat_open(_text(text), _text(bos), _text(eos), out))
        self._handle = ffi.gc(out[0], lib.e3chat_close)

    def apply(self, request: dict[str, Any]) -> dict[str, Any]:
        """Renders a request: see e3chat_apply in e3chat.h, which has the fields of both. Raises ChatError."""
        data = _text(json.dumps(request))
        return _result(lambda lib, out: lib.e3chat_apply(self._handle, data, out))


def parse(syntax: dict[str, Any], text: str, partial: bool) -> dict[str, Any]:
    """The message that a text is. syntax: what apply() gave. Raises WrongOutput."""
    prompt, parser, answer = (_text(t) for t in (syntax["generation_prompt"], syntax["parser"], text))
    return _result(
        lambda lib, out: lib.e3chat_parse(syntax["format"], prompt, parser, answer, int(partial), out)
    )


def schema(text: str) -> dict[str, Any]:
    """`grammar` and `incomplete` of a JSON schema: see e3chat_schema. Raises ChatError."""
    data = _text(text)
    return _result(lambda lib, out: lib.e3chat_schema(data, out))


def _text(text: str) -> bytes:
    if "\0" in text:
        raise ChatError("it has a null character")
    return text.encode()


def _result(call: Any) -> dict[str, Any]:
    ffi, lib = load()
    out = ffi.new("char **")
    _check(call(lib, out))
    try:
        return json.loads(ffi.string(out[0]))
    finally:
        lib.e3chat_free(out[0])


def _check(code: int) -> None:
    if code < 0:
        ffi, lib = load()
        message = " ".join(ffi.string(lib.e3chat_error()).decode("utf-8", "replace").split())
        if "bad_alloc" in message:
            message = "it takes too much memory"
        elif "While executing" in message:  # where in the template, before what is wrong
            message = message.rpartition("Error: ")[2]
        raise (WrongOutput if code == lib.E3CHAT_E_OUTPUT else ChatError)(message)
