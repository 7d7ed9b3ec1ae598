"""Writes heads as checkpoints in SpecForge's layout, which vLLM and SGLang load."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from ..common.files import make_folder, replacing
from ..errors import EagleError, ErrorKind
from ..heads.convert.source import read_source
from .model import Head


def config(head: Head, layers: Sequence[int], dtype: torch.dtype) -> dict[str, object]:
    """config.json. Its two lists of layers are those of SGLang and of vLLM."""
    s = head.shape
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": s.n_embd,
        "num_attention_heads": s.n_head,
        "num_key_value_heads": s.n_head_kv,
        "head_dim": s.head_dim,
        "intermediate_size": s.n_ff,
        "num_hidden_layers": 1,
        "rms_norm_eps": s.rms_eps,
        "rope_theta": s.rope_theta,
        "hidden_act": "silu",
        "max_position_embeddings": s.n_ctx,
        "vocab_size": s.n_vocab,
        "draft_vocab_size": len(head.d2t),
        "tie_word_embeddings": False,
        "attention_bias": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": _nested_ids(layers),
            "use_aux_hidden_state": True,
        },
        # vLLM uses these ids unchanged; without them it would use those above, which are one too low for it
        "eagle_aux_hidden_state_layer_ids": list(layers),
    }


def _nested_ids(layers: Sequence[int]) -> list[int]:
    """The ids under eagle_config, as SGLang reads them: it adds one to lists that begin with 1, to no others.

    (Layers that begin with 1 cannot be told to it. Source: SGLang, pull request 25454.)
    """
    return [k - 1 for k in layers] if layers[0] in (1, 2) else list(layers)


def tensors(head: Head, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors. d2t: offsets, int64. t2d: bool. Raises EagleError BAD_VALUE: not finite."""
    d2t = head.d2t.cpu()
    t2d = torch.zeros(head.shape.n_vocab, dtype=torch.bool)
    t2d[d2t] = True
    out = {name: p.detach().to("cpu", dtype).contiguous() for name, p in head.state_dict().items()}
    for name, p in head.state_dict().items():
        if not bool(out[name].isfinite().all()):
            raise EagleError(ErrorKind.BAD_VALUE, _too_large(name, p, dtype))
    return {**out, "d2t": d2t - torch.arange(len(d2t)), "t2d": t2d}


def _too_large(name: str, p: torch.Tensor, dtype: torch.dtype) -> str:
    kept = str(dtype).removeprefix("torch.")
    if bool(p.isfinite().all()):
        why = f"has weights up to {float(p.abs().max()):,.0f}, and {kept} holds {torch.finfo(dtype).max:,.0f}"
    else:
        why = "has weights that are no numbers"
    return (
        f"the trained head's {name} {why}: the training diverged, which too high a learning rate or texts of "
        "too few different words do: lower --lr, or add other texts, and choose another --out"
    )


def write(head: Head, layers: Sequence[int], out: Path, dtype: torch.dtype = torch.float16) -> None:
    """Writes config.json and model.safetensors to the folder `out`."""
    if 0 in layers:
        raise EagleError(
            ErrorKind.UNSUPPORTED,
            "this layout lists outputs of layers, so it has no id for the input of layer 0: use other layers",
        )
    make_folder(out)
    with replacing(out / "model.safetensors") as part:
        save_file(tensors(head, dtype), part, metadata={"format": "pt"})
    with replacing(out / "config.json") as part:
        part.write_text(json.dumps(config(head, layers, dtype), indent=2) + "\n", encoding="utf-8")


def _midlayer(folder: Path) -> dict[str, np.ndarray]:
    """The tensors of a published head by their checkpoint names."""
    return {name: t.read_all() for name, t in read_source(folder).tensors.items()}


def head_d2t(folder: Path) -> np.ndarray:
    """The target ids in the draft vocabulary of a published head, int64."""
    found = _midlayer(folder).get("d2t")
    if found is None:
        raise EagleError(
            ErrorKind.MISSING_TENSOR, f"{folder} has no d2t: --init-from needs a head with a draft vocabulary"
        )
    return found.astype(np.int64) + np.arange(len(found))


def read_head(folder: Path, head: Head, layers: Sequence[int]) -> None:
    """Loads a published head (midlayer layout) into `head`, to continue its training."""
    found, state = _midlayer(folder), head.state_dict()
    for name, p in state.items():
        if name not in found:
            raise EagleError(
                ErrorKind.MISSING_TENSOR,
                f"{folder} has no {name}: --init-from needs a head with one midlayer",
            )
        if tuple(found[name].shape) != tuple(p.shape):
            raise EagleError(
                ErrorKind.HEAD_MISMATCH,
                f"{name} of {folder} has shape {list(found[name].shape)}, expected {list(p.shape)}",
            )
        state[name] = torch.from_numpy(np.array(found[name], np.float32))
    head.load_state_dict(state)
