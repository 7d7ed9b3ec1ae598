"""A slot as bytes: its text, the target's keys and values, the head's state.

    magic "eagle3slot1\\n" | uint32 size of header | JSON header | target | head | texts | sha256

The header names the model and the head. The state of another model or head is refused, and so are damaged
bytes. The texts are those of the client's text memory, as TextMemory.tokens() gives them. The check protects
against accidents only: a user who may write into the folder of slots is trusted.
"""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import json
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..common import model_reader
from ..errors import EagleError, ErrorKind
from ..llama import cache_settings
from ..runtime.session import MODEL
from ..runtime.text_memory import END
from .slot_state import SlotState

if TYPE_CHECKING:
    from .model import BatchModel
    from .scheduler import BatchSlot

MAGIC = b"eagle3slot1\n"
MAX_HEADER = 1 << 26  # bytes; a token takes at most 8 of them


def identity(base: BatchModel, name: str) -> dict[str, Any]:
    """Identifies what a state belongs to: content and sizes of target and head, the cache, its settings.

    name: the model's.
    """
    s = base.settings
    head = base.engine.head.info() if base.engine.has_head else None
    file = s.eagle if base.engine.drafter != MODEL else None  # of a small model a slot has nothing
    return {
        "model": name,
        "content": model_reader.fingerprint(s.model),
        "n_vocab": base.n_vocab(),
        "n_embd": base.n_embd(),
        "head": head,
        "head_content": model_reader.fingerprint(file) if file else None,
        "types": [base.context_params.type_k, base.context_params.type_v],
        "flash_attn": s.flash_attn,
        "n_parallel": s.n_parallel,
        **({"lora": [model_reader.fingerprint(s.lora), s.lora_scale]} if s.lora else {}),
        # files of earlier versions have no such keys
        **({} if s.swa_full else {"swa_full": False}),
        **({"settings": settings} if (settings := cache_settings.settings(base)) else {}),
    }


def free_slot(slots: Sequence[BatchSlot], i: int) -> BatchSlot:
    """The i-th slot. Raises EagleError BAD_ARGUMENT if there is none, or a request has it."""
    if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < len(slots):
        raise EagleError(ErrorKind.BAD_ARGUMENT, f"there is no slot {i}, only 0..{len(slots) - 1}")
    if slots[i].job is not None:
        raise EagleError(ErrorKind.BAD_ARGUMENT, f"slot {i} is busy")
    return slots[i]


@dataclasses.dataclass
class Contents(SlotState):
    """Contents of a slot's file. texts: TextMemory.tokens() of the client that saved it."""

    texts: bytes = b""


def pack(of: dict[str, Any], contents: Contents) -> bytes:
    """The bytes of a slot's file. of: identity()."""
    sizes = {"target": len(contents.target), "head": len(contents.head), "texts": len(contents.texts)}
    header = json.dumps({"of": of, "tokens": contents.tokens, **sizes}).encode()
    parts: list[Any] = [
        MAGIC,
        struct.pack("<I", len(header)),
        header,
        memoryview(contents.target).cast("B"),
        contents.head,
        contents.texts,
    ]
    check = hashlib.sha256()
    for part in parts:
        check.update(part)
    return b"".join([*parts, check.digest()])


def unpack(expected: dict[str, Any], n_ctx: int, data: bytes) -> Contents:
    """The contents that pack() wrote. expected: identity(). n_ctx: tokens of a slot.

    Raises EagleError BAD_VALUE for damaged bytes or those of another model.
    """

    def bad(why: str) -> EagleError:
        return EagleError(ErrorKind.BAD_VALUE, f"not a slot that can be restored: {why}")

    at = len(MAGIC) + 4
    if data[: len(MAGIC)] != MAGIC or len(data) < at + 32:
        raise bad("another format, or cut off")
    view = memoryview(data)
    if hashlib.sha256(view[:-32]).digest() != data[-32:]:
        raise bad("damaged or cut off")
    n = struct.unpack("<I", data[len(MAGIC) : at])[0]
    if n > min(MAX_HEADER, len(data) - at - 32):
        raise bad("damaged")
    try:
        header = json.loads(data[at : at + n])
        of = header["of"]
        tokens = header["tokens"]
        sizes = header["target"], header["head"], header.get("texts", 0)  # older files have none
    except (ValueError, KeyError, TypeError, RecursionError):
        raise bad("damaged") from None
    if of != json.loads(json.dumps(expected)):
        raise bad("it belongs to another model, head or cache (n_parallel counts, and long rope factors)")
    n_vocab = expected["n_vocab"]
    if not isinstance(tokens, list) or not all(type(t) is int and 0 <= t < n_vocab for t in tokens):
        raise bad("damaged")
    if len(tokens) > n_ctx:
        raise bad(f"it has {len(tokens)} tokens, a slot here {n_ctx}")
    if not all(type(x) is int and x >= 0 for x in sizes) or at + n + sum(sizes) + 32 != len(data):
        raise bad("damaged")
    head_at = at + n + sizes[0]
    texts_at = at + n + sizes[0] + sizes[1]
    if not _are_texts(data[texts_at:-32], n_vocab):
        raise bad("damaged")
    target = (ctypes.c_uint8 * sizes[0]).from_buffer_copy(view[at + n : head_at])
    return Contents(tokens, target, data[head_at:texts_at], data[texts_at:-32])


def _are_texts(data: bytes, n_vocab: int) -> bool:
    """True if TextMemory.tokens() could have given these bytes."""
    if len(data) % 4 != 0:
        return False
    ids = np.frombuffer(data, np.int32)
    return not ids.size or bool(ids.min() >= END and ids.max() < n_vocab and ids[-1] == END)
