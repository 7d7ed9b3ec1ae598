"""The server's settings: one frozen dataclass, validated when it is created."""

from __future__ import annotations

import dataclasses
import ipaddress
import json
import math
import os
import re
from pathlib import Path
from typing import Any

from ..common import model_names
from ..common.cache_types import check_cache_types
from ..common.keywords import strict
from ..common.limits import MAX_DRAFT
from ..common.memory_size import LEAST_SIZE, PROMPT_CACHE, RESPONSE_STORE, check_memory, parse_size
from ..common.model_files import check_models
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
MAX_TEMPERATURE = 10
LEAST_BODY = 2_000_000  # bytes that a request's body may have in any case
# For each token of a slot: a text has some 4 bytes a token, JSON may write each of them as \u00e9, six bytes.
BODY_PER_TOKEN = 64


@strict
@dataclasses.dataclass(frozen=True)
class ServerSettings:
    """The server's settings. Raises EagleError BAD_ARGUMENT or BAD_FILE with the option at fault.

    n_parallel: slots, decoded in one batch. n_ctx: tokens of one slot, prompt and answer together.
    max_queue: requests that may wait for a slot; further ones get 503. max_connections: open connections,
    idle ones included; None takes what the process's file descriptors suffice for. max_tokens_cap: most
    tokens of an answer; None takes n_ctx. max_n: most choices of one request. max_draft: most draft
    tokens per round that a request's `speculative` may ask for. text: whether drafts also come from a
    slot's own text. text_memory: bytes (64M) for answers, from which later requests with the same API key
    are drafted; the keys share them equally; 0: none are kept. text_memory_prompts: prompts are kept too.
    prompt_cache: bytes (1G) for texts that slots gave up, which later prompts of the same key begin with.
    response_store: bytes (64M) for the answers of /v1/responses that previous_response_id may name; the keys
    share them equally; 0: none are kept.
    embeddings: a model for /v1/embeddings, a GGUF file or hf: name; `target`: the target itself.
    timeout: seconds from a request's arrival to its last token. grace: seconds that running requests have to
    finish after SIGTERM.
    template_timeout: time limit in seconds of a chat template, a grammar or a JSON schema.
    chat_template_file: a template to use instead of the model's. chat_template_kwargs: variables for the
    template, as JSON; those of a request come before them. reasoning_budget: most tokens of thoughts, for
    requests that do not say; -1: any number. temp, seed, n_predict: temperature, seed and most tokens of
    requests that do not say; seed -1: a random one for each; None and n_predict -1: as each route has it.
    stream_interval: seconds for which a stream collects tokens, after its first one, before it sends
    them; 0 sends the tokens of each round at once. slot_save_limit: total bytes of the files in
    slot_save_path. flash_attn: None enables it where the backend supports it. swa_full: False keeps the
    window alone of layers that have one. n_rs_seq: see EagleLlama. cache_type_k, cache_type_v: types of
    keys and values in the KV cache. lora, lora_scale: a LoRA adapter (GGUF) and its weight.
    api_key: one or several, one for each client, each as KEY or as NAME: KEY; every route except /health and
    /ready needs one of them. Without a key, the server listens only on loopback addresses.
    """

    model: str
    eagle: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | tuple[str, ...] | None = dataclasses.field(default=None, repr=False)
    n_parallel: int = 4
    n_ctx: int = 4096
    n_batch: int = 512
    threads: int | None = None
    n_gpu_layers: int = 0
    flash_attn: bool | None = None
    swa_full: bool = True
    n_rs_seq: int | None = None
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    lora: str | None = None
    lora_scale: float = 1.0
    chat_format: str | None = None
    chat_template_file: str | None = None
    chat_template_kwargs: str | None = None
    reasoning_budget: int = -1
    model_alias: str | None = None
    temp: float | None = None
    seed: int = -1
    n_predict: int = -1
    max_queue: int = 64
    max_connections: int | None = None
    max_tokens_cap: int | None = None
    max_n: int = 8
    max_draft: int = MAX_DRAFT
    text: bool = True
    text_memory: int | str = 0
    text_memory_prompts: bool = False
    prompt_cache: int | str = PROMPT_CACHE
    response_store: int | str = RESPONSE_STORE
    embeddings: str | None = None
    timeout: float = 600.0
    grace: float = 30.0
    template_timeout: float = 2.0
    stream_interval: float = 0.08
    slot_save_path: str | None = None
    slot_save_limit: int = 8 << 30
    cors_origin: tuple[str, ...] = ()
    log_prompts: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "cors_origin", tuple(self.cors_origin))
        object.__setattr__(self, "text_memory", parse_size(self.text_memory))
        check_memory(int(self.text_memory), self.text_memory_prompts, self.text)
        object.__setattr__(self, "prompt_cache", parse_size(self.prompt_cache, "prompt_cache"))
        object.__setattr__(self, "response_store", parse_size(self.response_store, "response_store"))
        object.__setattr__(self, "model", model_names.model(self.model))
        if self.eagle != model_names.AUTO:  # which Batcher looks for
            object.__setattr__(self, "eagle", model_names.head(self.eagle, self.model))
        check_models(self.model, None if self.eagle == model_names.AUTO else self.eagle)
        if self.embeddings not in (None, TARGET):
            object.__setattr__(self, "embeddings", model_names.model(self.embeddings))
            check_models(self.embeddings)
        for name, least, most in (
            ("port", 0, 65535),
            ("n_parallel", 1, 32),
            ("n_ctx", 64, 1 << 22),
            ("n_batch", 64, 1 << 14),
            ("threads", 1, 4096),
            ("n_gpu_layers", -1, 1 << 16),
            ("max_queue", 0, 1 << 16),
            ("max_connections", 1, 1 << 16),
            ("max_tokens_cap", 1, 1 << 24),
            ("max_n", 1, 256),
            ("max_draft", 0, MAX_DRAFT),
            ("n_rs_seq", 0, MAX_DRAFT),
            ("slot_save_limit", 1, 1 << 50),
            ("reasoning_budget", -1, 1 << 24),
        ):
            value = getattr(self, name)
            unset = value is None and name in ("threads", "max_connections", "max_tokens_cap", "n_rs_seq")
            fine = unset or type(value) is int and least <= value <= most
            self._check(fine, f"{_option(name)} is {value!r}, expected an integer {least}..{most}")
        for name, low, high in (
            ("timeout", 0.1, 1e6),
            ("grace", 0, 1e6),
            ("template_timeout", 0.05, 600),
            ("stream_interval", 0, 10),
        ):
            value = getattr(self, name)
            fine = math.isfinite(value) and low <= value <= high
            self._check(fine, f"{_option(name)} is {value!r}, expected seconds {low}..{high}")
        self._check_requests()
        self._check_target()
        self._check_key()
        n = len(self.api_keys)
        message = f"--text-memory has {self.text_memory} bytes, expected {LEAST_SIZE} for each of {n} keys"
        self._check(not self.text_memory or self.memory_of_client >= LEAST_SIZE, message)
        self._check_template()
        self._check_places()

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """The variables of chat_template_kwargs."""
        return json.loads(self.chat_template_kwargs) if self.chat_template_kwargs else {}

    def _check_requests(self) -> None:
        fine = self.temp is None or 0 <= self.temp <= MAX_TEMPERATURE
        self._check(fine, f"--temp is {self.temp!r}, expected a number 0..{MAX_TEMPERATURE}")
        for name, most in (("seed", (1 << 32) - 1), ("n_predict", 1 << 24)):
            value = getattr(self, name)
            fine = type(value) is int and -1 <= value <= most
            self._check(fine, f"{_option(name)} is {value!r}, expected an integer -1..{most}")
        self._check(self.n_predict != 0, "--n-predict is 0: answers would have no tokens; -1 sets no number")

    def _check_target(self) -> None:
        check_cache_types(self.cache_type_k, self.cache_type_v, self.flash_attn)
        check_adapter(self.lora)
        fine = math.isfinite(self.lora_scale)
        self._check(fine, f"--lora-scale is {self.lora_scale!r}, expected a number")
        self._check(self.lora is not None or self.lora_scale == 1, "--lora-scale needs --lora")

    def _check_template(self) -> None:
        both = self.chat_format is not None and self.chat_template_file is not None
        self._check(not both, "--chat-template-file has no effect beside --chat-format: give one of them")
        if self.chat_template_file is not None:
            read_template(self.chat_template_file)
        try:
            fine = isinstance(self.template_kwargs, dict)
        except ValueError:
            fine = False
        message = f"--chat-template-kwargs is {self.chat_template_kwargs!r:.80}, expected a JSON object"
        self._check(fine, message)

    def _check_key(self) -> None:
        names = self.client_names
        twice = next((name for name in names if names.count(name) > 1), "")
        self._check(not twice, f"--api-key-file has two keys of the name {twice}")
        for key in self.api_keys:
            fine = isinstance(key, str) and key.isascii() and key.isprintable() and key.strip() == key != ""
            self._check(fine, "--api-key must be printable ASCII without spaces at its ends")
        self._check(len(set(self.api_keys)) == len(self.api_keys), "--api-key-file has a key twice")
        if not self.api_keys:
            mend = "set --api-key, --api-key-file or EAGLE3_API_KEY, or use --host 127.0.0.1"
            self._check(is_loopback(self.host), f"other machines can reach --host {self.host}: {mend}")

    def _check_places(self) -> None:
        folder = self.slot_save_path
        for origin in self.cors_origin:
            any_page = "--cors-origin null lets in any site, as any page can have no origin: name sites, or *"
            self._check(origin != "null", any_page)
            scheme, _, site = origin.partition("://")
            fine = origin == "*" or (scheme in ORIGINS and site != "" and "/" not in site)
            message = f"--cors-origin is {origin!r}, expected a site such as https://example.org, or *"
            mend = "" if scheme in ORIGINS else f"; known are {', '.join(f'{s}://' for s in ORIGINS)}"
            self._check(fine, message + mend)
        if folder is not None:  # last, because nothing is made for settings that are refused
            try:
                Path(folder).mkdir(parents=True, exist_ok=True)
            except OSError as e:
                message = f"--slot-save-path {folder} cannot be made a folder: {e.strerror or e}"
                raise EagleError(ErrorKind.BAD_FILE, message) from e

    @staticmethod
    def _check(ok: bool, message: str, kind: ErrorKind = ErrorKind.BAD_ARGUMENT) -> None:
        if not ok:
            raise EagleError(kind, message)

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
        names = (
            "model eagle n_parallel n_ctx n_gpu_layers flash_attn swa_full n_rs_seq chat_format n_batch "
            "cache_type_k cache_type_v lora lora_scale"
        )
        more: dict[str, Any] = {"n_threads": self.threads or cores(), "interval": self.stream_interval}
        more["text"] = self.text
        more["text_memory"], more["shared_draft"] = self.memory_of_client, SHARED_DRAFT
        more["text_memory_prompts"], more["prompt_cache"] = self.text_memory_prompts, self.prompt_cache
        return {name: getattr(self, name) for name in names.split()} | more


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address. Of the names, only localhost is taken for loopback."""
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


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
