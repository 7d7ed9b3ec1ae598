"""The server's page in Chromium: what its tests share. Without Playwright or a browser they are skipped.

Playwright is imported where a browser starts: it takes long, and a quick run has no such test.
"""

import json
import os
import shutil
from urllib.parse import urlsplit

import pytest
from server_tools import process

from eagle3_llama.models import shipped_head

CHROMIUM = (
    os.environ.get("CHROMIUM")
    or shutil.which("chromium")
    or shutil.which("chromium-browser")
    or shutil.which("google-chrome")
)
NO_CHROMIUM = "no Chromium: apt-get install chromium, or name one in CHROMIUM"
pytestmark = [pytest.mark.thorough, pytest.mark.skipif(CHROMIUM is None, reason=NO_CHROMIUM)]

CALM = [
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
CHAT, MODELS = "**/v1/chat/completions", "**/v1/models"
WAIT = 120_000  # ms; CI's machine may be busy


def playwright():
    why = "the page's test drives a browser: pip install playwright"
    return pytest.importorskip("playwright.sync_api", reason=why)


def expect(*what):
    """Playwright's."""
    return playwright().expect(*what)


@pytest.fixture(scope="module")
def server():
    with process("--eagle", shipped_head(), "--n-ctx", 1024, "--threads", 2) as s:
        assert s.url, s.first
        yield s


@pytest.fixture(scope="module")
def browser():
    playwright().expect.set_options(timeout=WAIT)
    with playwright().sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM, args=CALM)
        yield browser
        browser.close()


@pytest.fixture
def visit(browser, server):
    """visit(**context's options) opens the page. Then checks for foreign requests and errors."""
    contexts, foreign, errors, allowed = [], [], [], []

    def open_page(url=server.url, allow=(), before=lambda page: None, **settings):
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 860}, **settings})
        contexts.append(context)
        allowed.extend(allow)
        context.on(
            "request",
            lambda r: (
                foreign.append(r.url)
                if urlsplit(r.url).scheme != "data" and not r.url.startswith(url)
                else None
            ),
        )
        page = context.new_page()
        page.set_default_timeout(WAIT)
        page.on("console", lambda m: errors.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda e: errors.append(str(e)))
        before(page)
        opened = page.goto(url)
        assert opened.ok, f"the browser cannot open the page: {opened.status}"
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert foreign == []
    assert [e for e in errors if not any(a in e for a in allowed)] == []


def configure(page, **values):
    page.click("#settings")
    for name, value in values.items():
        page.fill(f"[name={name}]", str(value))
    page.keyboard.press("Escape")
    expect(page.locator("#panel")).to_be_hidden()


def ask(page, text, wait=True):
    page.fill("#ask", text)
    page.press("#ask", "Enter")
    if wait:
        done(page)


def done(page):
    expect(page.locator("#go")).to_have_text("Send", timeout=WAIT)


def positions(page, where=".turn:last-child"):
    return [int(k) for k in of_tokens(page, where, "positions")]


def sources(page, where=".turn:last-child"):
    return of_tokens(page, where, "sources")


def of_tokens(page, where, name):
    spans = page.locator(f"{where} .tok").all()
    return [x for span in spans for x in (span.get_attribute(f"data-{name}") or "").split()]


def text_of(page, where=".turn:last-child"):
    return page.locator(f"{where} .out").first.text_content()


def stat(page, name):
    return float(page.locator(f".turn:last-child [data-stat={name}]").first.text_content().rstrip("×"))


def stream(*chunks, end="data: [DONE]\n\n"):
    """What a server might answer: of each chunk its text, positions, and sources if not the head's."""

    def chunk(text, positions, sources=None):
        sources = sources or ["head" if k else "target" for k in positions]
        return {
            "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}],
            "eagle": {"positions": positions, "sources": sources},
        }

    return "".join(f"data: {json.dumps(chunk(*c))}\n\n" for c in chunks) + end


def answers(page, **response):
    """The next question is answered with this instead of by the server; later ones by the server."""
    page.route(
        CHAT, lambda route: route.fulfill(**{"content_type": "text/event-stream", **response}), times=1
    )
