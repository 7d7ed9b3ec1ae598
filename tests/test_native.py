"""The native library under AddressSanitizer and UBSan: random rounds, damaged files, failing calls."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_models
from test_variants import converted

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="session")
def programs():
    build = [sys.executable, ROOT / "native" / "build.py", "--sanitize", "--tests", "--print-dir"]
    return Path(subprocess.run(build, check=True, capture_output=True, text=True).stdout.strip())


@pytest.mark.parametrize("seed", range(4))
def test_rounds_under_sanitizers(programs, tmp_path, seed):
    target = tiny_models.target(tmp_path / "target.gguf", kind=["F32", "Q8_0", "F16", "F32"][seed])
    head = tiny_models.head(
        tmp_path / "head.gguf",
        kind=["F32", "Q8_0", "F32", "F16"][seed],
        layers=[(1, 2, 3), (0, 2), (1, 2, 3, 4), (3,)][seed],
    )
    passes(programs, "rounds_test", target, head, seed, 400)


@pytest.mark.parametrize("name", ["speculators, qwen3", "EAGLE-1", "two projections, two layers"])
def test_rounds_of_variants_under_sanitizers(programs, tmp_path, name):
    target = tiny_models.target(tmp_path / "target.gguf", n_layer=12)
    _, head = converted(tmp_path, name, target, "q8_0" if "two" in name else "f32")
    passes(programs, "rounds_test", target, head, 5, 20)


@pytest.mark.parametrize(
    "case", ["features", "throws", "measure", "close", "capture", "joint", "shapes", "cuts", "split"]
)
def test_failures_under_sanitizers(programs, files, case):
    """The state after a failed call, and what must not grow or change: see native/tests/failures_test.cpp."""
    passes(
        programs, "failures_test", case, *files, leaks=case != "split"
    )  # a split target's buffer types live as long as the process


def test_a_second_source_of_drafts(programs, files):
    """A scripted one beside the head: chosen, told, rewound, saved, calibrated apart."""
    passes(programs, "sources_test", *files)


def test_weights_that_are_shared(programs, tmp_path):
    """Q4_0 weights are repacked for products, which makes rows unreadable: the model keeps two copies."""
    target = tiny_models.target(tmp_path / "target.gguf", kind="Q4_0", tied=True)
    passes(
        programs,
        "failures_test",
        "shared",
        target,
        tiny_models.head(tmp_path / "head.gguf", own_output=False),
    )


def passes(programs, name, *args, leaks=True):
    done = subprocess.run(
        [programs / name, *map(str, args)],
        capture_output=True,
        text=True,
        timeout=600,
        env={
            **os.environ,
            "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
            "ASAN_OPTIONS": f"detect_leaks={int(leaks)}",
        },
    )
    assert done.returncode == 0 and done.stdout.strip() == "ok", done.stderr[-3000:]
    assert "runtime error" not in done.stderr and "Sanitizer" not in done.stderr, done.stderr[-3000:]


@pytest.mark.parametrize("seed", range(1, 4))
def test_rows_together_and_alone(programs, seed):
    """Products of quantised matrices and attention, bit for bit."""
    passes(programs, "products_test", seed)


@pytest.mark.parametrize("seed", range(1, 4))
def test_planner_in_counted_time(programs, seed):
    """At least 0.97 of the best fixed length and of plain decoding; with wrong costs, 0.96 of plain."""
    passes(programs, "planner_test", seed)


@pytest.mark.parametrize("case", ["load", "measured", "turn", "steady"])
def test_what_the_planner_learnt_does_not_stick(programs, case):
    """Within 200 rounds of a change it is within 3% of a planner that begins there, on a simulated clock."""
    passes(programs, "planner_states_test", case)
