"""Children that may be killed: who brings one down waits for nobody but himself, and nobody for him."""

import itertools
import json
import signal
import sys
import threading

import pytest
import templates
from commands import run
from server_tools import no_threads, until
from tiers import each

from eagle3_llama import EagleError
from eagle3_llama.server.jobs.work_queue import Lazy
from eagle3_llama.server.prompt.message import Deltas
from eagle3_llama.server.prompt.named_formats import call_tool
from eagle3_llama.server.sandbox import child
from eagle3_llama.server.sandbox import pool as module
from eagle3_llama.server.sandbox.answers import AnswerReaders, Syntax
from eagle3_llama.server.sandbox.chat_library import ChatTemplate
from eagle3_llama.server.sandbox.pool import Sandbox, SandboxBroken, SandboxBusy, SandboxError
from eagle3_llama.server.sandbox.sized_cache import SizedCache

LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
TEMPLATE = "{% if messages[0].content == 'hang' %}" + LOOP + "{% endif %}{{ messages[0].content }}"


@pytest.fixture
def sandbox(monkeypatch):
    s = Sandbox(3600.0, templates={"template": TEMPLATE, "eos": "", "bos": ""})
    receive, s.last = module.receive, {}  # each child's last message, by its pipe

    def noted(pipe):
        s.last[pipe] = receive(pipe)
        return s.last[pipe]

    monkeypatch.setattr(module, "receive", noted)
    yield s
    s.close()


def render(sandbox, text):
    return sandbox.call(do="apply", messages=[{"role": "user", "content": text}])["prompt"]


def hang(sandbox, ended):
    """A call that would take an hour, in a thread; its error goes into `ended`."""

    def run():
        try:
            render(sandbox, "hang")
        except (SandboxError, SandboxBusy) as e:
            ended.append(e)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def busy_child(sandbox):
    """The child that has a call, and has said that it received it."""
    taken = lambda: sandbox._children - set(sandbox._free)
    busy = lambda: {c for c in taken() if sandbox.last.get(c.stdout) == module.RECEIVED}
    until(busy)
    return next(iter(busy()))


def both_started(sandbox):
    until(lambda: len(sandbox._children) == sandbox.CHILDREN)


def test_others_are_served_beside_one_that_hangs(sandbox):
    assert render(sandbox, "a") == "a"
    both_started(sandbox)
    ended = []
    thread = hang(sandbox, ended)
    child = busy_child(sandbox)
    assert render(sandbox, "b") == "b" and render(sandbox, "c") == "c"
    assert busy_child(sandbox) is child and child.poll() is None and not ended
    sandbox.close()
    thread.join(60)
    assert isinstance(ended[0], SandboxBusy)


def test_nobody_waits_for_the_next_child_to_start(sandbox, monkeypatch):
    """One is killed, and another cannot be had: the one that is left serves."""
    assert render(sandbox, "a") == "a"
    both_started(sandbox)
    ended = []
    thread = hang(sandbox, ended)
    child = busy_child(sandbox)
    held, go = threading.Event(), threading.Event()
    wait_for = Sandbox._wait_for
    monkeypatch.setattr(sandbox, "_wait_for", lambda c: (held.set(), go.wait(60), wait_for(sandbox, c)))
    child.kill()
    thread.join(60)
    assert isinstance(ended[0], SandboxBusy) and held.wait(60)  # not its fault: it was killed before its time
    assert [render(sandbox, t) for t in "bcd"] == ["b", "c", "d"] and not go.is_set()
    go.set()


@pytest.fixture
def heard():
    """Children are ended by SIGINT and SIGHUP, also where the tests run in the background or under nohup."""
    numbers = (signal.SIGINT, signal.SIGHUP)
    ignored = [n for n in numbers if signal.getsignal(n) is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, signal.SIG_DFL)
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


ENDS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@pytest.mark.parametrize("number", each(ENDS, ENDS[:1]))
def test_a_child_that_somebody_ends_is_no_fault_of_the_request(heard, sandbox, number):
    """The request has an hour. What ends the child says nothing of it."""
    ended = []
    thread = hang(sandbox, ended)
    child = busy_child(sandbox)
    both_started(sandbox)
    child.send_signal(number)
    thread.join(60)
    assert isinstance(ended[0], SandboxBusy)
    both_started(sandbox)
    assert render(sandbox, "a") == "a"


