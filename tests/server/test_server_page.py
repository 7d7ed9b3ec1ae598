"""The page in Chromium, against a real server: what is typed, shown, measured and said."""

import json
import os
import re
from pathlib import Path

import pytest
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
    positions,
    pytestmark,
    server,
    sources,
    stat,
    stream,
    text_of,
    visit,
)
from server_tools import ENDLESS, process

from eagle3_llama.models import shipped_head, smollm2


def luminance(colour):
    channels = [int(c) / 255 for c in re.findall(r"\d+", colour)[:3]]
    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def contrast(one, other):
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_a_question_by_keyboard(visit):
    page = visit()
    expect(page.locator("#model")).to_contain_text("with a head")
    configure(
        page, temperature=0, max_tokens=160, n_max=3
    )  # the planner may rest for so long on a busy machine
    page.focus("#ask")
    page.keyboard.type("Why is the")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("sky blue?")
    assert page.input_value("#ask") == "Why is the\nsky blue?"
    page.evaluate(
        "() => { window.seen = new Set(); "
        "new MutationObserver(() => seen.add(document.querySelectorAll('.tok').length))"
        ".observe(document.body, {childList: true, subtree: true}); }"
    )
    page.keyboard.press("Enter")
    assert page.input_value("#ask") == ""
    expect(page.locator("#go")).to_have_text("Stop")
    expect(page.locator("#go")).not_to_have_text("Stop", timeout=60000)
    seen = page.evaluate("[...seen]")
    assert len(seen) > 3  # they came one after another

    ks = positions(page)
    assert ks[0] == 0 and max(ks) >= 1 and len(ks) >= 32
    for before, k in zip(ks, ks[1:]):
        assert k == 0 or k == before + 1  # accepted tokens of a round follow each other
    assert [k > 0 for k in ks] == [source != "target" for source in sources(page)]
    title = page.locator(".tok[data-s='head'][data-positions='1']").first.get_attribute("title")
    assert title == "draft token of the head, accepted at position 1"
    assert page.locator(".tok[data-s='target']").first.get_attribute("title") == "the target’s own"
    assert "Why is the\nsky blue?" in page.locator(".said").text_content()
    assert len(text_of(page)) > 40
    assert stat(page, "speed") > 0
    lengths = [n + 1 for n in map(len, re.split("0", "".join(map(str, [min(k, 1) for k in ks[1:]])))[:-1])]
    words = page.locator(".chart svg").get_attribute("aria-label")
    counted = {int(n): int(c) for n, c in re.findall(r"(\d) (?:tokens?|or more tokens): (\d+)", words)}
    assert all(counted.get(n, 0) == lengths.count(n) for n in range(1, 7))
    expect(page.locator("#status")).to_contain_text("Answered: ")
    assert page.evaluate("document.activeElement.id") == "ask"

    page.click(".measure")
    done(page)
    assert stat(page, "plain") > 0 and stat(page, "speculation") > 0


def test_without_speculation_every_token_is_the_targets_own(visit):
    page = visit()
    configure(page, max_tokens=32, seed=5, n_max=3)  # the planner may find that drafts do not pay here
    page.locator("#speculate").press("Space")
    ask(page, "Name three rivers.")
    plain, ks = text_of(page), positions(page)
    assert set(ks) == {0} and len(ks) >= 16 and stat(page, "speed") > 0
    page.locator("#speculate").press("Space")
    page.click(".again")
    done(page)
    assert text_of(page) == plain and max(positions(page)) >= 1
    assert stat(page, "plain") > 0  # measured by the first answer
    expect(page.locator(".turn")).to_have_count(1)


@pytest.mark.parametrize("at_once", [False, True])
def test_side_by_side(visit, at_once):
    page = visit()
    configure(page, max_tokens=40, seed=7, n_max=3)
    page.click("text=Side by side >> nth=0")
    expect(page.locator("#turns")).to_contain_text("because both at once would share the machine")
    if at_once:
        page.click("#settings")
        page.check("[name=at_once]")
        page.click("#close")
        expect(page.locator("#turns")).to_contain_text("at once: they share the machine")
    ask(page, "What is a queue?")
    expect(page.locator("[data-stat=same]")).to_have_text("The two texts are identical.")
    one, two = (page.locator(f"[data-run={name}]") for name in ("speculation", "plain"))
    assert one.locator(".out").text_content() == two.locator(".out").text_content() != ""
    assert max(positions(page, "[data-run=speculation]")) >= 1 and set(
        positions(page, "[data-run=plain]")
    ) == {0}
    speeds = [float(run.locator("h3 b").text_content().split()[0]) for run in (one, two)]
    assert stat(page, "ratio") == pytest.approx(speeds[0] / speeds[1], abs=0.1)


