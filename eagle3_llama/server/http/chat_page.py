"""The chat page."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import importlib.resources
import re

from fastapi import FastAPI
from fastapi.responses import HTMLResponse, Response

PAGE_POLICY = (
    "default-src 'none'; script-src {}; style-src 'unsafe-inline'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def add(app: FastAPI) -> None:
    """Adds its route."""

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        html = await asyncio.to_thread(page_html)
        headers = {
            "Content-Security-Policy": page_policy(html),
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
        }
        return HTMLResponse(html, headers=headers)


def page_html() -> bytes:
    """The page, with the library in it that shows Markdown: the page loads nothing else."""
    folder = importlib.resources.files(__package__) / "page"
    library = (folder / "markdown-it" / "markdown-it.min.js").read_bytes()
    script = b"<script>%s</script>" % library.partition(b"//# sourceMappingURL")[0]
    return (folder / "index.html").read_bytes().replace(b"<script>/* markdown-it */</script>", script)


def page_policy(html: bytes) -> str:
    """The page's Content-Security-Policy. It allows only the page's own scripts.

    So a script in a model's answer could not run, even if the page inserted the answer as HTML by mistake.
    """
    hashes = (
        base64.b64encode(hashlib.sha256(script).digest()).decode()
        for script in re.findall(rb"<script[^>]*>(.*?)</script>", html, re.DOTALL)
    )
    return PAGE_POLICY.format(" ".join(f"'sha256-{h}'" for h in hashes) or "'none'")
