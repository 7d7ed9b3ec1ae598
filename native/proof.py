"""Proves a library on this processor before anyone uses it, and leaves out instruction sets that fail.

eagle3-proof (native/proof/), which is built with the library, runs in a child process: products in each
weight format and tiny generations. If it ends by a signal, does not end, or its sums differ, the library is
built again without the next instruction set of RUNGS. What was found is kept beside the library, in RECORD,
for `eagle3-llama info --system`. This file uses the standard library only.
"""

from __future__ import annotations

import os
import re
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))
from fetch import BuildError, say
from toolchain import InstructionSet

PROGRAM, RECORD = "eagle3-proof", "proof.json"
PATIENCE = 180.0  # seconds without a new step; a step takes milliseconds, a second under sanitizers
_ROWS_DIFFER, _CANNOT = 3, 4  # exit codes of eagle3-proof
_ARGUMENTS = {"": [], "stock-": ["--stock"], "sanitized-": ["--few"]}


class Rung(NamedTuple):
    name: str
    sets: tuple[str, ...]  # names of /proc/cpuinfo


# In the order in which they are left out, each with all before it.
RUNGS = (
    Rung("AMX", ("amx_tile", "amx_int8", "amx_bf16")),
    Rung(
        "AVX-512's VNNI, BF16, VBMI and FP16",
        ("avx512_vnni", "avx512_bf16", "avx512vbmi", "avx512_fp16", "avx_vnni"),
    ),
    Rung("AVX-512", ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")),
    Rung("AVX2, FMA and F16C", ("avx2", "fma", "f16c", "bmi2")),
    Rung("AVX and SSE4.2", ("avx", "sse4_2", "ssse3")),
    Rung("SME, SVE, I8MM and DOTPROD", ("sme", "sve", "i8mm", "asimddp")),
)


class Fault(NamedTuple):
    kind: str  # "failed", "rows" (only the rows differ), "cannot" (it could not be run at all)
    text: str  # such as "products in q4_0 (AMX) end with SIGSEGV"


class Built(NamedTuple):
    folder: Path
    used: list[InstructionSet]  # what the compiler may have used
    foreign: list[str]  # those of them that this processor has not, as the user asked


Make = Callable[[list[InstructionSet]], Built]  # builds without these sets


def prove(make: Make, kind: str = "", patience: float = PATIENCE) -> dict[str, Any]:
    """Builds, checks, and builds again without what fails. Returns the record of the last build.

    kind: "stock-" for an unpatched library, "sanitized-" for one with sanitizers. Raises BuildError if the
    library fails without all sets of RUNGS.
    """
    left_out: list[dict[str, Any]] = []
    gone: list[InstructionSet] = []
    while True:
        built = make(gone)
        fault = _checked(built.folder, kind, patience)
        if fault is None:
            return _record(built, left_out)
        if fault.kind == "cannot" or built.foreign:
            why = f"this processor has no {', '.join(built.foreign)}" if built.foreign else fault.text
            say(f"the library cannot be checked here: {why}")
            return _record(built, left_out, why)
        rungs = _next_rungs(built, fault, kind, patience)
        if not rungs and fault.kind == "rows":
            return _accepted(built, fault, left_out)
        if not rungs:
            raise BuildError(_nothing_left(fault, left_out))
        say(f"{fault.text} on this processor: building without {rungs[-1].name}")
        names = {name for rung in rungs for name in rung.sets}
        out = [each for each in built.used if each.name in names]
        what = " and ".join(rung.name for rung in rungs)
        left_out.append({"what": what, "sets": [each.name for each in out], "why": fault.text})
        gone = [*gone, *out]


def unchecked(make: Make) -> dict[str, Any]:
    """Builds without a check, because the user asked for none."""
    return _record(make([]), [], "EAGLE3_PROOF is OFF")


def _next_rungs(built: Built, fault: Fault, kind: str, patience: float) -> list[Rung]:
    """What to leave out next. AMX alone, only if the same library passes with EAGLE3_LLAMA_AMX=0.

    Where only rows differ, nothing else than AMX: its sums are right, and without AVX-512 it would be slower.
    """
    names = {each.name for each in built.used}
    rungs = [rung for rung in RUNGS if names.intersection(rung.sets)]
    if rungs and rungs[0].name == "AMX" and kind != "stock-":
        passes = check(built.folder, _ARGUMENTS[kind], patience, {"EAGLE3_LLAMA_AMX": "0"}) is None
        rungs = rungs[: 1 if passes else 2]
        return rungs if passes or fault.kind != "rows" else []
    return rungs[:1] if fault.kind != "rows" else []


def _accepted(built: Built, fault: Fault, left_out: list[dict[str, Any]]) -> dict[str, Any]:
    say(
        f"{fault.text} on this processor: two tokens of nearly the same probability may be exchanged against "
        "plain decoding; everything else is right"
    )
    return {**_record(built, left_out), "note": fault.text}


def _nothing_left(fault: Fault, left_out: list[dict[str, Any]]) -> str:
    without = f", also without {', '.join(each['what'] for each in left_out)}" if left_out else ""
    return (
        f"{fault.text} on this processor{without}: no library can be built here. Try another compiler (CC, "
        "CXX), and please report this line with the compiler's version and the output of lscpu"
    )


def _record(built: Built, left_out: list[dict[str, Any]], why_not: str = "") -> dict[str, Any]:
    """What is written to RECORD. why_not: why the library was not checked, or "" if it passed."""
    used = [each.name for each in built.used]
    return {"checked": not why_not, "why_not": why_not, "used": used, "left_out": left_out}


def _checked(folder: Path, kind: str, patience: float) -> Fault | None:
    """check(), with a line that shows how long it took."""
    print("eagle3-llama: checking the library ...", end="", file=sys.stderr, flush=True)
    start, fault = time.monotonic(), None
    try:
        fault = check(folder, _ARGUMENTS[kind], patience)
    finally:
        print(f" {time.monotonic() - start:.0f} s{', failed' if fault else ''}", file=sys.stderr, flush=True)
    return fault


def check(
    folder: Path, arguments: Sequence[str] = (), patience: float = PATIENCE, env: dict[str, str] | None = None
) -> Fault | None:
    """Runs eagle3-proof of this folder. None if all is right."""
    with tempfile.TemporaryDirectory(prefix="eagle3-proof-") as tmp, tempfile.TemporaryFile() as errors:
        chosen = ("EAGLE3_LLAMA_AMX", "EAGLE3_LLAMA_INTERLEAVE")
        inherited = {name: value for name, value in os.environ.items() if name not in chosen}
        leaks = {"ASAN_OPTIONS": "detect_leaks=0"}  # of a sanitized library
        try:
            child = subprocess.Popen(
                [folder / PROGRAM, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**inherited, **leaks, "TMPDIR": tmp, **(env or {})},
                preexec_fn=_no_core_file,
            )
        except OSError as error:  # built for another system
            return Fault("cannot", f"{PROGRAM} does not run: {error.strerror}")
        with child:
            step, ended = _follow(child, patience)
        errors.seek(0)
        said = errors.read().decode(errors="replace").strip().splitlines()
    return _judge(step, child.returncode if ended else None, said)


def _no_core_file() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def _follow(child: subprocess.Popen, patience: float) -> tuple[str, bool]:
    """The last line that the child wrote, and whether it ended by itself."""
    told, ended = b"", False
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        try:
            while selector.select(patience):
                data = os.read(child.stdout.fileno(), 4096)
                if not data:
                    child.wait(patience)
                    ended = True
                    break
                told += data
        except subprocess.TimeoutExpired:
            pass
        finally:
            child.kill()
    lines = told.decode(errors="replace").splitlines()
    return (lines[-1] if lines else ""), ended


def _judge(step: str, code: int | None, said: list[str]) -> Fault | None:
    """What the end of the child means. code: its exit code, or None if it had to be ended."""
    last = said[-1] if said else ""
    subject = re.sub(r" \(CPU\)$", "", step)
    plural = subject.startswith("products")
    if code is None:
        return Fault("failed", f"{subject or 'the start'} {'do' if plural else 'does'} not end")
    if code == 0 and step == "ok":
        return None
    if code < 0:
        name = _signal_name(-code)
        return Fault("failed", f"{subject or 'the start'} {'end' if plural else 'ends'} with {name}")
    if code == _CANNOT or not step:
        return Fault("cannot", last or f"{PROGRAM} ends with exit code {code}")
    if code == _ROWS_DIFFER:
        return Fault("rows", last)
    are = "are" if plural else "is"
    return Fault("failed", f"{subject} {are} wrong ({last or f'exit code {code}'})")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
