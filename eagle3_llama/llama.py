"""EagleLlama: a llama_cpp.Llama that drafts. `generate()` is the seam; the rest is llama-cpp-python's own."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import inspect
import os
import platform
import sys
import time
import warnings
from typing import Any, Generator, Iterator, Sequence

import numpy as np

from . import _library, costs
from .errors import EagleError, ErrorKind
from .params import EagleParams
from .stats import EagleStats

_library.load()  # our libllama, before llama_cpp looks for one

import llama_cpp  # noqa: E402
from llama_cpp import Llama, LlamaState  # noqa: E402

from .engine import Engine  # noqa: E402
from .scores import ScoreRows  # noqa: E402

_GENERATE = inspect.signature(Llama.generate)
_SAMPLER_ARGS = set(inspect.signature(Llama._init_sampler).parameters) - {"self", "logits_processor"}


def _address(pointer: Any) -> int:
    return ctypes.cast(pointer, ctypes.c_void_p).value or 0


class EagleState(LlamaState):
    """A saved state with the head's beside the target's. eagle_state is None when there was no head."""

    eagle_state: bytes | None = None


class EagleLlama(Llama):
    """A `llama_cpp.Llama` whose text comes faster: same arguments, same methods, same text.

    eagle_path: a head (GGUF) trained for this very model; None decodes plainly through the same code.
    extract_layers: target layers whose inputs the head reads, where its file names the wrong ones.
    n_max, n_min, p_min, tree: see EagleParams; as they stand, drafts are chosen by what they cost and bring here, measured
    when the model is first loaded (a second or two, kept in the cache).

    Raises EagleError (kind HEAD_MISMATCH) for a head of another target. What cannot be drafted for (recurrent
    and hybrid targets, a pruned sliding-window cache) is decoded plainly, with one warning.
    """

    _n_slots = 1

    def __init__(self, model_path: str, *, eagle_path: str | None = None, n_max: int | None = None, n_min: int = 0,
                 p_min: float = 0.0, tree: Any = None, extract_layers: Sequence[int] | None = None, logits_all: bool = False,
                 **kwargs: Any) -> None:
        self._stack = contextlib.ExitStack()  # __del__ needs it even if we stop below
        self._params = EagleParams(n_max, n_min, p_min, tree)
        if eagle_path is not None and kwargs.get("draft_model") is not None:
            raise EagleError(ErrorKind.BAD_ARGUMENT, "give eagle_path or draft_model, not both")
        self._eagle_path, self._extract_layers = eagle_path, extract_layers
        self._engine: Engine | None = None
        self._rows: ScoreRows | None = None
        self._record = "none"
        self._always_record = logits_all
        self._callback_error: BaseException | None = None
        self._verify_base: int | None = None
        self._accepted_out = 0  # accepted drafts that reached the caller
        self.token_source = 0  # of the token yielded last: its position in an accepted draft, 0 from the target
        # Rows are kept one by one where somebody reads them; llama-cpp-python's own array is n_ctx x n_vocab.
        delegates = kwargs.get("draft_model") is not None or kwargs.get("embedding") or kwargs.get("vocab_only")
        super().__init__(model_path, logits_all=bool(logits_all and delegates), **kwargs)
        if not delegates:
            self._engine = self._open_engine(eagle_path)
            self._stack.callback(self._engine.close)
            self.eagle_params = self._params

    def _open_engine(self, eagle_path: str | None) -> Engine:
        ctx, model = _address(self._ctx.ctx), _address(self._model.model)
        if eagle_path is not None and llama_cpp.llama_model_n_swa(self._model.model) > 0 and not self.context_params.swa_full:
            warnings.warn("EagleLlama decodes plainly: with swa_full=False the target cannot take back a draft; "
                          "leave swa_full out", RuntimeWarning, stacklevel=3)
            eagle_path = None
        try:
            return Engine(ctx, model, eagle_path, self._n_slots, self._extract_layers)
        except EagleError as e:
            if e.kind is not ErrorKind.UNSUPPORTED or eagle_path is None:
                raise
            warnings.warn(f"EagleLlama decodes plainly: {e}", RuntimeWarning, stacklevel=3)
            return Engine(ctx, model, None, self._n_slots)

    # -- settings and counters ----------------------------------------------------------------------------

    @property
    def eagle_params(self) -> EagleParams:
        """How drafts are made; may be set between calls."""
        return self._params

    @eagle_params.setter
    def eagle_params(self, params: EagleParams) -> None:
        if self._engine is not None:
            if self._engine.has_head and params.fixed_tree and not self._engine.can_tree:
                raise EagleError(ErrorKind.UNSUPPORTED, "this context cannot check a tree: load the model with flash_attn=True")
            if self._engine.has_head and params.n_max != 0 and self._engine.costs is None:
                room = llama_cpp.llama_n_ctx_seq(self._ctx.ctx)  # of one sequence, which may be a part of n_ctx()
                self._engine.plan(costs.cached(self._engine, self._cost_key(), room, min(self.n_batch, 256)))
                self._engine.release_threads()
            self._engine.set_capture(params.n_max != 0)
        self._params = params

    def _cost_key(self) -> list[object]:
        """What decides the costs of rows and drafts: files, the libraries' too, backend, threads."""
        p, lib_dir = self.context_params, _library.find_lib_dir()
        files = [self.model_path, self._eagle_path, *(sorted(lib_dir.iterdir()) if lib_dir else [])]
        about = [(str(f), os.path.getsize(f), os.path.getmtime(f)) for f in files if f]
        return [about, platform.processor(), os.cpu_count(), p.n_threads, p.n_threads_batch, p.n_ubatch, p.flash_attn_type,
                p.type_k, p.type_v, p.offload_kqv, self.model_params.n_gpu_layers]

    @property
    def stats(self) -> EagleStats:
        """Counters of all generations since load or stats.reset()."""
        return self._engine.stats if self._engine is not None else EagleStats()

    # -- evaluation ---------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Makes the native side hold exactly n_tokens positions."""
        n_past = self._engine.n_past()
        if n_past > self.n_tokens:
            self._engine.rewind(self.n_tokens)
            self._requires_eval = True
        elif n_past < self.n_tokens:
            self._engine.state_reset(self.n_tokens)

    def eval(self, tokens: Sequence[int]) -> None:
        """Evaluates tokens after what is there, in batches of n_batch."""
        if self._engine is None:
            return super().eval(tokens)
        self._settle()
        all_logits = self._record == "prompt"
        for i in range(0, len(tokens), self.n_batch):
            batch = list(tokens[i : i + self.n_batch])
            self._engine.prefill(batch, all_logits=all_logits)
            if all_logits:
                for row in range(len(batch) - (i + len(batch) == len(tokens))):  # the last one is sampled from
                    self._rows.add(self._logits(row))
            self.input_ids[self.n_tokens : self.n_tokens + len(batch)] = batch
            self.n_tokens += len(batch)
            self._requires_eval = False

    def _logits(self, row: int) -> np.ndarray:
        pointer = llama_cpp.llama_get_logits_ith(self._ctx.ctx, row)
        return np.ctypeslib.as_array(pointer, shape=(self._n_vocab,))

    @property
    def _scores(self) -> np.ndarray:
        return super()._scores if self._rows is None else self._rows.array()

    # -- generation ---------------------------------------------------------------------------------------

    def generate(self, tokens: Sequence[int], *args: Any, **kwargs: Any) -> Generator[int, Sequence[int] | None, None]:
        """As Llama.generate, and the same tokens for the same seed."""
        if self._engine is None:
            yield from super().generate(tokens, *args, **kwargs)
            return
        bound = _GENERATE.bind(self, tokens, *args, **kwargs)
        bound.apply_defaults()
        a = bound.arguments
        self._mirostat_mu = ctypes.c_float(2.0 * a["mirostat_tau"])
        sampler = {name: a[name] for name in _SAMPLER_ARGS}
        last, self._sampler = self._sampler, self._init_sampler(**sampler, logits_processor=self._guarded(a["logits_processor"]))
        if last is not None:
            last.close()  # it holds itself, and would wait for the collector of cycles

        # a logits processor is shown the text before its row, which only a chain lays out in order
        self._round_params = self._params.chain() if a["logits_processor"] and self._engine.trees(self._params) else self._params
        started = time.perf_counter()
        tokens = self._reuse_prefix(list(tokens)) if a["reset"] else list(tokens)
        stopping = a["stopping_criteria"]
        record = self._record if self._record != "none" else "last" if stopping is not None else "none"
        row0 = self.n_tokens + len(tokens) - 1 if record != "prompt" else 0
        self._rows = ScoreRows(self._n_vocab, row0, record != "last") if record != "none" else None
        try:
            self.eval(tokens)
            token = self._sample_last()
            self.stats.prompt += time.perf_counter() - started
            yield from self._stream(token, stopping)
        finally:
            self._verify_base = None
            self._settle()
            self._engine.release_threads()  # the next call may come from another thread

    def _reuse_prefix(self, tokens: list[int]) -> list[int]:
        """Keeps what the cache shares with the prompt and returns the rest, at least one token."""
        n = min(Llama.longest_token_prefix(self._input_ids.tolist(), tokens), len(tokens) - 1)
        self._settle()
        try:
            self._engine.rewind(n)
        except EagleError:  # a memory that cannot drop part of a sequence starts over
            n = 0
            self._engine.rewind(0)
        if n == 0:
            self.reset()
            return tokens
        if self.verbose:
            print(f"Llama.generate: {n} prefix-match hit, remaining {len(tokens) - n} prompt tokens to eval", file=sys.stderr)
        self.n_tokens = n
        return tokens[n:]

    def _sample_last(self) -> int:
        token = self._engine.sample(_address(self._sampler.sampler))
        self.token_source = 0
        self._raise_callback_error()
        return token

    def _stream(self, token: int, stopping: Any) -> Generator[int, Sequence[int] | None, None]:
        """Yields token, then what the rounds sample; n_tokens always counts what precedes the token yielded."""
        rounds = self._rounds(token)
        if self._stops(stopping, -1):
            return
        sent = yield self._count(token)
        while True:
            if sent:  # the caller goes on with tokens of its own
                self.eval([token, *sent])
                token = self._sample_last()
                rounds = self._rounds(token)
                if self._stops(stopping, -1):
                    return
                sent = yield self._count(token)
                continue
            base = self.n_tokens
            sampled = next(rounds)
            self._raise_callback_error()
            for i, token in enumerate(sampled):
                accepted = i + 1 < len(sampled)
                self._accepted_out += accepted
                self.token_source = i + 1 if accepted else 0
                self.n_tokens = base + i + 1
                if self._stops(stopping, i):
                    return
                sent = yield self._count(token)
                if sent:
                    break

    def _rounds(self, token: int) -> Iterator[list[int]]:
        return self._engine.rounds(0, token, self._round_params, _address(self._sampler.sampler), self._on_draft)

    def _on_draft(self, token: int, drafts: list[int]) -> None:
        base = self.n_tokens
        self.input_ids[base] = token
        self.input_ids[base + 1 : base + 1 + len(drafts)] = drafts
        self._verify_base = base + 1
        self._requires_eval = len(drafts) > 0  # then the last row of the batch may be a rejected one

    def _count(self, token: int) -> int:
        self._engine.stats.tokens += 1
        return token

    def _stops(self, stopping: Any, row: int) -> bool:
        """Keeps the row that the next token was sampled from, where anybody wants it, and asks the caller."""
        if self._rows is None:
            return False
        scores = self._rows.add(self._logits(self._engine.row(row) if row > 0 else row))
        return stopping is not None and stopping(self._input_ids, scores)

    def _guarded(self, processors: Any) -> Any:
        """Logits processors that see the sequence as it is at their row, and whose errors come back to the caller.

        llama-cpp-python loses exceptions raised inside a sampler.
        """
        if processors is None:
            return None

        def process(_: Any, scores: Any) -> Any:
            if self._callback_error is not None:
                return scores
            if self._verify_base is not None:  # rows of a round follow each other
                self.n_tokens = self._verify_base
                self._verify_base += 1
            try:
                for processor in processors:
                    scores[:] = processor(self._input_ids, scores)
            except BaseException as e:  # noqa: BLE001 - raised again by _raise_callback_error
                self._callback_error = e
            return scores

        return [process]

    def _raise_callback_error(self) -> None:
        error, self._callback_error = self._callback_error, None
        if error is not None:
            raise error

    # -- completions --------------------------------------------------------------------------------------

    def _create_completion(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """Llama's, with true logprobs without logits_all, and what drafting did in `usage`."""
        if self._engine is None:
            yield from super()._create_completion(*args, **kwargs)
            return
        logprobs, echo = kwargs.get("logprobs"), kwargs.get("echo")
        self._record = "prompt" if logprobs is not None and echo else "all" if logprobs is not None or self._always_record else "none"
        if self._record == "prompt":
            self.n_tokens = 0  # every row is wanted, so nothing is reused
        self._logits_all = logprobs is not None
        before = (self.stats.drafted, self._accepted_out)
        try:
            for item in super()._create_completion(*args, **kwargs):
                if "usage" in item:
                    item["usage"]["completion_tokens_details"] = self._details(before)
                yield item
        finally:
            self._record, self._logits_all, self._rows = "none", False, None

    def _details(self, before: tuple[int, int]) -> dict[str, int]:
        drafted, accepted = self.stats.drafted - before[0], self._accepted_out - before[1]
        return {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted}

    # -- state --------------------------------------------------------------------------------------------

    def save_state(self) -> LlamaState:
        """Target and head; no logits (they come back with the first token evaluated)."""
        if self._engine is None:
            return super().save_state()
        self._settle()
        size = llama_cpp.llama_state_get_size(self._ctx.ctx)
        buffer = (ctypes.c_uint8 * size)()
        n = llama_cpp.llama_state_get_data(self._ctx.ctx, buffer, size)
        if n == 0 or n > size:
            raise EagleError(ErrorKind.NATIVE, "the target's state cannot be saved")
        state = EagleState(input_ids=self.input_ids.copy(), scores=np.empty((0, self._n_vocab), np.float32),
                           n_tokens=self.n_tokens, llama_state=bytes(memoryview(buffer)[:n]), llama_state_size=n, seed=self._seed)
        state.eagle_state = self._engine.state() if self._engine.has_head else None
        return state

    def load_state(self, state: LlamaState) -> None:
        """Restores save_state(); a state without a head's (from a plain Llama) works too."""
        if self._engine is None:
            return super().load_state(state)
        buffer = (ctypes.c_uint8 * state.llama_state_size).from_buffer_copy(state.llama_state)
        self.n_tokens, self._requires_eval, self._rows = 0, True, None
        try:
            if llama_cpp.llama_state_set_data(self._ctx.ctx, buffer, state.llama_state_size) != state.llama_state_size:
                raise EagleError(ErrorKind.BAD_VALUE, "the state does not fit this model and context")
            eagle_state = getattr(state, "eagle_state", None)
            if eagle_state is not None and self._engine.has_head:
                self._engine.set_state(eagle_state)
            else:
                self._engine.state_reset(state.n_tokens)
        except EagleError:
            llama_cpp.llama_memory_clear(self._ctx.memory, True)
            self._engine.state_reset(0)
            raise
        self.input_ids[: state.n_tokens] = state.input_ids[: state.n_tokens]
        self.n_tokens, self._seed = state.n_tokens, state.seed

    def __getstate__(self) -> dict[str, Any]:
        p = self._params
        return {**super().__getstate__(), "eagle_path": self._eagle_path, **{f.name: getattr(p, f.name) for f in dataclasses.fields(p)}}
