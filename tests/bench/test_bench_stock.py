"""Stock llama-cpp-python beside our modes in one benchmark, in a process of its own."""

import os
import signal
import sys

import pytest

from eagle3_llama import EagleParams
from eagle3_llama.bench import child
from eagle3_llama.bench.modes import KINDS, Plain, Stock, StockPromptLookup, parse_modes
from eagle3_llama.bench.others import LENGTHS
from eagle3_llama.bench.prompts import bench_target
from eagle3_llama.bench.report import results
from eagle3_llama.bench.run import BenchSettings, run_bench
from eagle3_llama.bench.target import BenchTarget
from eagle3_llama.errors import EagleError, ErrorKind

stock = child.of_checkout("stock")
PLAIN, STOCK, LOOKUP = Plain("plain"), Stock("stock"), StockPromptLookup("stock_prompt_lookup")
GREEDY = {"temp": 0.0}
REPEATS = [1, *[60, 70, 80, 90] * 4]  # every draft of prompt lookup has something to copy


@pytest.fixture(scope="module")
def stocks(endless):
    """Two processes with the same target: plain, and with prompt lookup."""
    made = [stock.StockProcess(endless[0], 1, 256, None, lookup) for lookup in (False, True)]
    yield made
    for each in made:
        each.close()


@pytest.mark.thorough
def test_its_own_loop_gives_whole_answers(stocks):
    plain, lookup = (each.run(REPEATS, 20, GREEDY) for each in stocks)
    assert len(plain.tokens) == len(lookup.tokens) == 20 and plain.seconds > 0 and lookup.seconds > 0
    assert plain.tokens == stocks[0].run(REPEATS, 20, GREEDY).tokens
    assert plain.rounds == [] and sum(length for _, length, _ in lookup.rounds) == 19


@pytest.mark.thorough
def test_seed_and_sampling_reach_the_process(stocks):
    def text(seed, **sampling):
        stocks[0].set_seed(seed)
        return stocks[0].run(REPEATS, 12, sampling).tokens

    first = text(1, temp=1.0)
    assert first == text(1, temp=1.0) and first != text(2, temp=1.0) and first != text(1, temp=0.0)


@pytest.mark.thorough
def test_prompt_lookup_drafts_as_many_tokens_as_it_is_told(stocks):
    for n in (2, 5):
        drafted = [n_drafted for _, _, n_drafted in stocks[1].run(REPEATS, 20, GREEDY, n).rounds]
        assert max(drafted) <= n and len(drafted) >= 1
    first = stocks[1].run(REPEATS, 20, GREEDY, 5)
    assert stocks[1].run(REPEATS, 20, GREEDY, 5, again=True).tokens == first.tokens
    stocks[1].settle([REPEATS], 8)
    assert stocks[1].n_draft in LENGTHS
    assert LOOKUP.used(stocks[1]) == {"num_pred_tokens": stocks[1].n_draft}
    assert StockPromptLookup("x", n_draft=7).used(stocks[1]) == {"num_pred_tokens": 7}


@pytest.mark.thorough
def test_it_opens_the_unpatched_library_whatever_the_environment_says(endless, monkeypatch):
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", "/nowhere")
    monkeypatch.setenv("EAGLE3_LLAMA_LIB_DIR", "/nowhere")
    process = stock.StockProcess(endless[0], 1, 256)  # it raises if the library is another one
    assert len(process.run(REPEATS, 3, GREEDY).tokens) == 3
    process.close()


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGABRT", "SIGILL"])
def test_a_process_that_dies_by_a_signal_is_named(name):
    code = f"import os, sys; sys.stdin.readline(); os.kill(os.getpid(), {getattr(signal, name).value})"
    with pytest.raises(child.Crash, match=f"^crashed: {name}$") as e:
        child.Child([sys.executable, "-c", code]).ask("go")
    assert e.value.kind is ErrorKind.NATIVE


@pytest.mark.thorough
def test_a_mode_that_crashes_between_prompts_is_reported_and_the_others_go_on(endless, monkeypatch):
    target = BenchTarget(endless[0], [PLAIN, STOCK, LOOKUP], 1, 256)

    def crash_after_the_first():
        if not target.failed:
            os.kill(target.llm(STOCK).pid, signal.SIGSEGV)

    prompts = [("all", text) for text in ("a1 b2", "c3", "d4")]
    answers = bench_target(target, prompts, 8, 1, GREEDY, crash_after_the_first)
    rows = {r["mode"]: r for r in results(target, answers)}
    target.close()
    assert rows["stock"]["failed"] == "crashed: SIGSEGV" and "ratio" not in rows["stock"]
    assert [len(a.runs["stock"]) for a in answers] == [1, 0, 0]
    for mode in ("plain", "stock_prompt_lookup"):
        assert rows[mode]["tokens"] == 24 and rows[mode]["tok_per_s"] > 0 and rows[mode]["answers"] == 3


