"""`eagle="auto"`: a head for a target, found beside it, in the cache, in this package or in the list of
published heads.

It never fails a load. One line on stderr says what was chosen, or why nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path

from ..common.gguf_reader import read_architecture, read_gguf
from ..common.hub import HubName, Repository, choose, repository_of
from ..common.model_files import HEADS
from ..common.model_names import AUTO
from ..common.notes import note
from ..errors import EagleError
from ..models import shipped_head
from .convert.names import names_of, plain
from .convert.target import TargetFile, read_target
from .fitted import fit, records
from .hub import ORDER, fetch_head, is_head_file

PUBLISHED = Path(__file__).parents[1] / "data" / "heads.json"
LOOKED_AT = 64  # files beside a model that are opened: a folder may have thousands, on a slow disk
HEADER = 1 << 16  # bytes in which a file has to name its architecture, which is the first key of most


@dataclasses.dataclass(frozen=True)
class PublishedHead:
    """An entry of data/heads.json. Each fact was read at its source, the address of a page or a file.

    repo: of the head. target: the repository of the model that it was trained for. layout: the project that
    defined its format. layers: the inputs that it reads, where they are known. n_embd, n_layer, n_vocab: the
    target's sizes, where they are known, from sizes_source.
    """

    repo: str
    target: str
    source: str
    layout: str | None = None
    layers: tuple[int, ...] | None = None
    n_embd: int | None = None
    n_layer: int | None = None
    n_vocab: int | None = None
    sizes_source: str | None = None

    def is_for(self, names: set[str], target: TargetFile) -> bool:
        sizes = ((getattr(self, name), getattr(target, name)) for name in ("n_embd", "n_layer", "n_vocab"))
        same_name = {plain(self.target), plain(self.target.partition("/")[2])} & names
        return bool(same_name) and all(known is None or known == its for known, its in sizes)


def find_head(name: str, target: str) -> str | None:
    """The GGUF of a head for the target: of an hf: name, or of `auto`, which finds None if there is none.

    An hf: name may also be that of a small model that drafts. For an hf: name it raises EagleError as
    fetch_head() and fit() do.
    """
    if name == AUTO:
        return choose_head(Path(target))
    found = fetch_head(HubName.parse(name))
    [*ggufs] = (path for path in found.files.values() if path.suffix == ".gguf")
    if ggufs and not _is_head(ggufs[0]):
        return str(ggufs[0])
    return str(fit(found, Path(target)))


def choose_head(target: Path) -> str | None:
    """The GGUF of a head for the target, or None. It raises nothing."""
    why = []
    try:
        read_target(target)
    except EagleError:
        return None  # loading it says what is wrong
    for look in (_beside, _in_cache, _shipped, _in_list):
        try:
            path, message = look(target)
        except Exception as e:  # whatever it is: the model decodes without a head too
            path, message = None, str(e) or type(e).__name__
        if path is not None:
            note(f"head for {target.name}: {message}")
            return str(path)
        why.append(message)
    note(f"no head for {target.name}: {'; '.join(why)}; drafts come from the text alone")
    return None


def would_find(target: Path) -> str:
    """The find of `auto` for a target's file, in words. The Hub is not asked. Raises as read_target()."""
    model, why = read_target(target), []
    if repo := repository_of(target):
        why.append(f"the files of {repo} on the Hub, which are not looked at here")
    for look in (_in_cache, _shipped) if repo else (_in_folder, _in_cache, _shipped):
        path, message = look(target)
        if path is not None:
            return message
        why.append(message)
    names = names_of(target)
    listed = [entry.repo for entry in published() if entry.is_for(names, model)]
    return f"{listed[0]} on the Hub, published for it" if listed else f"no head: {'; '.join(why)}"


