"""Heads by name: which files of a repository are a head, whatever project published it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

from ..common.hub import HubName, Repository, choose, only
from ..common.model_names import is_name
from ..errors import EagleError, ErrorKind
from .fitted import HeadFiles

ORDER = ("Q8_0", "BF16", "F16", "Q4_K_M", "Q4_0", "F32")  # for heads that are GGUFs already
CONFIG, ONE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
MOST_CONFIG = 64 << 20  # bytes; a checkpoint's config and index have some kilobytes


@contextlib.contextmanager
def head_source(name: str | Path) -> Iterator[Path]:
    """The converter's source, for a path or an hf: name. Raises EagleError as fetch_head() does."""
    if not is_name(name):
        yield Path(name)
        return
    with fetch_head(HubName.parse(str(name))).as_source() as source:
        yield source


def checkpoint_folder(name: str | Path) -> Path:
    """A checkpoint's folder, for a path or an hf: name. Raises EagleError as fetch_head()."""
    if not is_name(name):
        return Path(name)
    head = fetch_head(HubName.parse(str(name)))
    if ONE not in head.files:
        raise EagleError(ErrorKind.BAD_FILE, f"{head.name} has no {ONE}: name a checkpoint that has one")
    return head.files[ONE].parent


def fetch_head(name: HubName) -> HeadFiles:
    """Fetches a head.

    Without a file or a format: eagle3-*.gguf, else a checkpoint in safetensors, else any GGUF. A pickle is
    taken only if it is named. Raises EagleError: BAD_FILE if there is no head or it cannot be fetched,
    BAD_ARGUMENT for a file of another kind, LIBRARY without huggingface_hub.
    """
    repository = Repository(name.repo)
    names = repository.files()
    wanted = _wanted(name, names)
    places = {}
    for file in wanted:
        most = MOST_CONFIG if file.endswith(".json") else None
        places[_as_read(file)] = repository.fetch(file, most)
    if INDEX in places:
        places.update({shard: repository.fetch(shard) for shard in _shards(places[INDEX], names)})
    return HeadFiles(name.repo if name.file is None else f"{name.repo}/{name.file}", places)


def _wanted(name: HubName, names: list[str]) -> list[str]:
    if name.file is not None:
        return _named(name, names)
    ggufs = [n for n in names if n.endswith(".gguf") and "mmproj" not in n]
    heads = [n for n in ggufs if is_head_file(n)]
    if name.format is not None or heads:
        return [choose(heads or ggufs, name.format, name.repo, names, ORDER)]
    if CONFIG in names:
        if ONE in names or INDEX in names:
            return [CONFIG, ONE if ONE in names else INDEX]
        tensors = [n for n in names if n.endswith(".safetensors") and "/" not in n]
        if tensors:
            return [CONFIG, only(tensors, name.repo, names)]
    if ggufs:
        return [choose(ggufs, None, name.repo, names, ORDER)]
    if pickles := [n for n in names if n.endswith(".bin")]:
        raise EagleError(
            ErrorKind.BAD_FILE,
            f"{name.repo} has its head only as a pickle, which is taken only if it is named: "
            f"hf:{name.repo}/{pickles[0]}",
        )
    return [only([], f"{name.repo} is a head", names)]


def _named(name: HubName, names: list[str]) -> list[str]:
    assert name.file is not None
    file = only([n for n in names if n == name.file], str(name), names)
    if file.endswith(".gguf"):
        return [file]
    if not file.endswith((".safetensors", ".bin")) or "/" in file:
        raise EagleError(
            ErrorKind.BAD_ARGUMENT,
            f"{name} is no head: name a GGUF file, or a .safetensors or .bin file beside {CONFIG}",
        )
    return [only([n for n in names if n == CONFIG], f"{name.repo} is {CONFIG}", names), file]


def is_head_file(name: str) -> bool:
    """True if a file is a head by llama.cpp's convention, eagle3-*.gguf beside its model."""
    return name.rpartition("/")[2].lower().startswith("eagle3-") and name.endswith(".gguf")


def _as_read(file: str) -> str:
    """The name by which the converter knows a file."""
    if file.endswith((".gguf", ".json")):
        return file.rpartition("/")[2]
    return "pytorch_model.bin" if file.endswith(".bin") else ONE


def _shards(index: Path, names: list[str]) -> list[str]:
    """The safetensors files that an index names. The converter checks what else is in it."""
    try:
        found = set(json.loads(index.read_bytes())["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return []  # the converter says what is wrong with it
    return sorted(n for n in names if n in found and n.endswith(".safetensors") and "/" not in n)
