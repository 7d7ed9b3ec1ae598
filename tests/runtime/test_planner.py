"""The planner on made-up costs: what it drafts when drafts are cheap, dear, or never right."""

import dataclasses
import itertools
import json
import math
import time

import pytest
from test_memories import made  # noqa: F401 - a fixture
from tiny_models import PROMPT

from eagle3_llama import EagleError, EagleLlama, EagleParams
from eagle3_llama.common.limits import MAX_ROWS
from eagle3_llama.llama.model_costs import cost_key
from eagle3_llama.runtime import cost_files
from eagle3_llama.runtime import costs as _costs
from eagle3_llama.runtime import library as _library
from eagle3_llama.runtime.binding import address
from eagle3_llama.runtime.cost_curves import rising
from eagle3_llama.runtime.cost_files import LOADS, cached, merged
from eagle3_llama.runtime.costs import Costs, measure
from eagle3_llama.runtime.engine import Ask
from eagle3_llama.runtime.measuring_plan import SLOW_ROW, plan_for
from eagle3_llama.runtime.token_costs import Memory

import llama_cpp
from llama_cpp import Llama

COMMON = {"n_ctx": 512, "n_batch": 64, "verbose": False}


@pytest.fixture
def eagle(files, tmp_path, monkeypatch):
    monkeypatch.setenv("EAGLE3_LLAMA_COSTS", str(tmp_path))
    llm = EagleLlama(files[0], eagle_path=files[1], **COMMON)
    yield llm
    llm.close()


def made_up(row: float, head: float) -> Costs:
    """A decode costs 1 ms and each further row a share `row` of it, a step of the head a share `head`."""
    layers = [0.0, *(1e-3 * (1 + row * (n - 1)) for n in range(1, MAX_ROWS + 1))]
    return Costs(
        layers, [0.0, *[1e-5] * MAX_ROWS], [0.0, *[1e-3 * head] * MAX_ROWS], [0.0] * (MAX_ROWS + 1), 0.0, 0.0
    )


def answer(llm, n):
    generator = llm.generate(PROMPT, temp=0.0)
    out = list(itertools.islice(generator, n))
    generator.close()
    return out


def test_dear_drafts_are_given_up(files, eagle):
    """Rows so dear that no clock's correction makes one pay: nothing is drafted, and the text is plain's."""
    plain = Llama(files[0], **COMMON)
    eagle.engine.planner.set_costs(made_up(row=5e4, head=0.1))
    assert answer(eagle, 400) == answer(plain, 400)
    assert eagle.stats.drafted == 0
    plain.close()


def written(llm, n, drafts):
    """PROMPT and what follows it, n tokens or one more; drafts(i) tokens are drafted at the i-th."""
    engine, sampler, text = llm.engine, llm._init_sampler(temp=0.0), list(PROMPT)
    engine.prefill(PROMPT[:-1])
    while len(text) < n:
        ask = Ask(0, text[-1], EagleParams(n_max=drafts(len(text))))
        (tokens,) = engine.round([ask], [address(sampler.sampler)])
        text += tokens.tokens
    return text


def test_a_head_that_rested_has_caught_up(files, eagle):
    """It has in its cache what one that was fed at every round has."""
    other = EagleLlama(files[0], eagle_path=files[1], **COMMON)
    text = written(eagle, 150, lambda i: 1 if i % 50 == 0 else 0)
    assert written(other, 150, lambda i: 1 if i < 149 else 0) == text
    assert eagle.stats.drafted < 4 and other.stats.drafted > 60
    (ids, probs), (ids_fed, probs_fed) = (
        llm.engine.steps.draft(text[-1], EagleParams(n_max=5)) for llm in (eagle, other)
    )
    assert ids == ids_fed and probs == pytest.approx(probs_fed, rel=1e-5)
    other.close()


def newest(costs):
    return max(costs.iterdir(), key=lambda path: path.stat().st_mtime_ns)


def test_costs_are_measured_and_kept(eagle, tmp_path, monkeypatch):
    monkeypatch.setattr(cost_files, "FAR_OFF", math.inf)  # however disturbed the loads before were
    costs = measure(eagle.engine, 512, 64, budget=0.1)
    assert len(costs.layers) == len(costs.output) == len(costs.head) == MAX_ROWS + 1
    assert costs.layers[1] > 0 and costs.head[8] > 0 and eagle.engine.n_past() == 0
    for _ in range(LOADS):
        last = cached(eagle.engine, ["key"], 512, 64)
    assert cached(eagle.engine, ["key"], 512, 64) == last
    path = newest(tmp_path)
    kept = path.read_text()
    for damaged in (
        "{}",
        "[{}]",
        "7",
        "[",
        kept.replace("[0.0", '["0"', 1),
        kept.replace('"cell": [', '"cell": [1e9, '),
    ):
        path.write_text(damaged)
        assert cached(eagle.engine, ["key"], 512, 64) != last and len(json.loads(path.read_text())) == 1


