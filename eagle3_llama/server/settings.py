"""What a server is told: one frozen dataclass, validated once."""

from __future__ import annotations

import dataclasses
import ipaddress
import math
import os
from pathlib import Path
from typing import Any

from ..common.keywords import strict
from ..errors import EagleError, ErrorKind

MAX_BODY = 2_000_000  # bytes of a request


@strict
@dataclasses.dataclass(frozen=True)
class ServerSettings:
    """Everything that decides how the server behaves; EagleError BAD_ARGUMENT or BAD_FILE names what is wrong.

    n_ctx: tokens of one slot, prompt and answer together; n_parallel slots are decoded at once. max_queue: requests that may
    wait for a slot, the next is told 503. max_tokens_cap: most tokens of an answer, None for n_ctx. max_n: most
    choices of one request. max_draft: most tokens that a request's `speculative` may have drafted a round.
    timeout: seconds from a request's arrival to its last token. grace: seconds that running requests have after SIGTERM.
    template_timeout: seconds that a chat template, a grammar or a JSON schema may take. stream_interval: seconds that tokens
    gather for after the first, until they are sent together; 0 sends those of each round at once. slot_save_limit: bytes that the
    files in slot_save_path may have together. flash_attn: None turns it on where the backend has it.
    api_key: asked on every route but /health; only a loopback address may be served without one.
    """

    model: str
    eagle: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = dataclasses.field(default=None, repr=False)
    n_parallel: int = 4
    n_ctx: int = 4096
    n_batch: int = 512
    threads: int | None = None
    n_gpu_layers: int = 0
    flash_attn: bool | None = None
    chat_format: str | None = None
    model_alias: str | None = None
    max_queue: int = 64
    max_tokens_cap: int | None = None
    max_n: int = 8
    max_draft: int = 63
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
        for name in ("model", "eagle"):
            path = getattr(self, name)
            self._check(path is None or Path(path).is_file(), f"no such file: {path}", ErrorKind.BAD_FILE)
        for name, least, most in (
            ("port", 0, 65535),
            ("n_parallel", 1, 32),
            ("n_ctx", 64, 1 << 22),
            ("n_batch", 64, 1 << 14),
            ("threads", 1, 4096),
            ("n_gpu_layers", -1, 1 << 16),
            ("max_queue", 0, 1 << 16),
            ("max_tokens_cap", 1, 1 << 24),
            ("max_n", 1, 256),
            ("max_draft", 0, 63),
            ("slot_save_limit", 1, 1 << 50),
        ):
            value = getattr(self, name)
            fine = (
                value is None
                and name in ("threads", "max_tokens_cap")
                or type(value) is int
                and least <= value <= most
            )
            self._check(fine, f"{_option(name)} is {value!r}, expected an integer {least}..{most}")
        for name, least, most in (
            ("timeout", 0.1, 1e6),
            ("grace", 0, 1e6),
            ("template_timeout", 0.05, 600),
            ("stream_interval", 0, 10),
        ):
            value = getattr(self, name)
            self._check(
                math.isfinite(value) and least <= value <= most,
                f"{_option(name)} is {value!r}, expected seconds {least}..{most}",
            )
        self._check_key()
        self._check_places()

    def _check_key(self) -> None:
        key = self.api_key
        if key is not None:
            fine = key.isascii() and key.isprintable() and key.strip() == key != ""
            self._check(fine, "--api-key must be printable ASCII without spaces around it")
        else:
            mend = "give --api-key, --api-key-file or EAGLE3_API_KEY, or serve 127.0.0.1"
            self._check(is_loopback(self.host), f"--host {self.host} can be reached from outside: {mend}")

    def _check_places(self) -> None:
        folder = self.slot_save_path
        self._check(
            folder is None or Path(folder).is_dir(),
            f"--slot-save-path {folder} is no folder: create it",
            ErrorKind.BAD_FILE,
        )
        for origin in self.cors_origin:
            fine = (
                origin == "*"
                or origin.startswith(("http://", "https://"))
                and "/" not in origin.split("://")[1]
            )
            self._check(fine, f"--cors-origin is {origin!r}, expected e.g. https://example.org, or *")

    @staticmethod
    def _check(ok: bool, message: str, kind: ErrorKind = ErrorKind.BAD_ARGUMENT) -> None:
        if not ok:
            raise EagleError(kind, message)

    @property
    def most_tokens(self) -> int:
        """Most tokens of an answer, whatever its request asks for."""
        return min(self.max_tokens_cap or self.n_ctx, self.n_ctx)

    @property
    def capacity(self) -> int:
        """Choices that may run or wait at once."""
        return self.n_parallel + self.max_queue

    def batch(self) -> dict[str, Any]:
        """Arguments of batching.BatchSettings."""
        names = (
            "model",
            "eagle",
            "n_parallel",
            "n_ctx",
            "n_gpu_layers",
            "flash_attn",
            "chat_format",
            "n_batch",
        )
        return {
            **{name: getattr(self, name) for name in names},
            "n_threads": self.threads or os.cpu_count(),
            "interval": self.stream_interval,
        }


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address; a name other than localhost may be anything."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def read_key(path: str | os.PathLike[str]) -> str:
    """The key in a file, without the newline at its end."""
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as e:
        raise EagleError(
            ErrorKind.BAD_FILE, f"cannot read --api-key-file {path}: {getattr(e, 'strerror', None) or e}"
        ) from e


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
