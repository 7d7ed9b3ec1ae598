"""The comparison of drafters: its slices and what its table says."""

import json

import pytest

from eagle3_llama.bench.child import of_checkout
from eagle3_llama.bench.modes import Plain, TextMode
from eagle3_llama.bench.others import PromptLookup
from eagle3_llama.errors import EagleError, ErrorKind

bars, slices, upstream = map(of_checkout, ("bars", "comparison", "upstream"))
ALONE, OTHERS, WITH_HEAD = bars.ALONE, bars.OTHERS, bars.WITH_HEAD
compared, ratios, tables = bars.compared, bars.ratios, bars.tables
MODES = (Plain("plain"), TextMode("text"), PromptLookup("prompt_lookup"))


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / "prompts.jsonl"
    items = [{"prompt": f"{c}{i} " * 5, "category": c, "split": "report"} for c in "ab" for i in range(2)]
    file.write_text("".join(json.dumps(item) + "\n" for item in [*items, {"prompt": "x", "split": "tune"}]))
    return file


def comparison(endless, prompts, **changes):
    sizes = {"n_predict": 8, "n_threads": 1, "n_ctx": 256, "flash_attn": None}
    return slices.Comparison((endless[0],), MODES, (str(prompts),), **{**sizes, **changes})


def records(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_comparison_goes_on_where_it_stopped(endless, prompts, tmp_path):
    """No time at all is one step; each answer is there once, whatever was cut off."""
    file, c = tmp_path / "out.jsonl", comparison(endless, prompts)
    assert not slices.run_slice(c, file, -1)  # nothing is loaded
    assert [r["what"] for r in records(file)] == ["settings"]
    file.write_text(file.read_text() + '{"what": "answer", "mod')
    said = []
    assert slices.run_slice(c, file, 600, said.append)
    done = records(file)
    answers = [r for r in done if r["what"] == "answer"]
    assert len(answers) == 4 * 3 == len({(r["id"], r["mode"]) for r in answers})
    assert {r["category"] for r in answers} == {"a", "b"} and all(r["same"] for r in answers)
    found = [r for r in done if r["what"] == "found" and r["mode"] == "prompt_lookup"]
    assert [r["category"] for r in found] == ["a", "b"]
    assert all(r["found"]["num_pred_tokens"] in (2, 3, 5, 10) for r in found) and len(said) == 6
    assert slices.run_slice(c, file, 600) and records(file) == done
    with pytest.raises(EagleError, match="other n_predict") as e:
        slices.run_slice(comparison(endless, prompts, n_predict=9), file, 600)
    assert e.value.kind is ErrorKind.BAD_ARGUMENT


def test_what_is_missing_is_measured_again_with_plain(endless, prompts, tmp_path):
    file, c = tmp_path / "out.jsonl", comparison(endless, prompts, limit=1)
    assert slices.run_slice(c, file, 600)
    kept = [
        r for r in records(file) if (r.get("category"), r["what"], r.get("mode")) != ("b", "answer", "text")
    ]
    file.write_text("".join(json.dumps(r) + "\n" for r in kept))
    assert slices.run_slice(c, file, 600)
    assert [r["mode"] for r in records(file)[len(kept) :]] == ["plain", "text"]


def answer(fmt, category, mode, relative, seconds=1.0, id="p", same=True, kind=None):
    return {
        **{"what": "answer", "format": fmt, "category": category, "mode": mode, "kind": kind or mode},
        **{"id": id, "tokens": 9, "plain_tokens": 9, "plain_seconds": seconds, "relative": relative},
        **{"same": same, "gap": None if same else 0.25},
    }


def cell(fmt, category, **speeds):
    return [answer(fmt, category, mode, 1 / speed) for mode, speed in {"plain": 1.0, **speeds}.items()]


def test_ratios_are_of_the_prompts_that_all_modes_have():
    """3 s in 1.5 s and 1 s in 1 s; what only plain has answered does not count."""
    rows = [answer("Q8_0", "a", "plain", 1.0, s, i) for i, s in (("p", 3.0), ("q", 1.0), ("r", 9.0))]
    rows += [answer("Q8_0", "a", "text", r, s, i) for i, s, r in (("p", 3.0, 0.5), ("q", 1.0, 1.0))]
    assert ratios(rows)["Q8_0", "a"] == {"plain": 1.0, "text": pytest.approx(1.6)}
    assert compared({"plain": 1.0, "head": 1.2, "eagle": 1.5}) == {WITH_HEAD: pytest.approx(1.25)}


def test_the_table_has_means_worst_cells_and_bars():
    speeds = {"head": 1.25, "eagle": 2.0, "text": 1.6, "prompt_lookup": 1.6, "upstream:ngram-mod": 1.0}
    slow = {"head": 1.25, "eagle": 1.25, "text": 0.9, "prompt_lookup": 0.8, "upstream:ngram-mod": 1.0}
    rows = [*cell("BF16", "editing", **speeds), *cell("BF16", "prose", **slow)]
    rows.append({**rows[0], "what": "found", "mode": "prompt_lookup", "found": {"num_pred_tokens": 5}})
    rows.append(answer("BF16", "prose", "upstream", 1.0, id="other", same=False))
    rows.append({"what": "failed", "format": "BF16", "mode": "upstream:x", "why": "crashed: SIGILL"})
    lines = list(tables(rows[:-2] + rows[-1:]))
    assert "| BF16 | editing | 1.600 | 1.600 | 1.250 | prompt_lookup num_pred_tokens=5 |" in lines
    assert "| BF16 | prose | 1.000 | 0.900 | 1.250 | upstream:ngram-mod |" in lines
    assert "| all | geometric mean | 1.265 | 1.200 | 1.250 |  |" in lines
    assert "| all | worst | 1.000 (BF16 prose) | 0.900 (BF16 prose) | 1.250 (BF16 editing) |  |" in lines
    bars = {line.rpartition(": ")[0]: line.rpartition(": ")[2] for line in lines if line.startswith("- ")}
    every = "every format, every category"
    assert bars[f"- {WITH_HEAD}, {every}, geometric mean at least 1.12"] == "1.265, reached"
    assert bars[f"- {ALONE}, {every}, worst cell at least 0.98"] == "0.900 (BF16 prose), **missed**"
    assert bars[f"- {OTHERS}, {every}, geometric mean at least 1.1"] == "1.250, reached"
    assert any(value == "not measured" for value in bars.values())
    assert lines[-1] == "- BF16: upstream:x crashed: SIGILL"


def test_texts_that_differ_are_told():
    rows = cell("BF16", "a", text=1.0)
    rows += [answer("BF16", "a", "eagle", 1.0, same=False)]
    rows += [answer("BF16", "a", "upstream:ngram-mod", 1.0, same=False, kind="upstream")]
    said = [line for line in tables(rows) if "differ" in line]
    assert said[0].startswith("- eagle: **the text must not differ:** 1 of 1")
    assert said[1].startswith("- upstream:ngram-mod: 1 of 1 answers differ") and said[1].endswith(
        "0.25 there"
    )


class Timed(upstream.Drafter):
    """A drafter that takes a time by its setting, and notes what was tried."""

    def __init__(self, speculation, best):
        self.tried, self.best = [], best
        self._program = lambda: None
        self._programs = {}
        super().__init__("t.gguf", "h.gguf", speculation, 1, 256, None)

    def run(self, prompt, n_predict):
        self.tried.append((self.setting, tuple(prompt)))
        seconds = 1.0 if self.best(self.setting) else 2.0 + len(self.tried) % 3
        return [1] * 8, seconds, []


@pytest.mark.parametrize(
    "spec, best, tried",
    [
        ("ngram-mod", {"n_gram": 3, "n_text": 8}, 17),
        ("ngram-cache", {"n_text": 2}, 4),
        ("draft-eagle3", {"n_max": 2, "backend_sampling": False}, 16),
        ("draft-eagle3,ngram-simple", {"n_max": 2, "backend_sampling": True}, 16 + 17),
    ],
)
def test_upstreams_search_finds_the_fastest(spec, best, tried):
    drafter = Timed(spec, lambda s: all(getattr(s, k) == v for k, v in best.items()))
    drafter.settle([[1], [2]])
    assert {k: getattr(drafter.setting, k) for k in best} == best
    assert sum(prompt == (1,) for _, prompt in drafter.tried) == tried
    assert 0 < sum(prompt == (2,) for _, prompt in drafter.tried) <= tried // 2
    assert all(max(s.n_max, s.n_text) > 0 for s, _ in drafter.tried)  # else it would draft nothing
