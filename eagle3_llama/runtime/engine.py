"""The native session from Python: each step of a round is one call."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ..errors import EagleError, ErrorKind
from .library import load
from .params import MAX_DRAFT, EagleParams, StaticTree, Tree
from .stats import EagleStats

_KINDS = {
    -1: ErrorKind.BAD_ARGUMENT,
    -2: ErrorKind.BAD_FILE,
    -3: ErrorKind.BAD_VALUE,
    -4: ErrorKind.HEAD_MISMATCH,
    -5: ErrorKind.MEMORY,
    -6: ErrorKind.DECODE,
    -7: ErrorKind.UNSUPPORTED,
    -8: ErrorKind.NATIVE,
}


PLANNED_NODES, PLANNED_WIDTH = 24, 4  # what the planner may grow; more has never paid


@dataclasses.dataclass(frozen=True)
class Draft:
    """Draft tokens that a caller brings: a chain, or a tree, level by level, in which tokens[i] follows
    tokens[parents[i]], or the ask's own token where that is -1."""

    tokens: Sequence[int]
    parents: Sequence[int] | None = None


@dataclasses.dataclass(frozen=True)
class Ask:
    """What a slot wants of a round. `token` was sampled and is not decoded yet.

    most: the number of draft tokens that are of use. given: a draft instead of the head's.
    """

    slot: int
    token: int
    params: EagleParams
    most: int = MAX_DRAFT
    given: Draft | None = None


class Round(list[int]):
    """The tokens that one round sampled: accepted draft tokens, then the bonus.

    drafted: number of draft tokens. levels: number of positions that they were for, fewer in a tree.
    """

    drafted: int = 0
    levels: int = 0


class _Buffers:
    """What a round of n asks passes to the library, allocated once."""

    def __init__(self, ffi: Any, n: int) -> None:
        self.asks = ffi.new("struct eagle3_ask[]", n)
        self.drafted, self.counts, self.keep = (ffi.new("int32_t[]", n) for _ in range(3))
        self.sampled = ffi.new("int32_t[]", n * (MAX_DRAFT + 1))
        self.of_ask = [self.sampled + i * (MAX_DRAFT + 1) for i in range(n)]
        self.samplers = ffi.new("uintptr_t[]", n)
        self.sampler_pointers = ffi.cast("struct llama_sampler **", self.samplers)
        self.zeros = [0] * n