def test_costs_are_those_of_the_libraries(eagle, tmp_path, monkeypatch):
    """An upgrade puts others in the same place."""
    (tmp_path / "lib").mkdir()
    monkeypatch.setattr(_library, "find_lib_dir", lambda: tmp_path / "lib")
    keys = [cost_key(eagle, eagle._eagle_path)]
    for content in (b"one", b"another"):
        (tmp_path / "lib" / "libggml-cpu.so").write_bytes(content)
        keys.append(cost_key(eagle, eagle._eagle_path))
    assert keys[0] != keys[1] != keys[2]


def test_costs_of_several_loads():
    """Relative costs are the median load's, at any speed of the machine. A disturbed load does not count."""
    a, b, c = (
        dataclasses.replace(
            made_up(row, 0.1), layers=[0.0, *(speed * (1 + row * n) for n in range(MAX_ROWS))]
        )
        for speed, row in ((1.0, 0.1), (1.2, 0.3), (1.1, 0.2))
    )
    slowed = dataclasses.replace(a, layers=[0.0, *[9.0] * MAX_ROWS])
    for loads in ([a, b, c], [slowed, b, c, a]):
        m = merged(loads)
        one = m.layers[1] + m.output[1]
        assert one == pytest.approx(a.layers[1] + a.output[1])
        assert m.layers[5] / one == pytest.approx(c.layers[5] / c.one_row)


class Machine:
    """An engine whose work takes what it says, by a clock of its own."""

    drafter = "head"

    def __init__(self, row, more, cell, output, prompt):
        self.row, self.more, self.cell, self.output, self.prompt = row, more, cell, output, prompt
        self.now, self.n = 0.0, 0

    def took(self, seconds):
        self.now += seconds
        return seconds

    def rewind(self, n, slot=0):
        self.n = n

    def prefill(self, tokens, slot=0):
        self.n += len(tokens)
        self.took(self.prompt * len(tokens))

    def layers(self, n):
        return self.row * (1 + self.more * (n - 1)) + self.cell * (1 + 0.5 * (n - 1)) * self.n

    def measure_target(self, n, slot=0):
        return self.took(self.layers(n) + (self.output if n == 1 else 0.0))

    def measure_output(self, n):
        return self.took(self.output * (1 + self.more * (n - 1)))

    def measure_head(self, n, slot=0):
        return self.took(0.1 * self.row)

    def measure_back(self, slot=0):
        return self.took(0.02 * self.row)


@pytest.mark.parametrize(
    "machine, most",
    [
        (Machine(0.020, 0.08, 6e-6, 0.006, 1 / 500), 1.7),  # SmolLM2 in F32 on two cores
        (Machine(0.006, 0.25, 6e-6, 0.001, 1 / 700), 1.5),  # in Q4_0
        (Machine(0.033, 0.08, 6e-6, 0.009, 1 / 300), 2.1),  # F32 on two busy cores
        (Machine(0.070, 0.15, 6e-6, 0.008, 1 / 100), 2.1),  # 1B
        (Machine(0.400, 0.10, 1e-5, 0.020, 1 / 20), 3.0),  # 8B
        (Machine(1.000, 0.10, 1e-5, 0.050, 1 / 8), 4.0),  # 20B
    ],
    ids=["F32", "Q4_0", "F32, busy", "1B", "8B", "20B"],
)
def test_measuring_ends_in_time(machine, most, monkeypatch):
    """And finds what there is, by what it had time for."""
    monkeypatch.setattr(time, "perf_counter", lambda: machine.now)
    costs = measure(machine, 4096, 256)
    assert machine.now < most
    machine.n = int(costs.context)
    assert costs.one_row == pytest.approx(machine.layers(1) + machine.output, rel=0.01)
    assert costs.head[1] == pytest.approx(0.1 * machine.row)
    assert costs.back == pytest.approx(0.02 * machine.row)
    for n in (16, 64):  # drafts from the text may have so many
        assert costs.layers[n] == pytest.approx(machine.layers(n), rel=0.05)
    for n in (1, 4, 8):
        assert costs.layers[n] == pytest.approx(machine.layers(n), rel=0.02)
        assert costs.cell[n] == pytest.approx(
            machine.cell * (1 + 0.5 * (n - 1)) if machine.row < 0.1 else 0.0, rel=0.02
        )