def _beside(target: Path) -> tuple[Path | None, str]:
    """A head in the repository that the target was fetched from, or in its folder if it is the user's own."""
    if (repo := repository_of(target)) is not None:
        names = [n for n in Repository(repo).files() if is_head_file(n)]
        if not names:
            return None, f"none in {repo}"
        name = choose(names, None, repo, names, ORDER)
        return fit(fetch_head(HubName(repo, name)), target), f"{name} of {repo}, beside it"
    return _in_folder(target)


def _in_folder(target: Path) -> tuple[Path | None, str]:
    """The first head in the target's folder whose sizes fit."""
    model, misfits, fitting = read_target(target), [], []
    for path in _heads_in(target.parent):
        if (wrong := misfit(path, model)) is None:
            fitting.append(path)
        else:
            misfits.append(f"{path.name} beside it {wrong}")
    if not fitting:
        return None, "; ".join(misfits) or "none beside it"
    others = f" (of {len(fitting)} that fit)" if len(fitting) > 1 else ""
    return fitting[0], f"{fitting[0].name}, beside it{others}"


def _heads_in(folder: Path) -> list[Path]:
    """The heads in a folder by what the files say of themselves, those named as llama.cpp's first."""
    files = sorted(folder.glob("*.gguf"), key=lambda path: (not is_head_file(path.name), path.name))
    looked_at = [path for path in files[:LOOKED_AT] if path.is_file()]  # opening a pipe would wait
    return [path for path in looked_at if is_head_file(path.name) or _is_head(path)]


def _is_head(path: Path) -> bool:
    try:
        return read_architecture(path, HEADER) in HEADS
    except EagleError:
        return False  # whatever it is, nobody said that it is a head


def _in_cache(target: Path) -> tuple[Path | None, str]:
    for record in records(target):
        assert record.path is not None
        return Path(record.path), f"{record.head}, in the cache"
    return None, "none in the cache"


def _shipped(target: Path) -> tuple[Path | None, str]:
    """The head that this package has, which fits one model: its sizes and each of its tokens."""
    head, model, tokens = shipped_head(), read_target(target), "tokenizer.ggml.tokens"
    if misfit(head, model) is None and read_gguf(head).get(tokens) == model.tokenizer[tokens].value:
        return head, "the one that this package has for it"
    return None, "none in this package"


def _in_list(target: Path) -> tuple[Path | None, str]:
    """The first published head that fits."""
    names, model, why = names_of(target), read_target(target), []
    for entry in published():
        if entry.is_for(names, model):
            try:
                path = fit(fetch_head(HubName(entry.repo)), target)
            except EagleError as e:
                why.append(f"{entry.repo} is published for it, but {e}")
            else:
                return path, f"{entry.repo}, published for {entry.target}"
    return None, "; ".join(why) or "none in the list of published heads"


@functools.cache
def published() -> tuple[PublishedHead, ...]:
    """The list of published heads."""
    entries = json.loads(PUBLISHED.read_text(encoding="utf-8"))["heads"]
    listed = lambda e: {**e, "layers": tuple(e["layers"])} if e.get("layers") else e
    return tuple(PublishedHead(**listed(e)) for e in entries)


def misfit(head: Path, target: TargetFile) -> str | None:
    """Why a GGUF cannot be a head of the target, by its sizes; None if it can."""
    try:
        file = read_gguf(head)
        arch = file.string("general.architecture")
        if arch not in HEADS:
            return "is no head"
        n_embd = file.size_of(f"{arch}.target_hidden_size", file.size_of(f"{arch}.embedding_length"))
        layers = file.get(f"{arch}.target_layers", file.get(f"{arch}.extract_layers", []))
    except EagleError as e:
        return f"cannot be read: {e}"
    if n_embd != target.n_embd:
        return f"is for a hidden size of {n_embd}, not {target.n_embd}"
    tokens = file.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and len(tokens) != target.n_vocab:
        return f"is for {len(tokens)} tokens, not {target.n_vocab}"
    if isinstance(layers, list) and any(type(i) is int and i > target.n_layer for i in layers):
        return f"reads layers {layers}, of {target.n_layer}"
    return None
