"""A LoRA adapter: whether its file is one, and whether llama.cpp took it.

llama-cpp-python takes no notice of an adapter that llama.cpp refused, and decodes without it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..common.gguf_reader import read_gguf
from ..common.model_files import check_file
from ..errors import EagleError, ErrorKind

_MEND = "convert the adapter with convert_lora_to_gguf.py of llama.cpp"


def check_adapter(path: str | None) -> None:
    """Raises EagleError for a file that is no LoRA adapter; None is fine."""
    if path is None:
        return
    check_file(path)
    file = read_gguf(Path(path))
    kind = (file.string("general.type", ""), file.string("adapter.type", ""))
    if kind != ("adapter", "lora"):
        what = f"general.type is {kind[0]!r:.40}, adapter.type {kind[1]!r:.40}"
        raise EagleError(ErrorKind.BAD_FILE, f"{path} is no LoRA adapter ({what}): {_MEND}")


def check_taken(llm: Any) -> None:
    """Raises EagleError if llama.cpp refused the adapter of a loaded Llama."""
    if llm.lora_path and not llm._lora_adapter:
        message = f"llama.cpp cannot use {llm.lora_path} with {llm.model_path}"
        mend = "it belongs to another model, or is damaged; verbose=True shows the reason"
        raise EagleError(ErrorKind.BAD_FILE, f"{message}: {mend}")
