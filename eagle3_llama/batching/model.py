"""The model that a Batcher's requests share."""

from __future__ import annotations

import dataclasses
import difflib
import threading
from typing import Annotated, Any

import numpy as np

from ..common.cache_types import CACHE_TYPES
from ..common.keywords import strict
from ..common.limits import MAX_DRAFT
from ..common.loaded_files import LoadedFiles
from ..common.model_settings import ModelSettings
from ..common.settings import Range, seconds
from ..errors import EagleError, ErrorKind
from ..llama.chat import is_end
from ..llama.eagle_llama import EagleLlama
from ..llama.metadata import number
from ..runtime.binding import llama_cpp
from ..runtime.machine import cores
from .job import RequestCancelled

TOKENIZERS = 2  # prompts that are tokenized at a time: each takes a core from the decoding
GEMM_STEP = 4  # rows that llama.cpp's products of repacked matrices take together
RECURRENT_STEP = 64  # tokens that a gated delta net computes together
# file types (LLAMA_FTYPE_...) without K-quants: a row's product does not depend on the rows beside it
ROWS_ALIKE = frozenset(
    getattr(llama_cpp, f"LLAMA_FTYPE_{name}")
    for name in (
        "ALL_F32 MOSTLY_F16 MOSTLY_BF16 MOSTLY_Q4_0 MOSTLY_Q4_1 MOSTLY_Q5_0 MOSTLY_Q5_1 MOSTLY_Q8_0"
    ).split()
)


@strict
@dataclasses.dataclass(frozen=True)
class BatchSettings(ModelSettings):
    """Settings of a Batcher. An unknown name raises EagleError BAD_ARGUMENT with the most similar known one.

    Those that are also options of `eagle3-llama serve` do what its help says. n_ctx: tokens of one slot; the
    cache has room for n_parallel times as many. text: whether requests that leave the drafts to the planner
    also draft from their text. text_memory: bytes for the answers of each client. interval: seconds for which
    a request lets tokens gather before it reads them; with 0 it reads those of each round at once.
    shared_draft: most draft tokens of a request that fixes their number, in rounds that others take part in.
    """

    n_threads: Annotated[int | None, Range(1, 1024)] = None
    extract_layers: tuple[int, ...] | None = None
    interval: Annotated[float, seconds(0, 10)] = 0.0
    shared_draft: Annotated[int, Range(0, MAX_DRAFT)] = MAX_DRAFT

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_chat_format(self.chat_format, None)  # before a large model is loaded


class BatchModel(EagleLlama):
    """A model with a context of several sequences, each with its own cache. It does not generate."""

    def __init__(self, s: BatchSettings) -> None:
        self._n_slots = s.n_parallel
        self.tokenizing = threading.BoundedSemaphore(TOKENIZERS)
        n = s.n_threads or cores()
        super().__init__(
            s.model,
            eagle=s.eagle,
            extract_layers=s.extract_layers,
            text=s.text,
            n_ctx=s.n_ctx * s.n_parallel,
            n_batch=s.n_batch,
            n_threads=n,
            n_threads_batch=n,
            n_gpu_layers=s.n_gpu_layers,
            flash_attn=s.flash_attn,
            n_rs_seq=s.n_rs_seq,
            swa_full=s.swa_full,
            type_k=CACHE_TYPES[s.cache_type_k],
            type_v=CACHE_TYPES[s.cache_type_v],
            lora_path=s.lora,
            lora_scale=s.lora_scale,
            chat_format=s.chat_format,
            verbose=False,
        )
        self.settings = dataclasses.replace(s, model=self.model_path, eagle=self._eagle_path)  # no names
        try:
            _check_chat_format(s.chat_format, self._chat_handlers)
        except EagleError:
            self.close()
            raise

    @EagleLlama.context_params.setter  # type: ignore[attr-defined, untyped-decorator]  # mypy does not know it
    def context_params(self, params: Any) -> None:
        params.n_seq_max = self._n_slots  # Llama has no argument for it
        self._context_params = params

    @staticmethod
    def _closed_error() -> EagleError:
        return RequestCancelled("shutdown")

    @property
    def loaded_files(self) -> LoadedFiles:
        """The files of the model and what belongs to it, as they were when it was loaded."""
        return self._files

    def batch_sizes(self) -> tuple[int, int]:
        """n_batch and n_ubatch of the context."""
        return llama_cpp.llama_n_batch(self._ctx.ctx), llama_cpp.llama_n_ubatch(self._ctx.ctx)

    def prompt_step(self) -> int:
        """A chunk of a micro-batch has a multiple of so many tokens, so that its bits are the whole's."""
        has_experts = (number(self.metadata, "expert_count") or 0) > 0
        if has_experts and number(self.metadata, "file_type", "general") not in ROWS_ALIKE:
            return self.batch_sizes()[1]  # how many rows an expert gets depends on the whole micro-batch
        return RECURRENT_STEP if self._is_recurrent or self._is_hybrid else GEMM_STEP

    def prunes_windows(self) -> bool:
        """True if layers with a sliding window keep the window alone."""
        return not self.settings.swa_full and llama_cpp.llama_model_n_swa(self.model) > 0

    def least_cut(self, slot: int, n_tokens: int) -> int:
        """Fewest tokens, besides none, that a slot of n_tokens can be cut to: its window must be there."""
        if not self.prunes_windows():
            return 0
        first = llama_cpp.llama_memory_seq_pos_min(llama_cpp.llama_get_memory(self._ctx.ctx), slot)
        window = llama_cpp.llama_model_n_swa(self.model)
        return min(first + window - 1, n_tokens) if first > 0 else 0

    def positions(self, slot: int) -> int:
        """Number of a slot's tokens that the context's memory holds."""
        return int(llama_cpp.llama_memory_seq_pos_max(llama_cpp.llama_get_memory(self._ctx.ctx), slot)) + 1

    def logits(self, row: int) -> np.ndarray:
        """A row of the last batch, float32 [n_vocab]; the next batch overwrites it."""
        return self._context.logits(row)

    def is_end(self, token: int) -> bool:
        """True if a token ends generation."""
        return bool(is_end(self, token))


def _check_chat_format(name: str | None, of_model: dict[str, Any] | None) -> None:
    """Raises EagleError BAD_ARGUMENT for an unknown chat format, with which every chat would fail.

    of_model: the formats of the file, None before it is loaded.
    """
    from llama_cpp.llama_chat_format import LlamaChatCompletionHandlerRegistry

    known = [*LlamaChatCompletionHandlerRegistry()._chat_handlers, *(of_model or ())]
    later = of_model is None and (name or "").startswith("chat_template.")
    if name is not None and name not in known and not later:
        near = difflib.get_close_matches(name, known, n=1)
        message = f"did you mean {near[0]}?" if near else f"known are {', '.join(sorted(known))}"
        raise EagleError(ErrorKind.BAD_ARGUMENT, f"there is no chat format {name!r:.80}: {message}")