def test_a_child_that_breaks_down_is_the_requests_fault(sandbox):
    ended = []
    thread = hang(sandbox, ended)
    child = busy_child(sandbox)
    child.send_signal(signal.SIGSEGV)
    thread.join(60)
    assert "too large, too deep" in str(ended[0])


def test_a_child_killed_while_it_is_free_gets_no_request(sandbox, monkeypatch):
    """For a moment after its kill nobody can tell: the request goes to the next one."""
    assert render(sandbox, "a") == "a"
    for _ in range(2):
        both_started(sandbox)
        until(lambda: len(sandbox._free) == sandbox.CHILDREN)
        with monkeypatch.context() as m:
            for child in sandbox._children:
                child.kill()
                m.setattr(child, "poll", lambda: None)
            assert render(sandbox, "b") == "b"


def test_a_child_that_cannot_start_is_said():
    s = Sandbox(5.0, model="/none.gguf")
    for _ in range(2):
        with pytest.raises(SandboxBroken, match="cannot read the vocabulary of /none.gguf"):
            s.call(do="check", text='root ::= "x"')
    s.close()
    with pytest.raises(SandboxBusy):
        s.call(do="check", text='root ::= "x"')


def test_threads_that_run_out_and_come_back(sandbox):
    """Calls are told that it is busy, more of them than there are children; then all is as before."""
    assert render(sandbox, "a") == "a"
    both_started(sandbox)
    with no_threads():
        for _ in range(2 * sandbox.CHILDREN):
            with pytest.raises(SandboxBusy):
                render(sandbox, "b")
    assert render(sandbox, "c") == "c"
    both_started(sandbox)


def test_a_call_that_breaks_loses_no_child(sandbox, monkeypatch):
    """Whatever is raised between taking a child and its answer."""
    assert render(sandbox, "a") == "a"
    here, receive = threading.current_thread(), module.receive

    def fails_here(pipe):
        if threading.current_thread() is here:  # not in the threads that wait for new children
            raise MemoryError
        return receive(pipe)

    with monkeypatch.context() as m:
        m.setattr(module, "receive", fails_here)
        for _ in range(2 * sandbox.CHILDREN):
            with pytest.raises(MemoryError):
                render(sandbox, "b")
    assert render(sandbox, "c") == "c"
    both_started(sandbox)


def test_the_cache_counts_sizes():
    cache, made = SizedCache(100), []

    def get(key, size):
        return cache.get((key,), lambda: (made.append(key), "x" * size)[1])

    for key, size in (
        ("a", 40),
        ("b", 40),
        ("a", 40),
        ("c", 40),
        ("a", 40),
        ("b", 40),
        ("d", 1000),
        ("b", 40),
    ):
        assert len(get(key, size)) == size and cache.size <= 100
    assert (
        made == ["a", "b", "c", "b", "d"] and len(cache) == 2
    )  # what was asked for last is kept; what is larger than all is not
    with pytest.raises(ZeroDivisionError):
        cache.get(("e",), lambda: 1 / 0)
    assert cache.get(("e",), lambda: None) is None


