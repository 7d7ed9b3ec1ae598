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
    """The answer with a header that names what was left out, in ASCII. The log names the same once."""
    if words := ", ".join(dict.fromkeys(left_out))[:MOST]:
        answer.headers[HEADER] = words
        _note(words)
    return answer


@functools.lru_cache(maxsize=64)
def _note(words: str) -> None:
    log.warning("this server runs no tools: requests are answered without %s", words)
