"""A server process under load: starting it, and asking it as clients do."""

from __future__ import annotations

import http.client
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from eagle3_llama.bench.prompts import read_prompts
from eagle3_llama.bench.run import spaced
from eagle3_llama.models import shipped_head, smollm2

_TEXT = re.compile(rb'"(?:content|reasoning_content|arguments|name)": ?"[^"]')
PROMPTS = Path(__file__).resolve().parents[1] / "data" / "eval_prompts.jsonl"
Format = Annotated[str, typer.Option(help="format of SmolLM2")]
Files = Annotated[
    list[Path] | None, typer.Option("--file", help="prompts, .jsonl; may be given several times")
]


def texts_of(files: list[Path] | None, n: int) -> list[str]:
    """n prompts of these files, or of eval_prompts.jsonl, spread evenly over them."""
    return [str(text) for _, text in spaced(read_prompts(files or [PROMPTS]), n)]


class Server:
    """A server process on a free port. options: further ones of its command line. key: that requests send."""

    key = ""

    def __init__(
        self, fmt: str, n_parallel: int, n_ctx: int, head: bool = True, options: Sequence[str] = ()
    ) -> None:
        command = f"-m eagle3_llama.server --port 0 --n-parallel {n_parallel} --n-ctx {n_ctx}".split()
        files = ["--model", str(smollm2(fmt)), *(["--eagle", str(shipped_head())] if head else [])]
        self.process = subprocess.Popen(
            [sys.executable, *command, *files, *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        found = re.search(r"http://127.0.0.1:(\d+)", self.process.stdout.readline())
        if not found:
            raise SystemExit("the server did not start")
        self.port = int(found[1])

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(60)

    def get(self, path: str) -> str:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        connection.request("GET", path)
        return connection.getresponse().read().decode()

    def first_and_last(
        self, text: str, max_tokens: int, speculative: dict[str, Any], fields: dict[str, Any]
    ) -> tuple[float, dict[str, Any]]:
        """Of a streamed greedy answer, the seconds until it has text or a call, and the last chunk.

        fields: further ones of the body. An answer without text gives the seconds to its end.
        """
        start, times = time.perf_counter(), []

        def note(data: bytearray) -> bool:
            if not times and _TEXT.search(data):
                times.append(time.perf_counter())
            return False

        more = {"stream": True, "stream_options": {"include_usage": True}, **fields}
        found = chunks(self._post(text, max_tokens, speculative, more, note))
        return (times or [time.perf_counter()])[0] - start, found[-1][1]

    def ask(
        self, text: str, max_tokens: int, speculative: dict[str, Any], leave_after: int | None = None
    ) -> tuple[str, dict[str, Any]]:
        """(text, last chunk) of a streamed greedy answer. The client disconnects after leave_after chunks."""
        leaves = lambda data: leave_after is not None and data.count(b"\n\n") > leave_after
        found = [c for _, c in chunks(self.stream(text, max_tokens, speculative, leaves))]
        parts = (choice["delta"].get("content") or "" for c in found for choice in c["choices"])
        return "".join(parts), found[-1]

    def stream(
        self, text: str, max_tokens: int, speculative: dict[str, Any], leaves: Callable[[bytearray], bool]
    ) -> bytearray:
        """The bytes of a streamed greedy answer. The client disconnects when leaves(bytes so far) is true."""
        more = {"stream": True, "stream_options": {"include_usage": True}}
        return self._post(text, max_tokens, speculative, more, leaves)

    def ask_whole(self, text: str, max_tokens: int) -> dict[str, Any]:
        """The same answer without streaming."""
        return json.loads(self._post(text, max_tokens, {}, {}, lambda data: False))

    def _post(
        self,
        text: str,
        max_tokens: int,
        speculative: dict[str, Any],
        more: dict[str, Any],
        leaves: Callable[[bytearray], bool],
    ) -> bytearray:
        body = {
            "messages": [{"role": "user", "content": text}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "speculative": {"report": True, **speculative},
            **more,
        }
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        try:
            headers = {"Content-Type": "application/json", **bearer(self.key)}
            connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
            response = connection.getresponse()
            if response.status != 200:
                raise RuntimeError(f"{response.status}: {response.read()[:300]!r}")
            data = bytearray()
            while part := response.read1(1 << 16):  # parsed only later, because the server needs the cores
                data += part
                if leaves(data):
                    break
            return data
        finally:
            connection.close()

    def memory(self) -> int:
        """Resident bytes without mapped files, whose pages the system loads and drops as it likes."""
        with open(f"/proc/{self.process.pid}/status", encoding="ascii") as f:
            return next(int(line.split()[1]) * 1024 for line in f if line.startswith("RssAnon:"))


def bearer(key: str) -> dict[str, str]:
    """The header of a request with this API key; none for ""."""
    return {"Authorization": f"Bearer {key}"} if key else {}


def chunks(data: bytearray) -> list[tuple[int, dict[str, Any]]]:
    """The complete chunks of a stream, each with the number of bytes up to its end."""
    found = [(m.end(), json.loads(m[1])) for m in re.finditer(rb"data: (\{.*\})\r?\n\r?\n", data)]
    if wrong := [c["error"] for _, c in found if "error" in c]:
        raise RuntimeError(str(wrong[0]))
    return found
