"""The server's settings: one frozen dataclass, validated when it is created."""

from __future__ import annotations

import dataclasses
import ipaddress
import json
import math
import os
import re
from pathlib import Path
from typing import Annotated, Any

from ..common import model_names
from ..common.keywords import strict
from ..common.limits import MAX_DRAFT
from ..common.memory_size import LEAST_SIZE, RESPONSE_STORE
from ..common.model_files import check_models
from ..common.model_settings import ModelSettings
from ..common.options import GpuLayers, Threads, size
from ..common.settings import Range, option, option_name, require, seconds
from ..errors import EagleError, ErrorKind
from ..llama.adapters import check_adapter
from ..runtime.machine import cores

# of sites, of browsers' extensions and of applications that show pages
ORIGINS = (
    "http https chrome-extension moz-extension safari-web-extension app tauri capacitor ionic vscode-webview"
).split()
SHARED_DRAFT = 8  # tokens of a draft that a request fixes, while others generate: they wait for its rows
_NAMED_KEY = re.compile(r"([A-Za-z0-9._-]{1,40}):\s+(\S.*)")
TARGET = "target"  # the value of --embeddings that names no file
LEAST_BODY = 2_000_000  # bytes that a request's body may have in any case
# For each token of a slot: a text has some 4 bytes a token, JSON may write each of them as \u00e9, six bytes.
BODY_PER_TOKEN = 64


