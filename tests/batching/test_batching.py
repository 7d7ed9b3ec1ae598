"""Many requests at once: each one's text is what it would be alone, whatever the others do."""

import threading

import pytest
from batch_tools import alone, batcher, plain, prompts, take, tiny  # noqa: F401 - fixtures too
from threads import ended, held, in_threads, wait_for
from tiny_models import PROMPT

from eagle3_llama import EagleError, EagleLlama, EagleParams  # before llama_cpp: it brings the library
from eagle3_llama.batching import Batcher, BatchSettings
from eagle3_llama.models import shipped_head, smollm2

from llama_cpp import LlamaGrammar

DEAD_END = r"root ::= [a-z]{5} [^\x00-\U0010FFFF]"


@pytest.mark.parametrize("n_ctx", [64, 256])
def test_costs_are_measured_in_the_room_of_a_slot(tiny, tmp_path, monkeypatch, n_ctx):
    monkeypatch.setenv("EAGLE3_LLAMA_COSTS", str(tmp_path))
    b = Batcher(BatchSettings(tiny[0], tiny[1], n_parallel=2, n_ctx=n_ctx, n_threads=1))
    with b.request() as llm:
        assert len(take(llm, 9, PROMPT, temp=0.0)) > 0
    b.close()
    assert len(list(tmp_path.iterdir())) == 1


SETTINGS = [
    EagleParams(),
    EagleParams(n_max=4),
    EagleParams(tree="12x3x3"),
    EagleParams(n_max=0),
    EagleParams(tree=False),
    EagleParams(n_max=6, p_min=0.01),
]


def test_texts_are_as_alone(batcher, plain):
    """Three slots, eight threads: greedy and seeded, every kind of draft. A quarter of them end early."""
    jobs = [
        (p, SETTINGS[i % len(SETTINGS)], {} if i % 3 else {"temp": 0.9, "top_k": 50}, i % 4 == 3)
        for i, p in enumerate(prompts(24))
    ]

    def work(job):
        prompt, params, sampling, leaves = job
        with batcher.request(params=params) as llm:
            llm.set_seed(7)
            return take(llm, 5 if leaves else 60, prompt, **(sampling or {"temp": 0.0}))

    got = in_threads(8, work, jobs)
    for (prompt, _, sampling, leaves), text in zip(jobs, got):
        assert text == alone(plain, 5 if leaves else 60, prompt, seed=7, **(sampling or {"temp": 0.0}))
    seen = batcher.snapshot()
    assert seen["drafted"] > 0 and seen["failures"] == 0 and seen["slots_busy"] == 0 and seen["rows"] >= 1


def test_short_prompts_start_together(batcher, monkeypatch):
    monkeypatch.setattr("eagle3_llama.batching.scheduler.STALL", 1e3)  # seconds: this machine may be slow
    rounds, work = [], batcher._scheduler._round
    monkeypatch.setattr(batcher._scheduler, "_round", lambda busy: (rounds.append(len(busy)), work(busy)))
    asked = [
        threading.Thread(target=take, args=(batcher.request(), 9, prompt), kwargs={"temp": 0.0})
        for prompt in ([1, 5], [1, 6, 7], [1, 8, 9])
    ]
    with held(batcher):  # nothing is decoded before all have come
        for t in asked:
            t.start()
        wait_for(lambda: batcher.waiting() == 3)
    ended(*asked, seconds=240)
    assert rounds[0] == 3


def test_grammar_penalties_processors(batcher, plain):
    """What samples row by row sees the right rows while others draft beside it."""
    grammar = "root ::= [a-z ]+"
    seen = []

    def favour(ids, scores):
        seen.append(ids.tolist())
        scores[ids[-1] % 200 + 3] += 4.0
        return scores

    def work(kind):
        with batcher.request(params=EagleParams(n_max=3) if kind != "processor" else EagleParams()) as llm:
            llm.set_seed(3)
            return take(llm, 40, PROMPT, **sampling(kind))

    def sampling(kind):
        return {
            "grammar": dict(grammar=LlamaGrammar.from_string(grammar, verbose=False), temp=0.0),
            "grammar, drawn": dict(grammar=LlamaGrammar.from_string(grammar, verbose=False), temp=0.8),
            "penalties": dict(repeat_penalty=1.3, frequency_penalty=0.4, temp=0.7),
            "mirostat": dict(mirostat_mode=2, temp=0.8),
            "processor": dict(logits_processor=[favour], temp=0.0),
        }[kind]

    kinds = ["grammar", "grammar, drawn", "penalties", "mirostat", "processor"]
    got = in_threads(5, work, kinds)
    text = got[kinds.index("processor")]
    for k in range(len(text)):  # shown to the processor at every row, in order
        assert seen[k] == [*PROMPT, *text[:k]]
    for kind, text in zip(kinds, got):
        assert text == alone(plain, 40, PROMPT, seed=3, **sampling(kind)), kind


def test_settings_are_checked(tiny):
    for wrong in ({"n_parallel": 0}, {"n_parallel": 33}, {"n_ctx": 5}, {"n_batch": 1}):
        with pytest.raises(EagleError, match=next(iter(wrong))):
            BatchSettings(tiny[0], **wrong)
    with Batcher(BatchSettings(tiny[0], n_parallel=2, n_ctx=128, n_threads=1, flash_attn=False)) as b:
        with pytest.raises(EagleError, match="no head"):
            b.request(params=EagleParams(tree="8x2x2"))
        with b.request() as llm:
            assert len(take(llm, 5, PROMPT, temp=0.0)) == 5


@pytest.mark.thorough
def test_real_model():
    """SmolLM2 and its head: eight chat answers at once on four slots."""
    target, head = str(smollm2("Q8_0")), str(shipped_head())
    b = Batcher(BatchSettings(target, head, n_parallel=4, n_ctx=512))
    ask = lambda i: dict(
        messages=[{"role": "user", "content": f"Write {i + 2} words about the sea."}],
        max_tokens=32,
        temperature=0.0,
    )

    def work(i):
        with b.request() as llm:
            return llm.create_chat_completion(**ask(i))["choices"][0]["message"]["content"]

    got = in_threads(8, work, list(range(8)))
    assert b.snapshot()["reused_tokens"] > 0
    with b.request() as llm, pytest.raises(EagleError):  # a grammar that leads nowhere
        llm.create_completion(
            "hello", max_tokens=40, temperature=0.0, grammar=LlamaGrammar.from_string(DEAD_END, verbose=False)
        )
    b.close()
    llm = EagleLlama(target, n_ctx=512, flash_attn=True, verbose=False)
    assert got == [llm.create_chat_completion(**ask(i))["choices"][0]["message"]["content"] for i in range(8)]
    llm.close()
