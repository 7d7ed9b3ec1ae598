"""Models and heads by name: from_pretrained(), and what a name comes to when a model is loaded."""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Sequence
from typing import Any

from ..common import keywords, model_names
from ..common.hub import PREFIX, Repository, cached_in, only
from ..common.model_files import check_models, is_head
from ..errors import EagleError, ErrorKind, TargetError
from ..runtime.params import EagleParams

_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+(/[^/]+\.(gguf|safetensors|bin))?")


class NamedLlama:
    """A Llama that can be loaded from the Hugging Face Hub."""

    @classmethod
    def from_pretrained(
        cls,
        repo_id: str,
        filename: str | None = None,
        additional_files: Sequence[str] | None = None,
        local_dir: str | os.PathLike[str] | None = None,
        local_dir_use_symlinks: bool | str = "auto",
        cache_dir: str | os.PathLike[str] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Fetches a model from the Hugging Face Hub and loads it, as Llama.from_pretrained does.

        filename: a name or a glob such as "*Q4_K_M.gguf"; None takes the only model, or the first by
        format (docs/use.md has the order). All parts of a split model are fetched. eagle: also a repository
        without hf:, such as "AngelSlim/Qwen3-1.7B_eagle3"; it goes into the same cache_dir.
        local_dir_use_symlinks has no effect any more.

        Raises EagleError: LIBRARY without the extra [hub], BAD_FILE if something cannot be fetched or no one
        file is meant.
        """
        try:
            repository = Repository(repo_id, cache_dir, local_dir)
            path = repository.fetch_model(filename)
            for wanted in additional_files or ():
                repository.fetch(_one(wanted, repository))
        except EagleError as e:
            raise TargetError(e.kind, str(e)) from e
        for name in {"eagle", *keywords.ALIASES} & kwargs.keys():
            kwargs[name] = _with_prefix(kwargs[name])
        with cached_in(cache_dir):
            return cls(model_path=str(path), **kwargs)  # type: ignore[call-arg]  # of the class that inherits


def _one(wanted: str, repository: Repository) -> str:
    names = repository.files()
    return only(fnmatch.filter(names, wanted), f"{repository.repo} for {wanted}", names)


def _with_prefix(eagle: Any) -> Any:
    """A repository's name as an hf: name; what is a path already stays."""
    if isinstance(eagle, str) and _REPOSITORY.fullmatch(eagle) and not os.path.exists(eagle):
        return eagle if eagle.endswith(".gguf") and eagle.count("/") < 2 else PREFIX + eagle
    return eagle


def drafter(eagle: Any, given: dict[str, Any]) -> str | None:
    """The drafter's name: the head's or a small model's. Its other keywords are taken out of those given.

    Raises EagleError BAD_ARGUMENT for both, HEAD_MISMATCH for a head in a small model's place.
    """
    head: str | None = keywords.one_of(
        {"eagle": eagle, **{name: given.pop(name, None) for name in keywords.ALIASES}}
    )
    own = given.get("draft_model")
    if not isinstance(own, (str, os.PathLike)):
        return head
    if head is not None:
        raise EagleError(ErrorKind.BAD_ARGUMENT, "give eagle or draft_model, not both")
    path = model_names.model(given.pop("draft_model"))
    if is_head(path):
        raise EagleError(ErrorKind.HEAD_MISMATCH, f"draft_model: {path} is a head: give it as eagle=")
    return path


def find(
    model: Any, eagle: str | None, params: EagleParams, layers: Any, whole: bool = True
) -> tuple[str, str | None, EagleParams, Any]:
    """(model's path, head's path, params, layers) for names or paths. Raises as check_models().

    Paths become absolute, as files are read after the load too. whole: the model's weights are needed.
    Where `auto` finds no head, what only a head can use is dropped from params and layers.
    """
    path = model_names.model(model)
    head = model_names.head(eagle, path)
    check_models(path, head, whole=whole, or_model=True)
    path, head = os.path.abspath(path), os.path.abspath(head) if head is not None else None
    if head is None and eagle is not None:
        return path, None, EagleParams(text=params.text), None
    return path, head, params, layers
