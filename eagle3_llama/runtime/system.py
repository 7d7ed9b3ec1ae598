"""`eagle3-llama info --system`: the processor, the library and its check, for a report of a fault.

The library is loaded and checked in child processes, because one that does not suit the processor may end a
process.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..common.files import cache_dir
from ..errors import EagleError
from . import checking, devices, library, machine, variants

Row = tuple[str, str]

# instruction sets that the CPU backend has code for, by Linux's names
_KNOWN_SETS = set(
    "ssse3 sse4_2 avx f16c fma avx2 bmi2 avx_vnni avx512f avx512bw avx512cd avx512dq avx512vl avx512vbmi "
    "avx512_vnni avx512_bf16 avx512_fp16 amx_tile amx_int8 amx_bf16 "
    "asimd asimdhp asimddp i8mm sve sve2 sme".split()
)
# shown if set: what changes a build, a decode, or the library that is loaded
_VARIABLES = re.compile(r"^(EAGLE3_LLAMA_\w+|CMAKE_ARGS|OMP_\w+|GOMP_\w+|KMP_\w+|GGML_\w+|LLAMA_\w+|MTMD_\w+"
                        r"|CUDA_VISIBLE_DEVICES|LD_LIBRARY_PATH|LD_PRELOAD)$")  # fmt: skip
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD")
_LIMITS = checking.Limits(asleep=60.0, wall=600.0)  # somebody waits; it computes for a few seconds
_LOAD = "from eagle3_llama.runtime.system import tell; tell()"


def describe() -> Iterator[Row]:
    """The system as (name, value) rows. Works without a library, and with one that cannot be loaded."""
    lib_dir = library.find_lib_dir()
    record = library.record(lib_dir) if lib_dir is not None else {}
    yield from _versions(record)
    yield from _machine()
    choice = _choice(lib_dir)
    yield from _instruction_sets(record, choice)
    yield from _library(lib_dir, record, choice)
    yield "cache", _cache()
    yield "environment", _environment(dict(os.environ))


def _versions(record: dict[str, Any]) -> Iterator[Row]:
    for package in ("eagle3-llama", "llama-cpp-python"):
        try:
            yield package, importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            yield package, "not installed"
    if "llama.cpp" in record:
        yield "llama.cpp", f"{record['llama.cpp']}, patched tree {record.get('tree', 'unknown')}"
    yield "Python", f"{platform.python_version()}, {platform.python_implementation()}"


def _machine() -> Iterator[Row]:
    yield "system", f"{platform.platform()}, {' '.join(platform.libc_ver()) or 'unknown libc'}"
    yield "processor", machine.model()
    yield "cores", f"{machine.cores()} usable of {os.cpu_count()}; so many threads by default"


def _choice(lib_dir: Path | None) -> variants.CpuBackend | str | None:
    """The variant that is chosen here, why none can be, or None if the library has none."""
    try:
        return variants.choose(lib_dir) if lib_dir is not None else None
    except EagleError as e:
        return str(e)


def _variant(lib_dir: Path, choice: variants.CpuBackend | str) -> Iterator[Row]:
    there = ", ".join(variants.names(lib_dir))
    if isinstance(choice, str):
        yield "variant", _private(choice)
        return
    how = "named by" if os.environ.get(variants.VARIABLE) else "chosen here; to name another:"
    yield "variant", f"{choice.name}, {how} {variants.VARIABLE}, of {there}"
    for name, why in choice.dropped:
        yield "not used here", f"the variant {name}, because {why}"
    if choice.remark:
        yield "note", choice.remark


def _instruction_sets(record: dict[str, Any], choice: variants.CpuBackend | str | None) -> Iterator[Row]:
    known = machine.sets()
    mine = sorted(known & (_KNOWN_SETS | set(record.get("used", ()))))
    yield "it has", ", ".join(mine) or "unknown"
    if "used" not in record:
        yield "used", "unknown: the library has no proof.json, which native/build.py writes"
        return
    used = record["used"]
    if isinstance(choice, variants.CpuBackend):
        used = record.get("variants", {}).get(choice.name, ())
    yield "used", ", ".join(used) or "no special ones"
    for each in record.get("left_out", ()):
        yield "left out", f"{each['what']}, because {each['why']}"
    if record.get("note"):
        yield "note", record["note"]


def _library(
    lib_dir: Path | None, record: dict[str, Any], choice: variants.CpuBackend | str | None
) -> Iterator[Row]:
    if lib_dir is None:
        yield "library", "not installed: install the package with pip"
        return
    if "compiler" in record:
        set_then = [f"{name}={_private(value)}" for name, value in record.get("environment", {}).items()]
        yield "compiled by", ", ".join([record["compiler"], *set_then])
    if "checked" in record:
        yield "checked when built", "yes" if record["checked"] else f"not checked: {record.get('why_not')}"
    yield "folder", _private(str(lib_dir))
    if choice is not None:
        yield from _variant(lib_dir, choice)
    told = _told_by_a_child()
    if "error" in told:
        yield "library", f"cannot be loaded: {_private(told['error'])}"
    elif not told:
        yield "library", f"did not load within {_LIMITS.wall:.0f} s: it waits, or the machine is too busy"
    else:
        yield "library", f"loads, ABI {told['abi']}"
        yield from (("device", _private(device)) for device in told["devices"] or ["none"])
        yield "ggml", told["ggml"]
    if (lib_dir / checking.FILE).is_file():
        chosen = [lib_dir / choice.file] if isinstance(choice, variants.CpuBackend) else []
        yield "products", _products(checking.check(lib_dir, chosen, _LIMITS, checking.of_the_user()))


def _products(fault: checking.Fault | None) -> str:
    if fault is None:
        return "right on this processor"
    return f"{'not checked: ' if fault.kind == 'cannot' else ''}{_private(fault.text)}"


def tell() -> None:
    """Loads the library and prints what it says of itself, as JSON: `describe` calls this in a child."""
    try:
        _, lib = library.load()
        import llama_cpp

        lib_dir = library.find_lib_dir()
        told: dict[str, Any] = {
            "abi": lib.eagle3_abi_version(),
            "devices": devices.beside_the_processor(lib_dir) if lib_dir is not None else [],
            "ggml": llama_cpp.llama_print_system_info().decode("utf-8", "replace").strip(" |"),
        }
    except EagleError as e:
        told = {"error": str(e)}
    print(json.dumps(told))


def _told_by_a_child() -> dict[str, Any]:
    """Output of `tell`. "error" says how the child failed; {} if it has not ended, for whatever reason."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _LOAD],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_LIMITS.wall,
            preexec_fn=checking.limited(_LIMITS.computing),
        )
    except subprocess.TimeoutExpired:
        return {}
    except OSError as e:
        return {"error": f"it does not run: {e.strerror}"}
    if done.returncode < 0:
        return {"error": f"the process ends with {checking.signal_name(-done.returncode)}"}
    last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    try:
        return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {"error": last}
    except (IndexError, ValueError):
        return {"error": last}