@strict
@dataclasses.dataclass(frozen=True)
class ServerSettings(ModelSettings):
    """The server's settings. Raises EagleError BAD_ARGUMENT or BAD_FILE with the option at fault.

    The fields are the options of `eagle3-llama serve`, whose help says what they do. Not said there:
    api_key may be several, one for each client, each as KEY or as NAME: KEY; api_key_file becomes api_key.
    All clients share text_memory and response_store equally. stream_interval begins after the first token.
    """

    threads: Annotated[int | None, Threads, Range(1, 4096)] = None
    n_gpu_layers: Annotated[int, GpuLayers, Range(-1, 1 << 16)] = 0
    host: Annotated[str, "address to listen on; any address except loopback needs a key"] = "127.0.0.1"
    port: Annotated[int, "port to listen on; 0: any free port", Range(0, 65535)] = 8000
    api_key: Annotated[
        str | tuple[str, ...] | None,
        option("key that every client must send", envvar="EAGLE3_API_KEY", show_envvar=True),
        str | None,
    ] = dataclasses.field(default=None, repr=False)
    api_key_file: Annotated[
        str | None,
        "file with one KEY or NAME: KEY a line; other users can see a command line, not this file",
        Path | None,
    ] = None
    chat_template_file: Annotated[
        str | None, "file with a chat template, instead of the model's", Path | None
    ] = None
    chat_template_kwargs: Annotated[str | None, "variables for the chat template, as a JSON object"] = None
    reasoning_budget: Annotated[
        int, "most tokens of an answer's thoughts, which then end; -1: any number", Range(-1, 1 << 24)
    ] = -1
    model_alias: Annotated[str | None, "model name that clients see; default: the name of its file"] = None
    temp: Annotated[
        float | None, "temperature of requests that name none; default: by route", Range(0, 10, "a number ")
    ] = None
    seed: Annotated[
        int, "seed of requests that name none; -1: a random one for each", Range(-1, (1 << 32) - 1)
    ] = -1
    n_predict: Annotated[
        int, "most tokens of answers to requests that name no number; -1: by route", Range(-1, 1 << 24)
    ] = -1
    max_queue: Annotated[
        int, "requests that may wait for a slot; further ones get 503", Range(0, 1 << 16)
    ] = 64
    max_connections: Annotated[
        int | None,
        "open connections; further ones get 503; default: by the limit on open files",
        Range(1, 1 << 16),
    ] = None
    max_tokens_cap: Annotated[int | None, "most tokens of an answer; default: --n-ctx", Range(1, 1 << 24)] = (
        None
    )
    max_n: Annotated[int, "most choices of one request", Range(1, 256)] = 8
    max_draft: Annotated[
        int, "most draft tokens per round that a request may ask for", Range(0, MAX_DRAFT)
    ] = MAX_DRAFT
    response_store: Annotated[
        int | str,
        size("bytes (64M) for answers of /v1/responses that previous_response_id may name; 0: none"),
    ] = RESPONSE_STORE
    embeddings: Annotated[
        str | None, option("model for /v1/embeddings, or `target`: the target itself", metavar="FILE")
    ] = None
    timeout: Annotated[float, "time limit of a request in seconds", seconds(0.1, 1e6)] = 600.0
    grace: Annotated[float, "seconds that running requests have to finish after SIGTERM", seconds(0, 1e6)] = (
        30.0
    )
    template_timeout: Annotated[
        float, "time limit of a chat template, a grammar or a JSON schema in seconds", seconds(0.05, 600)
    ] = 2.0
    stream_interval: Annotated[
        float, "seconds for which a stream collects tokens before it sends them; 0: none", seconds(0, 10)
    ] = 0.08
    slot_save_path: Annotated[str | None, "folder for saved slots", Path | None] = None
    slot_save_limit: Annotated[int, "total size of the saved slots in bytes", Range(1, 1 << 50)] = 8 << 30
    cors_origin: Annotated[
        tuple[str, ...], "site whose pages may send requests; may be repeated", list[str] | None
    ] = ()
    log_prompts: Annotated[bool, option("write prompts to the log", metavar="")] = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "cors_origin", tuple(self.cors_origin))
        object.__setattr__(self, "model", model_names.model(self.model))
        if self.eagle != model_names.AUTO:  # which Batcher looks for
            object.__setattr__(self, "eagle", model_names.head(self.eagle, self.model))
        check_models(self.model, None if self.eagle == model_names.AUTO else self.eagle, or_model=True)
        if self.embeddings not in (None, TARGET):
            object.__setattr__(self, "embeddings", model_names.model(self.embeddings))
            check_models(self.embeddings)
        if self.api_key_file is not None:
            object.__setattr__(self, "api_key", read_keys(self.api_key_file))
        super().__post_init__()
        require(self.n_predict != 0, "--n-predict is 0: answers would have no tokens; -1 sets no number")
        self._check_adapter()
        self._check_key()
        n = len(self.api_keys)
        message = f"--text-memory has {self.text_memory} bytes, expected {LEAST_SIZE} for each of {n} keys"
        require(not self.text_memory or self.memory_of_client >= LEAST_SIZE, message)
        self._check_template()
        self._check_places()

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """The variables of chat_template_kwargs."""
        return json.loads(self.chat_template_kwargs) if self.chat_template_kwargs else {}

    def _check_adapter(self) -> None:
        check_adapter(self.lora)
        fine = math.isfinite(self.lora_scale)
        require(fine, f"--lora-scale is {self.lora_scale!r}, expected a number")
        require(self.lora is not None or self.lora_scale == 1, "--lora-scale needs --lora")

    def _check_template(self) -> None:
        both = self.chat_format is not None and self.chat_template_file is not None
        require(not both, "--chat-template-file has no effect beside --chat-format: give one of them")
        if self.chat_template_file is not None:
            read_template(self.chat_template_file)
        try:
            fine = isinstance(self.template_kwargs, dict)
        except ValueError:
            fine = False
        message = f"--chat-template-kwargs is {self.chat_template_kwargs!r:.80}, expected a JSON object"
        require(fine, message)

    def _check_key(self) -> None:
        names = self.client_names
        twice = next((name for name in names if names.count(name) > 1), "")
        require(not twice, f"--api-key-file has two keys of the name {twice}")
        for key in self.api_keys:
            fine = isinstance(key, str) and key.isascii() and key.isprintable() and key.strip() == key != ""
            require(fine, "--api-key must be printable ASCII without spaces at its ends")
        require(len(set(self.api_keys)) == len(self.api_keys), "--api-key-file has a key twice")
        if not self.api_keys:
            mend = "set --api-key, --api-key-file or EAGLE3_API_KEY, or use --host 127.0.0.1"
            require(is_loopback(self.host), f"other machines can reach --host {self.host}: {mend}")

    def _check_places(self) -> None:
        folder = self.slot_save_path
        for origin in self.cors_origin:
            any_page = "--cors-origin null lets in any site, as any page can have no origin: name sites, or *"
            require(origin != "null", any_page)
            scheme, _, site = origin.partition("://")
            fine = origin == "*" or (scheme in ORIGINS and site != "" and "/" not in site)
            message = f"--cors-origin is {origin!r}, expected a site such as https://example.org, or *"
            mend = "" if scheme in ORIGINS else f"; known are {', '.join(f'{s}://' for s in ORIGINS)}"
            require(fine, message + mend)
        if folder is not None:  # last, because nothing is made for settings that are refused
            try:
                Path(folder).mkdir(parents=True, exist_ok=True)
            except OSError as e:
                message = f"--slot-save-path {folder} cannot be made a folder: {e.strerror or e}"
                raise EagleError(ErrorKind.BAD_FILE, message) from e

    @property
    def api_keys(self) -> tuple[str, ...]:
        """The keys of the clients; () if none is needed."""
        return tuple(key for _, key in self._named_keys)

    @property
    def client_names(self) -> tuple[str, ...]:
        """The name of each key: its own, or "key N" by its place. Logs and caches know a client by it."""
        return tuple(name or f"key {i}" for i, (name, _) in enumerate(self._named_keys))

    @property
    def _named_keys(self) -> list[tuple[str, str]]:
        given = self.api_key if isinstance(self.api_key, tuple) else (self.api_key,)
        found = [(_NAMED_KEY.fullmatch(key), key) for key in given if key is not None]
        return [(named[1], named[2]) if named else ("", key) for named, key in found]

    @property
    def memory_of_client(self) -> int:
        """Bytes of the text memory of each client."""
        return int(self.text_memory) // max(len(self.api_keys), 1)

    @property
    def responses_of_client(self) -> int:
        """Bytes of the stored responses of each client."""
        return int(self.response_store) // max(len(self.api_keys), 1)

    @property
    def most_tokens(self) -> int:
        """The most tokens of any answer."""
        return min(self.max_tokens_cap or self.n_ctx, self.n_ctx)

    @property
    def most_body(self) -> int:
        """The most bytes of a request's body: what fills a slot fits."""
        return max(LEAST_BODY, BODY_PER_TOKEN * self.n_ctx)

    @property
    def most_choices(self) -> int:
        """The most choices of one request: more than can run or wait at once could never be admitted."""
        return min(self.max_n, self.capacity)

    @property
    def capacity(self) -> int:
        """Choices that may run or wait at once."""
        return self.n_parallel + self.max_queue

    def batch(self) -> dict[str, Any]:
        """Arguments of batching.BatchSettings."""
        shared = {field.name: getattr(self, field.name) for field in dataclasses.fields(ModelSettings)}
        threads, memory = self.threads or cores(), self.memory_of_client
        own = {"n_threads": threads, "interval": self.stream_interval, "shared_draft": SHARED_DRAFT}
        return shared | own | {"text_memory": memory}

    _named = staticmethod(option_name)


def is_loopback(host: str) -> bool:
    """True if only this machine can reach an address. Of the names, only localhost is taken for loopback."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def read_template(path: str) -> str:
    """The text of --chat-template-file. Raises EagleError BAD_FILE."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        message = f"cannot read --chat-template-file {path}: {getattr(e, 'strerror', None) or e}"
        raise EagleError(ErrorKind.BAD_FILE, message) from e


def read_keys(path: str | os.PathLike[str]) -> tuple[str, ...]:
    """The keys in a file, one a line. Of a file without any, an empty one, which the settings refuse."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
        return tuple(line.strip() for line in lines if line.strip()) or ("",)
    except (OSError, UnicodeDecodeError) as e:
        message = f"cannot read --api-key-file {path}: {getattr(e, 'strerror', None) or e}"
        raise EagleError(ErrorKind.BAD_FILE, message) from e