def test_texts_that_differ_are_called_so(visit):
    page = visit()
    answers(page, body=stream(("One", [0]), (" two", [1])))
    page.click("text=Side by side >> nth=0")
    page.route(
        CHAT,
        lambda route: route.fulfill(
            content_type="text/event-stream", body=stream(("One", [0]), (" too", [0]))
        ),
        times=1,
    )
    ask(page, "Count.")
    expect(page.locator("[data-stat=same].no")).to_contain_text("differ from character 6 on")


@pytest.mark.parametrize("how", ["Escape", "button"])
def test_stop_keeps_what_came(visit, server, how):
    page = visit()
    page.route(  # else an answer may end by itself
        CHAT,
        lambda route: route.continue_(post_data=json.dumps({**route.request.post_data_json, **ENDLESS})),
        times=1,
    )
    configure(page, max_tokens=900)
    ask(page, "Write a very long story about the sea.", wait=False)
    expect(page.locator(".tok").nth(5)).to_be_attached(timeout=WAIT)  # a line break cannot be seen
    page.keyboard.press("Escape") if how == "Escape" else page.click("#go")
    done(page)
    expect(page.locator(".run .why")).to_have_text("Stopped.")
    assert 5 <= page.locator(".tok").count() < 900
    busy = lambda: page.evaluate(
        "fetch('/slots').then((r) => r.json()).then((slots) => slots.some((s) => s.busy))"
    )
    for _ in range(20):
        if not busy():
            break
        page.wait_for_timeout(250)
    assert not busy()
    configure(page, max_tokens=8)
    ask(page, "And now?")
    expect(page.locator(".turn")).to_have_count(2)
    assert len(positions(page)) >= 1


def test_on_a_phone_nothing_is_cut_off(visit):
    page = visit(viewport={"width": 320, "height": 568}, has_touch=True, is_mobile=True)
    fits = lambda: page.evaluate("document.documentElement.scrollWidth <= 320 && visualViewport.scale === 1")
    expect(page.locator("#model")).to_contain_text("with a head")
    assert fits()
    configure(page, max_tokens=24)
    page.tap("text=Side by side >> nth=0")
    ask(page, "W" * 90 + " what is that?")
    assert fits()
    page.click("#settings")
    assert fits() and page.evaluate("document.getElementById('panel').scrollWidth <= 320")
    page.click("#close")
    small = page.evaluate(
        "[...document.querySelectorAll('button, label.toggle')]"
        ".filter((e) => e.offsetParent && e.getBoundingClientRect().height < 24).length"
    )
    assert small == 0  # WCAG 2.5.8
    assert page.evaluate("document.getElementById('composer').offsetHeight") < 200


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_themes_can_be_read(visit, scheme):
    page = visit(color_scheme=scheme, reduced_motion="reduce")
    names = ("head", "text", "both")
    answers(page, body=stream((" own", [0]), *((f" {n}", [k], [n]) for k, n in enumerate(names, 1))))
    ask(page, "Colours?")
    style = lambda selector, name: page.locator(selector).first.evaluate(f"(e) => getComputedStyle(e).{name}")
    paper = style("body", "backgroundColor")
    assert (luminance(paper) > 0.5) == (scheme == "light")
    assert contrast(style(".out", "color"), paper) > 10
    for soft in ("#model", ".note", "#hint", ".key"):
        assert contrast(style(soft, "color"), paper) > 4.5
    line = lambda name, what, of=".tok": style(f"{of}[data-s='{name}']", f"textDecoration{what}")
    marks = [line(name, "Color") for name in names]
    assert len(set(marks)) == 3 and all(contrast(m, paper) >= 3 for m in marks)
    assert [line(name, "Style") for name in names] == ["solid", "dashed", "double"]  # not by colour alone
    assert [(line(n, "Color", ".key i"), line(n, "Style", ".key i")) for n in names] == [
        (line(n, "Color"), line(n, "Style")) for n in names
    ]
    assert line("target", "Line") == "none" and page.locator("#key li").count() == 4
    page.uncheck("#colours")
    assert {line(name, "Line") for name in names} == {"none"} and not page.is_visible("#key")
    page.click("#theme")
    assert (luminance(style("body", "backgroundColor")) > 0.5) == (scheme == "dark")
    page.reload()
    assert (luminance(style("body", "backgroundColor")) > 0.5) == (scheme == "dark")


