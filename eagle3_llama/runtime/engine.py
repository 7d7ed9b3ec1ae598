"""The native session from Python: each step of a round is one call."""

from __future__ import annotations

import dataclasses
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
class Ask:
    """What a slot wants of a round of several: token was sampled and is not decoded yet. most: drafted tokens that are of use."""

    slot: int
    token: int
    params: EagleParams
    most: int = MAX_DRAFT


class Round(list):
    """The tokens one round sampled: accepted drafts, then the bonus. `drafted` is what the head proposed."""

    drafted: int = 0


class Engine:
    """A target context, optionally with a head.

    ctx and model are addresses of a llama_context and its llama_model; both must outlive the engine, which
    therefore closes first. Without head_path the same calls decode plainly. extract_layers: target layers whose inputs
    the head reads, if not those that its file names.
    Source of the loop: EAGLE-3 (arXiv 2503.01840); the accept rule is native/src/session.cpp's verify().
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
        self._drafts = self.ffi.new(f"int32_t[{MAX_DRAFT}]")
        self._parents = self.ffi.new(f"int32_t[{MAX_DRAFT}]")
        self._sampled = self.ffi.new(f"int32_t[{MAX_DRAFT + 1}]")
        self.stats = EagleStats()
        self.costs: Any = None  # the planner's, once it has them
        self.can_tree = False
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
        """To be called by a thread that will not compute for a while: another one's decodes would be several times as slow."""
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

        sampler is the address of a llama_sampler chain; on_draft(token, drafts) is called before it runs. Yields the tokens of each round; the last of them
        is the next round's `token`. Ends never by itself. After each yield, and after an error, target and
        head hold the same positions: eagle3_n_past(slot).
        """
        s, lib, stats, now = self._session, self.lib, self.stats, time.perf_counter
        drafts, sampled = self._drafts, self._sampled
        sampler_ptr = self.ffi.cast("void *", sampler)
        t0 = now()
        while True:
            t1 = now()
            n = self._propose(slot, token, params)
            t2 = now()
            n = self._decode_what_fits(slot, token, n, params)  # rows [token, drafts]
            t3 = now()
            keep = 0
            try:
                on_draft(token, self.ffi.unpack(drafts, n))
                keep = self._check(
                    lib.eagle3_verify(s, slot, sampler_ptr, sampled)
                )  # accepted drafts + bonus
                t4 = now()
            finally:
                self._check(lib.eagle3_commit(s, slot, keep))  # whatever happened, nothing unverified stays
            out = Round(self.ffi.unpack(sampled, keep))
            out.drafted = n
            stats.count_round(n, keep)
            stats.draft += t2 - t1
            stats.target += t3 - t2
            stats.verify += t4 - t3
            token = out[-1]
            t5 = now()
            stats.other += t5 - t4 + t1 - t0
            yield out
            t0 = now()

    def round(
        self, asks: Sequence[Ask], samplers: Sequence[int], on_draft: Callable[[], None]
    ) -> list[Round | EagleError]:
        """One round of several slots: what rounds() yields for each, or the error of a slot whose sampler or commit failed.

        samplers are addresses of llama_sampler chains. An error of the round itself is raised, and the slots are as they were. stats.tokens
        is left to the caller, who knows which of the tokens are of use.
        """
        s, lib, n, stats, now = self._session, self.lib, len(asks), self.stats, time.perf_counter
        drafted, counts, keep = (self.ffi.new("int32_t[]", n) for _ in range(3))
        sampled = self.ffi.new("int32_t[]", n * (MAX_DRAFT + 1))
        chains = self.ffi.new("void *[]", [self.ffi.cast("void *", x) for x in samplers])
        held = [self.n_past(a.slot) for a in asks]
        t0 = now()
        self._check(lib.eagle3_round_draft(s, self._native_asks(asks), n, drafted))
        t1 = now()
        self._check(lib.eagle3_round_decode(s))
        t2 = now()
        try:
            on_draft()
            self._check(lib.eagle3_round_verify(s, chains, sampled, counts))
            keep[0:n] = [max(c, 0) for c in counts]
            t3 = now()
        finally:
            code = lib.eagle3_round_commit(s, keep)  # whatever happened, nothing unverified stays
            failure = (
                self._error(code) if code < 0 else None
            )  # of the slots that do not hold what they should
        rounds: list[Round | EagleError] = []
        for i, count in enumerate(counts):
            if failure is not None and self.n_past(asks[i].slot) != held[i] + keep[i]:
                rounds.append(failure)
                continue
            if count < 0:
                rounds.append(
                    EagleError(
                        _KINDS.get(count, ErrorKind.NATIVE),
                        "sampling failed: the grammar or another sampler gave up",
                    )
                )
                continue
            out = Round(self.ffi.unpack(sampled + i * (MAX_DRAFT + 1), count))
            out.drafted = drafted[i]
            stats.count_round(out.drafted, count)
            rounds.append(out)
        stats.draft += t1 - t0
        stats.target += t2 - t1
        stats.verify += t3 - t2
        stats.other += now() - t3
        return rounds

    def round_drafts(self, i: int) -> list[int]:
        """What the round under way drafted for its i-th slot."""
        n = self._check(self.lib.eagle3_round_drafted(self._session, i, self._drafts, self._parents))
        return self.ffi.unpack(self._drafts, n)

    def _native_asks(self, asks: Sequence[Ask]) -> Any:
        out = self.ffi.new("struct eagle3_ask[]", len(asks))
        for a, q in zip(out, asks):
            p, a.slot, a.token, a.depth, a.width = q.params, q.slot, q.token, 1, 1
            if p.n_max == 0 or not self.has_head or (p.planned and self.costs is None):
                a.kind = self.lib.EAGLE3_PLAIN
            elif isinstance(p.tree, Tree):
                a.kind, a.n_max, a.depth, a.width, a.p_min = (
                    self.lib.EAGLE3_TREE,
                    p.tree.nodes,
                    p.tree.depth,
                    p.tree.width,
                    p.p_min,
                )
            elif p.planned:
                a.kind, a.n_max, a.width = (
                    self.lib.EAGLE3_PLANNED,
                    min(PLANNED_NODES * len(asks), MAX_DRAFT),
                    PLANNED_WIDTH if self.trees(p) else 1,
                )
            else:
                a.kind, a.n_max, a.p_min = self.lib.EAGLE3_CHAIN, p.n_max, p.p_min
            a.n_max = a.n_max if p.planned else min(a.n_max, q.most)
        return out

    def _propose(self, slot: int, token: int, params: EagleParams) -> int:
        """The head's draft into self._drafts; returns its length. Tests put other drafters here."""
        s, lib, out, null = self._session, self.lib, self._drafts, self.ffi.NULL
        tree = params.tree
        if isinstance(tree, Tree):
            return self._check(
                lib.eagle3_draft_tree(
                    s, slot, token, tree.nodes, tree.depth, tree.width, params.p_min, out, self._parents, null
                )
            )
        if isinstance(tree, StaticTree):
            self._parents[0 : len(tree.parents)] = tree.parents
            return self._check(
                lib.eagle3_draft_choices(
                    s, slot, token, len(tree.parents), self._parents, tree.ranks, out, null
                )
            )
        if params.planned:
            if self.costs is None:  # no head, nothing to choose
                return 0
            width = PLANNED_WIDTH if self.trees(params) else 1
            return self._check(
                lib.eagle3_draft_planned(s, slot, token, PLANNED_NODES, width, out, self._parents, null)
            )
        return self._check(
            lib.eagle3_draft(s, slot, token, params.n_max, params.n_min, params.p_min, out, null)
        )

    def _decode(self, slot: int, token: int, n: int, params: EagleParams) -> None:
        if self.trees(params):
            self._check(
                self.lib.eagle3_decode_tree(self._session, slot, token, self._drafts, self._parents, n)
            )
        else:
            self._check(self.lib.eagle3_decode(self._session, slot, token, self._drafts, n))

    def _decode_what_fits(self, slot: int, token: int, n: int, params: EagleParams) -> int:
        """The number of drafts decoded: all, or none where the cache has no room for them."""
        try:
            self._decode(slot, token, n, params)
            return n
        except (
            EagleError
        ) as e:  # an image may fill more cells than positions (M-RoPE), by which the head's drafts are cut
            if n == 0 or e.kind is not ErrorKind.DECODE:
                raise
        self._decode(slot, token, 0, params)
        return 0

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
        """What the planner believes: rate and plain_rate in tokens/s, trust in the head, rounds it rests for."""
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
        """Decodes at most n_batch prompt tokens; logits of the last one, or of all, are left in the context."""
        ids = self.ffi.new("int32_t[]", list(tokens))
        self._check(self.lib.eagle3_prefill(self._session, slot, ids, len(tokens), int(all_logits)))

    def draft(self, token: int, params: EagleParams, slot: int = 0) -> tuple[list[int], list[float]]:
        """What the head proposes after `token`: target ids and their probabilities. Tests and tools use it."""
        probs = self.ffi.new(f"float[{MAX_DRAFT}]")
        n = self._check(
            self.lib.eagle3_draft(
                self._session, slot, token, params.n_max, params.n_min, params.p_min, self._drafts, probs
            )
        )
        return list(self._drafts[0:n]), list(probs[0:n])

    def decode(self, token: int, drafts: Sequence[int], slot: int = 0) -> None:
        """One target batch [token, drafts] with logits for every row."""
        self._check(
            self.lib.eagle3_decode(
                self._session, slot, token, self.ffi.new("int32_t[]", list(drafts) or 1), len(drafts)
            )
        )

    def decode_tree(self, token: int, drafts: Sequence[int], parents: Sequence[int], slot: int = 0) -> None:
        """One target batch of token and a tree: drafts[i] follows drafts[parents[i]], -1 for token."""
        new = lambda xs: self.ffi.new("int32_t[]", list(xs) or 1)
        self._check(
            self.lib.eagle3_decode_tree(self._session, slot, token, new(drafts), new(parents), len(drafts))
        )

    def verify(self, sampler: int, slot: int = 0) -> list[int]:
        """Samples the rows of the last decode() until one disagrees with its draft."""
        n = self._check(
            self.lib.eagle3_verify(self._session, slot, self.ffi.cast("void *", sampler), self._sampled)
        )
        return self.ffi.unpack(self._sampled, n)

    def sample(self, sampler: int, row: int = -1) -> int:
        """One token from a row of the last decode; a sampler that fails raises."""
        return self._check(self.lib.eagle3_sample(self._session, self.ffi.cast("void *", sampler), row))

    def commit(self, n_keep: int, slot: int = 0) -> None:
        """Keeps the first n_keep rows of the last decode()."""
        self._check(self.lib.eagle3_commit(self._session, slot, n_keep))

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

    def head_info(self) -> dict[str, object]:
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
        """The head alone, from position 0: tokens [n] (of positions 1..n), features [n, layers * n_embd_target].

        Returns g [n, n_embd], the state that a draft's next step takes in place of g [n, n_embd], logits [n, n_vocab_draft].
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
