"""The planner of a session: the costs that it is told, and what it expects of the next rounds."""

from __future__ import annotations

from collections.abc import Callable

from .costs import Costs
from .library import checked
from .session import Session


class Planner:
    """Chooses the drafts of a session by what they cost, once it has costs.

    on_match: called once with a slot before a round whose drafts may pay, while there are no costs.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self.costs: Costs | None = None
        self.on_match: Callable[[int], None] | None = None

    def set_costs(self, costs: Costs) -> None:
        """Gives it costs, in seconds. Raises EagleError BAD_ARGUMENT for senseless ones."""
        s = self._session
        c = s.ffi.new("struct eagle3_costs *")
        for name in ("layers", "output", "head", "cell"):
            setattr(c, name, list(getattr(costs, name)))
        c.first = costs.first
        c.context = costs.context
        c.back = costs.back
        checked(s.lib.eagle3_plan_set(s.handle, c))
        self.costs = costs
        self.on_match = None

    def info(self) -> dict[str, float]:
        """Its expectations: rate and plain_rate in tokens/s, trust in the head, rounds it rests.

        And what it foresaw of all rounds since the costs were set, in seconds: foreseen, their time;
        foreseen_plain, the time in which plain decoding would bring the tokens that it expected of them.
        """
        s = self._session
        out = s.ffi.new("struct eagle3_plan_info *")
        checked(s.lib.eagle3_plan_get(s.handle, out))
        names = ("rate", "plain_rate", "trust", "asleep", "foreseen", "foreseen_plain")
        return {name: getattr(out, name) for name in names}
