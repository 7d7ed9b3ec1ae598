"""Mistakes with an EagleLlama that are told: use it after close(), assign a drafting setting to it."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import re
import sys
import warnings
from collections.abc import Generator
from typing import Any, NoReturn

from ..common.model_reader import read_model
from ..errors import EagleError, ErrorKind, TargetError
from ..runtime.binding import Llama
from ..runtime.engine import Engine
from ..runtime.params import EagleParams
from .adapters import check_adapter
from .model_costs import on_device

LLAMA_NAMES = tuple(  # the settings that Llama knows
    name for name in inspect.signature(Llama.__init__).parameters if name not in ("self", "kwargs")
)
_CALLS = (Llama.create_completion, Llama.create_chat_completion)
CALL_NAMES = {name for call in _CALLS for name in inspect.signature(call).parameters}
_TOO_LONG = re.compile(r"exceed context window of \d+")  # Llama's ValueError
_AT_LOAD = {  # Llama's ValueErrors, and what is likely
    "Failed to load model from file": "the file is damaged, or newer than this llama.cpp",
    "Failed to create llama_context": "llama.cpp made no context for it: give a smaller n_ctx if "
    "there is too little memory; verbose=True shows its reason",
}
_ON_DEVICE = {  # the same, where layers are asked to be on a device
    "Failed to load model from file": "the device has too little memory, or no such split_mode, or the model "
    "is newer than this llama.cpp: give a smaller n_gpu_layers; verbose=True shows the reason",
    "Failed to create llama_context": "llama.cpp made no context for it: give a smaller n_ctx or "
    "n_gpu_layers if there is too little memory; verbose=True shows its reason",
}


def check_trees(engine: Engine, params: EagleParams) -> None:
    """Raises EagleError UNSUPPORTED if params ask for a tree that cannot be drafted, or not be checked."""
    if not params.fixed_tree or engine.drafter is None:
        return
    if not engine.has_head:
        raise EagleError(
            ErrorKind.UNSUPPORTED, "a draft model drafts chains, not trees of a given shape: leave tree out"
        )
    if not engine.can_tree:
        why = engine.tree_refusal
        mend = "load the model with flash_attn=True, or leave" if "flash" in why else "leave"
        raise EagleError(ErrorKind.UNSUPPORTED, f"this target cannot check a tree, as {why}: {mend} tree out")


class Closed:
    """Stands where the model and its context were. llama-cpp-python would hand freed memory to llama.cpp."""

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise closed()


def closed() -> EagleError:
    """The error of a call after close()."""
    return EagleError(ErrorKind.BAD_ARGUMENT, "the model is closed: load it again with EagleLlama(...)")


def load_error(path: str, error: ValueError, n_gpu_layers: int | None = None) -> TargetError:
    """The error for a ValueError of Llama's constructor, which was given n_gpu_layers."""
    if isinstance(error, TargetError):
        return error
    whole = on_device(n_gpu_layers) and is_whole(path)
    for message, why in (_ON_DEVICE if whole else _AT_LOAD).items():
        if message in str(error):
            kind = ErrorKind.UNSUPPORTED if whole else ErrorKind.BAD_FILE
            known = split_error(path) or type_error(path)
            return known or TargetError(kind, f"{path} cannot be loaded: {why}")
    return TargetError(ErrorKind.BAD_ARGUMENT, str(error))


def is_whole(path: str) -> bool:
    """True if the file can be read."""
    try:
        read_model(path)
    except EagleError:
        return False
    return True


def split_error(path: str) -> TargetError | None:
    """The fault in the parts of a split model; None if nothing is, or it is in one file."""
    try:
        read_model(path)
    except EagleError as e:
        return TargetError(e.kind, str(e)) if e.kind is ErrorKind.BAD_FILE else None
    return None


