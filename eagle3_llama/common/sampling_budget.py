"""The time that a request's grammar may take of the batcher's thread, which all requests share."""

from __future__ import annotations

import dataclasses

from ..errors import EagleError, ErrorKind

ROW_SECONDS = 0.02  # processor time for each sampled token, with a vocabulary of VOCABULARY or less
VOCABULARY = 50_000  # larger ones take longer in proportion, where a grammar looks at every token
ROWS = 20  # tokens whose time may be taken at once


class SlowGrammar(EagleError):
    """A grammar took more than its budget."""


@dataclasses.dataclass(eq=False)
class SamplingBudget:
    """The seconds that are left: each token adds its part, and what is saved is at most that of ROWS tokens.

    So a grammar may have expensive places, and none may slow others down for long.
    """

    n_vocab: int

    def __post_init__(self) -> None:
        self.row_seconds = ROW_SECONDS * max(1.0, self.n_vocab / VOCABULARY)
        self.left = ROWS * self.row_seconds

    def spend(self, seconds: float, n_tokens: int) -> None:
        """Spends the time that sampling n_tokens took. Raises SlowGrammar if it is more than there is."""
        most = ROWS * self.row_seconds
        self.left = min(self.left + n_tokens * self.row_seconds, most) - seconds
        if self.left < 0:
            raise SlowGrammar(
                ErrorKind.BAD_ARGUMENT,
                f"the grammar or schema takes too long: more than {1000 * self.row_seconds:.0f} ms a token."
                " Write fewer alternatives that begin alike, and no repetition directly beside another one",
            )
