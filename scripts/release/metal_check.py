#!/usr/bin/env python3
"""Does Metal compute what our graphs need? Read from llama.cpp's sources, as no test here has a Mac's GPU.

    python scripts/release/metal_check.py [VERSION]

VERSION: of llama-cpp-python; without it, the pinned one. The operations are those that native/src builds
graphs of: each ggml_... call there, with the operation that ggml/src/ggml.c gives it. For each the report
says whether ggml-metal computes it on every GPU, on those with SIMD-group reductions or matrices, or not at
all. The paravirtual GPU of GitHub's runners has neither. Then come the head sizes that attention has kernels
for. Exit status: 0 if everything is there, 1 if not, 2 if the check cannot run.
"""

from __future__ import annotations

import argparse
import re
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "native"))
import fetch
from fetch import ROOT

GRAPHS = "ggml/src/ggml.c"
METAL = "ggml/src/ggml-metal/ggml-metal-device.m"
SIZES = (64, 80, 96, 112, 128, 192, 256)  # of heads in published targets and EAGLE heads
# Kinds of an operation that our graphs use, and types that its case must name.
NEEDS = {
    "GLU": ("GGML_GLU_OP_SWIGLU",),
    "CONCAT": ("GGML_TYPE_F32",),
    "SET_ROWS": ("GGML_TYPE_F32", "GGML_TYPE_F16", "GGML_TYPE_Q8_0"),
}
_FREE = {"NONE", "RESHAPE", "VIEW", "TRANSPOSE", "PERMUTE"}  # they compute nothing


class Support(NamedTuple):
    """What the sources say of an operation. where: which GPUs; "" for none."""

    operation: str
    where: str
    lacks: tuple[str, ...] = ()  # names in NEEDS

    @property
    def good(self) -> bool:
        return bool(self.where) and not self.lacks


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("version", nargs="?", default=fetch.VERSION, help="of llama-cpp-python")
    version = parser.parse_args().version
    try:
        files = sources(version)
        found = list(supports(used_operations(files[GRAPHS]), files[METAL]))
        sizes = head_sizes(files[METAL])
    except (fetch.BuildError, KeyError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for each in found:
        lacks = f"; its case does not name {', '.join(each.lacks)}" if each.lacks else ""
        print(f"{each.operation}: {each.where or 'not computed'}{lacks}")
    missing = [size for size in SIZES if size not in sizes]
    print(f"attention: heads of {', '.join(map(str, sorted(sizes)))}")
    if missing:
        print(f"attention: no heads of {', '.join(map(str, missing))}")
    return 0 if all(each.good for each in found) and not missing else 1


def sources(version: str) -> dict[str, str]:
    """The two files of that version. Raises BuildError if it cannot be had, KeyError if one is not there."""
    if version == fetch.VERSION:
        return dict(read(fetch.sdist()))
    with fetch.download(version) as path:
        return dict(read(path))


def read(path: Path) -> Iterator[tuple[str, str]]:
    with tarfile.open(path) as sdist:
        for member in sdist.getmembers():
            name = member.name.partition("/vendor/llama.cpp/")[2]
            data = sdist.extractfile(member) if name in (GRAPHS, METAL) else None
            if data is not None:
                yield name, data.read().decode("utf-8")


def used_operations(ggml: str) -> set[str]:
    """The operations of the graphs that native/src builds. Raises ValueError if ggml.c is not understood."""
    known = operations(ggml)
    calls = set()
    for path in (ROOT / "native" / "src").rglob("*.[ch]pp"):
        calls |= set(re.findall(r"\b(ggml_\w+)\s*\(", path.read_text(encoding="utf-8")))
    used = {operation for call in calls for operation in known.get(call, ())} - _FREE
    if not {"MUL_MAT", "RMS_NORM", "ROPE"} <= used:
        raise ValueError(f"{GRAPHS} gives operations in another way than before: mend metal_check.py")
    return used


def operations(ggml: str) -> dict[str, set[str]]:
    """{function of ggml.c: operations that it gives its result, also through functions that it calls}."""
    heads = re.finditer(r"^(?:static )?struct ggml_tensor \* (ggml_\w+)\(", ggml, re.MULTILINE)
    starts = [(match[1], match.end()) for match in heads]
    bodies = {name: ggml[at : ggml.index("\n}", at)] for name, at in starts}

    def of(name: str, before: frozenset[str]) -> set[str]:
        body = bodies[name]
        own = set(re.findall(r"->op\s*=\s*GGML_OP_(\w+)", body))
        called = set(re.findall(r"\b(ggml_\w+_impl|ggml_\w+)\(", body)) & set(bodies) - before - {name}
        if own:
            return own
        return {each for call in called for each in of(call, before | {name})}

    return {name: of(name, frozenset()) for name in bodies}


def cases(metal: str) -> dict[str, str]:
    """{operation: the code of its case in ggml_metal_device_supports_op}. Raises ValueError if it is gone."""
    match = re.search(r"^bool ggml_metal_device_supports_op\(.*?^}", metal, re.MULTILINE | re.DOTALL)
    if not match:
        raise ValueError(f"{METAL} has no ggml_metal_device_supports_op: mend metal_check.py")
    found, names, code = {}, list[str](), list[str]()
    for line in [*match[0].splitlines(), "        default:"]:
        label = re.fullmatch(r" {8}(?:case GGML_OP_(\w+)|default):", line)
        if label is None:
            code.append(line)
            continue
        if any(text.strip() for text in code):
            found |= dict.fromkeys(names, "\n".join(code))
            names = []
        code = []
        names += [label[1]] if label[1] else []
    return found


def supports(wanted: set[str], metal: str) -> Iterator[Support]:
    of = cases(metal)
    for operation in sorted(wanted):
        code = of.get(operation, "")
        if not code or code.strip() == "return false;":
            yield Support(operation, "")
            continue
        needs = NEEDS.get(operation, ())
        lacks = tuple(need for need in needs if not re.search(rf"\b{need}\b", code))
        where = "on every GPU"
        if "has_simdgroup_reduction" in code:
            where = "with SIMD-group reductions"
        elif "has_simdgroup_mm" in code:
            where = "with SIMD-group matrices"
        yield Support(operation, where, lacks)


def head_sizes(metal: str) -> set[int]:
    """Those that attention has kernels for."""
    code = cases(metal).get("FLASH_ATTN_EXT", "")
    return set(map(int, re.findall(r"src\[0\]->ne\[0\] != (\d+)", code)))


if __name__ == "__main__":
    sys.exit(main())
