"""The settings that a batcher and a server share: the model and its slots."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from .cache_types import check_cache_types
from .limits import MAX_DRAFT
from .memory_size import PROMPT_CACHE, check_memory
from .options import (
    N_CTX,
    CacheTypeK,
    CacheTypeV,
    Eagle,
    FlashAttn,
    FromText,
    GpuLayers,
    Lora,
    LoraScale,
    Model,
    SwaFull,
    TextMemoryPrompts,
    TextMemorySize,
    size,
)
from .settings import Range, check, option


@dataclasses.dataclass(frozen=True)
class ModelSettings:
    """A model with slots. Raises EagleError BAD_ARGUMENT."""

    model: Annotated[str, Model]
    eagle: Annotated[str | None, Eagle] = None
    n_parallel: Annotated[int, "number of slots: requests decoded in one batch", Range(1, 32)] = 4
    n_ctx: Annotated[
        int,
        option("context of one request in tokens: prompt and answer", "--n-ctx", "-c"),
        Range(64, 1 << 22),
    ] = N_CTX
    n_batch: Annotated[int, "most prompt tokens decoded between two rounds", Range(64, 1 << 14)] = 512
    n_gpu_layers: Annotated[int, GpuLayers] = 0
    flash_attn: FlashAttn = None
    swa_full: SwaFull = True
    n_rs_seq: Annotated[
        int | None,
        "snapshots of a hybrid target's state in each slot; default: by what they take",
        Range(0, MAX_DRAFT),
    ] = None
    cache_type_k: CacheTypeK = "f16"
    cache_type_v: CacheTypeV = "f16"
    lora: Annotated[str | None, Lora] = None
    lora_scale: LoraScale = 1.0
    chat_format: Annotated[str | None, "a chat format of llama-cpp-python; default: the model's template"] = (
        None
    )
    text: FromText = True
    text_memory: Annotated[int | str, TextMemorySize] = 0
    text_memory_prompts: TextMemoryPrompts = False
    prompt_cache: Annotated[
        int | str,
        size(
            "bytes (1G) in which texts are kept that slots gave up, so that later prompts of the same"
            " API key are not decoded again; 0: none"
        ),
    ] = PROMPT_CACHE

    def __post_init__(self) -> None:
        check(self, self._named)
        check_memory(int(self.text_memory), self.text_memory_prompts, self.text)
        check_cache_types(self.cache_type_k, self.cache_type_v, self.flash_attn)

    @staticmethod
    def _named(name: str) -> str:
        """A field's name in errors."""
        return name
