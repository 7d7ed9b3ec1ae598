"""Says what of a request has no effect here: tools that a server would run, grammars of custom tools."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable

from starlette.responses import Response

HEADER = "X-Left-Out"
MOST = 1000  # characters of the header

log = logging.getLogger("eagle3_llama.server")


def tell(answer: Response, left_out: Iterable[str]) -> Response:
    """The answer with a header that names what was left out, in ASCII.

    The log has a line for each kind, once, without the names of a client's own tools.
    """
    words = list(dict.fromkeys(left_out))
    if words:
        answer.headers[HEADER] = ", ".join(words)[:MOST]
    for kind in {word.partition(" of ")[0] for word in words}:
        _note(kind)
    return answer


@functools.lru_cache(maxsize=256)
def _note(kind: str) -> None:
    if kind == "grammar":
        log.warning(
            "requests have custom tools with grammars, which are shown to the model, but not enforced"
        )
    else:
        log.warning("this server runs no tools: %s of requests is left out", kind)
