"""The metadata of a GGUF file, as llama-cpp-python reads it: text by name."""

from __future__ import annotations

from collections.abc import Mapping


def number(metadata: Mapping[str, str], name: str, group: str | None = None) -> int | None:
    """The whole number GROUP.NAME, None if there is none. group: by default the model's architecture."""
    group = group or metadata.get("general.architecture", "")
    try:
        return int(metadata[f"{group}.{name}"])
    except (KeyError, ValueError):
        return None
