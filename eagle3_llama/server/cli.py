"""`eagle3-llama serve`, and `python -m eagle3_llama.server` with the same options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ..common import extras
from ..common.limits import MAX_DRAFT
from ..common.memory_size import PROMPT_CACHE, RESPONSE_STORE, parse_size
from ..common.options import (
    N_CTX,
    CacheTypeK,
    CacheTypeV,
    Eagle,
    FlashAttn,
    FromText,
    GpuLayers,
    Lora,
    LoraScale,
    Model,
    SwaFull,
    TextMemoryPrompts,
    TextMemorySize,
    Threads,
)
from .config_file import use
from .settings import ServerSettings, read_keys


def serve(
    model: Model,
    config: Annotated[
        Path | None,
        typer.Option(
            callback=use, is_eager=True, help="file with options, in TOML; the command line comes first"
        ),
    ] = None,
    eagle: Eagle = None,
    host: Annotated[
        str, typer.Option(help="address to listen on; any address except loopback needs a key")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="port to listen on; 0: any free port")] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="EAGLE3_API_KEY", show_envvar=True, help="key that every client must send"),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            help="file with one KEY or NAME: KEY a line; other users can see a command line, not this file"
        ),
    ] = None,
    n_parallel: Annotated[int, typer.Option(help="number of slots: requests decoded in one batch")] = 4,
    n_ctx: Annotated[
        int, typer.Option("--n-ctx", "-c", help="context of one request in tokens: prompt and answer")
    ] = N_CTX,
    n_batch: Annotated[int, typer.Option(help="most prompt tokens decoded between two rounds")] = 512,
    threads: Threads = None,
    n_gpu_layers: GpuLayers = 0,
    flash_attn: FlashAttn = None,
    swa_full: SwaFull = True,
    n_rs_seq: Annotated[
        int | None,
        typer.Option(help="snapshots of a hybrid target's state in each slot; default: by what they take"),
    ] = None,
    cache_type_k: CacheTypeK = "f16",
    cache_type_v: CacheTypeV = "f16",
    lora: Lora = None,
    lora_scale: LoraScale = 1.0,
    chat_format: Annotated[
        str | None, typer.Option(help="a chat format of llama-cpp-python; default: the model's template")
    ] = None,
    chat_template_file: Annotated[
        Path | None, typer.Option(help="file with a chat template, instead of the model's")
    ] = None,
    chat_template_kwargs: Annotated[
        str | None, typer.Option(help="variables for the chat template, as a JSON object")
    ] = None,
    reasoning_budget: Annotated[
        int, typer.Option(help="most tokens of an answer's thoughts, which then end; -1: any number")
    ] = -1,
    model_alias: Annotated[
        str | None, typer.Option(help="model name that clients see; default: the name of its file")
    ] = None,
    temp: Annotated[
        float | None, typer.Option(help="temperature of requests that name none; default: by route")
    ] = None,
    seed: Annotated[
        int, typer.Option(help="seed of requests that name none; -1: a random one for each")
    ] = -1,
    n_predict: Annotated[
        int, typer.Option(help="most tokens of answers to requests that name no number; -1: by route")
    ] = -1,
    max_queue: Annotated[
        int, typer.Option(help="requests that may wait for a slot; further ones get 503")
    ] = 64,
    max_connections: Annotated[
        int | None,
        typer.Option(help="open connections; further ones get 503; default: by the limit on open files"),
    ] = None,
    max_tokens_cap: Annotated[
        int | None, typer.Option(help="most tokens of an answer; default: --n-ctx")
    ] = None,
    max_n: Annotated[int, typer.Option(help="most choices of one request")] = 8,
    max_draft: Annotated[
        int, typer.Option(help="most draft tokens per round that a request may ask for")
    ] = MAX_DRAFT,
    text: FromText = True,
    text_memory: TextMemorySize = 0,
    text_memory_prompts: TextMemoryPrompts = False,
    prompt_cache: Annotated[
        int,
        typer.Option(
            parser=lambda given: parse_size(given, "prompt_cache"),
            metavar="SIZE",
            help="bytes (1G) in which texts are kept that slots gave up, so that later prompts of the same"
            " API key are not decoded again; 0: none",
        ),
    ] = PROMPT_CACHE,
    response_store: Annotated[
        int,
        typer.Option(
            parser=lambda given: parse_size(given, "response_store"),
            metavar="SIZE",
            help="bytes (64M) for answers of /v1/responses that previous_response_id may name; 0: none",
        ),
    ] = RESPONSE_STORE,
    embeddings: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="model for /v1/embeddings, or `target`: the target itself"),
    ] = None,
    timeout: Annotated[float, typer.Option(help="time limit of a request in seconds")] = 600.0,
    grace: Annotated[
        float, typer.Option(help="seconds that running requests have to finish after SIGTERM")
    ] = 30.0,
    template_timeout: Annotated[
        float, typer.Option(help="time limit of a chat template, a grammar or a JSON schema in seconds")
    ] = 2.0,
    stream_interval: Annotated[
        float, typer.Option(help="seconds for which a stream collects tokens before it sends them; 0: none")
    ] = 0.08,
    slot_save_path: Annotated[Path | None, typer.Option(help="folder for saved slots")] = None,
    slot_save_limit: Annotated[int, typer.Option(help="total size of the saved slots in bytes")] = 8 << 30,
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="site whose pages may send requests; may be repeated")
    ] = None,
    log_prompts: Annotated[bool, typer.Option(metavar="", help="write prompts to the log")] = False,
) -> None:
    """Serve a model through OpenAI's API, many requests in one batch, with speculative decoding."""
    given: dict[str, Any] = {k: str(v) if isinstance(v, Path) else v for k, v in locals().items()}
    key_file = given.pop("api_key_file")
    del given["config"]  # its options are among the others
    if key_file is not None:
        given["api_key"] = read_keys(key_file)
    settings = ServerSettings(**given | {"cors_origin": tuple(cors_origin or ())})
    try:
        from .http.process import serve as run
    except ModuleNotFoundError as e:
        raise extras.missing("the server needs", "server", e) from e
    run(settings)
