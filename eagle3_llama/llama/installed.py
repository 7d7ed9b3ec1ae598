"""install(): libraries that make their own `llama_cpp.Llama` get one that drafts."""

from __future__ import annotations

import inspect
import os
from typing import Any

from ..common import keywords, model_names
from ..common.model_files import check_file
from ..runtime import llama_class
from ..runtime.binding import Llama
from . import guards
from .eagle_llama import EagleLlama

VARIABLE = "EAGLE3_LLAMA_HEAD"
_OURS = {*inspect.signature(EagleLlama.__init__).parameters} - {"self", "model_path", "kwargs"}
_SETTINGS = (*sorted(_OURS), *(n for n in guards.LLAMA_NAMES if n not in _OURS and n != "model_path"))


class InstalledLlama(EagleLlama):
    """Made by `llama_cpp.Llama(...)` after install(): an EagleLlama with the settings of that call."""

    settings: dict[str, Any] = {}

    def __init__(self, model_path: str | os.PathLike[str], **given: Any) -> None:
        own = given.get("draft_model") is not None  # which has settings of its own
        other = any(map(given.get, keywords.ALIASES))
        unused = keywords.OURS if own else ("eagle",) if other else ()
        settings = {name: value for name, value in self.settings.items() if name not in unused}
        # The caller is a library, whose user cannot leave out what Llama ignores.
        known = {k: v for k, v in given.items() if k in _SETTINGS or k in keywords.ALIASES or _meant(k)}
        super().__init__(model_path, **{**settings, **known})


def install(eagle: str | os.PathLike[str] | None = None, **settings: Any) -> None:
    """From now on `llama_cpp.Llama(...)` makes an EagleLlama in this process, whoever calls it.

    It does not matter when a library imported llama_cpp. A second call replaces the settings of the first.
    eagle: the head, as EagleLlama takes it; by default what EAGLE3_LLAMA_HEAD names, and without that drafts
    come from the text alone. "auto" suits programs with several models. settings: further arguments of
    EagleLlama, such as flash_attn=True. What a caller of Llama gives itself comes first.

    Raises EagleError: BAD_ARGUMENT for an unknown setting, BAD_FILE for a head that is not there, LIBRARY if
    llama_cpp has loaded another libllama already.
    """
    for name in settings.keys() - set(_SETTINGS):
        raise keywords.unknown(name, _SETTINGS, otherwise="the settings are the arguments of EagleLlama")
    head = eagle if eagle is not None else os.environ.get(VARIABLE) or None
    if head is not None and not model_names.is_name(head):
        check_file(head)
        head = os.path.abspath(head)  # the program may change its folder
    InstalledLlama.settings = settings | ({} if head is None else {"eagle": head})
    llama_class.replace(Llama, InstalledLlama)


def _meant(name: str) -> bool:
    return keywords.meant(name, guards.LLAMA_NAMES) is not None
