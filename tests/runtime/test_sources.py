"""Who drafted a token, the head, the slot's own text or both: what rounds, reports and statistics say."""

import concurrent.futures
import dataclasses
import io
import itertools
import json
import logging

import pytest
import tiny_models
from rich.console import Console
from server_tools import events, idle, metric, running, settings, until
from test_planner import made_up
from tiny_models import PROMPT

from eagle3_llama import EagleLlama, EagleParams
from eagle3_llama.batching import Batcher, BatchSettings
from eagle3_llama.batching.samplers import Thoughts
from eagle3_llama.llama.chat import Printer, styled_counts
from eagle3_llama.runtime.asks import Ask
from eagle3_llama.runtime.binding import address
from eagle3_llama.runtime.drafted import BOTH, DRAFTERS, TARGET, Draft, drafter_labels
from eagle3_llama.runtime.round_tokens import RoundTokens
from eagle3_llama.runtime.session import Session
from eagle3_llama.runtime.stats import EagleStats
from eagle3_llama.server.prompt.completion import complete

from llama_cpp import Llama, LlamaGrammar

CHEAP = made_up(row=0.0, head=1e-3)  # whatever is likely enough is drafted
N = 120
OF_TREE = ("head", "text", "head", BOTH, "text", "head")  # who drafted each token of a tree


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A target whose greedy text soon repeats itself and never ends, and a head that knows nothing."""
    at = tmp_path_factory.mktemp("sources")
    target = tiny_models.target(at / "target.gguf", ends=False, adds=0.0)
    return str(target), str(tiny_models.head(at / "head.gguf"))


@pytest.fixture
def llm(files):
    llm = EagleLlama(files[0], eagle=files[1], n_ctx=512, n_threads=1, flash_attn=True, verbose=False)
    llm.engine.planner.set_costs(CHEAP)
    yield llm
    llm.close()


def rounds(llm, params, given=None):
    """The rounds of N tokens or more after PROMPT, each with the text before it."""
    engine, sampler, text, out = llm.engine, llm._init_sampler(temp=0.0), list(PROMPT), []
    engine.prefill(text[:-1])
    while len(text) < len(PROMPT) + N:
        ask = Ask(0, text[-1], params, given=given and Draft(*given))
        (tokens,) = engine.round([ask], [address(sampler.sampler)])
        out.append((list(text), tokens))
        text += tokens.tokens
    return out


def test_a_round_says_who_drafted_its_tokens(llm):
    out = rounds(llm, EagleParams())
    for before, tokens in out:
        assert (
            len(tokens.sources) == len(tokens.tokens)
            and tokens.sources[-1] == TARGET
            and TARGET not in tokens.sources[:-1]
        )
        assert sum(tokens.drafted_from.values()) == tokens.drafted and TARGET not in tokens.drafted_from
        text = [*before, *tokens.tokens]
        for i, source in enumerate(tokens.sources, len(before)):
            if source in ("text", BOTH):  # it followed the token before it already
                assert (text[i - 1], text[i]) in itertools.pairwise(text[:i]), (i, source)
    assert sum(source in ("text", BOTH) for _, tokens in out for source in tokens.sources) > N // 4
    stats = llm.stats
    assert sum(stats.drafted_from.values()) == stats.drafted == sum(t.drafted for _, t in out)
    assert sum(stats.accepted_from.values()) == stats.accepted == sum(len(t.tokens) - 1 for _, t in out)
    for name in DRAFTERS:
        assert stats.accepted_from[name] == sum(t.sources.count(name) for _, t in out)
    stats.reset()
    assert stats == EagleStats() and set(stats.drafted_from.values()) == {0}


def test_drafts_of_the_head_alone_and_of_the_caller(llm):
    for tree in (None, "8x3x2"):
        out = rounds(llm, EagleParams(4) if tree is None else EagleParams(tree=tree))
        assert {source for _, tokens in out for source in tokens.sources[:-1]} <= {"head"}
        assert (
            llm.stats.drafted_from
            == {**dict.fromkeys(DRAFTERS, 0), "head": llm.stats.drafted}
            != dict.fromkeys(DRAFTERS, 0)
        )
        llm.engine.rewind(0)
        llm.stats.reset()
    after = rounds(llm, EagleParams(0))[0][1].tokens[0]  # what the target says first
    llm.engine.rewind(0)
    ((_, tokens), *_) = rounds(llm, EagleParams(), given=([after - 1, after], [-1, -1]))
    assert len(tokens.tokens) == 2 and tokens.sources == [TARGET] * 2 and tokens.positions == [1, 0]
    assert tokens.drafted_from == {TARGET: 2} and llm.stats.accepted > sum(llm.stats.accepted_from.values())


def test_the_path_through_a_tree():
    draft = Draft([5, 6, 7, 5, 6, 5], [-1, -1, 0, 1, 1, 3], OF_TREE)
    assert draft.levels == 3 and draft.counts() == {"head": 3, "text": 2, BOTH: 1}
    assert draft.along([6, 5, 5]) == ["text", BOTH, "head"] and draft.along([5, 7]) == ["head"] * 2
    assert draft.along([]) == []
    chain = Draft([5, 6, 5], None, DRAFTERS)
    assert chain.levels == 3 and chain.along([5, 6]) == ["head", "text"]
    assert Draft().levels == 0 and Draft().counts() == {}


def test_a_rounds_tokens_are_one_record():
    """What a round sampled carries its draft, and keeps what was counted when its end is cut off."""
    draft = Draft([5, 6, 7, 5, 6, 5], [-1, -1, 0, 1, 1, 3], OF_TREE)
    out = RoundTokens.sampled([6, 5, 5, 9], draft)
    assert out.positions == [1, 2, 3, 0] and out.sources == ["text", BOTH, "head", TARGET]
    assert (out.drafted, out.accepted, out.levels) == (6, 3, 3) and out.drafted_from == draft.counts()
    cut = out.cut(2)
    assert (cut.tokens, cut.positions, cut.sources) == ([6, 5], [1, 2], ["text", BOTH])
    assert (cut.drafted, cut.accepted, cut.levels) == (6, 2, 3) and out.cut(4) == out
    plain = RoundTokens.sampled([9], Draft())
    assert plain == RoundTokens.first(9) and (plain.drafted, plain.accepted) == (0, 0)
    with pytest.raises(AttributeError):
        out.tokens = []


def test_a_generation_says_it_of_each_token(llm):
    seen = []
    for token in itertools.islice(llm.generate(PROMPT, temp=0.0), N):
        seen.append((token, llm.draft_position, llm.draft_source))
    assert all((k > 0) == (source in DRAFTERS) for _, k, source in seen) and seen[0][2] == "target"
    assert "text" in {source for *_, source in seen}
    used = llm._used
    accepted = [source for _, k, source in seen if k > 0]
    assert used.by_source("accepted") == {name: accepted.count(name) for name in DRAFTERS}
    assert used.by_source("drafted") == llm.stats.drafted_from


def test_a_batcher_says_it_of_each_token(files):
    with Batcher(BatchSettings(files[0], files[1], n_parallel=2, n_ctx=512, n_threads=1)) as batcher:
        batcher.engine.planner.set_costs(CHEAP)
        with batcher.request() as llm:
            n = sum(1 for _ in itertools.islice(llm.generate(PROMPT, temp=0.0), N))
            positions, sources = llm.take_report()
            assert len(positions) == len(sources) == n == N and llm.take_report() == ([], [])
            assert all((k > 0) == (source in DRAFTERS) for k, source in zip(positions, sources))
            assert "text" in sources
            by = llm.used().by_source("accepted")
            assert by == {name: sources.count(name) for name in DRAFTERS}
            assert all(llm.stats.accepted_from[name] >= by[name] for name in DRAFTERS)
        until(lambda: batcher.snapshot()["slots_busy"] == 0)  # counters of a round that runs differ
        counted = batcher.snapshot()
        assert sum(counted["drafted_from"].values()) == counted["drafted"] > 0
        assert sum(counted["accepted_from"].values()) == counted["accepted"] > 0


def test_a_server_says_it_of_each_token(files):
    given = settings(model=files[0], eagle=files[1], n_ctx=512, n_parallel=2, threads=1)
    with running(given) as server:
        server.batcher.engine.planner.set_costs(CHEAP)
        body = {"prompt": PROMPT, "max_tokens": N, "temperature": 0, "speculative": {"report": True}}
        whole = server.client.post("/v1/completions", json=body).json()
        with server.client.stream("POST", "/v1/completions", json=body | {"stream": True}) as r:
            *chunks, last, _ = events(r)
        sources, positions = ([x for c in chunks for x in c["eagle"][k]] for k in ("sources", "positions"))
        assert all((k > 0) == (source in DRAFTERS) for k, source in zip(positions, sources, strict=True))
        assert "text" in sources
        accepted = {name: sources.count(name) for name in DRAFTERS}
        assert last["eagle"]["accepted"] == accepted
        assert whole["eagle"].keys() == last["eagle"].keys() == {"drafted", "accepted"}
        assert sum(whole["eagle"]["accepted"].values()) > 0
        until(lambda: idle(server))
        for what in ("drafted", "accepted"):
            by = [metric(server, f"eagle3_{what}_from_total", f'source="{name}"') for name in DRAFTERS]
            assert sum(by) == metric(server, f"eagle3_{what}_total") and by[1] + by[2] > 0
        with running(dataclasses.replace(given, text=False), server.batcher) as other:
            told = [s.client.get("/v1/models").json()["data"][0]["eagle"] for s in (server, other)]
        assert [(t["head"], t["text"]) for t in told] == [(True, True), (True, False)]


def test_the_session_names_its_sources(llm):
    assert llm._engine.source_names() == ["head", "text", "grammar"]
    assert drafter_labels(["head", "text"]) == [TARGET, "head", "text", BOTH]
    assert drafter_labels(["head", "text", "x"]) == [TARGET, "head", "text", BOTH, "x", BOTH, BOTH, BOTH]
    assert set(drafter_labels(["head", "text", "grammar"])) == {TARGET, *DRAFTERS}


def test_another_source_shows_up_by_itself(files, monkeypatch, caplog):
    """Whatever the session calls a source, tokens, statistics, usage, metrics and the log call it too."""
    monkeypatch.setattr(Session, "source_names", lambda self: ["head", "document", "grammar"])
    given = settings(model=files[0], eagle=files[1], n_ctx=512, n_parallel=1, threads=1)
    with running(given) as server, caplog.at_level(logging.INFO, "eagle3_llama.server.access"):
        server.batcher.engine.planner.set_costs(CHEAP)
        body = {"prompt": PROMPT, "max_tokens": N, "temperature": 0, "speculative": {"report": True}}
        with server.client.stream("POST", "/v1/completions", json=body | {"stream": True}) as r:
            *chunks, last, _ = events(r)
        sources = [s for c in chunks for s in c["eagle"]["sources"]]
        accepted = {name: sources.count(name) for name in (*DRAFTERS, "document")}
        assert last["eagle"]["accepted"] == accepted and accepted["document"] > 0 == accepted["text"]
        until(lambda: idle(server))
        for what in ("drafted", "accepted"):
            by = [metric(server, f"eagle3_{what}_from_total", f'source="{name}"') for name in accepted]
            assert by == list(server.batcher.snapshot()[f"{what}_from"].values()) and by[-1] > 0 == by[1]
            assert sum(by) == metric(server, f"eagle3_{what}_total")
    assert json.loads(caplog.records[0].message)["accepted_from"] == accepted


def printed(llm, **console):
    out = io.StringIO()
    console = Console(file=out, width=200, **console)
    printer = Printer(console, llm)
    text = "".join(printer.write(80 + i, source) for i, source in enumerate((TARGET, *DRAFTERS, "document")))
    console.print(
        styled_counts(EagleStats(drafted_from={"head": 3, "text": 2, "both": 0, "document": 1}), console)
    )
    return text, out.getvalue()


def test_a_terminal_shows_who_drafted_a_token(llm):
    """By colour and by weight or underline, so that each differs without its colour too."""
    text, plain = printed(llm)
    assert plain == text + "head 0 of 3, text 0 of 2, document 0 of 1\n"
    assert printed(llm, force_terminal=True, no_color=True)[1] == plain
    codes = [
        set(part.split("m")[0].split(";"))
        for part in printed(llm, force_terminal=True, color_system="standard")[1].split("\x1b[")[1:10:2]
    ]
    attributes = [code & {"1", "3", "4"} for code in codes]
    assert attributes == [{"1"}, {"4"}, {"3", "4"}, {"1", "4"}, {"3"}]
    assert len({min(c - {"1", "3", "4"}) for c in codes}) == 5


CALLS = r"""root ::= ("{\"name\": \"" [a-z] [a-z] "\" , \"arguments\": {}}\n")+"""


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.9, "top_k": 40, "seed": 7}])
def test_a_grammar_drafts_what_it_forces(llm, files, sampling):
    """The text is plain decoding's. Without drafts from the text there are none from a grammar."""
    asked = {"max_tokens": 150, "grammar": LlamaGrammar.from_string(CALLS, verbose=False), **sampling}
    plain = Llama(files[0], n_ctx=512, n_threads=1, flash_attn=True, verbose=False)
    text = plain.create_completion(PROMPT, **asked)["choices"][0]["text"]
    plain.close()
    assert len(set(text.splitlines())) > 1 or not sampling["temperature"]
    for drafts in (True, False):
        llm.text = drafts
        llm.reset()
        llm.stats.reset()
        assert llm.create_completion(PROMPT, **asked)["choices"][0]["text"] == text
        assert (llm.stats.accepted_from["grammar"] > 0) == drafts, llm.stats


