"""`eagle3-llama serve`, and `python -m eagle3_llama.server` with the same options."""

from __future__ import annotations

from typing import Any

from ..common import extras
from ..common.settings import with_options
from .config_file import ConfigFile
from .settings import ServerSettings


@with_options(ServerSettings)
def serve(config: ConfigFile = None, **given: Any) -> None:
    """Serve a model through OpenAI's API, many requests in one batch, with speculative decoding."""
    settings = ServerSettings(**given)  # the options of the file are among them
    try:
        from .http.process import serve as run
    except ModuleNotFoundError as e:
        raise extras.missing("the server needs", "server", e) from e
    run(settings)
