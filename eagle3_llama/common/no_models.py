"""Files that stand where a model should, and are none by themselves: what each is, and what to do with it.

The beginning of a file tells. llama.cpp says "failed to load", or ends the process.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from pathlib import Path

_CONVERT = (
    "convert a model with llama.cpp's convert_hf_to_gguf.py, and a head's folder with eagle3-llama convert"
)
_UNPACK = "unpack it"
# first bytes of files that are no GGUF, in lower case
_BEGINNINGS = (
    (b"version https://git-lfs", "a pointer of Git LFS to it", "fetch the file with `git lfs pull`"),
    (b"<!doctype", "a web page", "download the file itself (its link has /resolve/, not /blob/)"),
    (b"<html", "a web page", "download the file itself (its link has /resolve/, not /blob/)"),
    (b"<?xml", "a text in XML, such as a server's error", "download the file again"),
    (b"{", "a text in JSON, such as a configuration or a server's error", "give the file of the weights"),
    (b"pk\x03\x04", "a ZIP archive, as PyTorch's .bin and .pt files are", _CONVERT),
    (b"\x80", "a pickle, as older files of PyTorch are", _CONVERT),
    (b"\x1f\x8b", "compressed (gzip)", _UNPACK),
    (b"\xfd7zxz", "compressed (xz)", _UNPACK),
    (b"\x28\xb5\x2f\xfd", "compressed (zstd)", _UNPACK),
    *((magic, "of a format before GGUF", _CONVERT) for magic in (b"tjgg", b"lmgg", b"fmgg", b"algg")),
    (b"\0\0\0\0", "empty at its beginning: it was not fetched to the end", "fetch it again"),
)
# general.type, or general.architecture, of GGUF files
_NOT_USED = "give the model, and no head: this kind is not used here"
_PROJECTOR = "a projector for images or sound (mmproj)", "give the model, and this file to its chat handler"
_KINDS = {
    "adapter": ("an adapter (LoRA)", "give the model that it belongs to, and this file as lora_path"),
    "mmproj": _PROJECTOR,
    "clip": _PROJECTOR,
    "imatrix": ("an importance matrix, for llama-quantize", "give the model"),
    "controlvector": ("a control vector", "give the model that it belongs to"),
    "dflash": ("a block drafter (DFlash)", _NOT_USED),
    "gemma4-assistant": ("a drafter for gemma 4", _NOT_USED),
}
_LAYER = b"\0\0\0\0\0\0\0blk.0."  # the end of a length, and the first tensor of a model's first layer
_NEXT = b".nextn."
MOST = 64 << 20  # bytes of metadata; the largest vocabularies have some 20 MB


def not_gguf(path: Path, beginning: bytes) -> str:
    """The fault of a file that is no GGUF, and how to mend it. beginning: 32 bytes or more."""
    size, begins = path.stat().st_size, beginning.lstrip(b" \r\n\t\xef\xbb\xbf").lower()
    if size == 0:
        return f"{path} is not a GGUF file, but empty: fetch it again"
    if beginning[8:9] == b"{" and 2 <= int.from_bytes(beginning[:8], "little") < size:
        return f"{path} is not a GGUF file, but one of safetensors: {_CONVERT}"
    for magic, what, mend in _BEGINNINGS:
        if begins.startswith(magic):
            return f"{path} is not a GGUF file, but {what}: {mend}"
    return f"{path} is not a GGUF file: give one"


def kind_of(strings: Mapping[str, str]) -> tuple[str, str] | None:
    """The kind of a GGUF file with these keys, and how to mend it; None if it may be a model."""
    named = (strings.get(f"general.{name}", "") for name in ("type", "architecture"))
    return next((_KINDS[name] for name in named if name in _KINDS), None)


def lacks_layers(path: Path, n_tensors: int) -> tuple[str, str] | None:
    """The same of a file whose tensors are not those of a model; None if they may be."""
    if n_tensors == 0:
        return "a vocabulary alone, without weights", "give the file of the model"
    if _has(path, _LAYER) or not _has(path, _NEXT):
        return None
    what = "a file of next-token layers (MTP) alone"
    return what, "give the model that they were published with: this kind is not used here"


def _has(path: Path, words: bytes) -> bool:
    """True if the metadata of a file has these bytes. To walk through a vocabulary would take a second."""
    with path.open("rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return data.find(words, 0, MOST) >= 0