def test_a_grammar_drafts_for_each_slot(files):
    """Slots with a grammar, and one without: each has the text that it has alone."""
    s = BatchSettings(files[0], files[1], n_parallel=3, n_ctx=256, n_threads=1, flash_attn=True)
    grammars = [CALLS, None, 'root ::= "ab" [cd] "efgh" root?']
    asked = [
        {"max_tokens": 60, "temperature": 0.8, "seed": i}
        | ({"grammar": LlamaGrammar.from_string(g, verbose=False)} if g else {})
        for i, g in enumerate(grammars)
    ]
    plain = Llama(files[0], n_ctx=256, n_threads=1, flash_attn=True, verbose=False)
    texts = [plain.create_completion(PROMPT, **a)["choices"][0]["text"] for a in asked]
    plain.close()
    with Batcher(s) as batcher:
        batcher.engine.planner.set_costs(CHEAP)

        def answer(given):
            with batcher.request() as request:
                return request.create_completion(PROMPT, **given)["choices"][0]["text"]

        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            assert list(pool.map(answer, asked)) == texts
        assert batcher.snapshot()["accepted_from"]["grammar"] > 0


CLOSING = "/think> and so"  # what ends thoughts, a token for each byte
BUDGET = 8


def thinking(batcher, seed, **more):
    """A text that begins within thoughts, whose budget ends. Returns it, its rounds and accepted drafts."""
    closing = tuple(3 + ord(c) for c in CLOSING)
    thoughts = Thoughts("<think>", ("/think>",), inside=True, budget=BUDGET, closing=closing)
    before = batcher.snapshot()
    with batcher.request(**more) as request:
        made = complete(
            request, PROMPT, max_tokens=40, seed=seed, temperature=1.5, thoughts=thoughts, stream=False
        )
    after = batcher.snapshot()
    drafted = sum(after["accepted_from"][n] - before["accepted_from"][n] for n in ("grammar", BOTH))
    return made["choices"][0]["text"], after["rounds"] - before["rounds"], drafted


