#!/usr/bin/env python3
"""Measures this package on a card in eight minutes: is the text right, and how fast are drafts?

    scripts/device/run_on_card.py --libraries dist/cuda-sm90.tar.xz --out card.jsonl     # where the card is
    .venv/bin/python scripts/device/run_on_card.py --rehearse --out rehearsal.jsonl      # here, in a minute

Nothing is downloaded: the models are made there, in memory (tests/kit/cycle_models.py). Every step runs in a
process of its own and has a limit; its line of JSON is written as soon as it has ended, failed, or run out
of its time, and the next step begins. The first minute is a rehearsal with a model of 1B. The file's first
line names the card, the processor and the commit. scripts/measure/pages.py --add turns it into tables.

--rehearse takes tiny models, and ggml's RPC backend on the loopback interface as the device, so it shows
that every step works, and no speed. --tiny takes tiny models on this machine's own device. --libraries: what
scripts/device/build_cuda.py packed; without it the package as it is installed. NVIDIA's libraries are those
of PyTorch, of a pip package or of a toolkit. Exit status 1 if a step failed or ran out of its time.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(Path(__file__).resolve().parent))
TOTAL = 480.0  # seconds
PATIENCE = 8  # times as much for tiny models, whose machine may be busy
LEAST = 5.0  # seconds: a step with less than this left is not begun
CALLS = "EAGLE3_CUDA_CALLS"  # the library that counts calls of NVIDIA's
Line = dict[str, Any]


UPSTREAM = {"rehearsal", "upstream"}  # steps that run upstream's drafter


class Step(NamedTuple):
    """seconds: its limit on a card. The function of the same name is in card_steps.py."""

    name: str
    seconds: float


STEPS = (
    Step("machine", 15),
    Step("rehearsal", 45),
    Step("texts", 50),
    Step("random", 15),
    Step("ties", 20),
    Step("widths", 15),
    Step("rows", 45),
    Step("speeds", 90),
    Step("upstream", 45),
    Step("prompt", 35),
    Step("sampling", 25),
    Step("q4_k_m", 40),
    Step("f16", 40),
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="the file of results, a line of JSON a step")
    parser.add_argument("--libraries", type=Path, help="an archive of build_cuda.py")
    parser.add_argument("--rehearse", action="store_true", help="tiny models, on the RPC device")
    parser.add_argument("--tiny", action="store_true", help="tiny models, on this machine's device")
    parser.add_argument("--folder", type=Path, help="for the models: 30 GB of memory (/dev/shm)")
    parser.add_argument("--steps", help=f"of {', '.join(step.name for step in STEPS)} (all)")
    parser.add_argument("--commit", help="of the code, where git does not know it")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        return child(given)
    names = given.steps.split(",") if given.steps else [step.name for step in STEPS]
    if unknown := set(names) - {step.name for step in STEPS}:
        parser.error(f"unknown steps: {', '.join(sorted(unknown))}")
    with tempfile.TemporaryDirectory(dir=given.folder or memory(), prefix="eagle3-card-") as tmp:
        try:
            env = environment(given.libraries, Path(tmp), not UPSTREAM.isdisjoint(names))
        except (OSError, ValueError, subprocess.CalledProcessError) as error:
            parser.error(str(error))
        lines = run(given, [step for step in STEPS if step.name in names], Path(tmp), env)
        with given.out.open("w", encoding="utf-8") as out:
            failed = 0
            for line in lines:
                text = json.dumps(line)
                print(text, file=out, flush=True)
                print(text, flush=True)
                failed += line.get("ended", "done") not in ("done", "not there")
    return 1 if failed else 0


def memory() -> str | None:
    """A folder in memory, so that models are made and read fast; None for the usual one."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def run(given: argparse.Namespace, steps: list[Step], folder: Path, env: dict[str, str]) -> Iterator[Line]:
    """The first line, then one for each step."""
    begin, times = time.monotonic(), PATIENCE if given.rehearse or given.tiny else 1
    yield {
        "what": "a rehearsal" if given.rehearse or given.tiny else "a run on a card",
        "commit": given.commit or commit(),
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(["scripts/device/run_on_card.py", *sys.argv[1:]]),
    }
    for step in steps:
        left = times * TOTAL - (time.monotonic() - begin)
        if left < LEAST:
            yield {"step": step.name, "ended": "not run", "message": "the eight minutes are over", "rows": []}
            continue
        yield one(given, step, min(times * step.seconds, left), folder, env)


