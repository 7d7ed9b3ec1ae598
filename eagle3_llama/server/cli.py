"""`eagle3-llama serve`, and `python -m eagle3_llama.server` with the same options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..common.options import N_CTX, Eagle, FlashAttn, GpuLayers, Model, Threads
from ..errors import EagleError, ErrorKind
from .settings import ServerSettings, read_key


def serve(
    model: Model,
    eagle: Eagle = None,
    host: Annotated[
        str, typer.Option(help="address to listen on; any but loopback needs a key")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: any that is free")] = 8000,
    api_key: Annotated[
        str | None, typer.Option(envvar="EAGLE3_API_KEY", show_envvar=True, help="asked of every client")
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="file with the key: command lines can be seen by others")
    ] = None,
    n_parallel: Annotated[int, typer.Option(help="requests decoded at once")] = 4,
    n_ctx: Annotated[
        int, typer.Option("--n-ctx", "-c", help="tokens of one request, prompt and answer")
    ] = N_CTX,
    n_batch: Annotated[int, typer.Option(help="most prompt tokens evaluated between two rounds")] = 512,
    threads: Threads = None,
    n_gpu_layers: GpuLayers = 0,
    flash_attn: FlashAttn = None,
    chat_format: Annotated[
        str | None, typer.Option(help="one of llama-cpp-python's; default: the model's template")
    ] = None,
    model_alias: Annotated[str | None, typer.Option(help="name to clients; default: the model's")] = None,
    max_queue: Annotated[int, typer.Option(help="requests that may wait; the next is told 503")] = 64,
    max_tokens_cap: Annotated[
        int | None, typer.Option(help="most tokens of an answer; default: --n-ctx")
    ] = None,
    max_n: Annotated[int, typer.Option(help="most choices of one request")] = 8,
    max_draft: Annotated[int, typer.Option(help="most tokens a request may have drafted a round")] = 63,
    timeout: Annotated[float, typer.Option(help="seconds for one request")] = 600.0,
    grace: Annotated[float, typer.Option(help="seconds that running requests have after SIGTERM")] = 30.0,
    template_timeout: Annotated[
        float, typer.Option(help="seconds for a chat template, grammar or schema")
    ] = 2.0,
    stream_interval: Annotated[
        float, typer.Option(help="seconds that tokens gather for until they are sent; 0: at once")
    ] = 0.08,
    slot_save_path: Annotated[Path | None, typer.Option(help="folder that slots may be saved to")] = None,
    slot_save_limit: Annotated[int, typer.Option(help="bytes that those files may have together")] = 8 << 30,
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="site whose pages may ask; may be repeated")
    ] = None,
    log_prompts: Annotated[bool, typer.Option(help="prompts in the log")] = False,
) -> None:
    """Serve a model with OpenAI's API: many requests at once, each drafted for."""
    given = dict(locals())
    key_file = given.pop("api_key_file")
    if key_file is not None:
        given["api_key"] = read_key(key_file)
    settings = ServerSettings(
        **{k: str(v) if isinstance(v, Path) else v for k, v in given.items()}
        | {"cors_origin": tuple(cors_origin or ())}
    )
    try:
        from .run import serve as run
    except ModuleNotFoundError as e:
        raise EagleError(
            ErrorKind.LIBRARY, f"the server needs {e.name}: pip install 'eagle3-llama[server]'"
        ) from e
    run(settings)
