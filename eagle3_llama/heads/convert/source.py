"""Reads the config and the tensors of a head from any supported file format."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ...common.files import parse_object, reading
from ...common.model_files import missing
from ...errors import EagleError, ErrorKind
from .config import Config, read_config
from .gguf_source import read_gguf_head
from .layouts.base import Layout
from .pickle_file import read_pickle
from .rope import Rope
from .safetensors_file import HeadTensor, read_safetensors

_ONE, _INDEX, _PICKLE = "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"


@dataclass(frozen=True)
class Source:
    """A head as stored. layout and rope are None for a checkpoint: the converter infers them."""

    config: Config
    tensors: dict[str, HeadTensor]
    layout: Layout | None = None
    rope: Rope | None = None
    outtype: str = "f16"  # default type of the output


def read_source(head: Path) -> Source:
    """Raises EagleError if anything is missing or malformed in the folder or the GGUF."""
    if head.is_file() and head.suffix == ".gguf":
        return Source(*read_gguf_head(head))
    if not head.exists():
        raise EagleError(ErrorKind.BAD_FILE, missing(head, "file or folder"))
    if not head.is_dir():
        raise EagleError(
            ErrorKind.BAD_ARGUMENT,
            f"{head} is not a folder: give the one with config.json and model.safetensors, or a GGUF head",
        )
    config, tensors = read_config(head), _read_tensors(head)
    return Source(config, tensors)


def _read_tensors(head_dir: Path) -> dict[str, HeadTensor]:
    if (head_dir / _ONE).exists():
        return read_safetensors(head_dir / _ONE)
    if (head_dir / _INDEX).exists():
        return _read_shards(head_dir)
    files = sorted(head_dir.glob("*.safetensors"))
    if len(files) == 1:
        return read_safetensors(files[0])
    if files:
        raise EagleError(
            ErrorKind.BAD_FILE,
            f"{head_dir} has {len(files)} safetensors files but no {_INDEX}: download the folder again",
        )
    if (head_dir / _PICKLE).exists():
        return read_pickle(head_dir / _PICKLE)
    raise EagleError(ErrorKind.BAD_FILE, f"{head_dir} has neither {_ONE} nor {_INDEX} nor {_PICKLE}")


def _read_shards(head_dir: Path) -> dict[str, HeadTensor]:
    path = head_dir / _INDEX
    with reading(path):
        weight_map = parse_object(path.read_bytes(), str(path), ErrorKind.BAD_VALUE).get("weight_map")
    if not isinstance(weight_map, dict):
        raise EagleError(ErrorKind.BAD_VALUE, f"key weight_map of {path} is missing or not an object")
    for name, shard in weight_map.items():  # never read a file outside the folder
        if not isinstance(shard, str) or not shard.endswith(".safetensors") or Path(shard).name != shard:
            raise EagleError(
                ErrorKind.BAD_VALUE,
                f"tensor {name}: {path} names {shard!r:.60}, which is not a safetensors file in the folder",
            )
    shards = {shard: read_safetensors(head_dir / shard) for shard in sorted(set(weight_map.values()))}
    for name, shard in weight_map.items():
        for other in shards:
            if other != shard and name in shards[other]:
                raise EagleError(
                    ErrorKind.BAD_VALUE,
                    f"tensor {name} is in two files, {shard} and {other}: download the head again",
                )
        if name not in shards[shard]:
            raise EagleError(
                ErrorKind.MISSING_TENSOR, f"tensor {name} is not in {shard}, although {_INDEX} lists it there"
            )
    return {name: shards[shard][name] for name, shard in weight_map.items()}