def test_a_source_that_the_page_does_not_know(visit):
    """It has a line, an entry of the key, a tooltip and a count, with the name that its tokens bring."""
    page = visit()
    key = page.locator("#key [data-s=document]")
    expect(key).to_have_count(0)
    answers(page, body=stream(("a", [0]), (" b", [1], ["document"]), (" c", [2], ["head"]), ("!", [0])))
    ask(page, "Who?")
    expect(key).to_have_text("document")
    assert page.locator("#key li").count() == 5
    token = page.locator(".tok[data-s=document]")
    assert "of the source “document”, accepted at position 1" in token.get_attribute("title")
    assert token.evaluate("(e) => getComputedStyle(e).textDecorationStyle") == "dotted"
    expect(page.locator(".note").last).to_contain_text("1 of the head, 1 of the source “document”.")


def only(**eagle):
    """Opens the page of a server that drafts from nothing else than this."""

    def answered(route):
        model = route.fetch().json()
        model["data"][0]["eagle"] |= eagle
        route.fulfill(json=model)

    return lambda page: page.route(MODELS, answered)


def test_without_a_head_the_page_drafts_from_the_text(visit):
    page = visit(before=only(head=False, text=True))
    expect(page.locator("#model")).to_contain_text("without a head")
    expect(page.locator("#nohead")).to_have_text("The server has no head: it drafts from the text.")
    expect(page.locator("#who")).to_have_text("The text itself drafts.")
    assert [page.is_visible(f"#key [data-s={n}]") for n in ("head", "text", "both")] == [False, True, False]
    for control in ("#speculate", "#compare"):
        expect(page.locator(control)).to_be_enabled()
    assert page.locator("#drafts").evaluate("(e) => e.disabled")  # settings of a head
    bodies = []
    page.on("request", lambda r: bodies.append(r.post_data_json) if r.method == "POST" else None)
    answers(page, body=stream(("a", [0]), (" b", [1], ["text"]), (" c", [2], ["text"]), ("!", [0])))
    ask(page, "Again?")
    assert bodies[0]["speculative"] == {"enabled": True, "report": True}
    assert sources(page) == ["target", "text", "text", "target"]
    assert page.locator(".tok").nth(2).get_attribute("title") == (
        "draft token from the text itself, accepted at position 2"
    )
    expect(page.locator(".note")).to_contain_text("Accepted draft tokens: 2 from the text itself.")


def test_without_drafts_the_page_says_so(visit):
    page = visit(before=only(head=False, text=False))
    expect(page.locator("#nohead")).to_contain_text("all tokens are the target’s own")
    for control in ("#speculate", "#compare"):
        expect(page.locator(control)).to_be_disabled()
    configure(page, max_tokens=8)
    ask(page, "Hello?")
    assert set(positions(page)) == {0}


def test_what_is_set_is_sent(visit):
    page, bodies = visit(), []
    page.route(
        CHAT,
        lambda route: (
            bodies.append(route.request.post_data_json),
            route.fulfill(content_type="text/event-stream", body=stream(("Yes", [0]))),
        ),
    )
    ask(page, "One")
    page.click("#settings")
    for name, value in {
        "temperature": "0.3",
        "top_p": "",
        "min_p": "0.1",
        "seed": "11",
        "max_tokens": "12",
        "n_max": "4",
        "p_min": "0.5",
        "system": "Be brief.",
    }.items():
        page.fill(f"[name={name}]", value)
    page.click("#close")
    ask(page, "Two")
    page.click("#settings")
    page.fill("[name=tree]", "8x3x2")
    page.fill("[name=p_min]", "0")
    page.click("#close")
    ask(page, "Three")
    first, second, third = bodies
    assert (
        first["messages"] == [{"role": "user", "content": "One"}]
        and first["stream"]
        and first["stream_options"] == {"include_usage": True}
    )
    assert (
        first["speculative"] == {"enabled": True, "report": True}
        and first["max_tokens"] == 256
        and isinstance(first["seed"], int)
    )
    assert {k: second.get(k) for k in ("temperature", "top_p", "min_p", "seed", "max_tokens")} == {
        "temperature": 0.3,
        "top_p": None,
        "min_p": 0.1,
        "seed": 11,
        "max_tokens": 12,
    }
    assert second["speculative"] == {"enabled": True, "report": True, "n_max": 4, "p_min": 0.5}
    assert [m["role"] for m in second["messages"]] == ["system", "user", "assistant", "user"]
    assert third["speculative"] == {"enabled": True, "report": True, "tree": "8x3x2"}

    configure(page, temperature=9)
    page.fill("#ask", "Four")
    page.press("#ask", "Enter")
    expect(page.locator("#panel")).to_be_visible()  # where the field is marked
    assert page.input_value("#ask") == "Four" and len(bodies) == 3
    page.click("text=Restore the defaults")
    page.keyboard.press("Escape")
    assert page.input_value("[name=temperature]") == "0.7"