@pytest.mark.parametrize("row", [0.020, 0.4], ids=["fast", "slow"])
def test_what_tokens_cost_is_known_where_decodes_differ_by_more(row, monkeypatch):
    """Another program slows the decodes behind the far context. A slow model is not measured there at all."""
    machine = Machine(row, 0.08, 2e-6, 0.006, 1 / 500)
    monkeypatch.setattr(time, "perf_counter", lambda: machine.now)
    alone = machine.layers
    monkeypatch.setattr(machine, "layers", lambda n: alone(n) * (1.3 if machine.n > 100 else 1.0))
    weights = 1e9  # bytes, of which a row reads all; tokens are read at the same speed
    kept = 2e-6 / 1.5 / (machine.layers(1) + machine.output) * weights
    memory = Memory(weights, lambda slot: int(kept * machine.n))
    costs = measure(machine, 4096, 256, memory=memory)
    assert costs.cell[1] == pytest.approx(2e-6, rel=0.5)
    assert 2e-6 < costs.cell[8] < 3 * 2e-6 / 1.5 * 5
    if row < 0.1:
        assert measure(machine, 4096, 256).cell[1] > 1e-5


@pytest.fixture(autouse=True)
def calm(monkeypatch):
    """What else runs on the machine is no matter of these tests: no context switch is counted."""
    monkeypatch.setattr(_costs, "switches", lambda: 0)


def test_a_load_beside_a_busy_program_is_not_kept_as_a_calm_one(tmp_path, monkeypatch):
    """Its rows cost twice as much relative to one, and it says so: calm loads replace it, and are counted."""
    machine = Machine(0.006, 0.25, 6e-6, 0.001, 1 / 700)
    monkeypatch.setattr(time, "perf_counter", lambda: machine.now)
    monkeypatch.setenv("EAGLE3_LLAMA_COSTS", str(tmp_path))
    true = cached(machine, ["key"], 512, 64)
    path = newest(tmp_path)
    dear = {"layers": [t * (2.0 if n > 1 else 1.0) for n, t in enumerate(true.layers)], "switches": 200.0}
    busy = dataclasses.asdict(true) | dear
    path.write_text(json.dumps([busy]))
    assert cached(machine, ["key"], 512, 64).layers[8] == pytest.approx(true.layers[8], rel=0.01)
    for n_loads in (3, 4, 5):
        cached(machine, ["key"], 512, 64)
        assert len(json.loads(path.read_text())) == n_loads
    cached(machine, ["key"], 512, 64)
    assert len(json.loads(path.read_text())) == 5  # four calm ones: no more are measured


def test_a_machine_that_is_always_busy_is_measured_eight_times(tmp_path, monkeypatch):
    machine = Machine(0.006, 0.25, 6e-6, 0.001, 1 / 700)
    monkeypatch.setattr(time, "perf_counter", lambda: machine.now)
    monkeypatch.setattr(_costs, "switches", lambda: int(300 * machine.now))
    monkeypatch.setenv("EAGLE3_LLAMA_COSTS", str(tmp_path))
    for n_loads in range(1, 12):
        assert cached(machine, ["key"], 512, 64).layers[1] > 0
        kept = json.loads(newest(tmp_path).read_text())
        assert len(kept) == min(n_loads, 2 * LOADS)
        assert all(c["switches"] > 100 for c in kept)


def test_a_disturbed_load_is_not_believed_for_ever(tmp_path, monkeypatch):
    """Another program on the same cores: a row at ten times its cost, and further rows free."""
    machine = Machine(0.006, 0.25, 6e-6, 0.001, 1 / 700)
    monkeypatch.setattr(time, "perf_counter", lambda: machine.now)
    monkeypatch.setenv("EAGLE3_LLAMA_COSTS", str(tmp_path))
    true = cached(machine, ["key"], 512, 64)
    disturbed = [0.0, *(10 * true.layers[8] for _ in range(MAX_ROWS))]
    path = newest(tmp_path)
    path.write_text(json.dumps([dataclasses.asdict(true) | {"layers": disturbed}]))
    again = cached(machine, ["key"], 512, 64)
    assert [again.layers[n] for n in (1, 12)] == pytest.approx([true.layers[n] for n in (1, 12)], rel=0.01)
    assert [c["layers"] == disturbed for c in json.loads(path.read_text())] == [True, False]


