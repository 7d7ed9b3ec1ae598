"""The class behind `llama_cpp.Llama`: a stock Llama, or after install() an object of our class.

Libraries bind the name Llama when they are imported, before or after this package. So the name stays, and the
class itself decides.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

from ..common import keywords

_MARK = "_eagle3_llama_watches"  # marks an __init__ that asks for the class
_instead: list[type] = []  # the class whose objects stand for Llama's, if there is one


def watch(llama: type) -> None:
    """Makes `llama(...)` follow replace(), and warn about settings that only EagleLlama has.

    llama: llama_cpp.Llama. Subclasses make their own objects, as before.
    """
    own = llama.__init__  # type: ignore[misc]
    if getattr(own, _MARK, False):  # wrappers of others keep it
        return

    @functools.wraps(own)  # __new__ would hide the signatures of Llama and of its subclasses
    def __init__(self: Any, *args: Any, **given: Any) -> None:
        if type(self) is llama and _instead:
            self.__class__ = _instead[0]  # a subclass
            _instead[0].__init__(self, *args, **given)  # type: ignore[misc]
            return
        ours = sorted({*keywords.OURS, *keywords.ALIASES} & given.keys()) if type(self) is llama else ()
        if ours:
            _tell(" and ".join(ours))
        own(self, *args, **given)

    setattr(__init__, _MARK, True)
    llama.__init__ = __init__  # type: ignore[misc]


def replace(llama: type, by: type) -> None:
    """From now on `llama(...)` makes an object of `by`, a subclass, wherever the name was bound."""
    watch(llama)
    _instead[:] = [by]


@functools.cache
def _tell(names: str) -> None:
    warnings.warn(
        f"llama_cpp.Llama ignores {names}, so this model is decoded without drafts: call "
        "eagle3_llama.install() before it is loaded, or take EagleLlama",
        RuntimeWarning,
        stacklevel=3,
    )
