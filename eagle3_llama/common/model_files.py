"""Checks model files before anything is loaded or written: each is there, is a GGUF, and is of its kind."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ..errors import EagleError, ErrorKind, TargetError
from .gguf_reader import find_size, read_architecture, read_beginning
from .model_reader import PART, model_architecture
from .no_models import kind_of, lacks_layers

HEADS = ("eagle3", "eagle")  # general.architecture of heads
_ON_THE_HUB = re.compile(r"\w[\w.-]*/\w[\w.-]*(:[\w.-]+|(/\w[\w.-]*)+)?")  # OWNER/REPO[:FORMAT or /FILE]

Name = str | os.PathLike[str]


def is_head(path: Name) -> bool:
    """True if the GGUF file is an EAGLE head. Raises EagleError BAD_FILE or TRUNCATED for what is no GGUF."""
    return _architecture(Path(path)) in HEADS


def check_models(target: Name, *heads: Name | None, whole: bool = True, or_model: bool = False) -> None:
    """Checks a target and its heads (None: no head). Reads the beginning of each file.

    whole: the target's weights are needed. or_model: a small model may stand in a head's place. Raises
    TargetError if the target is at fault, else EagleError: BAD_FILE (missing, a folder, no GGUF, no model),
    TRUNCATED, BAD_VALUE, HEAD_MISMATCH (a head in the target's place, no head in a head's place).
    """
    given = [Path(head) for head in heads if head is not None]
    try:
        check_file(target, "target")
        if other := _another_kind(Path(target), whole):
            what, mend = other
            raise EagleError(ErrorKind.BAD_FILE, f"{target} is no model by itself, but {what}: {mend}")
        kind = model_architecture(target)
    except EagleError as e:
        raise TargetError(e.kind, str(e)) from e
    kinds = [_architecture(head) for head in given]
    if kind in HEADS:
        swapped = next((h for h, k in zip(given, kinds) if k not in HEADS), None)
        mend = (
            f"{swapped} is a model: exchange the two"
            if swapped
            else "give the model that it was trained for, and this file as its head"
        )
        raise TargetError(
            ErrorKind.HEAD_MISMATCH, f"{target} is a head itself, and stands in the target's place: {mend}"
        )
    for head, found in zip(given, kinds):
        if found not in HEADS:
            other = _another_kind(head, whole=True)
            if or_model and other is None:
                _check_smaller(Path(target), head)
                continue
            what = other[0] if other else f"a model (its general.architecture is {found!r:.40})"
            raise EagleError(
                ErrorKind.HEAD_MISMATCH,
                f"{head} is not an EAGLE head, but {what}: give "
                "the GGUF of a head for this target; eagle3-llama convert makes one of a checkpoint",
            )
        _check_size(Path(target), kind, head, found)


def _check_smaller(target: Path, small: Path) -> None:
    """Raises EagleError HEAD_MISMATCH if the target itself is to draft for it."""
    if target.exists() and small.samefile(target):
        raise EagleError(
            ErrorKind.HEAD_MISMATCH,
            f"{small} is the target itself: give a head, or a smaller model of its family, or nothing",
        )


def _check_size(target: Path, kind: str, head: Path, head_kind: str) -> None:
    """Raises EagleError HEAD_MISMATCH for a head of another hidden size, before minutes of loading."""
    wanted = find_size(head, f"{head_kind}.target_hidden_size") or find_size(
        head, f"{head_kind}.embedding_length"
    )
    there = find_size(target, f"{kind}.embedding_length")
    if None not in (wanted, there) and wanted != there:
        raise EagleError(
            ErrorKind.HEAD_MISMATCH,
            f"{head} is for a target of hidden size {wanted}, {target} has {there}: take the head trained for"
            " this model",
        )


def check_file(path: Name, kind: str = "") -> None:
    """Raises EagleError BAD_FILE unless there is a file at `path`. It says how to mend what is there.

    kind: "target", "head" or "model" (either) for what may also have an hf: name.
    """
    path = Path(path)
    if path.is_dir():
        raise EagleError(ErrorKind.BAD_FILE, f"{path} is a folder: {_mend_folder(path, kind)}")
    if not path.is_file():
        raise EagleError(ErrorKind.BAD_FILE, missing(path) if kind else f"no such file: {path}")


def missing(path: Name, what: str = "file") -> str:
    """The message about a model or a head that is not there. It may be meant as a name on the Hub."""
    name = os.fspath(path)
    is_name = _ON_THE_HUB.fullmatch(name) and not Path(name.partition("/")[0]).exists()
    if is_name and not (name.count("/") == 1 and name.endswith(".gguf")):
        return f"no such {what}: {name}; for the Hub write hf:{name}"
    return f"no such {what}: {name}"


def _architecture(path: Path) -> str:
    check_file(path, "head")
    strings, _ = read_beginning(path)
    return strings.get("general.architecture", "") if kind_of(strings) else read_architecture(path)


def _another_kind(path: Path, whole: bool) -> tuple[str, str] | None:
    """The kind of a GGUF file that is no model by itself, and how to mend it. None for models and heads."""
    strings, n_tensors = read_beginning(path)
    if found := kind_of(strings):
        return found
    is_part = PART.search(path.name) is not None  # whose tensors may all be in later parts
    looks = whole and not is_part and strings.get("general.architecture") not in HEADS
    return lacks_layers(path, n_tensors) if looks else None


def _mend_folder(folder: Path, kind: str) -> str:
    """Advice on what to give instead of a folder."""
    ggufs = sorted(folder.glob("*.gguf"))
    if ggufs:
        return f"use {' or '.join(map(str, ggufs[:3]))}"
    if (folder / "config.json").is_file():
        if kind == "target":
            return (
                "a model is a GGUF file here: convert_hf_to_gguf.py of llama.cpp makes one of a checkpoint, "
                "and the Hub has those of many models, hf:OWNER/REPO"
            )
        return (
            f"a checkpoint's; for a head, eagle3-llama convert {folder} --model TARGET.gguf --out head.gguf "
            "makes a GGUF file of it"
        )
    return "give a file"
