"""Damaged and hostile files in the converter, in `info` and, under the sanitizers, in the loader.

EAGLE3_FUZZ is how many inputs each part gets. A full run takes longer than a test may:
EAGLE3_FUZZ=20000 ./scripts/test --all tests/heads/test_hostile_files.py -n 0 -o faulthandler_timeout=0
"""

import json
import os
import resource
import shutil
import sys
import time
from pathlib import Path

import heads
import numpy as np
import pytest
import tiny_models
from checkpoints import write_head
from commands import run
from converting import shared
from paths import ROOT

from eagle3_llama import EagleError
from eagle3_llama.errors import ErrorKind
from eagle3_llama.heads.convert import convert
from eagle3_llama.heads.info import describe

MOST_MEMORY = 2 << 30
TIMES = 300  # limit of a damaged file, in units of the valid file: a wrong length that is believed takes more
NASTY = [0, 1, 2, 3, 0x7F, 0x80, 0xFF]
LENGTHS = [2**31 - 1, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**64 - 1]


def damaged(data, rng, donor):
    """Flips bits, sets bytes, truncates, inserts a piece of the donor or of itself, or enlarges a length."""
    data = bytearray(data)
    # headers are where the sense is: half of all damage goes there
    span = len(data) if rng.random() < 0.5 else min(len(data), 4096)
    kind = rng.integers(5)
    at = int(rng.integers(span)) if span else 0
    if kind == 0:
        for _ in range(int(rng.integers(1, 8))):
            data[int(rng.integers(span))] ^= 1 << int(rng.integers(8))
    elif kind == 1:
        n = int(rng.integers(1, 9))
        data[at : at + n] = bytes(int(rng.choice(NASTY)) for _ in range(n))
    elif kind == 2:
        del data[at:]
    elif kind == 3:
        source = donor if rng.random() < 0.5 else bytes(data)
        a, n = int(rng.integers(len(source))), int(rng.integers(1, 200))
        data[at : at + (n if rng.random() < 0.5 else 0)] = source[a : a + n]
    else:
        data[at : at + 8] = LENGTHS[int(rng.integers(len(LENGTHS)))].to_bytes(8, "little")
    return bytes(data)


