"""A small server that speaks the part of the Hugging Face Hub's API that fetching needs.

Listings, HEAD with ETag and commit, GET with ranges. It counts what it is asked, and can break off a file.
"""

import contextlib
import hashlib
import http.server
import json
import os
import re
import threading
import urllib.parse

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """repositories: name -> {file name -> bytes}. break_off: file names whose first GET ends half way.

    sizes: file name -> what a listing says instead of the file's size.
    """

    def __init__(self, repositories):
        self.repositories = repositories
        self.break_off = set()
        self.sizes = {}
        self.asked = []  # (method, path, Range header)
        hub = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self):
                hub.answer(self)

            do_GET = do_HEAD

            def log_message(self, *_):
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def close(self):
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def gets(self, name):
        """The ranges of the GETs of a file, None for all of it."""
        return [r for method, path, r in self.asked if method == "GET" and path.endswith(f"/{name}")]

    def env(self, folder, **more):
        """A process's environment with this hub, and a cache of its own."""
        return {**os.environ, **variables(self.url, folder), **more}

    def answer(self, request):
        path = urllib.parse.unquote(urllib.parse.urlsplit(request.path).path)
        asked_range = request.headers.get("Range")
        self.asked.append((request.command, path, asked_range))
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/revision/main", path):
            return self._list(request, found[1])
        found = re.fullmatch(r"/([^/]+/[^/]+)/resolve/main/(.+)", path)
        data = self.repositories.get(found[1], {}).get(found[2]) if found else None
        if data is None:
            code = "EntryNotFound" if found and found[1] in self.repositories else "RepoNotFound"
            return reply(request, 404, b"{}", {"X-Error-Code": code, "X-Repo-Commit": COMMIT})
        self._file(request, found[2], data, asked_range)

    def _list(self, request, repo):
        files = self.repositories.get(repo)
        if files is None:
            return reply(request, 404, b"{}", {"X-Error-Code": "RepoNotFound"})
        info = {"id": repo, "sha": COMMIT, "siblings": [self._sibling(*file) for file in files.items()]}
        reply(request, 200, json.dumps(info).encode(), {"Content-Type": "application/json"})

    def _sibling(self, name, data):
        return {"rfilename": name, "size": self.sizes.get(name, len(data)), "blobId": "0" * 40}

    def _file(self, request, name, data, asked_range):
        headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": COMMIT}
        headers |= {"X-Linked-Size": str(len(data)), "Accept-Ranges": "bytes"}
        first = int(re.fullmatch(r"bytes=(\d+)-", asked_range)[1]) if asked_range else 0
        if asked_range:
            headers["Content-Range"] = f"bytes {first}-{len(data) - 1}/{len(data)}"
        half = len(data) // 2 if request.command == "GET" and name in self.break_off else None
        self.break_off.discard(name if half is not None else None)
        reply(request, 206 if asked_range else 200, data[first:], headers, half)


def reply(request, status, body, headers, half=None):
    """half: so many bytes of the body are sent, then the connection is closed."""
    request.send_response(status)
    for name, value in {**headers, "Content-Length": str(len(body))}.items():
        request.send_header(name, value)
    request.end_headers()
    if request.command == "GET":
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            request.wfile.write(body[:half])
    request.close_connection = half is not None


def variables(url, folder):
    """What a process needs to ask the hub at `url`, and to leave nothing outside `folder`."""
    return {
        "HF_ENDPOINT": url,
        "HF_HOME": str(folder / "hf"),
        "HF_HUB_CACHE": str(folder / "hf" / "hub"),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_UPDATE_CHECK": "1",
        "HF_HUB_OFFLINE": "0",
        "HF_TOKEN": "",
        "NO_PROXY": "127.0.0.1",
        "EAGLE3_LLAMA_CACHE": str(folder / "cache"),
    }