@pytest.mark.parametrize("head", [False, True])
def test_the_end_of_thoughts_is_drafted(files, head):
    """It is known text once the budget is spent: hardly a round of its own. The text is plain decoding's.

    The planner may choose shorter drafts, or none, where the machine is busy: so not each text is drafted.
    """
    s = BatchSettings(files[0], files[1] if head else None, n_ctx=256, n_threads=1, flash_attn=True)
    foretold = 0
    with Batcher(s) as batcher:
        for seed in range(3):
            batcher.engine.planner.set_costs(CHEAP)
            text, n_rounds, drafted = thinking(batcher, seed)
            plain, n_plain, none = thinking(batcher, seed, params=EagleParams(0))
            assert text == plain and CLOSING in text and none == 0
            assert drafted <= len(CLOSING) and n_rounds <= n_plain - drafted
            foretold += drafted
    assert foretold > len(CLOSING) // 2


def test_costs_are_measured_when_something_is_forced(files, cheap_rows, monkeypatch):
    """Without a head nothing is drafted before, and the text need not repeat itself."""
    monkeypatch.setattr(Session, "text_match", lambda *_: 0)
    with EagleLlama(files[0], n_ctx=512, n_threads=1, flash_attn=True, verbose=False) as llm:
        free = LlamaGrammar.from_string("root ::= [a-z]+", verbose=False)
        llm.create_completion(PROMPT, max_tokens=30, temperature=0.9, seed=1, grammar=free)
        assert llm.engine.planner.costs is None and llm.stats.drafted == 0
        calls = LlamaGrammar.from_string(CALLS, verbose=False)
        llm.create_completion(PROMPT, max_tokens=60, temperature=0.9, seed=1, grammar=calls)
        assert llm.engine.planner.costs is not None and llm.stats.accepted_from["grammar"] > 0
    s = BatchSettings(files[0], n_ctx=256, n_threads=1, flash_attn=True, n_parallel=2)
    monkeypatch.setattr("eagle3_llama.runtime.cost_files.known", lambda *_: None)
    with Batcher(s) as batcher:
        assert batcher.engine.planner.costs is None
        text, n_rounds, drafted = thinking(batcher, 1)
        assert batcher.engine.planner.costs is not None and drafted == len(CLOSING)