def type_error(path: str) -> TargetError | None:
    """The fault of a model that has weights of a type that nobody knew; None if it has none."""
    try:
        tensors = read_model(path).tensors
    except EagleError:
        return None
    unknown = [name for name, tensor in tensors.items() if tensor.qtype is None]
    if not unknown:
        return None
    more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
    return TargetError(
        ErrorKind.UNSUPPORTED,
        f"{path} cannot be loaded: tensor {unknown[0]!r:.80}{more} has a weight type that this llama.cpp "
        "does not know: take the model in another format, such as Q4_K_M, or a newer eagle3-llama",
    )


def check_files(given: dict[str, Any]) -> None:
    """Raises EagleError for a draft model that cannot be called, and for a file that is no LoRA adapter.

    Llama would fail at the first draft, and decode without the adapter. given: Llama's keywords, in which the
    adapter's path becomes absolute.
    """
    draft_model, lora_path = given.get("draft_model"), given.get("lora_path")
    check_adapter(lora_path)
    if lora_path is not None:
        given["lora_path"] = os.path.abspath(lora_path)
    if draft_model is not None and not callable(draft_model):
        raise EagleError(
            ErrorKind.BAD_ARGUMENT,
            f"draft_model is {draft_model!r:.80}, expected the path of a small model, or a LlamaDraftModel",
        )


def completions(steps: Any) -> Generator[Any, None, None]:
    """The items of Llama._create_completion. json.dumps() can write their logprobs, whose values are Llama's.

    Raises TargetError BAD_ARGUMENT if the prompt is too long for the context.
    """
    try:
        for item in steps:
            for choice in item["choices"]:
                if logprobs := choice.get("logprobs"):
                    _python_floats(logprobs)
            yield item
    except ValueError as e:
        if isinstance(e, EagleError) or not _TOO_LONG.search(str(e)):
            raise
        raise TargetError(
            ErrorKind.BAD_ARGUMENT, f"{e}: shorten the prompt, or load the model with a larger n_ctx"
        ) from e
    finally:
        steps.close()


def _python_floats(logprobs: dict[str, Any]) -> None:
    def plain(x: Any) -> float | None:
        return x if x is None else float(x)

    if "token_logprobs" in logprobs:
        logprobs["token_logprobs"] = [plain(x) for x in logprobs["token_logprobs"]]
    if logprobs.get("top_logprobs"):
        logprobs["top_logprobs"] = [
            row if row is None else {token: plain(x) for token, x in row.items()}
            for row in logprobs["top_logprobs"]
        ]


class OwnContext:
    """Llama's `ctx`. Other libraries decode with it, without drafts, and the user is told so once."""

    @property
    def ctx(self) -> Any:
        """The pointer to the llama_context."""
        reader = sys._getframe(1).f_globals.get("__name__", "")
        package = reader.partition(".")[0]
        if package not in ("llama_cpp", "eagle3_llama"):
            _tell_reader(package)
        return super().ctx  # type: ignore[misc]  # of the Llama that this is mixed into


@functools.cache
def _tell_reader(package: str) -> None:
    warnings.warn(
        f"{package} takes this model's context (ctx): what it decodes there with llama.cpp's own functions "
        "has no drafts. What Llama's methods generate has them",
        RuntimeWarning,
        stacklevel=3,
    )


def _setting(name: str) -> property:
    def get(self: Any) -> Any:
        return getattr(self.eagle_params, name)

    def assign(self: Any, value: Any) -> None:
        if type(self).eagle_params.fset is None:  # a request's
            raise EagleError(
                ErrorKind.BAD_ARGUMENT, f"{name} of a request cannot change: give it to Batcher.request()"
            )
        self.eagle_params = dataclasses.replace(self.eagle_params, **{name: value})

    return property(get, assign, doc=f"{name} of eagle_params. Assigning it makes new eagle_params.")


class DraftSettings:
    """The fields of eagle_params as attributes. What is assigned is checked, and holds from the next call."""

    n_max = _setting("n_max")
    n_min = _setting("n_min")
    p_min = _setting("p_min")
    tree = _setting("tree")
    text = _setting("text")
