"""The costs of a loaded model for its planner: measured, or from the cache of earlier loads."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from typing import Any

from ..common import loaded_files, model_reader
from ..errors import EagleError, ErrorKind
from ..runtime import cost_files, costs, library, machine, token_costs, variants
from ..runtime.binding import Llama, llama_cpp
from ..runtime.engine import Engine
from . import snapshot_costs, snapshots

# what the environment says about where weights lie
PLACES = ("EAGLE3_LLAMA_AMX", "EAGLE3_LLAMA_INTERLEAVE")
MOST_BATCH = 256  # rows of a batch while measuring
GAIN = 1.03  # flash attention's that is worth a line


class MeasuredLlama(Llama):
    """A Llama whose decodes are measured: with an engine over its context, and the files that it is of."""

    _n_slots = 1
    _engine: Engine | None = None
    _eagle_path: str | None
    _files: loaded_files.LoadedFiles

    @property
    def engine(self) -> Engine:
        """The engine over this model's context."""
        assert self._engine is not None, "llama-cpp-python decodes itself"
        return self._engine


def cost_key(llm: MeasuredLlama, head: str | None, flash: int | None = None) -> list[object]:
    """Files, those of the libraries too, the machine, where tensors are, threads in use, and the cache.

    flash: another flash_attn_type than the context's.
    """
    p = llm.context_params
    cache = [p.type_k, p.type_v, p.offload_kqv, p.op_offload, p.swa_full, p.kv_unified, p.n_seq_max]
    sizes = [p.n_threads, p.n_threads_batch, llm.engine.threads, p.n_batch, p.n_ubatch, p.n_rs_seq]
    return [*_where(llm, head), [*cache, p.flash_attn_type if flash is None else flash], *sizes]


def _where(llm: MeasuredLlama, head: str | None) -> list[object]:
    """The part of the key that holds for every context: files, machine, and where tensors are."""
    m = llm.model_params
    lib_dir = library.find_lib_dir()
    ours = [*llm._files.model, llm._files.head if head else None, llm._files.lora]
    libraries = map(loaded_files.stamp, sorted(lib_dir.iterdir()) if lib_dir else [])
    about = [tuple(file) for file in (*ours, *libraries) if file]
    placed = [
        variants.choose(lib_dir) if lib_dir else None,
        *map(os.environ.get, PLACES),
        m.n_gpu_layers,
        m.split_mode,
        m.main_gpu,
        llm.tensor_split,
        m.load_mode,
    ]
    adapted = [llm.numa, llm.kv_overrides, llm.lora_scale]
    return [about, machine.identity(lib_dir), placed + adapted]


def choose_snapshots(llm: MeasuredLlama, params: Any) -> snapshots.Chosen:
    """How many snapshots of a recurrent state the context keeps that is about to be made with params.

    On a device they are not measured: what a decode there takes needs the context's own layout.
    """
    model, p = llm._model.model, params

    def measured(n: int) -> snapshot_costs.Ways | None:
        if on_device(llm.model_params.n_gpu_layers):
            return None
        made = [p.n_threads, p.n_threads_batch, p.type_k, p.type_v, p.flash_attn_type]
        return snapshot_costs.kept(model, p, n, [*_where(llm, None), *made])

    weights = llama_cpp.llama_model_size(model)
    return snapshots.choose(llm._model.metadata(), weights, llm._n_slots, params.n_ubatch, measured)


def measure(llm: MeasuredLlama) -> None:
    """Gives the planner costs from the cache, or measured now. Empties the first slot."""
    measure_threads(llm)
    key = cost_key(llm, llm._eagle_path)
    most = min(llm.n_batch, MOST_BATCH)
    memory, device = functools.partial(memory_of, llm), on_device(llm.model_params.n_gpu_layers)
    found = cost_files.cached(llm.engine, key, room(llm), most, memory, device)
    llm.engine.planner.set_costs(found)
    llm.engine.release_threads()


def measure_threads(llm: MeasuredLlama) -> None:
    """Finds how many threads are fastest now, if the model can take back the rows. Empties the first slot."""
    try:
        llm.engine.rewind(0)
        llm.engine.measure_threads()
    except EagleError as e:
        if e.kind is not ErrorKind.UNSUPPORTED:
            raise


def report_flash(llm: MeasuredLlama) -> None:
    """Says after a verbose load without flash attention what it would bring, once loads measured both."""
    if not llm.verbose or llm.context_params.flash_attn_type != llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED:
        return
    size, head = room(llm), llm._eagle_path
    kinds = (None, llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED)
    without, flash = (cost_files.known(cost_key(llm, head, kind), size) for kind in kinds)
    n_past = size / 2
    if without and flash and (gain := without.decode(1, n_past) / flash.decode(1, n_past)) >= GAIN:
        print(
            f"EagleLlama: behind {n_past:.0f} tokens, flash_attn=True decodes {gain:.2f} times as fast on"
            " this machine; near ties of two tokens may then fall the other way",
            file=sys.stderr,
        )


def read(llm: MeasuredLlama) -> None:
    """Gives the planner the costs that a load measured. Without any, they are measured when needed.

    Once: it is in the middle of an answer. The planner corrects what another program disturbed.
    """
    if llm.engine.n_past() == 0:
        measure_threads(llm)
        llm.engine.release_threads()
    found = cost_files.known(cost_key(llm, llm._eagle_path), room(llm))
    if found is not None:
        llm.engine.planner.set_costs(found)
    else:
        llm.engine.planner.on_match = functools.partial(measure_in_use, llm)


def measure_in_use(llm: MeasuredLlama, slot: int) -> None:
    """Measures after what a slot holds, which stays. If there is no room for that, nothing is drafted."""
    engine = llm.engine
    size = room(llm)
    most = min(llm.n_batch, MOST_BATCH)
    try:
        found = costs.measure_in_use(
            engine,
            size,
            costs.Times(),
            1,
            slot,
            most,
            large=True,
            memory=memory_of(llm),
            on_device=on_device(llm.model_params.n_gpu_layers),
        )
    except EagleError:
        return
    if found is not None:
        engine.planner.set_costs(cost_files.remember(cost_key(llm, llm._eagle_path), size, found))


def on_device(n_gpu_layers: int | None) -> bool:
    """True if layers of a model that is loaded so are on a device."""
    return bool(n_gpu_layers) and bool(llama_cpp.llama_supports_gpu_offload())


def memory_of(llm: MeasuredLlama) -> token_costs.Memory | None:
    """The bytes that the model reads; None if a slot has more than keys and values of its tokens."""
    if llm._is_recurrent or llm._is_hybrid:
        return None
    return token_costs.Memory(
        _row_bytes(llm), lambda slot: llama_cpp.llama_state_seq_get_size(llm._ctx.ctx, slot)
    )


def _row_bytes(llm: MeasuredLlama) -> int:
    """Bytes of the weights that a row reads. All of them if the files say less than llama.cpp knows."""
    with contextlib.suppress(EagleError):
        loaded_files.check_same(llm._files.model)
        if found := model_reader.row_bytes(model_reader.read_model(llm.model_path)):
            return found
    return int(llama_cpp.llama_model_size(llm._model.model))


def room(llm: MeasuredLlama) -> int:
    """Positions of one sequence; n_ctx() may be those of several."""
    return int(llama_cpp.llama_n_ctx_seq(llm._ctx.ctx))