def test_fixed_drafts_are_taken_by_the_server(visit):
    page = visit()
    configure(page, max_tokens=24, temperature=0, n_max=2)
    ask(page, "Count to ten.")
    assert 1 <= max(positions(page)) <= 2
    configure(page, tree="8x4x2")
    ask(page, "Count to ten again.")
    assert 1 <= max(positions(page)) <= 4
    page.click("#settings")
    page.check("[value=chains]")
    page.click("#close")
    ask(page, "And once more.")
    assert positions(page)


def test_copy_clear_and_bring_back(visit):
    page = visit(permissions=["clipboard-read", "clipboard-write"])
    answers(page, body=stream(("Copied words", [0])))
    ask(page, "One")
    page.click(".copy")
    expect(page.locator(".copy")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == "Copied words"
    page.click("#clear")
    expect(page.locator(".turn")).to_have_count(0)
    expect(page.locator("#empty")).to_be_visible()
    page.click("#undo button")
    assert text_of(page) == "Copied words"


def test_bytes_of_one_character_are_shown_with_it(visit):
    page = visit()
    answers(page, body=stream((" ", [0]), ("", [1, 2]), ("😊", [3]), ("!", [0]), ("", [0])))
    ask(page, "Smile")
    spans = page.locator(".tok")
    assert [s.text_content() for s in spans.all()] == [" ", "😊", "!"]
    assert (
        spans.nth(1)
        .get_attribute("title")
        .startswith("3 tokens: draft token of the head, accepted at position 1; draft token of ")
    )
    assert spans.nth(1).get_attribute("data-positions") == "1 2 3"
    expect(page.locator(".chart svg")).to_have_attribute(
        "aria-label", re.compile("1 token: 1, .*4 tokens: 1")
    )


def test_every_control_has_a_name(visit):
    page = visit()
    page.click("#settings")
    names = page.evaluate("""[...document.querySelectorAll('input, textarea, button, dialog, main, form')]
        .filter((e) => !(e.getAttribute('aria-label') || e.getAttribute('aria-labelledby') ||
            e.labels?.length || e.textContent.trim())).map((e) => e.outerHTML)""")
    assert names == []
    page.keyboard.press("Escape")
    order = []
    page.evaluate("document.activeElement.blur()")
    page.locator(".skip").focus()
    for _ in range(12):
        order.append(page.evaluate("document.activeElement.id || document.activeElement.className"))
        page.keyboard.press("Tab")
    assert [
        x for x in order if x in ("skip", "settings", "theme", "try", "ask", "go", "speculate", "compare")
    ] == ["skip", "settings", "theme", "try", "try", "try", "ask", "go", "speculate", "compare"]
    assert page.evaluate("document.querySelectorAll('h1').length") == 1


@pytest.mark.skipif(
    "EAGLE3_PAGE_SHOTS" not in os.environ, reason="screenshots are taken with EAGLE3_PAGE_SHOTS=folder"
)
def test_screenshots(visit):
    folder = Path(os.environ["EAGLE3_PAGE_SHOTS"])
    with process(
        "--model",
        smollm2("BF16"),
        "--model-alias",
        "SmolLM2-135M-Instruct BF16",
        "--eagle",
        shipped_head(),
        "--n-ctx",
        2048,
        "--threads",
        2,
    ) as s:
        page = visit(s.url)
        configure(page, max_tokens=120, temperature=0, seed=1)
        page.click("text=Side by side >> nth=0")
        ask(page, "Explain what a queue is, with an example.")
        page.evaluate("scrollTo(0, 0)")
        page.screenshot(path=folder / "page.png")
        phone = visit(
            s.url,
            viewport={"width": 360, "height": 740},
            device_scale_factor=2,
            is_mobile=True,
            color_scheme="dark",
        )
        configure(phone, max_tokens=40, temperature=0, seed=1)
        ask(phone, "Explain what a queue is, with an example.")
        phone.click(".measure")
        done(phone)
        phone.mouse.move(0, 0)
        phone.evaluate("scrollTo(0, 0)")
        phone.screenshot(path=folder / "page_phone.png")
    assert all((folder / name).stat().st_size < 200_000 for name in ("page.png", "page_phone.png"))
