"""Compares the native head with the NumPy reference, stage by stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import EagleError, ErrorKind

__all__ = ["Stage", "agrees", "compare", "stage_names", "verdict"]

LEAST = 0.999  # cosine of a stage: quantised products round activations to 8 bits, which costs about 0.0002


@dataclass(frozen=True)
class Stage:
    """Largest absolute error, largest absolute reference value, and cosine similarity, over all rows."""

    name: str
    error: float
    largest: float
    cosine: float


def stage_names(n_layer: int) -> list[str]:
    """The stages of a head with n_layer decoder layers, in the order of computation."""
    layers = [f"{stage}-{i}" for i in range(n_layer) for stage in ("attn_in", "attn_out", "ffn_out")]
    return ["g", *layers, "prenorm", "logits"]


def compare(head: str | Path, target: str | Path, prompt: str, n_threads: int = 2) -> list[Stage]:
    """Compares the captured features of the prompt with the target's graph, then each stage of the head.

    Raises EagleError as loading a model does, and BAD_ARGUMENT for a prompt of fewer than two tokens.
    """
    from ...runtime.capture import Capture
    from ...runtime.engine import Engine
    from .graph import GraphLayers, llama_cpp
    from .read import read_reference

    reference = read_reference(Path(head), Path(target))
    vocab = llama_cpp.Llama(str(target), vocab_only=True, verbose=False)
    tokens = vocab.tokenize(prompt.encode())
    vocab.close()
    if len(tokens) < 2:
        raise EagleError(
            ErrorKind.BAD_ARGUMENT, f"--prompt {prompt[:40]!r} has {len(tokens)} tokens: give a longer one"
        )
    n = len(tokens)
    graph = GraphLayers(target, n_ctx=n + 8, n_batch=n, n_ubatch=n, n_threads=n_threads)
    engine = None
    try:
        engine = Engine(graph.ctx, graph.model, str(head))
        layers: Any = engine.head.info()["layers"]
        with Capture(graph.ctx, layers, graph.n_embd) as capture:
            if graph.decode(tokens, range(n)) != 0:
                raise EagleError(ErrorKind.DECODE, "the target could not decode the prompt")
            features = capture.read(n)
        stages = [_stage("features", features, np.stack([graph.truth(k) for k in layers], axis=1))]
        ids, x = np.array(tokens[1:]), features[:-1].reshape(n - 1, -1)
        expected = reference.forward(ids, reference.fuse(x))
        _, _, logits = engine.head.forward(ids, x)
        for name in stage_names(reference.n_layer)[:-1]:
            stages.append(_stage(name, engine.head.trace(ids, x, name), expected[name]))
        return [*stages, _stage("logits", logits, expected["logits"])]
    finally:
        if engine is not None:
            engine.close()
        graph.close()


def agrees(stage: Stage) -> bool:
    """True if a stage is the reference's but for rounding."""
    return stage.cosine >= LEAST  # and not NaN


def verdict(stages: Sequence[Stage]) -> str:
    """One sentence: whether all stages agree with the reference, or which is the first that does not."""
    wrong = next((s for s in stages if not agrees(s)), None)
    if wrong is None:
        least = min(s.cosine for s in stages)
        return (
            f"the native graph agrees with the reference: no cosine is below {LEAST} (lowest {least:.5f})."
            " What is left is rounding; compare a largest error with the largest value beside it"
        )
    return (
        f"the native graph DIFFERS from the reference, first at {wrong.name}: cosine {wrong.cosine:.5f},"
        f" expected at least {LEAST}"
    )


def _stage(name: str, ours: np.ndarray, theirs: np.ndarray) -> Stage:
    a, b = (np.asarray(x, np.float64).ravel() for x in (ours, theirs))
    norms = float(np.linalg.norm(a) * np.linalg.norm(b))
    return Stage(
        name,
        float(np.abs(a - b).max()),
        float(np.abs(b).max()),
        float(a @ b) / norms if norms else float(norms == 0),
    )
