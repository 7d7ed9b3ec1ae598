"""scripts/measure/hostile.py soak: thirty of its cases, and what it calls wrong."""

import importlib
import json

import pytest
import typer
from paths import ROOT


@pytest.fixture(scope="module")
def soak():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "scripts" / "measure")
        yield importlib.import_module("hostile")


@pytest.mark.thorough
def test_thirty_cases(soak, tmp_path):
    """They come from a process of its own, and the usual request among them keeps its text."""
    report = tmp_path / "report.json"
    with pytest.raises(typer.Exit) as ended:
        soak.soak(cases=30, minutes=9.0, seed=0, template="Qwen-Qwen3-0.6B", fmt="Q8_0", json_file=report)
    said = json.loads(report.read_text())
    assert said["wrong"] == [] and ended.value.exit_code == 0
    assert len(said["samples"]) == 3 and all(own > 1 << 20 for own, _, _ in said["samples"])


def test_cases_are_made_from_their_numbers(soak):
    cases = [soak.case(seed) for seed in range(400)]
    assert cases == [soak.case(seed) for seed in range(400)]
    assert len({c.kind for c in cases}) == 9 and len({c.path for c in cases}) >= 6
    assert {c.leaves is None for c in cases} == {True, False}
    own = {c.kind for c in cases if c.path == "/completion"}  # of llama.cpp's server
    assert own == {"schema", "grammar", "field", "bytes", "texts"}


def test_what_is_wrong(soak, monkeypatch):
    """A 500, a failure after a stream has begun, a usual text that changes, memory that grows."""
    answers = iter([(500, b"{}"), (200, b'data: {"code":"internal_error"}'), (400, b"{}"), (504, b"{}")])
    monkeypatch.setattr(soak, "post", lambda port, made: next(answers))
    server, found = type("Server", (), {"port": 1, "process": None}), soak.Soak()
    for seed in range(4):
        found.send(server, seed)
    assert [line.split(",")[0] for line in found.wrong] == ["case 0", "case 1"]
    usual = lambda text: (200, json.dumps({"choices": [{"message": {"content": text}}]}).encode())
    answers = iter([usual("a"), usual("a"), usual("b")])
    monkeypatch.setattr(soak, "memory", lambda pid: soak.Sample(1, 0, 0))
    server.process = type("Process", (), {"pid": 1})
    for _ in range(3):
        found.check(server)
    assert len(found.wrong) == 3 and "usual text is 'b'" in found.wrong[-1]
    found.samples = [soak.Sample(100 + i, 0, 0) for i in range(90)]
    assert found.growth() == pytest.approx(30 / 144.5)
