"""What decides the costs that the planner reads."""

from __future__ import annotations

import os
from typing import Any

from ..runtime import library, machine


def cost_key(llm: Any, head: Any) -> list[object]:
    """Files, those of the libraries too, the machine, where tensors are, threads, and the cache."""
    p, m, lib_dir = llm.context_params, llm.model_params, library.find_lib_dir()
    files = [llm.model_path, head, llm.lora_path, *(sorted(lib_dir.iterdir()) if lib_dir else [])]
    about = [(str(f), os.path.getsize(f), os.path.getmtime(f)) for f in files if f]
    placed = [m.n_gpu_layers, m.split_mode, m.main_gpu, llm.tensor_split, m.load_mode]
    adapted = [llm.numa, llm.kv_overrides, llm.lora_scale]
    cache = [p.type_k, p.type_v, p.offload_kqv, p.op_offload, p.swa_full, p.kv_unified, p.n_seq_max]
    sizes = [p.n_threads, p.n_threads_batch, p.n_batch, p.n_ubatch]
    return [about, machine.identity(lib_dir), placed + adapted, [*cache, p.flash_attn_type], *sizes]
