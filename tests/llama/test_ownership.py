"""Calls that leave the text as it is, beside a generation in another thread: save_state(), eagle_params."""

import functools
import gc
import itertools
import threading

import pytest
from threads import ended, started
from tiers import each
from tiny_models import PROMPT, take

from eagle3_llama import EagleError, EagleLlama, EagleParams, ErrorKind
from eagle3_llama.llama import saved_state
from eagle3_llama.runtime.engine import Engine

from llama_cpp import LogitsProcessorList

CTX = {"n_ctx": 256, "n_batch": 32, "n_threads": 1, "n_threads_batch": 1, "flash_attn": True}
N = 60  # tokens of the text


@pytest.fixture(params=["head", "plain"])
def eagle(request, endless):
    llm = EagleLlama(endless[0], eagle=endless[1] if request.param == "head" else None, verbose=False, **CTX)
    if request.param == "head":
        llm.eagle_params = EagleParams(n_max=3)
    yield llm
    llm.close()


class Gate:
    """Stops whoever passes until it is opened. Only the first passage is stopped."""

    def __init__(self):
        self.reached, self.open, self.passed = threading.Event(), threading.Event(), itertools.count()

    def passing(self, work):
        def call(*args, **kwargs):
            if next(self.passed) == 0:
                self.reached.set()
                assert self.open.wait(60)
            return work(*args, **kwargs)

        return call


@pytest.fixture
def in_a_save(eagle, monkeypatch):
    """A gate between the two halves of a save: the size is known, nothing is copied yet."""
    gate = Gate()
    monkeypatch.setattr(
        saved_state.llama_cpp,
        "llama_state_get_data",
        gate.passing(saved_state.llama_cpp.llama_state_get_data),
    )
    return gate


def goes_on(endless, state, n):
    """What a fresh model says from a state on."""
    other = EagleLlama(endless[0], eagle=endless[1], n_max=3, verbose=False, **CTX)
    other.load_state(state)
    text = [int(t) for t in state.input_ids[: state.n_tokens]]
    out = [*text[len(PROMPT) :], *take(other, n - (len(text) - len(PROMPT)), text)]
    other.close()
    return out


def save_that_delays(in_a_save, eagle, work, *args):
    """What is saved, and what work(*args) returns, which begins during the save and ends behind it."""
    saver, saved = started(eagle.save_state)
    assert in_a_save.reached.wait(60)
    worker, got = started(work, *args)
    worker.join(0.2)
    assert worker.is_alive(), "it had the context during a save"
    in_a_save.open.set()
    ended(saver), ended(worker)
    return saved[0], got[0]


def test_a_generation_waits_for_a_save(eagle, endless, in_a_save):
    """What is saved is the text as it was when the save began."""
    expected = take(eagle, N)
    generator = eagle.generate(PROMPT, temp=0.0)
    begun = list(itertools.islice(generator, 20))
    saved, token = save_that_delays(in_a_save, eagle, next, generator)
    assert [*begun, token, *itertools.islice(generator, N - 21)] == expected
    generator.close()
    assert saved.n_tokens == len(PROMPT) + 19 and goes_on(endless, saved, N) == expected


@pytest.mark.parametrize(
    "change",
    [
        lambda llm: llm.close(),
        lambda llm: llm.reset(),
        lambda llm: llm.eval([5, 6]),
        lambda llm: setattr(llm, "eagle_params", EagleParams(n_max=0)),
    ],
    ids=["close", "reset", "eval", "eagle_params"],
)
def test_a_change_waits_for_a_save(eagle, endless, in_a_save, change):
    expected = take(eagle, N)
    take(eagle, 20)
    saved, changed = save_that_delays(in_a_save, eagle, change, eagle)
    assert changed is None and goes_on(endless, saved, N) == expected