def test_loads_that_were_all_disturbed_are_measured_anew(tmp_path, monkeypatch):
    """Two programs that begin together on the same cores disturb each other's loads, every time."""
    machine = Machine(0.006, 0.25, 6e-6, 0.001, 1 / 700)
    monkeypatch.setattr(time, "perf_counter", lambda: machine.now)
    monkeypatch.setenv("EAGLE3_LLAMA_COSTS", str(tmp_path))
    true = cached(machine, ["key"], 512, 64)
    for scale, kept in ((3.0, 1), (1.2, LOADS)):  # 1.2: no more than the speed of machines changes
        said = dataclasses.asdict(true) | {"layers": [scale * t for t in true.layers]}
        newest(tmp_path).write_text(json.dumps([said] * LOADS))
        now = cached(machine, ["key"], 512, 64)
        assert now.layers[8] == pytest.approx(true.layers[8] * (1.0 if kept == 1 else scale), rel=0.01)
        assert len(json.loads(newest(tmp_path).read_text())) == kept


LENGTH = MAX_ROWS + 1
UNSOUND = {
    "0 of a row": {"layers": [0.0] * LENGTH},
    "0 of a pass": {"head": [0.0] * LENGTH},
    "0 of many rows": {"head": [0.0, *[1e-3] * (MAX_ROWS - 1), 0.0]},
    "less than any clock shows": {"layers": [0.0, *[1e-50] * MAX_ROWS]},  # 0 as the planner's 32 bits
    "negative": {"output": [0.0, *[-1e-3] * MAX_ROWS]},
    "NaN": {"cell": [0.0, *[float("nan")] * MAX_ROWS]},
    "infinite": {"layers": [0.0, *[float("inf")] * MAX_ROWS]},
    "a year": {"head": [0.0, *[3e7] * MAX_ROWS]},
    "lists of other lengths, the same in sum": {
        "output": [1e-3] * (LENGTH - 1),
        "cell": [0.0] * (LENGTH + 1),
    },
    "text": {"layers": "1" * LENGTH},
    "text in a list": {"layers": [0.0, *["1"] * MAX_ROWS]},
    "true": {"layers": [0.0, *[True] * MAX_ROWS]},
    "null": {"first": None},
    "a list in place of a number": {"context": [8]},
    "negative positions": {"context": -1},
    "a field too many": {"backend": "CPU"},
}


@pytest.mark.parametrize("unsound", UNSOUND.values(), ids=UNSOUND)
def test_unsound_costs_are_measured_anew(unsound, tmp_path, monkeypatch):
    """Every measurement in the file is replaced, and what comes out is what the planner takes."""
    machine = Machine(0.006, 0.25, 6e-6, 0.001, 1 / 700)
    monkeypatch.setattr(time, "perf_counter", lambda: machine.now)
    monkeypatch.setenv("EAGLE3_LLAMA_COSTS", str(tmp_path))
    sound = dataclasses.asdict(cached(machine, ["key"], 512, 64))
    path = newest(tmp_path)
    path.write_text(json.dumps([sound, sound | unsound, sound, sound]))
    costs = cached(machine, ["key"], 512, 64)
    (kept,) = json.loads(path.read_text())
    assert all(kept[name] == pytest.approx(sound[name], rel=0.01) for name in sound)
    assert min(*costs.layers[1:], *costs.head[1:]) > 0


@pytest.mark.parametrize("text", ["", "[", "null", "7", "{}", "[{}]", "[[]]", "[" * 100_000, b"\xff\xfe"])
def test_a_broken_file_of_costs_is_replaced(text, tmp_path, monkeypatch):
    machine = Machine(0.006, 0.25, 6e-6, 0.001, 1 / 700)
    monkeypatch.setattr(time, "perf_counter", lambda: machine.now)
    monkeypatch.setenv("EAGLE3_LLAMA_COSTS", str(tmp_path))
    cached(machine, ["key"], 512, 64)
    path = newest(tmp_path)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert cached(machine, ["key"], 512, 64).layers[1] > 0
    assert len(json.loads(path.read_text())) == 1


def test_costs_that_cannot_be_kept_are_used(tmp_path, monkeypatch):
    """The next load measures again; nothing half-written stays."""
    machine = Machine(0.006, 0.25, 6e-6, 0.001, 1 / 700)
    monkeypatch.setattr(time, "perf_counter", lambda: machine.now)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EAGLE3_LLAMA_COSTS", str(tmp_path / "file" / "costs"))  # no folder can be there
    assert cached(machine, ["key"], 512, 64).layers[1] > 0
    monkeypatch.setenv("EAGLE3_LLAMA_COSTS", str(tmp_path / "costs"))
    cached(machine, ["key"], 512, 64)
    path = newest(tmp_path / "costs")
    path.unlink()
    path.mkdir()  # a folder where the file should be
    assert cached(machine, ["key"], 512, 64).layers[1] > 0
    assert list((tmp_path / "costs").iterdir()) == [path] and not any(path.iterdir())


