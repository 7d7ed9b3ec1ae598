"""The head without its target: for comparisons, tests and analyses."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import EagleError, ErrorKind
from .library import checked
from .session import Session


class HeadAlone:
    """The head of a session alone: its facts, and its results for given features."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.lib = session.lib
        self.ffi = session.ffi

    def info(self) -> dict[str, Any]:
        """Sizes of the head and the target layers it reads."""
        info = self.ffi.new("struct eagle3_head_info *")
        checked(self.lib.eagle3_head_get_info(self._session.head_handle, info))
        names = ("n_embd", "n_embd_target", "n_vocab_draft", "n_blocks", "n_bytes", "n_bytes_step")
        return {
            **{name: getattr(info, name) for name in names},
            "layers": list(info.layers[0 : info.n_layers_captured]),
        }

    def d2t(self) -> np.ndarray:
        """Target id of every draft id, int32 [n_vocab_draft]."""
        out = np.empty(self.info()["n_vocab_draft"], np.int32)
        checked(self.lib.eagle3_head_d2t(self._session.head_handle, self.ffi.from_buffer("int32_t[]", out)))
        return out

    def forward(self, tokens: np.ndarray, features: np.ndarray, slot: int = 0) -> tuple[np.ndarray, ...]:
        """The head alone, from position 0: tokens [n] of positions 1..n, features
        [n, layers * n_embd_target].

        Returns g [n, n_embd], the state that a draft's next step takes in place of g [n, n_embd], and
        logits [n, n_vocab_draft].
        """
        info = self.info()
        outs = [np.empty((len(tokens), info[k]), np.float32) for k in ("n_embd", "n_embd", "n_vocab_draft")]
        inputs = self._head_inputs(tokens, features)
        checked(
            self.lib.eagle3_head_forward(
                self._session.handle, slot, *inputs, *(self.ffi.from_buffer("float[]", o) for o in outs)
            )
        )
        return tuple(outs)

    def trace(self, tokens: np.ndarray, features: np.ndarray, stage: str, slot: int = 0) -> np.ndarray:
        """One stage of forward() by name (compare.stage_names): [n, width]."""
        widest = self.info()["n_embd"] * 2
        out = np.empty(len(tokens) * widest, np.float32)
        inputs = self._head_inputs(tokens, features)
        n = checked(
            self.lib.eagle3_head_trace(
                self._session.handle,
                slot,
                *inputs,
                stage.encode(),
                self.ffi.from_buffer("float[]", out),
                out.size,
            )
        )
        return out[:n].reshape(len(tokens), -1)

    def _head_inputs(self, tokens: np.ndarray, features: np.ndarray) -> tuple[Any, Any, int]:
        info = self.info()
        n = len(tokens)
        tokens = np.ascontiguousarray(tokens, np.int32)
        features = np.ascontiguousarray(features, np.float32)
        if n < 1 or features.size != n * len(info["layers"]) * info["n_embd_target"]:
            raise EagleError(ErrorKind.BAD_ARGUMENT, f"features have shape {features.shape} for {n} tokens")
        return (self.ffi.from_buffer("int32_t[]", tokens), self.ffi.from_buffer("float[]", features), n)