class Engine:
    """A target context, optionally with a head.

    ctx and model are addresses of a llama_context and its llama_model; both must outlive the engine, which
    therefore closes first. Without head_path nothing is drafted. extract_layers: target layers whose inputs
    the head reads, if not those that its file names.
    Source of the loop: EAGLE-3 (arXiv 2503.01840). The acceptance rule is session::verify in
    native/src/round.cpp.
    """

    def __init__(
        self,
        ctx: int,
        model: int,
        head_path: str | None = None,
        n_slots: int = 1,
        extract_layers: Sequence[int] | None = None,
    ) -> None:
        self.ffi, self.lib = load()
        self._head = self._session = self.ffi.NULL
        self._drafts, self._parents = (self.ffi.new(f"int32_t[{MAX_DRAFT}]") for _ in range(2))
        self._buffers: dict[int, _Buffers] = {}  # by number of asks
        self._shapes: dict[StaticTree, tuple[Any, Any]] = {}  # parents and ranks
        self.stats = EagleStats()
        self.costs: Any = None  # the planner's, once it has them
        self.can_tree = False
        self.in_round = False  # between the decode of a round and its commit
        if head_path is not None:
            out = self.ffi.new("eagle3_head **")
            self._check(
                self.lib.eagle3_head_open(str(head_path).encode(), self.ffi.cast("void *", model), out)
            )
            self._head = out[0]
        out = self.ffi.new("eagle3_session **")
        try:
            if head_path is not None and extract_layers is not None:
                layers = self.ffi.new("int32_t[]", list(extract_layers))
                self._check(self.lib.eagle3_head_set_layers(self._head, layers, len(layers)))
            self._check(self.lib.eagle3_session_open(self.ffi.cast("void *", ctx), self._head, n_slots, out))
            self._session = out[0]
            self.can_tree = bool(self._check(self.lib.eagle3_can_tree(self._session)))
        except BaseException:
            self.close()
            raise

    def _check(self, code: int) -> int:
        if code >= 0:
            return code
        raise self._error(code)

    def _error(self, code: int) -> EagleError:
        message = self.ffi.string(self.lib.eagle3_last_error()).decode("utf-8", "replace")
        return EagleError(_KINDS.get(code, ErrorKind.NATIVE), message)

    @property
    def has_head(self) -> bool:
        return self._head != self.ffi.NULL

    def close(self) -> None:
        """Frees session and head; may be called twice."""
        if self._session != self.ffi.NULL:
            self.lib.eagle3_session_close(self._session)
            self._session = self.ffi.NULL
        if self._head != self.ffi.NULL:
            self.lib.eagle3_head_close(self._head)
            self._head = self.ffi.NULL

    def release_threads(self) -> None:
        """Ends this thread's worker threads: call it if the thread will not compute for a while.

        Otherwise decodes of other threads take several times as long.
        """
        self.lib.eagle3_release_threads()

    # -- the hot loop -------------------------------------------------------------------------------------

    def rounds(
        self,
        slot: int,
        token: int,
        params: EagleParams,
        sampler: int,
        on_draft: Callable[[int, list[int]], None],
    ) -> Iterator[Round]:
        """Rounds of speculative decoding after `token`, which is sampled but not decoded yet.

        sampler is the address of a llama_sampler chain. on_draft(token, drafts) is called before it runs.
        Yields the tokens of each round, without end; the last of them is the next round's `token`. After each
        yield, and after an error, target and head hold the same positions: n_past(slot).
        """

        def report(token: int) -> None:
            on_draft(token, self.round_drafts(0))

        while True:
            ask = Ask(slot, token, params)
            (out,) = self.round([ask], [sampler], functools.partial(report, token))
            if isinstance(out, EagleError):
                raise out
            token = out[-1]
            yield out

    def round(
        self, asks: Sequence[Ask], samplers: Sequence[int], on_draft: Callable[[], None]
    ) -> list[Round | EagleError]:
        """One round of several slots: of each its tokens, or the error of its sampler or commit.

        samplers are addresses of llama_sampler chains. on_draft() is called before they run. An error of the
        round itself is raised; the slots are then as they were. The caller counts stats.tokens, because it
        knows which of the tokens are of use.
        """
        s, lib, n, stats, now = self._session, self.lib, len(asks), self.stats, time.perf_counter
        b = self._buffers.get(n) or self._buffers.setdefault(n, _Buffers(self.ffi, n))
        held = [self.n_past(a.slot) for a in asks]
        errors: dict[int, EagleError] = {}
        t0 = now()
        self._draft(asks, b)
        t1 = now()
        self._decode_what_fits(b, n)
        t2 = now()
        b.keep[0:n] = b.zeros
        self.in_round = True
        try:
            levels = [self._levels(i, ask, b.drafted[i]) for i, ask in enumerate(asks)]
            on_draft()
            b.samplers[0:n] = samplers
            self._check(lib.eagle3_round_verify(s, b.sampler_pointers, b.sampled, b.counts))
            counts = self.ffi.unpack(b.counts, n)
            errors.update((i, self._error(count)) for i, count in enumerate(counts) if count < 0)
            b.keep[0:n] = [max(count, 0) for count in counts]
            t3 = now()
        finally:
            code = lib.eagle3_round_commit(s, b.keep)  # whatever happened, nothing unverified stays
            self.in_round = False
            if code < 0:  # of the slots that do not hold what they should
                failure, keep = self._error(code), b.keep
                errors.update(
                    (i, failure) for i, a in enumerate(asks) if self.n_past(a.slot) != held[i] + keep[i]
                )
        rounds: list[Round | EagleError] = []
        for i, count in enumerate(counts):
            if i in errors:
                rounds.append(errors[i])
                continue
            out = Round(self.ffi.unpack(b.of_ask[i], count))
            out.drafted, out.levels = b.drafted[i], levels[i]
            stats.count_round(out.drafted, count - 1, out.levels)
            rounds.append(out)
        stats.draft += t1 - t0
        stats.target += t2 - t1
        stats.verify += t3 - t2
        stats.other += now() - t3
        return rounds

    def round_drafts(self, i: int) -> list[int]:
        """The draft tokens of the i-th ask of the round under way."""
        null = self.ffi.NULL
        n = self._check(self.lib.eagle3_round_drafted(self._session, i, self._drafts, null, null))
        drafts: list[int] = self.ffi.unpack(self._drafts, n)
        return drafts

    def _levels(self, i: int, ask: Ask, n: int) -> int:
        """The number of levels of the i-th ask's draft of n tokens.

        Levels come in order, so it is the depth of the last token.
        """
        tree = self.trees(ask.params) if ask.given is None else ask.given.parents is not None
        if n == 0 or not tree:
            return n
        null = self.ffi.NULL
        self._check(self.lib.eagle3_round_drafted(self._session, i, self._drafts, self._parents, null))
        depth, node = 0, n - 1
        while node >= 0:
            depth, node = depth + 1, self._parents[node]
        return depth

    def _draft(self, asks: Sequence[Ask], b: _Buffers) -> None:
        arrays = [self._fill(a, ask, len(asks)) for a, ask in zip(b.asks, asks)]
        self._check(self.lib.eagle3_round_draft(self._session, b.asks, len(asks), b.drafted))
        del arrays  # read until here

    def _decode_what_fits(self, b: _Buffers, n: int) -> None:
        """Decodes the round, without draft tokens if the KV cache has no room for them.

        An image may fill more cells than positions (M-RoPE), and drafts are cut by positions.
        """
        code = self.lib.eagle3_round_decode(self._session)
        if code >= 0:
            return
        error = self._error(code)
        if error.kind is not ErrorKind.DECODE or not any(b.drafted):
            raise error
        for a in b.asks:
            a.kind = self.lib.EAGLE3_PLAIN
        self._check(self.lib.eagle3_round_draft(self._session, b.asks, n, b.drafted))
        self._check(self.lib.eagle3_round_decode(self._session))

    def _fill(self, a: Any, ask: Ask, n: int) -> object:
        """The native form of an ask of a round of n. Returns what must live until the call has read it."""
        lib, p = self.lib, ask.params
        a.slot, a.token = ask.slot, ask.token
        if ask.given is not None:
            return self._fill_given(a, ask.given)
        if p.n_max == 0 or not self.has_head or (p.planned and self.costs is None):
            a.kind = lib.EAGLE3_PLAIN
        elif p.planned:
            a.kind, a.n_max = lib.EAGLE3_PLANNED, min(PLANNED_NODES * n, MAX_DRAFT)
            a.width = PLANNED_WIDTH if self.trees(p) else 1
        elif isinstance(p.tree, Tree):
            a.kind, a.n_max, a.p_min = lib.EAGLE3_TREE, min(p.tree.nodes, ask.most), p.p_min
            a.depth, a.width = p.tree.depth, p.tree.width
        elif isinstance(p.tree, StaticTree):
            a.kind, a.n = lib.EAGLE3_CHOICES, min(len(p.tree.parents), ask.most)
            a.parents, a.ranks = self._shapes.get(p.tree) or self._shapes.setdefault(
                p.tree, (self._ints(p.tree.parents), self._ints(p.tree.ranks))
            )
        else:
            a.kind, a.n_max = lib.EAGLE3_CHAIN, min(p.n_max or 0, ask.most)
            a.n_min, a.p_min = p.n_min, p.p_min
        return None

    def _fill_given(self, a: Any, given: Draft) -> object:
        tokens = self._ints(given.tokens)
        parents = self.ffi.NULL if given.parents is None else self._ints(given.parents)
        a.kind, a.n, a.tokens, a.parents = self.lib.EAGLE3_GIVEN, len(given.tokens), tokens, parents
        return tokens, parents

    def _ints(self, values: Sequence[int]) -> Any:
        return self.ffi.new("int32_t[]", list(values) or 1)

    def trees(self, params: EagleParams) -> bool:
        """Whether drafts made with params are trees."""
        return params.fixed_tree or (params.planned and params.tree is not False and self.can_tree)

    # -- the planner --------------------------------------------------------------------------------------

    def plan(self, costs: Any) -> None:
        """Gives the planner its costs (costs.Costs)."""
        c = self.ffi.new("struct eagle3_costs *")
        c.layers, c.output, c.head, c.cell = (
            list(costs.layers),
            list(costs.output),
            list(costs.head),
            list(costs.cell),
        )
        c.first, c.other, c.context = costs.first, costs.other, costs.context
        self._check(self.lib.eagle3_plan_set(self._session, c))
        self.costs = costs

    def plan_info(self) -> dict[str, float]:
        """What the planner expects: rate and plain_rate in tokens/s, trust in the head, rounds it rests."""
        out = self.ffi.new("struct eagle3_plan_info *")
        self._check(self.lib.eagle3_plan_get(self._session, out))
        return {name: getattr(out, name) for name in ("rate", "plain_rate", "trust", "asleep")}

    def measure_target(self, n: int, slot: int = 0) -> float:
        return self._seconds(lambda out: self.lib.eagle3_measure_target(self._session, slot, n, out))

    def measure_output(self, n: int) -> float:
        return self._seconds(lambda out: self.lib.eagle3_measure_output(self._session, n, out))

    def measure_head(self, n: int, slot: int = 0) -> float:
        return self._seconds(lambda out: self.lib.eagle3_measure_head(self._session, slot, n, out))

    def _seconds(self, call: Callable[[Any], int]) -> float:
        out = self.ffi.new("float *")
        self._check(call(out))
        return out[0]

    # -- everything else ----------------------------------------------------------------------------------

    def n_past(self, slot: int = 0) -> int:
        """Positions decoded and kept."""
        return self._check(self.lib.eagle3_n_past(self._session, slot))

    def prefill(self, tokens: Sequence[int], slot: int = 0, all_logits: bool = False) -> None:
        """Decodes at most n_batch prompt tokens. The context then has the logits of the last one, or all."""
        ids = self.ffi.new("int32_t[]", list(tokens))
        self._check(self.lib.eagle3_prefill(self._session, slot, ids, len(tokens), int(all_logits)))

    def draft(self, token: int, params: EagleParams, slot: int = 0) -> tuple[list[int], list[float]]:
        """What the head drafts after `token`: target ids and their probabilities, each given its parent."""
        self._draft([Ask(slot, token, params)], _Buffers(self.ffi, 1))
        probs = self.ffi.new(f"float[{MAX_DRAFT}]")
        n = self._check(self.lib.eagle3_round_drafted(self._session, 0, self._drafts, self.ffi.NULL, probs))
        return list(self._drafts[0:n]), list(probs[0:n])

    def decode(
        self, token: int, drafts: Sequence[int], parents: Sequence[int] | None = None, slot: int = 0
    ) -> None:
        """One target batch [token, drafts], a chain or with parents a tree, with logits for every row."""
        self._draft([Ask(slot, token, EagleParams(0), given=Draft(drafts, parents))], _Buffers(self.ffi, 1))
        self._check(self.lib.eagle3_round_decode(self._session))

    def verify(self, sampler: int) -> list[int]:
        """Samples the rows of the last decode() until one disagrees with its draft."""
        b = _Buffers(self.ffi, 1)
        b.samplers[0] = sampler
        self._check(self.lib.eagle3_round_verify(self._session, b.sampler_pointers, b.sampled, b.counts))
        return list(b.sampled[0 : self._check(b.counts[0])])

    def commit(self, n_keep: int) -> None:
        """Keeps the first n_keep rows of the last decode()."""
        self._check(self.lib.eagle3_round_commit(self._session, self.ffi.new("int32_t[]", [n_keep])))

    def sample(self, sampler: int, row: int = -1) -> int:
        """One token from a row of the last decode; a sampler that fails raises."""
        return self._check(self.lib.eagle3_sample(self._session, self.ffi.cast("void *", sampler), row))

    def row(self, i: int, slot: int = 0) -> int:
        """The target's row that the i-th token of the last round was sampled from."""
        return self._check(self.lib.eagle3_verified_row(self._session, slot, i))

    def rewind(self, n_past: int, slot: int = 0) -> None:
        """Forgets positions from n_past on."""
        self._check(self.lib.eagle3_rewind(self._session, slot, n_past))

    def state_reset(self, n_past: int, slot: int = 0) -> None:
        """The sequence now holds n_past tokens that the head never saw."""
        self._check(self.lib.eagle3_state_reset(self._session, slot, n_past))

    def set_capture(self, on: bool) -> None:
        """Off: decoding costs what it costs without a head, and drafts are empty."""
        self._check(self.lib.eagle3_session_set_capture(self._session, int(on)))

    def state(self, slot: int = 0) -> bytes:
        """The head's state of a slot, to be kept beside the target's."""
        size = self._check(self.lib.eagle3_state_size(self._session, slot))
        buf = self.ffi.new("uint8_t[]", size)
        return bytes(
            self.ffi.buffer(buf, self._check(self.lib.eagle3_state_get(self._session, slot, buf, size)))
        )

    def set_state(self, data: bytes, slot: int = 0) -> None:
        """Restores state(); damaged or foreign bytes are refused and change nothing."""
        self._check(
            self.lib.eagle3_state_set(self._session, slot, self.ffi.from_buffer("uint8_t[]", data), len(data))
        )

    def head_info(self) -> dict[str, Any]:
        """Sizes of the head and the target layers it reads."""
        info = self.ffi.new("struct eagle3_head_info *")
        self._check(self.lib.eagle3_head_get_info(self._head, info))
        names = ("n_embd", "n_embd_target", "n_vocab_draft", "n_blocks", "n_bytes", "n_bytes_step")
        return {
            **{name: getattr(info, name) for name in names},
            "layers": list(info.layers[0 : info.n_layers_captured]),
        }

    def d2t(self) -> np.ndarray:
        """Target id of every draft id, int32 [n_vocab_draft]."""
        out = np.empty(self.head_info()["n_vocab_draft"], np.int32)
        self._check(self.lib.eagle3_head_d2t(self._head, self.ffi.from_buffer("int32_t[]", out)))
        return out

    def head_forward(self, tokens: np.ndarray, features: np.ndarray, slot: int = 0) -> tuple[np.ndarray, ...]:
        """The head alone, from position 0: tokens [n] of positions 1..n, features
        [n, layers * n_embd_target].

        Returns g [n, n_embd], the state that a draft's next step takes in place of g [n, n_embd], and
        logits [n, n_vocab_draft].
        """
        info = self.head_info()
        outs = [np.empty((len(tokens), info[k]), np.float32) for k in ("n_embd", "n_embd", "n_vocab_draft")]
        inputs = self._head_inputs(tokens, features)
        self._check(
            self.lib.eagle3_head_forward(
                self._session, slot, *inputs, *(self.ffi.from_buffer("float[]", o) for o in outs)
            )
        )
        return tuple(outs)

    def head_trace(self, tokens: np.ndarray, features: np.ndarray, stage: str, slot: int = 0) -> np.ndarray:
        """One stage of head_forward by name (compare.stage_names): [n, width]."""
        widest = self.head_info()["n_embd"] * 2
        out = np.empty(len(tokens) * widest, np.float32)
        inputs = self._head_inputs(tokens, features)
        n = self._check(
            self.lib.eagle3_head_trace(
                self._session, slot, *inputs, stage.encode(), self.ffi.from_buffer("float[]", out), out.size
            )
        )
        return out[:n].reshape(len(tokens), -1)

    def _head_inputs(self, tokens: np.ndarray, features: np.ndarray) -> tuple[Any, Any, int]:
        info, n = self.head_info(), len(tokens)
        tokens, features = np.ascontiguousarray(tokens, np.int32), np.ascontiguousarray(features, np.float32)
        if n < 1 or features.size != n * len(info["layers"]) * info["n_embd_target"]:
            raise EagleError(ErrorKind.BAD_ARGUMENT, f"features have shape {features.shape} for {n} tokens")
        return self.ffi.from_buffer("int32_t[]", tokens), self.ffi.from_buffer("float[]", features), n
