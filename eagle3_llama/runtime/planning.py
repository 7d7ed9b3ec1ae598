"""The planner of a session: what it is told, what it expects, and the measurements that it is told of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .library import checked
from .session import Session


class Planning(Session):
    """Costs of the planner, in seconds. The measurements leave rows of their own in the context."""

    def plan(self, costs: Any) -> None:
        """Gives the planner its costs (costs.Costs)."""
        c = self.ffi.new("struct eagle3_costs *")
        c.layers, c.output, c.head, c.cell = (
            list(costs.layers),
            list(costs.output),
            list(costs.head),
            list(costs.cell),
        )
        c.first, c.context = costs.first, costs.context
        checked(self.lib.eagle3_plan_set(self._session, c))
        self.costs, self.on_match = costs, None

    def plan_info(self) -> dict[str, float]:
        """What the planner expects: rate and plain_rate in tokens/s, trust in the head, rounds it rests.

        And what it foresaw of all rounds since the costs were set, in seconds: foreseen, their time;
        foreseen_plain, the time in which plain decoding would bring the tokens that it expected of them.
        """
        out = self.ffi.new("struct eagle3_plan_info *")
        checked(self.lib.eagle3_plan_get(self._session, out))
        names = ("rate", "plain_rate", "trust", "asleep", "foreseen", "foreseen_plain")
        return {name: getattr(out, name) for name in names}

    def measure_target(self, n: int, slot: int = 0) -> float:
        return self._seconds(lambda out: self.lib.eagle3_measure_target(self._session, slot, n, out))

    def measure_output(self, n: int) -> float:
        return self._seconds(lambda out: self.lib.eagle3_measure_output(self._session, n, out))

    def measure_head(self, n: int, slot: int = 0) -> float:
        return self._seconds(lambda out: self.lib.eagle3_measure_head(self._session, slot, n, out))

    def measure_threads(self, slot: int = 0) -> None:
        """Decodes a row with each number of threads that rounds may use. The next begins with the fastest."""
        checked(self.lib.eagle3_measure_threads(self._session, slot))

    @property
    def threads(self) -> int:
        """The number of threads that the next round uses: the context's, or fewer beside a busy program."""
        return checked(self.lib.eagle3_threads_now(self._session))

    def _seconds(self, call: Callable[[Any], int]) -> float:
        out = self.ffi.new("float *")
        checked(call(out))
        return out[0]
