"""The names of models: whether a head's config names the target that it is converted for."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from ...common.gguf_reader import Gguf
from ...common.hub import repository_of
from ...common.model_reader import read_model
from .config import Config

_VERIFIER = "speculators_config.verifier.name_or_path"  # vLLM's speculators, RedHatAI


def names_of(target: Path) -> set[str]:
    """The names of a target's GGUF and of the models that it was made from, as plain() has them.

    Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, general metadata.
    """
    file = read_model(target)
    found = set(_named(file))
    if repo := repository_of(target):
        found |= {repo, repo.partition("/")[2]}
    found |= {re.sub(r"[-_.]gguf$", "", name, flags=re.IGNORECASE) for name in found}
    return {plain(name) for name in found if plain(name)}


def _named(file: Gguf) -> Iterator[str]:
    text: Callable[[str], str] = lambda key: (
        v.decode("utf-8", "replace") if isinstance(v := file.get(key), bytes) else ""
    )
    yield text("general.name")
    keys = ["general.source.huggingface.repository", "general.source.url", "general.repo_url"]
    n = file.get("general.base_model.count", 0)
    for i in range(min(n, 8) if type(n) is int else 0):
        yield text(f"general.base_model.{i}.name")
        keys.append(f"general.base_model.{i}.repo_url")
    for key in keys:
        parts = text(key).rstrip("/").split("/")[-2:]
        if len(parts) == 2:
            yield "/".join(parts)


def plain(name: str) -> str:
    """A name without case and punctuation: Qwen3-1.7B and Qwen3 1.7B are the same.

    So are Meta-Llama-3.1 and Llama-3.1, its later name (github.com/basetenlabs/truss-examples/pull/357).
    """
    return re.sub(r"[^a-z0-9/]", "", name.lower()).replace("metallama", "llama")


def named_target(config: Config, target: Path) -> str | None:
    """A line about the target that config.json names, None if it names none. A name is no proof."""
    name = config.string(_VERIFIER, None)
    if name is None:
        return None
    message = f"config.json names the head's target: {name}"
    names = names_of(target)
    if not names or {plain(name), plain(name.rpartition("/")[2])} & names:
        return message
    itself = ", ".join(sorted(names))
    return f"{message}; {target.name} calls itself {itself}: --self-test tells if it is another"