def commit() -> str:
    words = ["git", "-C", str(ROOT), "rev-parse", "--short=7", "HEAD"]
    try:
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def one(given: argparse.Namespace, step: Step, limit: float, folder: Path, env: dict[str, str]) -> Line:
    """Runs a step in a process of its own. What it found before its time ran out is in its line too."""
    command = [sys.executable, __file__, "--child", step.name, "--folder", str(folder), "--out", "-"]
    command += ["--rehearse"] * given.rehearse + ["--tiny"] * given.tiny
    if step.name == "rows" and CALLS in env:
        env = {**env, "LD_PRELOAD": env[CALLS]}
    log = (folder / f"{step.name}.log").open("w+", encoding="utf-8", errors="replace")
    begin, late = time.monotonic(), threading.Event()
    with log, subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=log, text=True, env=env, start_new_session=True
    ) as process:  # fmt: skip

        def stop() -> None:
            late.set()
            with contextlib.suppress(ProcessLookupError):  # it has ended by itself just now
                os.killpg(process.pid, 9)

        clock = threading.Timer(limit, stop)
        clock.start()
        assert process.stdout is not None
        rows = [json.loads(line) for line in process.stdout if line.endswith("}\n")]
        process.wait()
        clock.cancel()
        log.seek(0)
        last = log.read().strip()[-2000:].splitlines()
    line: Line = {"step": step.name, "seconds": round(time.monotonic() - begin, 1), "limit": limit}
    if late.is_set():
        line |= {"ended": "out of time", "message": f"it was ended after {limit:.0f} s"}
    elif process.returncode != 0:
        why = rows.pop()["failed"] if rows and "failed" in rows[-1] else f"exit status {process.returncode}"
        line |= {"ended": "failed", "message": why, "log": last[-12:]}
    elif rows and "not_there" in rows[-1]:
        line |= {"ended": "not there", "message": rows.pop()["not_there"]}
    else:
        line |= {"ended": "done"}
    return line | {"rows": rows}


def child(given: argparse.Namespace) -> int:
    """One step: rows of JSON on standard output, which nothing else may write to."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "kit"), str(ROOT / "native")]
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import card_steps

    report = lambda **row: print(json.dumps(row), file=out, flush=True)
    try:
        card_steps.run(given.child, given.folder, given.rehearse, given.tiny, report)
    except card_steps.NotThere as error:
        report(not_there=str(error))
    except BaseException as error:
        report(failed=f"{type(error).__name__}: {error}"[:600])
        raise
    return 0


def environment(archive: Path | None, folder: Path, upstream: bool) -> dict[str, str]:
    """For the steps: where the libraries are, and upstream's drafter.

    Raises OSError, ValueError or CalledProcessError.
    """
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "EAGLE3_LLAMA_COSTS": str(folder / "costs")}
    if archive is None and upstream:  # this checkout's: it is built before the clock runs
        command = [sys.executable, str(ROOT / "native" / "build.py"), "--bench", "--print-dir"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        env["EAGLE3_UPSTREAM"] = str(Path(done.stdout.strip()) / "upstream")
    if archive is None:
        return env
    if not archive.is_file():
        raise ValueError(f"{archive} is missing: scripts/device/build_cuda.py makes it")
    there = folder / "libraries"
    there.mkdir()
    subprocess.run(["tar", "-xJf", str(archive), "-C", str(there)], check=True)
    env["EAGLE3_LLAMA_LIB_DIR"] = str(there / "lib")
    env["EAGLE3_UPSTREAM"] = str(there / "upstream" / "upstream")
    env[CALLS] = str(there / "lib" / "libcuda_calls.so")
    env["PYTHONPATH"] = os.pathsep.join([str(there / "python"), env.get("PYTHONPATH", "")]).strip(os.pathsep)
    env["LD_LIBRARY_PATH"] = os.pathsep.join([*nvidia(), env.get("LD_LIBRARY_PATH", "")]).strip(os.pathsep)
    return env


def nvidia() -> list[str]:
    """The folders with libcudart.so.13 and libcublas.so.13. Raises ValueError if there are none."""
    places = [Path(path) / "nvidia" / "cu13" / "lib" for path in sys.path if path]
    places += [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "lib64"]
    found = [str(place) for place in places if (place / "libcublas.so.13").is_file()]
    system = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True).stdout if not found else ""
    if not found and "libcublas.so.13" not in system:
        raise ValueError(
            "libcublas.so.13 is not there: install PyTorch for CUDA 13, or pip install nvidia-cublas==13.* "
            "nvidia-cuda-runtime==13.*"
        )
    return found


if __name__ == "__main__":
    if shutil.which("tar") is None:
        sys.exit("error: tar is missing")
    sys.exit(main())
