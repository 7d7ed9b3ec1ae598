"""Proves a library on this processor before anyone uses it, and leaves out instruction sets that fail.

eagle3-proof (native/proof/), which is built with the library, runs in a child process: products in each
weight format and tiny generations. If it ends by a signal, does not end, or its sums differ, the library is
built again without the next instruction set of RUNGS. If it could not be run, or the machine was too busy for
it, the library is kept as it is and called not checked. What was found is kept beside the library, in RECORD,
for `eagle3-llama info --system`. This file uses the standard library only.
"""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))
from fetch import ROOT, BuildError, say
from toolchain import InstructionSet


def _of_the_package(name: str) -> ModuleType:
    """A file of the package that needs nothing installed. The package itself may not be importable yet."""
    path = ROOT / "eagle3_llama" / "runtime" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"_eagle3_{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


checking = _of_the_package("checking")
Fault, check = checking.Fault, checking.check
Limits, LIMITS = checking.Limits, checking.LIMITS
PROGRAM, RECORD = checking.PROGRAM, "proof.json"
_ARGUMENTS = {"": [], "stock-": ["--stock"], "sanitized-": ["--few"]}
_ENDS = {"failed": ", failed", "rows": ", rows differ", "cannot": ", not checked"}  # by Fault.kind


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


class Built(NamedTuple):
    folder: Path
    used: list[InstructionSet]  # what the compiler may have used
    foreign: list[str]  # those of them that this processor has not, as the user asked
    variants: dict[str, list[str]] | None = None  # the sets of each CPU backend, where there are several


Make = Callable[[list[InstructionSet]], Built]  # builds without these sets


def prove(make: Make, kind: str = "", limits: Limits = LIMITS) -> dict[str, Any]:
    """Builds, checks, and builds again without what fails. Returns the record of the last build.

    kind: "stock-" for an unpatched library, "sanitized-" for one with sanitizers. Raises BuildError if the
    library fails without all sets of RUNGS.
    """
    left_out: list[dict[str, Any]] = []
    gone: list[InstructionSet] = []
    while True:
        built = make(gone)
        fault = _checked(built.folder, _ARGUMENTS[kind], limits)
        if fault is None:
            return _record(built, left_out)
        if fault.kind == "cannot" or built.foreign:
            why = f"this processor has no {', '.join(built.foreign)}" if built.foreign else fault.text
            say(f"the library was not checked: {why}")
            return _record(built, left_out, why)
        rungs = _next_rungs(built, fault, kind, limits)
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


def prove_variants(built: Built, checked: bool = True, limits: Limits = LIMITS) -> dict[str, Any]:
    """Checks each CPU backend that this processor can run, and deletes those that fail. Returns the record.

    Where the library is used, the one that is chosen is checked again (eagle3_llama/runtime/variants.py).
    Raises BuildError if none is left.
    """
    kept, left_out, here = dict(built.variants or {}), [], []
    unknown: list[str] = [] if checked else ["EAGLE3_PROOF is OFF"]
    for name in sorted(kept) if checked else ():
        path = built.folder / checking.backend_file(name)
        try:
            if checking.score(built.folder, path) == 0:
                continue
        except OSError as error:
            why = f"{PROGRAM} does not run: {error.strerror}"
            say(f"the library was not checked: {why}")
            return {**_record(built, [], why), "variants": kept}
        fault = _checked(built.folder, [path], limits, f"the variant {name}")
        if fault is None or fault.kind == "rows":
            here.append(name)
            continue
        if fault.kind == "cannot":
            unknown.append(f"the variant {name}: {fault.text}")
            say(f"the variant {name} was not checked: {fault.text}")
            continue
        say(f"{fault.text} on this processor: leaving out the variant {name}")
        left_out.append({"what": f"the variant {name}", "sets": kept.pop(name), "why": fault.text})
        path.unlink()
    if not kept:
        raise BuildError(_nothing_left(Fault("failed", left_out[-1]["why"]), left_out))
    record = _record(built, left_out, "; ".join(unknown))
    return {**record, "variants": kept, "checked_variants": here}


def unchecked(make: Make) -> dict[str, Any]:
    """Builds without a check, because the user asked for none."""
    return _record(make([]), [], "EAGLE3_PROOF is OFF")


def _next_rungs(built: Built, fault: Fault, kind: str, limits: Limits) -> list[Rung]:
    """What to leave out next. AMX alone, only if the same library passes with EAGLE3_LLAMA_AMX=0.

    Where only rows differ, nothing else than AMX: its sums are right, and without AVX-512 it would be slower.
    """
    names = {each.name for each in built.used}
    rungs = [rung for rung in RUNGS if names.intersection(rung.sets)]
    if rungs and rungs[0].name == "AMX" and kind != "stock-":
        without = check(built.folder, _ARGUMENTS[kind], limits, {"EAGLE3_LLAMA_AMX": "0"})
        passes = without is None or without.kind == "cannot"  # not known: the next build is checked, too
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


def _checked(
    folder: Path, arguments: Sequence[object], limits: Limits, what: str = "the library"
) -> Fault | None:
    """check(), with a line that shows how long it took."""
    print(f"eagle3-llama: checking {what} ...", end="", file=sys.stderr, flush=True)
    start, end = time.monotonic(), ""
    try:
        fault = check(folder, arguments, limits)
        end = _ENDS[fault.kind] if fault else ""
    finally:
        print(f" {time.monotonic() - start:.0f} s{end}", file=sys.stderr, flush=True)
    return fault