def damaged_config(text, rng):
    """A value replaced by one of another kind, a key dropped, or damaged as bytes."""
    if rng.random() < 0.3:
        return damaged(text, rng, text)
    config = json.loads(text)
    where = config
    while True:
        key = str(rng.choice(sorted(where)))
        if not isinstance(where[key], dict) or not where[key] or rng.random() < 0.3:
            break
        where = where[key]
    values = [
        None,
        0,
        -1,
        1,
        2**31,
        10**400,
        1e308,
        -0.0,
        "x",
        "",
        [],
        [1],
        [2, 3, 4],
        {},
        {"a": 1},
        True,
        False,
        "\x1b[31m",
        [[1]],
        64,
        65,
        128,
    ]
    where[key] = values[int(rng.integers(len(values)))]
    if rng.random() < 0.2:
        del where[key]
    return json.dumps(config).encode()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A target, and checkpoints and GGUFs of several layouts."""
    d = tmp_path_factory.mktemp("files")
    target = tiny_models.target(d / "target.gguf", n_layer=12)
    folders, ggufs = [], []
    for i, name in enumerate(
        ["SafeAILab", "SpecForge, EAGLE-3.1", "speculators, qwen3", "EAGLE-1", "two projections", "yarn rope"]
    ):
        head = heads.make(name, shared(target))
        folders.append(write_head(d / str(i), head.config, head.tensors))
        ggufs.append(d / f"{i}.gguf")
        convert(folders[-1], target, ggufs[-1], ["f32", "q8_0"][i % 2])
    return target, folders, ggufs


def only_errors(call, most):
    """That a call ends within `most` seconds of computing, well or with an EagleError of one line."""
    start = time.process_time()
    try:
        call()
    except EagleError as e:
        assert isinstance(e.kind, ErrorKind) and len(str(e).split()) > 2, repr(e)
        assert "\n" not in str(e) and str(e).isprintable(), repr(e)
    assert time.process_time() - start < most


def longest_of_whole(target, sources, out):
    """Seconds of computing that the slowest of the undamaged takes."""
    took = []
    for source in sources:
        start = time.process_time()
        convert(source, target, out)
        took.append(time.process_time() - start)
        out.unlink()
    return max(took)


@pytest.fixture
def n(pytestconfig):
    """How many inputs a part gets."""
    return int(os.environ.get("EAGLE3_FUZZ", "600" if pytestconfig.getoption("all") else "150"))


def test_converter_and_info(files, tmp_path, n):
    """In a process of its own, whose memory is known at the end."""
    done = run(
        [
            sys.executable,
            "-c",
            f"import test_hostile_files as t; t.hostile_checkpoints({n})",
            *map(str, (files[0], tmp_path)),
            *map(str, files[1] + files[2]),
        ],
        seconds=max(600, n),  # so much more than it takes that only what never ends reaches it
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests" / "kit")},
        cwd=Path(__file__).parent,
    )
    tried, refused, peak = map(int, done.stdout.split())
    assert tried == n and refused > n // 4 and peak < MOST_MEMORY
    assert not list(tmp_path.glob("out*")) and not list(tmp_path.glob(".out*"))


def most_memory():
    """Peak memory of this program in bytes. ru_maxrss would include the memory of its parent process."""
    line = next(
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")
    )
    return int(line.split()[1]) << 10


def hostile_checkpoints(n):
    target, work, *sources = map(Path, sys.argv[1:])
    resource.setrlimit(
        resource.RLIMIT_AS, (8 << 30, 8 << 30)
    )  # an absurd allocation fails instead of swapping
    rng, refused = np.random.default_rng(n), 0
    most = TIMES * longest_of_whole(target, sources, work / "whole.gguf")
    data = {
        s: (s.read_bytes() if s.is_file() else {p.name: p.read_bytes() for p in s.iterdir()})
        for s in [target, *sources]
    }
    whole = [v for v in data.values() if isinstance(v, bytes)]
    for _ in range(n):
        source = sources[int(rng.integers(len(sources)))]
        donor = whole[int(rng.integers(len(whole)))]
        head, aim = work / "head", target
        shutil.rmtree(head, ignore_errors=True)
        if source.is_file():
            head = work / "head.gguf"
            head.write_bytes(damaged(data[source], rng, donor))
        else:
            head.mkdir()
            what = int(rng.integers(3))
            for name, content in data[source].items():
                hit = what == 2 or (name == "config.json") == (what == 0)
                content = (
                    content
                    if not hit
                    else damaged_config(content, rng)
                    if name == "config.json"
                    else damaged(content, rng, donor)
                )
                (head / name).write_bytes(content)
        if rng.random() < 0.2:
            aim = work / "aim.gguf"
            aim.write_bytes(damaged(data[target], rng, donor))
        out = work / "out.gguf"
        only_errors(
            lambda: convert(head, aim, out, ["f32", "q8_0", "q4_0", None][int(rng.integers(4))]), most
        )
        refused += not out.exists()
        assert not [p for p in work.iterdir() if p.name.startswith(".")], "a temporary file stayed"
        for path in (out, aim, head):
            if path.is_file():
                only_errors(lambda: describe(path), most)
        out.unlink(missing_ok=True)
    print(n, refused, most_memory())


def test_loading_under_sanitizers(files, programs, tmp_path, n):
    """Damaged GGUFs of every variant: refused with a message, or drafted with."""
    target, _, ggufs = files
    rng = np.random.default_rng(n + 1)
    data = [g.read_bytes() for g in ggufs]
    done, paths, env = (
        [],
        [tmp_path / f"{i}.gguf" for i in range(100)],
        {
            **os.environ,
            "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
            "ASAN_OPTIONS": "detect_leaks=1:allocator_may_return_null=1:hard_rss_limit_mb=2048",
        },
    )
    for _ in range(-(-n // len(paths))):
        for path in paths:
            i, j = rng.integers(len(data), size=2)
            path.write_bytes(damaged(data[i], rng, data[j]))
        # a wrong length that is believed would not end, or end for lack of memory
        ended = run([programs / "heads_test", target], None, input="\n".join(map(str, paths)) + "\n", env=env)
        lines = ended.stdout.splitlines()
        if ended.returncode != 0 or len(lines) != len(paths):
            kept = Path(os.environ.get("TMPDIR", "/tmp")) / "hostile.gguf"
            shutil.copy(paths[min(len(lines), len(paths) - 1)], kept)
            pytest.fail(f"{kept}: {ended.stderr[-3000:]}")
        done += lines
    refused = [line for line in done if line.startswith("-")]
    whole = run([programs / "heads_test", target], input="\n".join(map(str, ggufs)) + "\n", env=env)
    assert [line for line in whole.stdout.splitlines() if line.startswith("-")] == []
    assert len(done) // 10 < len(refused) < len(done)
    assert all(len(line.split()) > 3 for line in refused), "every refusal says why"
