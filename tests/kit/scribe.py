"""A server on the loopback before another one, which makes the model write given texts.

Agents send no grammar, and the demo model was trained for no tools. What an agent asks goes on as it came,
with a grammar of one text; the answer comes back as it is.
"""

import contextlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
from client_tools import written

ASIDE = "A word."  # the answer to requests without tools, such as those for a title


class Scribe:
    """url: for the agent. texts: for its requests with tools, in turn; the last one is repeated.

    tools: False for an agent that has none, of which all requests count. bodies, answers: of the requests
    that count, in turn: JSON, and the text of the response. refused: all answers other than 200.
    """

    def __init__(self, target, texts, tools=True):
        self.target, self.texts, self.tools = target, texts, tools
        self.bodies, self.answers, self.refused = [], [], []
        self._lock = threading.Lock()
        handler = type("Handler", (_Handler,), {"scribe": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self):
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)

    def asked(self, body):
        """(the body with a grammar, the number of the request or None for one without tools)."""
        with self._lock:
            if self.tools and not body.get("tools"):
                return body | written(ASIDE), None
            n = len(self.bodies)
            self.bodies.append(body)
            self.answers.append("")
            return body | written(self.texts[min(n, len(self.texts) - 1)]), n

    def cached(self, n):
        """(tokens of the n-th prompt, those of them that were found)."""
        last = lambda name: int(re.findall(rf'"{name}":(\d+)', self.answers[n])[-1])
        if '"cache_read_input_tokens":' in self.answers[n]:  # Anthropic's API counts these apart
            found = last("cache_read_input_tokens")
            return last("input_tokens") + found, found
        if '"cached_tokens":' not in self.answers[n]:  # a stream whose usage is not asked for
            found = last("cache_n")
            return last("prompt_n") + found, found
        prompt = "input_tokens" if '"input_tokens":' in self.answers[n] else "prompt_tokens"
        return last(prompt), last("cached_tokens")


class _Handler(BaseHTTPRequestHandler):
    scribe = None

    def do_GET(self):
        self._pass(httpx.Request("GET", self.scribe.target + self.path), None)

    def do_POST(self):
        raw = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body, n = self.scribe.asked(json.loads(raw))
        url = self.scribe.target + self.path
        self._pass(httpx.Request("POST", url, json=body, headers={"Content-Type": "application/json"}), n)

    def _pass(self, request, n):
        with httpx.Client(timeout=600) as client, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            r = client.send(request, stream=True)
            self.send_response(r.status_code)
            self.send_header("Content-Type", r.headers.get("content-type", "application/json"))
            self.send_header("Connection", "close")
            self.end_headers()
            told = b""
            for part in r.iter_raw():
                told += part
                self.wfile.write(part)
                self.wfile.flush()
            if r.status_code != 200:
                self.scribe.refused.append(told.decode())
            if n is not None:
                self.scribe.answers[n] = told.decode()

    def log_message(self, *_):
        pass
