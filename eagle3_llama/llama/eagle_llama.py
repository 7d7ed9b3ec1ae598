"""EagleLlama: a llama_cpp.Llama that drafts. `generate()` is the seam; the rest is llama-cpp-python's own."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import inspect
import os
import sys
import time
import warnings
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import numpy as np

from ..common import keywords
from ..errors import EagleError, ErrorKind
from ..runtime import costs, library, machine
from ..runtime.binding import Llama, LlamaState, llama_cpp
from ..runtime.engine import Engine
from ..runtime.params import EagleParams
from ..runtime.stats import EagleStats
from . import saved_state
from .flash import FlashLlama
from .media import MediaRows
from .ownership import Claim, Ownership
from .saved_state import EagleState  # noqa: F401 - states that were pickled earlier name it here
from .scores import ScoreRows, reserved_rows

_GENERATE = inspect.signature(Llama.generate)
_SAMPLE = inspect.signature(Llama.sample)
_LLAMA_NAMES = tuple(
    name for name in inspect.signature(Llama.__init__).parameters if name not in ("self", "kwargs")
)
_CALLS = (Llama.create_completion, Llama.create_chat_completion)
_CALL_NAMES = {name for call in _CALLS for name in inspect.signature(call).parameters}
_SAMPLER_ARGS = set(inspect.signature(Llama._init_sampler).parameters) - {"self", "logits_processor"}
_GENERATION = "another generation"


def _address(pointer: Any) -> int:
    return ctypes.cast(pointer, ctypes.c_void_p).value or 0


class EagleLlama(FlashLlama):
    """A `llama_cpp.Llama` whose text comes faster: same arguments with the same defaults, same methods, same text.

    eagle: a head (GGUF) trained for this very model; None decodes plainly through the same code. (eagle_path and head are
    other names for it.)
    flash_attn: False as in Llama, for it changes the text in near ties; None leaves it to llama.cpp, which turns it on where
    the backend has it, as the commands, the server and Batcher do. Trees need it.
    extract_layers: target layers whose inputs the head reads, where its file names the wrong ones.
    n_max, n_min, p_min, tree: see EagleParams; as they stand, drafts are chosen by what they cost and bring here, measured
    when the model is first loaded (a second or two, kept in the cache).

    Raises EagleError (kind HEAD_MISMATCH) for a head of another target, BAD_ARGUMENT for a keyword that means one of these;
    of others that Llama would ignore in silence it warns, once each. What cannot be drafted for (recurrent and hybrid
    targets, a pruned sliding-window cache, embedding=True) is decoded plainly, with one warning.
    """

    _n_slots = 1

    def __init__(
        self,
        model_path: str | os.PathLike[str],
        *,
        eagle: str | os.PathLike[str] | None = None,
        n_max: int | None = None,
        n_min: int = 0,
        p_min: float = 0.0,
        tree: Any = None,
        extract_layers: Sequence[int] | None = None,
        logits_all: bool = False,
        flash_attn: bool | None = False,
        **kwargs: Any,
    ) -> None:
        self._owner, self._stack = (
            Ownership(),
            contextlib.ExitStack(),
        )  # __del__ needs them even if we stop below
        eagle_path = keywords.one_of(
            {"eagle": eagle, **{name: kwargs.pop(name, None) for name in keywords.ALIASES}}
        )
        keywords.check_ignored(
            [name for name in kwargs if name not in _LLAMA_NAMES], _LLAMA_NAMES, _CALL_NAMES
        )
        self._params = EagleParams(n_max, n_min, p_min, tree)
        keywords.check_unused(eagle_path, self._params, extract_layers, kwargs)
        self._eagle_path, self._extract_layers = eagle_path, extract_layers
        self._engine: Engine | None = None
        self._media = MediaRows()
        self._rows: ScoreRows | None = None
        self._callback_error: BaseException | None = None
        self._verify_base: int | None = None
        self._drafted_out = self._accepted_out = 0  # drafts, and accepted ones that reached the caller
        self.token_source = (
            0  # of the token yielded last: its position in an accepted draft, 0 from the target
        )
        delegates = (
            kwargs.get("draft_model") is not None or kwargs.get("embedding") or kwargs.get("vocab_only")
        )
        try:
            super().__init__(
                os.fspath(model_path),
                logits_all=bool(logits_all and delegates),
                flash_attn=flash_attn,
                **kwargs,
            )
            if not delegates:
                self._begin(logits_all)
        except BaseException:
            self.close()  # the traceback holds this object, which would hold the model
            raise

    def _begin(self, logits_all: bool) -> None:
        # Rows of logits are kept where somebody reads them. None is not False, at which llama-cpp-python refuses logprobs.
        self._logits_all = logits_all or None
        self.input_ids = np.zeros(
            self._n_ctx, np.intc
        )  # n_ctx as the context rounded it up, which Llama forgets here
        if logits_all:
            self.scores = reserved_rows(self._n_ctx, self._n_vocab)
        self._engine = self._open_engine(self._eagle_path)
        self._stack.callback(self._engine.close)
        self.eagle_params = self._params

    def close(self) -> None:
        """Frees head and model; may be called twice. A generation under way cannot go on."""
        if hasattr(self, "_stack"):  # or the constructor was not even entered
            with self._owner.call("close()"):
                super().close()

    def _open_engine(self, eagle_path: str | None) -> Engine:
        ctx, model = _address(self._ctx.ctx), _address(self._model.model)
        if (
            eagle_path is not None
            and llama_cpp.llama_model_n_swa(self._model.model) > 0
            and not self.context_params.swa_full
        ):
            warnings.warn(
                "EagleLlama decodes plainly: with swa_full=False the target cannot take back a draft; "
                "leave swa_full out",
                RuntimeWarning,
                stacklevel=3,
            )
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
        if not isinstance(params, EagleParams):
            raise EagleError(
                ErrorKind.BAD_ARGUMENT, f"eagle_params is {params!r:.80}, expected EagleParams(...)"
            )
        if self._engine is not None:
            if self._engine.has_head and params.fixed_tree and not self._engine.can_tree:
                raise EagleError(
                    ErrorKind.UNSUPPORTED,
                    "this context cannot check a tree: load the model with flash_attn=True, or leave tree out",
                )
            if self._engine.has_head and params.n_max != 0 and self._engine.costs is None:
                self._measure()
            self._engine.set_capture(params.n_max != 0)
        self._params = params

    def _measure(self) -> None:
        """Gives the planner its costs. Measuring leaves nothing of a text in the context."""
        with self._owner.call("measuring what rows and drafts cost"):
            room = llama_cpp.llama_n_ctx_seq(self._ctx.ctx)  # of one sequence, which may be a part of n_ctx()
            self._engine.plan(costs.cached(self._engine, self._cost_key(), room, min(self.n_batch, 256)))
            self._engine.release_threads()
            self.reset()

    def _cost_key(self) -> list[object]:
        """What decides the costs of rows and drafts: files, the libraries' too, machine, where tensors are, threads, the cache."""
        p, m, lib_dir = self.context_params, self.model_params, library.find_lib_dir()
        files = [
            self.model_path,
            self._eagle_path,
            self.lora_path,
            *(sorted(lib_dir.iterdir()) if lib_dir else []),
        ]
        about = [(str(f), os.path.getsize(f), os.path.getmtime(f)) for f in files if f]
        placed = [
            m.n_gpu_layers,
            m.split_mode,
            m.main_gpu,
            self.tensor_split,
            m.load_mode,
            self.numa,
            self.kv_overrides,
            self.lora_scale,
        ]
        cache = [
            p.type_k,
            p.type_v,
            p.offload_kqv,
            p.op_offload,
            p.swa_full,
            p.kv_unified,
            p.n_seq_max,
            p.flash_attn_type,
        ]
        return [
            about,
            machine.identity(lib_dir),
            placed,
            cache,
            p.n_threads,
            p.n_threads_batch,
            p.n_batch,
            p.n_ubatch,
        ]

    @property
    def stats(self) -> EagleStats:
        """Counters of all generations since load or stats.reset()."""
        return self._engine.stats if self._engine is not None else EagleStats()

    # -- evaluation ---------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Makes the native side hold exactly n_tokens positions. More of them than it decoded are an image's,
        or gone: a recurrent target that could not take back rows is empty, and so is the text then."""
        n_past = self._engine.n_past()
        memory = llama_cpp.llama_get_memory(self._ctx.ctx)
        if n_past == 0 < self.n_tokens and llama_cpp.llama_memory_seq_pos_max(memory, 0) < 0:
            super().reset()
        elif n_past > self.n_tokens:
            self._engine.rewind(self.n_tokens)
            self._requires_eval = True
        elif n_past < self.n_tokens:
            self._engine.state_reset(self.n_tokens)  # the head goes on behind them
            self.input_ids[n_past : self.n_tokens] = self._media.ids(
                n_past, self.n_tokens - n_past, self._n_vocab
            )

    def eval(self, tokens: Sequence[int]) -> None:
        """Evaluates tokens after what is there, in batches of n_batch."""
        with self._owner.call("eval()"):
            if self._engine is None:
                super().eval(tokens)
            else:
                self._rows = None
                self._eval(tokens, all_logits=False)

    def _eval(self, tokens: Sequence[int], all_logits: bool) -> None:
        self._settle()
        all_logits = bool(all_logits or self._logits_all)
        for i in range(0, len(tokens), self.n_batch):
            batch = list(tokens[i : i + self.n_batch])
            self._engine.prefill(batch, all_logits=all_logits)
            for row in range(len(batch) if all_logits else 0):
                self._keep(self.n_tokens + row, row)
            self.input_ids[self.n_tokens : self.n_tokens + len(batch)] = batch
            self.n_tokens += len(batch)
            self._requires_eval = False

    def reset(self) -> None:
        """Forgets the text."""
        with self._owner.call("reset()"):
            super().reset()
            if self._engine is not None:
                self._settle()  # rows that somebody else decodes now begin at 0

    def embed(self, *args: Any, **kwargs: Any) -> Any:
        """As Llama.embed."""
        with self._owner.call("embed()"):
            return super().embed(*args, **kwargs)

    def sample(self, *args: Any, **kwargs: Any) -> int:
        """As Llama.sample: after a generation with its sampler, whatever is asked."""
        with self._owner.call("sample()"):
            return super().sample(*args, **kwargs) if self._engine is None else self._sample(*args, **kwargs)

    def _sample(self, *args: Any, **kwargs: Any) -> int:
        bound = _SAMPLE.bind(self, *args, **kwargs)
        bound.apply_defaults()
        a = bound.arguments
        self._refresh()
        row = -1 if a["idx"] is None else a["idx"] - self.n_tokens
        if not llama_cpp.llama_get_logits_ith(self._ctx.ctx, row):
            raise EagleError(
                ErrorKind.BAD_ARGUMENT,
                f"idx is {a['idx']}: the logits of that position are not "
                "there (logits_all=True keeps those of the last batch)",
            )
        sampler = self._sampler or self._new_sampler(a)
        try:
            token = self._engine.sample(_address(sampler.sampler), row)
        finally:
            if sampler is not self._sampler:
                sampler.close()
        self._raise_callback_error()
        return token

    def _refresh(self) -> None:
        """Makes the last row decoded that of the last token, which a rejected draft may have followed."""
        if self.n_tokens == 0:
            raise EagleError(
                ErrorKind.BAD_ARGUMENT,
                "there is nothing to sample from: eval() tokens first, or give a prompt",
            )
        if self._requires_eval:
            self._settle()
            self._engine.rewind(self.n_tokens - 1)
            self.n_tokens -= 1
            self._eval([int(self.input_ids[self.n_tokens])], all_logits=False)

    def _logits(self, row: int) -> np.ndarray:
        pointer = llama_cpp.llama_get_logits_ith(self._ctx.ctx, row)
        return np.ctypeslib.as_array(pointer, shape=(self._n_vocab,))

    def _keep(self, position: int, row: int) -> np.ndarray | None:
        """Copies a row of the last batch to where somebody reads the scores of position, and returns the copy."""
        if self._logits_all:
            self.scores[position] = self._logits(row)
            return self.scores[position]
        return self._rows.put(position, self._logits(row)) if self._rows is not None else None

    @property
    def _scores(self) -> np.ndarray:
        return super()._scores if self._rows is None else self._rows.array()

    # -- generation ---------------------------------------------------------------------------------------

    def generate(
        self, tokens: Sequence[int], *args: Any, **kwargs: Any
    ) -> Generator[int, Sequence[int] | None, None]:
        """As Llama.generate, and the same tokens for the same seed."""
        claim = self._owner.claim(_GENERATION, adopts=True)
        if self._engine is None:
            steps = super().generate(tokens, *args, **kwargs)
        else:
            steps, claim.adopts = self._generate(claim, tokens, *args, **kwargs), False
        yield from self._owner.run(claim, steps, take=True)

    def _generate(
        self, claim: Claim, tokens: Sequence[int], *args: Any, **kwargs: Any
    ) -> Generator[int, Sequence[int] | None, None]:
        bound = _GENERATE.bind(self, tokens, *args, **kwargs)
        bound.apply_defaults()
        a = bound.arguments
        self._mirostat_mu = ctypes.c_float(2.0 * a["mirostat_tau"])
        last, self._sampler = self._sampler, self._new_sampler(a)
        if last is not None:
            last.close()  # it holds itself, and would wait for the collector of cycles
        self._callback_error = self._verify_base = None

        # a logits processor is shown the text before its row, which only a chain lays out in order
        self._round_params = (
            self._params.chain()
            if a["logits_processor"] and self._engine.trees(self._params)
            else self._params
        )
        started = time.perf_counter()
        stopping, whole = a["stopping_criteria"], claim.record == "prompt"
        tokens = self._reuse_prefix(list(tokens), whole) if a["reset"] else list(tokens)
        if not tokens:
            self._refresh()
        self._rows = None
        if not self._logits_all and (claim.record != "none" or stopping is not None):
            row0 = self.n_tokens if whole else self.n_tokens + len(tokens) - 1
            self._rows = ScoreRows(self._n_vocab, row0, claim.record != "none")
        try:
            self._eval(tokens, whole)
            token = self._sample_last()
            self.stats.prompt += time.perf_counter() - started
            yield from self._stream(token, stopping)
        finally:
            self._owner.release(claim, self._end)

    def _end(self) -> None:
        """After a generation, wherever it stopped."""
        self._verify_base = None
        self._settle()
        self._engine.release_threads()  # the next call may come from another thread

    def _new_sampler(self, a: dict[str, Any]) -> Any:
        """A sampler of generate()'s or sample()'s arguments."""
        processors = self._guarded(a["logits_processor"])
        return self._init_sampler(**{name: a[name] for name in _SAMPLER_ARGS}, logits_processor=processors)

    def _reuse_prefix(self, tokens: list[int], whole: bool) -> list[int]:
        """Keeps what the cache shares with the prompt and returns the rest: none if the last row is the prompt's own.

        whole: every row is wanted.
        """
        n = 0 if whole else Llama.longest_token_prefix(self._input_ids.tolist(), tokens)
        self._settle()
        if n == len(tokens) == self.n_tokens and not self._requires_eval:
            return []
        n = min(n, max(len(tokens) - 1, 0))
        self._media.check(tokens, n)
        try:
            self._engine.rewind(n)
        except EagleError:  # a memory that cannot drop part of a sequence starts over
            n = 0
            self._engine.rewind(0)
        if n == 0:
            super().reset()
            return tokens
        if self.verbose:
            print(
                f"Llama.generate: {n} prefix-match hit, remaining {len(tokens) - n} prompt tokens to eval",
                file=sys.stderr,
            )
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
        sent = yield from self._give(token)
        while True:
            if sent:  # the caller goes on with tokens of its own
                self._eval([token, *sent], all_logits=False)
                token = self._sample_last()
                rounds = self._rounds(token)
                if self._stops(stopping, -1):
                    return
                sent = yield from self._give(token)
                continue
            base = self.n_tokens
            sampled = next(rounds)
            self._raise_callback_error()
            self._drafted_out += sampled.drafted
            self.input_ids[base + 1 : base + len(sampled)] = sampled[
                :-1
            ]  # the drafts of a tree lie there level by level
            for i, token in enumerate(sampled):
                accepted = i + 1 < len(sampled)
                self._accepted_out += accepted
                self.token_source = i + 1 if accepted else 0
                self.n_tokens = base + i + 1
                if self._stops(stopping, i):
                    return
                sent = yield from self._give(token)
                if sent:
                    break

    def _give(self, token: int) -> Generator[int, Sequence[int] | None, Sequence[int] | None]:
        """Yields token and returns what the caller sends; n_tokens is not the caller's to set meanwhile."""
        n = self.n_tokens
        self._engine.stats.tokens += 1
        sent = yield token
        if self.n_tokens != n:
            raise EagleError(
                ErrorKind.CONTEXT_TAKEN,
                f"this generation cannot go on: n_tokens was {n} at its "
                f"last token and is {self.n_tokens} now",
            )
        return sent

    def _rounds(self, token: int) -> Iterator[list[int]]:
        return self._engine.rounds(
            0, token, self._round_params, _address(self._sampler.sampler), self._on_draft
        )

    def _on_draft(self, token: int, drafts: list[int]) -> None:
        base = self.n_tokens
        self.input_ids[base] = token
        self.input_ids[base + 1 : base + 1 + len(drafts)] = drafts
        self._verify_base = base + 1
        self._requires_eval = len(drafts) > 0  # then the last row of the batch may be a rejected one

    def _stops(self, stopping: Any, row: int) -> bool:
        """Keeps the row that the next token was sampled from, where anybody wants it, and asks the caller."""
        if self._rows is None and not self._logits_all:
            return False
        scores = self._keep(self.n_tokens - 1, self._engine.row(row) if row > 0 else row)
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
            except BaseException as e:
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
        claim = self._owner.claim(_GENERATION, adopts=True)
        steps = super()._create_completion(*args, **kwargs)
        if self._engine is not None:
            logprobs, echo = kwargs.get("logprobs"), kwargs.get("echo")
            claim.record = "none" if logprobs is None else "prompt" if echo else "all"
            steps = self._complete(claim, steps)
        yield from self._owner.run(claim, steps)

    def _complete(self, claim: Claim, steps: Generator[Any, None, None]) -> Generator[Any, None, None]:
        before = (self._drafted_out, self._accepted_out)
        try:
            for item in steps:
                if "usage" in item:
                    item["usage"]["completion_tokens_details"] = self._details(before)
                yield item
        finally:
            steps.close()
            self._owner.release(claim, self._forget_rows)

    def _forget_rows(self) -> None:
        self._rows = None

    def _details(self, before: tuple[int, int]) -> dict[str, int]:
        drafted, accepted = self._drafted_out - before[0], self._accepted_out - before[1]
        return {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted}

    # -- state --------------------------------------------------------------------------------------------

    def save_state(self) -> LlamaState:
        """Target and head, and with logits_all the scores. A generation under way goes on after it."""
        self._owner.look()
        return super().save_state() if self._engine is None else saved_state.save(self)

    def load_state(self, state: LlamaState) -> None:
        """Restores save_state(); a state without a head's (from a plain Llama) works too."""
        with self._owner.call("load_state()"):
            if self._engine is None:
                super().load_state(state)
            else:
                saved_state.load(self, state)

    def __getstate__(self) -> dict[str, Any]:
        ours = {f.name: getattr(self._params, f.name) for f in dataclasses.fields(self._params)}
        ours.update(
            eagle_path=self._eagle_path,
            extract_layers=self._extract_layers,
            logits_all=bool(self._logits_all),
        )
        return {**super().__getstate__(), **ours}