def test_a_save_s_own_thread_changes_nothing(eagle, endless, in_a_save, monkeypatch):
    """A signal handler that uses the model is refused. A collected generation ends after the save."""
    expected = take(eagle, N)
    generator = eagle.generate(PROMPT, temp=0.0)
    list(itertools.islice(generator, 20))
    held, refused, copy = [generator], [], saved_state.llama_cpp.llama_state_get_data
    del generator
    rewound = []
    rewind = eagle.engine.rewind
    monkeypatch.setattr(eagle.engine, "rewind", lambda *a: (rewound.append(a), rewind(*a))[1])

    def interrupted(*args):
        held.clear()
        gc.collect()
        for use in (eagle.close, eagle.reset, lambda: eagle.eval([5])):
            with pytest.raises(EagleError, match=r"middle of a step of save_state\(\)") as e:
                use()
            refused.append(e.value.kind)
        assert not rewound
        return copy(*args)

    in_a_save.open.set()
    monkeypatch.setattr(saved_state.llama_cpp, "llama_state_get_data", interrupted)
    state = eagle.save_state()
    assert refused == [ErrorKind.BUSY] * 3
    assert goes_on(endless, state, N) == expected == take(eagle, N)


def test_during_a_step_it_is_refused(eagle, monkeypatch):
    """In another thread. The step goes on."""
    expected = take(eagle, N)
    gate, generator = Gate(), eagle.generate(PROMPT, temp=0.0)
    next(generator)
    monkeypatch.setattr(Engine, "_verify_rows", gate.passing(Engine._verify_rows))
    reader, more = started(next, generator)
    assert gate.reached.wait(60)
    change = functools.partial(setattr, eagle, "eagle_params", EagleParams(n_max=0))
    for use in (eagle.save_state, eagle.memory, change):
        with pytest.raises(EagleError, match="middle of a step") as e:
            use()
        assert e.value.kind is ErrorKind.BUSY
    gate.open.set()
    ended(reader)
    assert [expected[0], more[0], *itertools.islice(generator, N - 2)] == expected
    generator.close()


def test_in_a_logits_processor_it_is_refused(eagle):
    """There a round is under way: its rows are in the context, and the head has not seen them."""
    expected = take(eagle, N)
    errors = []

    def processor(ids, scores):
        if len(ids) > len(PROMPT):
            for use in (eagle.save_state, lambda: setattr(eagle, "eagle_params", EagleParams(n_max=0))):
                with pytest.raises(EagleError, match="a round is under way") as e:
                    use()
                errors.append(e.value.kind)
        return scores

    assert take(eagle, N, logits_processor=LogitsProcessorList([processor])) == expected
    assert len(errors) >= 2 * (N - 1) and set(errors) == {ErrorKind.BUSY}


@pytest.mark.parametrize("n", each([40, 200], quick=[40]))
def test_saves_beside_a_generation(eagle, endless, n):
    """States are saved while another thread generates: each goes on with the same text."""
    expected = take(eagle, N)
    over, states, refused, wrong = threading.Event(), [], 0, []

    def generate():
        while not over.is_set():
            if (said := take(eagle, N)) != expected:
                wrong.append(said)

    generating, errors = started(generate)
    try:
        while len(states) < n and generating.is_alive():
            try:
                states.append(eagle.save_state())
            except EagleError as e:
                assert e.kind is ErrorKind.BUSY
                refused += 1
    finally:
        over.set()
        ended(generating)
    assert errors == [None] and not wrong and len(states) == n
    for state in states[::20]:
        if state.n_tokens >= len(PROMPT):
            assert goes_on(endless, state, N) == expected
    assert take(eagle, N) == expected


def test_a_chat_handler_decodes_by_itself(eagle):
    """As those for images do, by the context. Meanwhile nobody else gets it, and the handler may go on."""
    gate, two = Gate(), []

    def handler(*, llama, messages, **_):
        llama.reset()
        llama.eval(PROMPT)
        gate.passing(lambda: None)()
        ask = dict(prompt=PROMPT, max_tokens=5, temperature=0.0)
        two.extend(llama.create_completion(**ask)["choices"][0]["text"] for _ in range(2))
        return two

    eagle.chat_handler = handler
    chat, got = started(lambda: eagle.create_chat_completion(messages=[]))
    assert gate.reached.wait(60)
    for use in (lambda: next(eagle.generate(PROMPT)), eagle.save_state, eagle.close):
        with pytest.raises(EagleError, match=r"middle of a step of create_chat_completion\(\)"):
            use()
    gate.open.set()
    ended(chat)
    assert got == [two] and two[0] == two[1] and len(two) == 2