# A llama_cpp that does not suit the processor: it dies when a model is loaded, or raises.
CRASHES = "import os\nclass Llama:\n    def __init__(self, *_, **__):\n        os.kill(os.getpid(), 11)\n"
RAISES = "class Llama:\n    def __init__(self, *_, **__):\n        raise ValueError('no such format')\n"


@pytest.mark.thorough
@pytest.mark.parametrize(
    "library, said",
    [(CRASHES, "crashed: SIGSEGV"), (RAISES, "failed: ValueError: no such format")],
    ids=["crashes", "raises"],
)
def test_a_library_that_crashes_when_it_loads(endless, tmp_path, monkeypatch, capsys, library, said):
    (tmp_path / "llama_cpp").mkdir()
    (tmp_path / "llama_cpp" / "__init__.py").write_text(library)
    prompts, out = tmp_path / "prompts.jsonl", stock.environment
    prompts.write_text('"a1 b2"\n')
    monkeypatch.setattr(stock, "environment", lambda folder: {**out(folder), "PYTHONPATH": str(tmp_path)})
    modes = parse_modes(["stock", "plain", "stock_prompt_lookup:3"], [], None, EagleParams(), [])
    report = run_bench(BenchSettings((endless[0],), tuple(modes), (str(prompts),), n_predict=8, n_ctx=256))
    failed = {r["mode"]: r["failed"] for r in report["results"] if "failed" in r}
    assert failed == {"stock": said, "stock_prompt_lookup:3": said}
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(maxsplit=1)[1] for line in lines if line.startswith("stock")] == [said] * 2


@pytest.mark.thorough
def test_modes_take_turns_prompt_by_prompt(endless):
    """Forward, then backward: what the machine does in the meantime meets none of them alone."""
    ran = []

    class Recorded(BenchTarget):
        def run(self, mode, *arguments):
            ran.append(mode.name)
            return super().run(mode, *arguments)

    target = Recorded(endless[0], [PLAIN, STOCK], 1, 256)
    pid = target.llm(STOCK).pid
    bench_target(target, [("all", "a1"), ("all", "b2")], 4, 2, GREEDY, lambda: None)
    assert target.llm(STOCK).pid == pid
    target.close()
    assert ran == ["plain", "stock", "stock", "plain", "stock", "plain", "plain", "stock"]


def test_names_of_modes():
    def parse(*names):
        return parse_modes(names, [], None, EagleParams(), [])

    assert parse("stock", "stock_prompt_lookup") == [STOCK, LOOKUP]
    assert parse("stock_prompt_lookup:3")[0].n_draft == 3
    for wrong in ("stock_prompt_lookup:x", "stock_prompt_lookup:0", "stock:3", "plain:2", "stok"):
        with pytest.raises(EagleError, match=wrong.partition(":")[0]) as e:
            parse(wrong)
        assert e.value.kind is ErrorKind.BAD_ARGUMENT
    assert list(KINDS)[:2] == ["plain", "eagle"] and all(cls.kind == kind for kind, cls in KINDS.items())


def test_an_installed_package_says_that_it_needs_a_checkout(tmp_path, monkeypatch):
    monkeypatch.setattr(child, "__file__", str(tmp_path / "eagle3_llama" / "bench" / "child.py"))
    with pytest.raises(EagleError, match="use a checkout") as e:
        child.unpatched.__wrapped__("--stock")
    assert e.value.kind is ErrorKind.UNSUPPORTED
    for name in ("upstream:ngram-mod", "stock"):  # their files are not in the wheel either
        with pytest.raises(EagleError, match="use a checkout") as e:
            parse_modes([name], [], None, EagleParams(), [])[0].prepare()
        assert e.value.kind is ErrorKind.UNSUPPORTED
    assert not child.built("--stock")


@pytest.mark.thorough
def test_a_prompt_of_several_batches(endless):
    """llama-cpp-python's prompt lookup raises on it without logits_all."""
    process = stock.StockProcess(endless[0], 1, 1024, None, lookup=True)
    prompt = [1, *[60 + i % 200 for i in range(700)]]
    assert len(process.run(prompt, 6, GREEDY).tokens) == 6
    process.close()
