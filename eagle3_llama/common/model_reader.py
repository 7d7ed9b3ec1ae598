"""Reads a model: one GGUF, or all parts of a split one, NAME-00001-of-00003.gguf and so on.

Whatever reads a target's weights, counts them, or tells one model from another does it here. The rules are
those by which llama.cpp loads parts: the first has the metadata, and each says in split.* which part it is.
"""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import replace
from pathlib import Path

from ..errors import EagleError, ErrorKind
from .files import reading, sha256_of
from .gguf_reader import Gguf, read_architecture, read_gguf

PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")  # ends the file's name
BLOCK, BLOCKS = 1 << 16, 16  # bytes of a block of weights, and how many blocks tell two files apart
Name = str | os.PathLike[str]


def read_model(path: Name) -> Gguf:
    """The keys of the model and the tensors of all its parts. `path` is its file, or its first part.

    Raises EagleError as read_gguf() does for each part, and BAD_FILE for a part that is not the first, for
    parts that are missing, and for parts of different models.
    """
    first = read_gguf(Path(path))
    count = _number(first, "count")
    if count < 2:
        return first
    tensors, size = dict(first.tensors), first.size
    for other in _others(first, count):
        part = read_gguf(other)
        n = int(_named(other)[1])
        if (_number(part, "no"), _number(part, "count")) != (n - 1, count):
            raise EagleError(
                ErrorKind.BAD_FILE, f"{other} is not part {n} of {count}: fetch the parts of {path} again"
            )
        if twice := tensors.keys() & part.tensors.keys():
            raise EagleError(
                ErrorKind.BAD_FILE, f"{other} has the tensor {min(twice)}, which an earlier part has too"
            )
        tensors |= part.tensors
        size += part.size
    wanted = _number(first, "tensors.count", len(tensors))
    if wanted != len(tensors):
        raise EagleError(
            ErrorKind.BAD_FILE,
            f"the {count} parts of {path} have {len(tensors)} tensors, and its metadata counts {wanted}: "
            "fetch all of them again",
        )
    return replace(first, tensors=tensors, size=size)


def model_architecture(path: Name) -> str:
    """general.architecture. Of a split model, all parts are looked at. Raises EagleError as read_model()."""
    path = Path(path)
    if PART.search(path.name):
        return read_model(path).string("general.architecture")
    try:
        return read_architecture(path)
    except EagleError as e:
        if e.kind is ErrorKind.BAD_VALUE:
            read_model(path)  # a later part under another name has no metadata: this says so
        raise


def files_of(path: Name) -> list[Path]:
    """The model's file, or by its name all parts of a split model that are there. Reads none of them."""
    path = Path(path)
    found = PART.search(path.name)
    if found is None or int(found[1]) != 1:
        return [path]
    return [path, *(p for p in _parts(path, int(found[2]))[1:] if p.is_file())]


def size_of(path: Name) -> int:
    """Bytes of all files of a model."""
    return sum(os.path.getsize(file) for file in files_of(path))


def row_bytes(model: Gguf) -> int:
    """Bytes of the weights that one row reads.

    All of them, with two exceptions. If there is an output matrix beside the token embedding, one row of the
    embedding is read, which is left out here. Of experts, those that a token uses count.
    """
    architecture = model.string("general.architecture")
    n_expert = model.size_of(f"{architecture}.expert_count", 0)
    n_used = min(model.size_of(f"{architecture}.expert_used_count", n_expert), n_expert)
    total = 0.0
    for name, tensor in model.tensors.items():
        if name == "token_embd.weight" and "output.weight" in model.tensors:
            continue
        is_expert = n_expert and "_exps." in name
        total += tensor.n_bytes * (n_used / n_expert if is_expert else 1)
    return int(total)


def fingerprint(path: Name) -> str:
    """The identity of a model, or of any file: a hash of its content, not of its name.

    Of a GGUF the SHA-256 of its size, its metadata and some blocks of its weights, because hashing all of a
    large model would take longer than loading it; of a split model, of all its parts. Of another file the
    SHA-256. Raises EagleError BAD_FILE, and as read_gguf().
    """
    files = files_of(path)
    if len(files) == 1:
        return _fingerprint(files[0])
    return hashlib.sha256(" ".join(map(_fingerprint, files)).encode()).hexdigest()


def hub_hash(path: Path) -> str | None:
    """The hash of a file's content by which the Hub's cache calls it; None for a file anywhere else.

    Source: https://huggingface.co/docs/huggingface_hub/guides/manage-cache
    """
    if not path.is_symlink():
        return None
    blob = Path(os.readlink(path))
    folders = path.absolute().parts
    inside = "snapshots" in folders and any(name.startswith("models--") for name in folders)
    is_hash = re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", blob.name)
    return blob.name if inside and blob.parent.name == "blobs" and is_hash else None


def _fingerprint(path: Path) -> str:
    if named := hub_hash(path):
        return named
    if path.suffix != ".gguf":
        return sha256_of(path)
    with reading(path), path.open("rb") as f:
        digest, size = hashlib.sha256(), path.stat().st_size
        start = min((t.offset for t in read_gguf(path).tensors.values()), default=size)
        digest.update(size.to_bytes(8, "little") + f.read(start))
        for i in range(BLOCKS):
            f.seek(start + (size - start) * i // BLOCKS)
            digest.update(f.read(BLOCK))
    return digest.hexdigest()


def _number(file: Gguf, key: str, default: int = 0) -> int:
    value = file.get(f"split.{key}", default)
    return value if type(value) is int and value >= 0 else default


def _named(path: Path) -> re.Match[str]:
    found = PART.search(path.name)
    assert found is not None
    return found


def _parts(path: Path, count: int) -> list[Path]:
    start = path.name[: _named(path).start()]
    return [path.with_name(f"{start}-{n:05d}-of-{count:05d}.gguf") for n in range(1, count + 1)]


def _others(first: Gguf, count: int) -> list[Path]:
    """The later parts. Raises EagleError BAD_FILE unless `first` is the first one, and all are there."""
    path, at = first.path, _number(first, "no")
    found = PART.search(path.name)
    if at != 0:
        name = _parts(path, count)[0].name if found else f"...-00001-of-{count:05d}.gguf"
        raise EagleError(
            ErrorKind.BAD_FILE, f"{path} is part {at + 1} of a model in {count} files: give the first, {name}"
        )
    if found is None or (int(found[1]), int(found[2])) != (1, count):
        raise EagleError(
            ErrorKind.BAD_FILE,
            f"{path} is the first of {count} files of a model, which are found by their names: call it "
            f"NAME-00001-of-{count:05d}.gguf, with the NAME of the others",
        )
    parts = _parts(path, count)
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise EagleError(
            ErrorKind.BAD_FILE,
            f"{path} is the first of {count} files of a model, and {', '.join(missing[:3])}{more} "
            f"{'is' if len(missing) == 1 else 'are'} not beside it: put all of them into one folder",
        )
    return parts[1:]
