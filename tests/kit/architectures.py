"""What capture gives on tiny random models of every architecture that llama.cpp's own test can make.

    python tests/kit/architectures.py    # one JSON line a model

llama.cpp's tests/test-llama-archs.cpp is compiled as it is, within shim/generator.hpp, against our libraries.
"""

import json
import sys
import tempfile
from pathlib import Path

from commands import run
from paths import ROOT

HERE = Path(__file__).resolve().parent


_tools = {}  # of this process, by name: a compiler needs half a minute for one


def compile_tool(folder, name="architectures"):
    """The program of a file of shim/, compiled within llama.cpp's generator, once a process."""
    if name not in _tools:
        _tools[name] = _compiled(folder, name)
    return _tools[name]


def _compiled(folder, name):
    sys.path.insert(0, str(ROOT / "native"))
    from fetch import patched_tree

    from eagle3_llama.runtime.library import find_lib_dir

    tree, lib, tool = Path(patched_tree()[0]), find_lib_dir(), folder / name
    includes = [
        f"-I{p}"
        for p in (
            HERE / "shim",
            ROOT / "native" / "include",
            *(tree / d for d in ("tests", "include", "ggml/include", "src")),
        )
    ]
    run(
        [
            "c++",
            "-std=c++17",
            "-O1",
            "-w",
            *includes,
            HERE / "shim" / f"{name}.cpp",
            "-o",
            tool,
            f"-L{lib}",
            "-leagle3",
            "-lllama",
            "-lggml",
            "-lggml-base",
            f"-Wl,-rpath,{lib}",
        ]
    )
    return tool


def check_all(tool):
    """A dict an architecture and kind: arch, kind, n_layer, code, seen, equal, plain, rows, three, or why.

    seen are layers whose inputs the graph showed, equal those that capture gave alike; plain is the code of a
    decode after it. rows: whether the logits of rows have the same bits when these are decoded one by one and
    together, None where neither is possible. three is the code of a decode of three sequences.
    """
    listed = run([tool, "list"]).stdout
    for line in listed.splitlines():
        arch, supported, dense, moe = line.split("\t")
        if arch == "(unknown)":
            continue
        if supported == "0":
            yield {"arch": arch, "why": "the generator leaves it out"}
            continue
        for kind in ["dense"] * int(dense) + ["moe"] * int(moe):
            yield {"arch": arch, "kind": kind, **check(tool, arch, kind)}


def check(tool, arch, kind):
    done = run([tool, "check", arch, kind], code=None)
    if done.returncode != 0:
        return {
            "why": f"the generator ends with {done.returncode}: "
            f"{(done.stderr.strip().splitlines() or [''])[-1][:100]}"
        }
    n_layer, code, seen, equal, plain, rows, three = done.stdout.rstrip("\n").split("\t")
    return {
        "n_layer": int(n_layer),
        "code": int(code),
        "seen": [int(k) for k in seen.split()],
        "equal": [int(k) for k in equal.split()],
        "plain": int(plain),
        "rows": None if rows == "-1" else rows == "1",
        "three": int(three),
    }


def main():
    with tempfile.TemporaryDirectory() as folder:
        for result in check_all(compile_tool(Path(folder))):
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
