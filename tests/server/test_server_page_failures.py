"""The page in Chromium when something fails: keys, hostile text, a busy server, a lost network."""

import json
import re

from page_tools import (  # noqa: F401 - some names are fixtures and the mark
    CHAT,
    MODELS,
    WAIT,
    answers,
    ask,
    browser,
    configure,
    done,
    expect,
    pytestmark,
    server,
    sources,
    stream,
    text_of,
    visit,
)
from server_tools import process

from eagle3_llama.models import shipped_head

HOSTILE = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'><b>bold</b> &lt;i&gt;"


def test_a_wrong_key_is_asked_for_again(visit):
    with process("--eagle", shipped_head(), "--threads", 2, env={"EAGLE3_API_KEY": "right-key"}) as keyed:
        assert keyed.url, keyed.first
        page = visit(keyed.url, allow=["401"], http_credentials={"username": "any", "password": "right-key"})
        configure(page, max_tokens=8)
        page.click("#settings")
        page.fill("#apikey", "wrong-key")
        page.press("#apikey", "Enter")
        box = page.locator(".trouble[data-kind=key]")
        expect(box).to_contain_text("does not accept this API key")
        ask(page, "Hello?")
        expect(box).to_be_visible()
        assert page.evaluate("document.activeElement.id") == "askkey"
        page.fill("#askkey", "right-key")
        page.press("#askkey", "Enter")
        expect(page.locator(".tok").first).to_be_attached(timeout=WAIT)
        done(page)
        expect(box).to_have_count(0)
        expect(page.locator(".turn")).to_have_count(1)
        expect(page.locator("#model")).to_contain_text("with a head")
        stored = page.evaluate(
            "[JSON.stringify(localStorage), JSON.stringify(sessionStorage), document.cookie, location.href]"
        )
        assert ["right-key" in s for s in stored] == [False, True, False, False]


def test_a_server_that_asks_for_a_key_at_first(visit):
    """Where the page itself is served to everyone."""

    def refuse(route):
        if route.request.headers.get("authorization") == "Bearer sesame":
            route.continue_()
        else:
            route.fulfill(status=401, json={"error": {"message": "a key is needed"}})

    page = visit(allow=["401"], before=lambda page: [page.route(p, refuse) for p in (CHAT, MODELS)])
    expect(page.locator(".trouble")).to_contain_text("asks for an API key")
    page.fill("#askkey", "sesame")
    page.press("#askkey", "Enter")
    expect(page.locator("#model")).to_contain_text("with a head")
    expect(page.locator(".trouble")).to_have_count(0)
    configure(page, max_tokens=8)
    ask(page, "Hello?")
    assert sources(page)


def test_what_looks_like_a_script_is_text(visit):
    page = visit(allow=["422"])
    answers(page, body=stream((HOSTILE[:20], [0]), (HOSTILE[20:], [1])))
    ask(page, HOSTILE)
    assert text_of(page) == HOSTILE and HOSTILE in page.locator(".said").text_content()
    assert (
        page.locator("#talk").evaluate("(e) => e.querySelectorAll('script, img, b:not(h3 b), i').length") == 0
    )
    answers(page, status=422, json={"error": {"message": HOSTILE}})
    ask(page, "Again?")
    assert "<script>" in page.locator(".trouble").text_content()
    page.unroute_all()
    page.route(
        CHAT,
        lambda route: route.fulfill(
            content_type="text/event-stream", body=f"data: {json.dumps({'error': {'message': HOSTILE}})}\n\n"
        ),
        times=1,
    )
    page.click(".retry")
    expect(page.locator(".trouble h3")).to_have_text("The answer was interrupted")
    assert page.evaluate("window.hacked") is None


MARKDOWN = """## Rivers

1. the *Danube*
2. the `Rhine`

```python
print("<b>")
```

| river | km |
|---|---|
| Danube | 2850 |

[a link](https://example.org) [a script](javascript:alert(1)) ![a picture](https://example.org/x.png)
"""


def test_answers_as_markdown(visit):
    """A button shows finished answers so, and brings the tokens back."""
    page = visit()
    answers(page, body=stream(*((text, [k]) for text, k in ((MARKDOWN, 0), (HOSTILE, 1)))))
    ask(page, "Rivers?")
    shown, out = page.locator(".shown"), page.locator(".out")
    expect(shown).to_have_count(0)
    page.click("text=Show as Markdown")
    expect(out).to_be_hidden()
    assert shown.locator("h2").text_content() == "Rivers" and shown.locator("li").count() == 2
    assert shown.locator("pre code").text_content() == 'print("<b>")\n'
    assert "mono" in shown.locator("pre code").evaluate("e => getComputedStyle(e).fontFamily")
    assert shown.locator("td").all_text_contents() == ["Danube", "2850"]
    links = shown.locator("a").all()
    assert [a.get_attribute("href") for a in links][:1] == ["https://example.org"]
    assert all(a.get_attribute("rel") == "noopener noreferrer" for a in links)
    assert not [a for a in links if "javascript" in a.get_attribute("href")]
    assert shown.evaluate("(e) => e.querySelectorAll('script, img, b, i, [onerror]').length") == 0
    assert "<script>" in shown.text_content() and page.evaluate("window.hacked") is None
    page.click("text=Show the tokens")
    expect(out).to_be_visible()
    expect(shown).to_have_count(0)
    assert text_of(page) == MARKDOWN + HOSTILE and sources(page) == ["target", "head"]
    page.click("text=Show as Markdown")  # and for the next one
    answers(page, body=stream(("**more**", [0])))
    ask(page, "And?")
    expect(page.locator(".turn:last-child .shown strong")).to_have_text("more")


def test_a_busy_server_says_when(visit):
    page = visit(allow=["503"])
    configure(page, max_tokens=8)
    ask(page, "One?")
    answers(page, status=503, headers={"Retry-After": "7"}, json={"error": {"message": "the queue is full"}})
    ask(page, "Two?")
    box = page.locator(".trouble[data-kind=busy]")
    expect(box).to_contain_text("The queue is full.")
    assert re.search(r"Try again in [67] seconds\.", box.text_content())
    expect(page.locator(".turn")).to_have_count(2)
    page.click(".retry")
    done(page)
    expect(box).to_have_count(0)
    assert sources(page) and text_of(page, ".turn:first-of-type")


def test_a_lost_network_keeps_the_conversation(visit):
    page = visit(allow=["ERR_FAILED", "Failed to load"])
    configure(page, max_tokens=8)
    ask(page, "One?")
    first = text_of(page)
    page.route(CHAT, lambda route: route.abort(), times=1)
    ask(page, "Two?")
    expect(page.locator(".trouble")).to_contain_text("cannot be reached")
    answers(page, body=stream(("Half an", [0]), (" ans", [1]), end=""))  # ends without [DONE]
    page.click(".retry")
    done(page)
    expect(page.locator(".trouble")).to_contain_text("keeps the text received so far")
    assert text_of(page) == "Half an ans"
    expect(page.locator(".turn:last-child .why")).to_have_text("Interrupted.")
    page.click(".retry")
    done(page)
    expect(page.locator(".trouble")).to_have_count(0)
    assert sources(page) and text_of(page, "article:nth-of-type(1)") == first
