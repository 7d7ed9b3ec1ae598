"""llama_cpp.Llama that can leave the choice of flash attention to llama.cpp."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..runtime.binding import Llama, llama_cpp
from .guards import DraftSettings, OwnContext, completions


class FlashLlama(DraftSettings, OwnContext, Llama):
    """flash_attn=None is llama.cpp's `auto`: on if the backend supports it. Default: False, as in Llama."""

    def __init__(self, model_path: str, *, flash_attn: bool | None = False, **kwargs: Any) -> None:
        self._flash_attn = flash_attn
        super().__init__(model_path, flash_attn=bool(flash_attn), **kwargs)

    @property
    def context_params(self) -> Any:
        if self._flash_attn is None:  # Llama sets on or off before it creates the context from this
            self._context_params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_AUTO
        if self.__dict__.get("_model") is not None and self.__dict__.get("_ctx") is None:
            self._fit_context(self._context_params)
        return self._context_params

    @context_params.setter
    def context_params(self, params: Any) -> None:
        self._context_params = params

    def _fit_context(self, params: Any) -> None:
        """Sets what depends on the model: called once it is loaded, before its context is made."""

    def _create_completion(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        yield from completions(super()._create_completion(*args, **kwargs))

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "flash_attn": self._flash_attn}  # type: ignore[no-untyped-call]
