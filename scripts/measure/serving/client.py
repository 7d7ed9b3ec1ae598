"""A server process under load, ours or llama.cpp's: starting it, and asking it as clients do."""

from __future__ import annotations

import http.client
import json
import re
import socket
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
from eagle3_llama.runtime.machine import cores

START = 60.0  # seconds in which llama-server loads its model
_TEXT = re.compile(rb'"(?:content|reasoning_content|arguments|name)": ?"[^"]')
PROMPTS = Path(__file__).resolve().parents[2] / "data" / "eval_prompts.jsonl"
Format = Annotated[str, typer.Option(help="format of SmolLM2")]
Files = Annotated[
    list[Path] | None, typer.Option("--file", help="prompts, .jsonl; may be given several times")
]
LlamaServerPath = Annotated[
    Path | None, typer.Option(help="path of llama.cpp's llama-server, to be measured too")
]
Messages = list[dict[str, str]]
Leaves = Callable[[bytearray], bool]


def texts_of(files: list[Path] | None, n: int) -> list[str]:
    """n prompts of these files, or of eval_prompts.jsonl, spread evenly over them."""
    return [str(text) for _, text in spaced(read_prompts(files or [PROMPTS]), n)]


def never(data: bytearray) -> bool:
    return False


def send(
    port: int,
    path: str,
    body: bytes | None = None,
    *,
    key: str = "",
    seconds: float = 300.0,
    lag: float = 0.0,
    leaves: Leaves = never,
) -> tuple[int, bytearray]:
    """(status, bytes of the answer) of a POST of `body`, or of a GET. Raises OSError if there is none.

    seconds: the longest wait for bytes. lag: seconds after which the answer's body is read. The client
    disconnects when leaves(bytes so far) is true.
    """
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=seconds)
    try:
        headers = {"Content-Type": "application/json", **bearer(key)}
        connection.request("GET" if body is None else "POST", path, body, headers)
        response, data = connection.getresponse(), bytearray()
        time.sleep(lag)
        while not leaves(data):  # parsed only later, because the server needs the cores
            part = response.read1(1 << 16)
            if not part:
                break
            data += part
        return response.status, data
    except http.client.HTTPException as e:
        raise OSError(repr(e)) from e
    finally:
        connection.close()


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
        return send(self.port, path)[1].decode()

    def chat(
        self, asked: str | Messages, max_tokens: int, leaves: Leaves = never, **fields: Any
    ) -> bytearray:
        """The bytes of a greedy answer. fields: others of the body. Raises RuntimeError if it is none."""
        messages = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
        body = {"messages": messages, "max_tokens": max_tokens, "temperature": 0, **fields}
        path = "/v1/chat/completions"
        status, data = send(self.port, path, json.dumps(body).encode(), key=self.key, leaves=leaves)
        if status != 200:
            raise RuntimeError(f"{status}: {bytes(data[:300])!r}")
        return data

    def streamed(
        self, asked: str | Messages, max_tokens: int, leaves: Leaves = never, **fields: Any
    ) -> tuple[str, dict[str, Any], float]:
        """Of a streamed greedy answer its text, its last chunk, and the seconds until it has text or a call.

        An answer without text gives the seconds to its end.
        """
        start, times = time.perf_counter(), []

        def note(data: bytearray) -> bool:
            if not times and _TEXT.search(data):
                times.append(time.perf_counter())
            return leaves(data)

        usage = {"include_usage": True}
        found = chunks(self.chat(asked, max_tokens, note, stream=True, stream_options=usage, **fields))
        first = (times or [time.perf_counter()])[0] - start
        parts = (choice["delta"].get("content") or "" for c in found for choice in c["choices"])
        return "".join(parts), found[-1], first

    def memory(self) -> int:
        """Resident bytes without mapped files, whose pages the system loads and drops as it likes."""
        return resident(self.process.pid)


class LlamaServer(Server):
    """A llama-server on a free port. n_ctx: tokens of a slot. Raises SystemExit if it does not start."""

    def __init__(
        self, program: Path, fmt: str, n_parallel: int, n_ctx: int, options: Sequence[str] = ()
    ) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        n, threads = n_parallel * n_ctx, str(cores())
        command = [str(program), "--model", str(smollm2(fmt)), "--port", str(self.port), "-c", str(n)]
        command += ["-np", str(n_parallel), "-t", threads, "-tb", threads, "-fa", "on", *options]
        try:
            self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        except OSError as error:
            raise SystemExit(f"{program} cannot be started: {error}") from None
        self._wait()

    def _wait(self) -> None:
        end = time.monotonic() + START
        while time.monotonic() < end and self.process.poll() is None:
            try:
                if send(self.port, "/health", seconds=1.0)[0] == 200:
                    return
            except OSError:
                pass
            time.sleep(0.1)
        self.process.kill()
        self.process.wait()
        raise SystemExit(f"{self.process.args[0]} did not start: run it by hand to see why")


def resident(pid: int) -> int:
    """Resident bytes of a process without mapped files. Raises OSError if it is gone."""
    with open(f"/proc/{pid}/status", encoding="ascii") as f:
        return next(int(line.split()[1]) * 1024 for line in f if line.startswith("RssAnon:"))


def bearer(key: str) -> dict[str, str]:
    """The header of a request with this API key; none for ""."""
    return {"Authorization": f"Bearer {key}"} if key else {}


def chunks(data: bytearray) -> list[dict[str, Any]]:
    """The complete chunks of a stream."""
    found = [json.loads(m) for m in re.findall(rb"data: (\{.*\})\r?\n\r?\n", data)]
    if wrong := [c["error"] for c in found if "error" in c]:
        raise RuntimeError(str(wrong[0]))
    return found