def test_a_clock_too_coarse_for_the_head(monkeypatch):
    """What took no time by the clock is not free: the planner refuses costs of 0."""
    machine = Machine(0.006, 0.25, 6e-6, 0.001, 1 / 700)
    monkeypatch.setattr(time, "perf_counter", lambda: machine.now)
    monkeypatch.setattr(machine, "measure_head", lambda n, slot=0: 0.0)
    costs = measure(machine, 512, 64)
    assert min(costs.head[1:]) > 0


@pytest.mark.parametrize("n_ctx, n_batch", [(256, 64), (24, 24), (16, 8), (512, 1)])
def test_costs_in_little_room(files, tmp_path, monkeypatch, n_ctx, n_batch):
    monkeypatch.setenv("EAGLE3_LLAMA_COSTS", str(tmp_path))
    llm = EagleLlama(files[0], eagle_path=files[1], n_ctx=n_ctx, n_batch=n_batch, verbose=False)
    assert llm.engine.planner.costs.layers[1] > 0 and len(answer(llm, 9)) == 9
    llm.close()


@pytest.mark.parametrize("name, value", [("layers", float("nan")), ("head", 0.0), ("output", -1.0)])
def test_senseless_costs_are_refused(eagle, name, value):
    good = made_up(0.1, 0.1)
    bad = dataclasses.replace(good, **{name: [0.0, *[value] * MAX_ROWS]})
    with pytest.raises(EagleError, match="of 1 rows is"):
        eagle.engine.planner.set_costs(bad)
    eagle.eagle_params = EagleParams(n_max=2)


def test_measuring_a_recurrent_target(made):  # noqa: F811 - the fixture
    """Its state goes back by a checkpoint: measured rows stay behind no text that does not count them."""
    llm = EagleLlama(str(made("mamba", with_head=False)[0]), n_ctx=64, n_threads=1, verbose=False)
    engine, memory = llm.engine, llm._ctx.memory
    expected = answer(llm, 9)
    llm.reset()
    engine.rewind(0)
    engine.prefill(PROMPT)
    for n in (1, 4):
        assert engine.measure_target(n, 0) > 0
        assert engine.n_past() == len(PROMPT)
        assert llama_cpp.llama_memory_seq_pos_max(memory, 0) == len(PROMPT) - 1
    llm.n_tokens = len(PROMPT)
    llm.input_ids[: len(PROMPT)] = PROMPT
    assert answer(llm, 9) == expected
    llm.close()


def test_costs_that_seem_to_fall_with_more_rows_get_a_common_value():
    """Not the least of them, which would be too low for one row wherever further rows are almost free."""
    assert rising({1: 1.0, 2: 2.0, 4: 3.0}) == {1: 1.0, 2: 2.0, 4: 3.0}
    flat = {1: 1.02, 2: 0.97, 3: 1.01, 4: 0.98, 5: 1.0, 8: 1.4}
    assert rising(flat) == pytest.approx({1: 0.995, 2: 0.995, 3: 0.995, 4: 0.995, 5: 1.0, 8: 1.4})
    disturbed = {1: 1.0, 2: 9.0, 3: 1.1, 4: 1.2}
    assert rising(disturbed) == {1: 1.0, 2: 1.2, 3: 1.2, 4: 1.2}
    assert rising({1: 1.0, 2: 0.8}, {1: 3}) == {1: 1.0, 2: 1.0}  # measured three times, and once


def test_plan_of_a_slow_model():
    """It measures each size once, in one round, and nothing with a far context. A quick one goes on."""
    quick, slow = plan_for(SLOW_ROW), plan_for(SLOW_ROW * 1.01)
    assert quick.sizes(4) == [1, 4, 2, 1, 3, 1, 1] and slow.sizes(4) == [1, 4, 2, 3]
    assert [quick.goes_on(n, elapsed=9.0, budget=1.0) for n in range(3)] == [True, True, False]
    assert [quick.goes_on(n, elapsed=0.5, budget=1.0) for n in (2, 8, 9)] == [True, True, False]
    assert [slow.goes_on(n, elapsed=0.0, budget=1.0) for n in range(2)] == [True, False]
    assert quick.fill_until and not slow.fill_until and not slow.large_until
    assert quick.until(0) > quick.until(1) and slow.until(0) > quick.until(0)