def test_once_is_once():
    """Of many threads one makes it; a failure is everyone's."""
    made, got, gate = [], [], threading.Event()
    once = Lazy(lambda: (gate.wait(60), made.append(1), "x")[2])
    threads = [threading.Thread(target=lambda: got.append(once())) for _ in range(4)]
    for t in threads:
        t.start()
    gate.set()
    for t in threads:
        t.join(60)
    assert got == ["x"] * 4 and made == [1]
    broken = Lazy(lambda: made.append(2) or 1 / 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            broken()
    assert made == [1, 2]


def test_other_handlers_are_left_alone():
    def functionary(**_):
        """A handler with a way of its own."""

    assert call_tool(functionary, "root ::= x") is functionary


# -- chats ------------------------------------------------------------------------------------------------

HOSTILE = {
    "loops": LOOP,
    "a long range": "{% for i in range(1000000000) %}{% endfor %}",
    "a long text": "{{ 'x' * 2000000000 }}",
    "a doubled text": "{% set ns = namespace(t='xx') %}{% for i in range(40) %}{% set ns.t = ns.t + ns.t %}"
    "{% endfor %}{{ ns.t }}",
    "a macro that calls itself": "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "parentheses": "{{ " + "(" * 200_000 + "1" + ")" * 200_000 + " }}",
    "conditions": "{% if 1 %}" * 500_000 + "{% endif %}" * 500_000,
    "no template": "{% if %}",
    "a long prompt": "{% for i in range(9000) %}{{ '" + "x" * 1000 + "' }}{% endfor %}",
}


# one for each limit; test_server_pressure.py has one that takes too long
@pytest.mark.parametrize("name", each(HOSTILE, ["a long text", "parentheses", "no template"]))
def test_hostile_templates(name):
    """Each ends its own request, in words, and the next one has a child again."""
    template = HOSTILE[name].join(["{% if messages[0].content == 'go' %}", "{% else %}fine{% endif %}"])
    if name in ("parentheses", "conditions", "no template"):  # the text itself cannot be parsed
        template = HOSTILE[name]
    s = Sandbox(3.0, templates={"template": template, "eos": "", "bos": ""})
    try:
        for _ in range(2):
            with pytest.raises(SandboxError) as told:
                render(s, "go")
            assert len(str(told.value)) > 10
        assert template == HOSTILE[name] or render(s, "x") == "fine"
    finally:
        s.close()


def test_arguments_that_nest_deep():
    """Those that a client sends back are parsed for templates that want them as objects."""
    s = Sandbox(20.0, templates={"template": templates.text("Qwen3-Coder"), "eos": "", "bos": ""})
    nested = lambda n: '{"a": ' + "[" * n + "]" * n + "}"

    def echoed(arguments):
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        said = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        return s.call(do="apply", messages=said)["prompt"]

    try:
        echoed(nested(10))
        with pytest.raises(SandboxError):
            echoed(nested(1_000_000))
        echoed(nested(10))
    finally:
        s.close()


@pytest.fixture(scope="module")
def answers():
    s = AnswerReaders(20.0)
    yield s
    s.close()


def test_an_answer_that_nests_deep(answers):
    """What a model writes has no limit but its context. The parser's stack has one."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    template = ChatTemplate(templates.text("Qwen-Qwen3-0.6B"), "", "")
    asked = {"messages": [{"role": "user", "content": "x"}], "tools": [tool]}
    made = template.apply(asked)
    syntax = Syntax({k: made[k] for k in ("format", "generation_prompt", "parser")})
    begun = '<tool_call>\n{"name": "f", "arguments": {"a": '
    parse = lambda n: answers.parse(syntax, begun + "[" * n, True)
    assert parse(3500)["tool_calls"][0]["arguments"].count("[") == 3500
    with pytest.raises(SandboxError):
        parse(1_000_000)
    assert parse(3)["tool_calls"][0]["name"] == "f"


def test_a_parser_is_sent_to_each_child_once(answers, monkeypatch):
    """However often texts are read. One that a child has forgotten is sent again."""
    sent, call = [], answers.call

    def noted(**request):
        sent.append(request.get("syntax"))
        return call(**request)

    monkeypatch.setattr(answers, "call", noted)
    made = [Syntax({"format": 0, "generation_prompt": f"{i}", "parser": ""}) for i in range(12)]
    for n in range(20):
        assert answers.parse(made[0], f"text {n}", n < 19)["content"].endswith(f"text {n}")
    assert 1 <= len([s for s in sent if s is not None]) <= AnswerReaders.CHILDREN
    for syntax in (*made, *made):
        assert answers.parse(syntax, "some text", False)["content"].endswith("some text")


def test_a_text_that_brings_its_parser_down_goes_on_as_content():
    def read(text, partial):
        if "[[" in text:
            raise SandboxError("it is too large, too deep, or not supported")
        return {"content": text.partition("<")[0], "reasoning_content": "", "tool_calls": []}

    deltas, text, out = Deltas(read, True), "I look. <call>[[[", []
    for n in range(1, len(text) + 1):
        out += deltas.of(text[:n], True, n == len(text))
    assert "".join(d["content"] for d in out) == text
    busy = Deltas(lambda text, partial: None, True)  # no answer of its parser's
    assert list(busy.of("ab", True)) == [] and list(busy.of("abc", False, True)) == [{"content": "abc"}]


# -- grammars ---------------------------------------------------------------------------------------------


# each rule has three ways to go on, and may be empty
AMBIGUOUS = "root ::= a0" + "".join(
    f'\na{i} ::= a{i + 1} "x" | a{i + 1} "y" | a{i + 1} "z" | ""' for i in range(24)
)
AMBIGUOUS += '\na24 ::= "w"'
STUCK = "root ::= <[1000000]>"  # a token that there is not
# each character is read by some hundred of 450 parts, another hundred for each
WIDE = "root ::= " + " | ".join(
    "[^{}]* [^{}]* [^{}]*".format(*(chr(97 + (i + k) % 26) for k in range(3))) for i in range(150)
)


def alternatives(n, nested):
    words = " | ".join(f'"w{i}"' for i in range(n))
    return f'root ::= "x" item\nitem ::= {words}' if nested else f"root ::= {words}"


def tools(n, text_first=False):
    """A schema of calls of n tools. text_first: a text comes before their names, in all at once."""
    arguments = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}}
    first = {"text": {"type": "string"}} if text_first else {}
    calls = [{**first, "name": {"const": f"tool_{i}"}, "arguments": arguments} for i in range(n)]
    return json.dumps({"anyOf": [{"type": "object", "properties": p, "required": list(p)} for p in calls]})


@pytest.fixture(scope="module")
def grammars(tiny):
    """Children: what llama.cpp writes, they read from the file of standard error."""
    s = Sandbox(3600.0, model=tiny.targets[0])
    yield s
    s.close()


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("n", [600, 5000])
def test_many_alternatives_are_no_ambiguity(grammars, n, nested):
    grammars.call(do="check", text=alternatives(n, nested))


def test_choices_and_tools(grammars):
    cities = json.dumps({"enum": [f"city {i}" for i in range(600)]})
    assert "city 599" in grammars.call(do="convert", text=cities)["grammar"]
    for n in (60, 200):
        assert f"tool_{n - 1}" in grammars.call(do="convert", text=tools(n))["grammar"]
        made = grammars.call(do="convert", text=tools(n, text_first=True))
        assert f"tool_{n - 1}" in made["grammar"]


@pytest.mark.parametrize(
    "grammar, message",
    [
        ("root ::= (", "the grammar is invalid: "),
        (AMBIGUOUS, "the grammar is too ambiguous"),
        (WIDE, "the grammar takes too long"),
        (STUCK, "allows no token"),
    ],
)
def test_what_a_check_says(grammars, grammar, message):
    with pytest.raises(SandboxError, match=message):
        grammars.call(do="check", text=grammar)


def test_a_grammar_that_nests_deep(grammars):
    """The parser recurses for each parenthesis: what passes in a child must pass in a server's thread too."""
    nested = lambda n: "root ::= " + "(" * n + '"x"' + ")" * n
    grammars.call(do="check", text=nested(1000))
    with pytest.raises(SandboxError):
        grammars.call(do="check", text=nested(30_000))
    code = (
        "import resource; from eagle3_llama.server.sandbox import child;"
        " child._limit(); print(resource.getrlimit(resource.RLIMIT_STACK)[0])"
    )
    assert 0 < int(run([sys.executable, "-c", code]).stdout) <= 2 << 20


def test_a_grammar_that_takes_too_long(tiny):
    """The child's clock is ahead by more than a grammar may take for one token."""
    times = itertools.count(0.0, 1.0)
    grammars = child.Grammars(tiny.targets[0], lambda: next(times))
    with pytest.raises(EagleError, match="takes too long: more than 20 ms a token"):
        grammars.check("root ::= .*")
