"""What a conversion needs of the target: sizes and tokenizer, from its GGUF's header."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import gguf

from ..errors import EagleError, ErrorKind


@dataclasses.dataclass(frozen=True)
class Target:
    """Sizes of the target; tokenizer holds (key, value, type, element type) to copy into the head."""

    n_embd: int
    n_layer: int
    n_vocab: int
    tokenizer: list[tuple[str, Any, gguf.GGUFValueType, gguf.GGUFValueType | None]]


def read_target(path: Path) -> Target:
    """Reads a target GGUF's keys; its weights are not touched."""
    if not path.is_file():
        raise EagleError(ErrorKind.BAD_FILE, f"no such file: {path}")
    try:
        fields = gguf.GGUFReader(path).fields
        arch = fields["general.architecture"].contents()
        tokens = fields["tokenizer.ggml.tokens"]
        return Target(int(fields[f"{arch}.embedding_length"].contents()), int(fields[f"{arch}.block_count"].contents()),
                      len(tokens.data), [_copy(k, f) for k, f in fields.items() if k.startswith("tokenizer.ggml.")])
    except KeyError as e:
        raise EagleError(ErrorKind.BAD_VALUE, f"{path}: key {e.args[0]} is missing: not a target model") from e
    except Exception as e:  # the reader raises whatever its numpy slices raise
        raise EagleError(ErrorKind.TRUNCATED, f"{path} is truncated or no GGUF file ({type(e).__name__})") from e


def _copy(key: str, field: gguf.ReaderField) -> tuple[str, Any, gguf.GGUFValueType, gguf.GGUFValueType | None]:
    kind = field.types[0]
    return key, field.contents(), kind, field.types[-1] if kind is gguf.GGUFValueType.ARRAY else None