def _cache() -> str:
    """The folder of models, downloads and builds, its size, and how to remove it."""
    try:
        folder = cache_dir()
    except EagleError as e:
        return str(e)
    if not folder.is_dir():
        return f"{_private(str(folder))}, not there yet"
    sizes = sorted(((_bytes(part), part.name) for part in folder.iterdir()), reverse=True)
    parts = ", ".join(f"{name} {size / 1e6:,.0f}" for size, name in sizes[:3])
    shown = _private(str(folder))
    typed = re.sub(r"([^\w/.~-])", r"\\\1", shown)
    return f"{shown}, {sum(size for size, _ in sizes) / 1e6:,.0f} MB ({parts}); to remove it: rm -r {typed}"


def _bytes(path: Path) -> int:
    """Of a file, or of all files below a folder. What vanishes meanwhile counts nothing."""
    walk = os.walk(path) if path.is_dir() else [(str(path.parent), [], [path.name])]
    total = 0
    for folder, _, names in walk:
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_size
    return total


def _environment(env: dict[str, str]) -> str:
    shown = {name: value for name, value in sorted(env.items()) if _VARIABLES.match(name)}
    return ", ".join(
        f"{name}={'(set)' if _SECRET.search(name) else _private(value)}" for name, value in shown.items()
    ) or "nothing set that matters"  # fmt: skip


def _private(text: str) -> str:
    """Without the path of the user's home."""
    home = os.path.expanduser("~")  # as it is, if there is none
    return text.replace(home, "~") if len(home) > 1 else text
