"""How many snapshots of a recurrent state a load keeps: by sizes where these decide, else as measured."""

import itertools

import hybrid_models
import pytest
from tiny_models import take

from eagle3_llama import EagleLlama
from eagle3_llama.llama import snapshot_costs, snapshots
from eagle3_llama.llama.snapshot_costs import Ways

ALONE = {"n_ctx": 256, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
METADATA = {  # 4 * 3 layers * (16 * 32 + 3 * (32 + 2 * 16)) = 8448 bytes
    "general.architecture": "qwen35",
    **{f"qwen35.{name}": str(n) for name, n in (("block_count", 3), ("ssm.conv_kernel", 4))},
    **{f"qwen35.ssm.{name}": str(n) for name, n in (("inner_size", 32), ("state_size", 16))},
    "qwen35.ssm.group_count": "1",
}
STATE = 8448


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return str(hybrid_models.made(tmp_path_factory.mktemp("hybrids"), "tiny-hybrid", "Q8_0", 0.7)[0])


def chosen(times, ways=None, n_slots=1, n_ubatch=512, metadata=METADATA):
    """n_rs_seq where the weights have so many times the state's bytes, and what was measured for it."""
    asked = []

    def measured(n):
        asked.append(n)
        return ways

    return snapshots.choose(metadata, STATE * times, n_slots, n_ubatch, measured).n, asked


def test_sizes_decide():
    assert snapshots.state_bytes(METADATA) == STATE
    assert chosen(1000, metadata={"general.architecture": "llama"}) == (0, [])
    assert chosen(snapshots.CHEAP) == (16, []) and chosen(snapshots.DEAR - 1) == (0, [])
    assert chosen(snapshots.CHEAP, n_ubatch=12) == (10, [])
    assert chosen(snapshots.CHEAP, n_slots=(64 << 20) // STATE // 5) == (5, [])


@pytest.mark.parametrize("times", [snapshots.DEAR, snapshots.SHARE, snapshots.CHEAP - 1])
def test_what_they_take_decides(times):
    """They cost each plain round something, and a checkpoint only those that draft."""
    assert chosen(times, Ways(1.0, 1.009, 0.5)) == (16, [16])
    assert chosen(times, Ways(1.0, 1.011, 0.5)) == (0, [16])
    assert chosen(times, Ways(1.0, 1.009, 0.008)) == (0, [16])
    assert chosen(times, Ways(1.0, 0.99, 0.008)) == (16, [16])
    assert chosen(times, None) == (16 if times >= snapshots.SHARE else 0, [16])  # it could not be measured


def test_a_load_says_what_it_chose(target, tmp_path, monkeypatch, capfd):
    """Measured by the first load alone, kept beside the other costs, and without an effect on the text."""
    monkeypatch.setenv("EAGLE3_LLAMA_COSTS", str(tmp_path))
    monkeypatch.setattr(snapshot_costs, "switches", lambda: 0)
    monkeypatch.setattr(snapshots, "CHEAP", 1 << 60)
    monkeypatch.setattr(snapshots, "DEAR", 0)
    with EagleLlama(target, text=False, **ALONE) as plain:  # nothing drafts: nothing to measure
        text = take(plain, 40)
        assert plain.context_params.n_rs_seq == 0 and not list(tmp_path.iterdir())
    for extra in (0.0, 1.0):
        monkeypatch.setattr(snapshots, "MOST_EXTRA", extra)
        monkeypatch.setattr(snapshot_costs, "measure", lambda *_: Ways(1.0, 1.5, 2.0))
        for file in tmp_path.iterdir():
            file.unlink()
        with EagleLlama(target, **{**ALONE, "verbose": True}) as llm:
            assert llm.context_params.n_rs_seq == 16 * int(extra)
            assert take(llm, 40) == text
        said = capfd.readouterr().err
        assert f"EagleLlama: n_rs_seq {16 * int(extra)}: they add 50.0% to a decode of 1000.00 ms" in said
        monkeypatch.setattr(snapshot_costs, "measure", None)  # what is kept is taken
        EagleLlama(target, **ALONE).close()


def test_measured(target, tmp_path, monkeypatch):
    """With the model's own decodes, again if the file is broken. No architecture without them has any."""
    monkeypatch.setenv("EAGLE3_LLAMA_COSTS", str(tmp_path))
    monkeypatch.setattr(snapshot_costs, "switches", lambda: 0)  # however busy the machine is
    with EagleLlama(target, text=False, **ALONE) as llm:
        model, params = llm._model.model, llm.context_params
        before = take(llm, 20)
        ways = snapshot_costs.kept(model, params, 4, ["a key"])
        assert ways.plain > 0 and ways.snapshots > 0 and 0 < ways.checkpoint < 1
        (file,) = tmp_path.iterdir()
        assert snapshot_costs.kept(model, params, 4, ["a key"]) == ways
        for broken in ("", "[]", '{"plain": 1}', '{"plain": 0.0, "snapshots": 1.0, "checkpoint": 1.0}'):
            file.write_text(broken)
            assert snapshot_costs.kept(model, params, 4, ["a key"]).plain > 0
            assert len(file.read_text()) > len(broken)
        assert take(llm, 20) == before  # its own context is as it was


def test_disturbed(target, tmp_path, monkeypatch):
    """Beside other programs nothing is measured that would be kept for ever."""
    monkeypatch.setenv("EAGLE3_LLAMA_COSTS", str(tmp_path))
    counts = itertools.count(step=1000)
    monkeypatch.setattr(snapshot_costs, "switches", lambda: next(counts))
    monkeypatch.setattr(snapshot_costs, "measure", lambda *_: Ways(1.0, 1.0, 1.0))
    assert snapshot_costs.kept(None, None, 4, ["a key"]) is None
    assert not list(tmp_path.iterdir())


def test_none_of_them(files):
    """A target without a recurrent state keeps none: it is not measured."""
    with EagleLlama(files[0], **ALONE) as llm:
        assert llm.context_params.n_rs_seq == 0
        assert snapshot_costs.measure(llm._model.model, llm.context_params, 4) is None
