"""What capture gives on tiny random models of every architecture that llama.cpp's own test can make.

    python tests/kit/architectures.py    # one JSON line a model

llama.cpp's tests/test-llama-archs.cpp is compiled as it is, within native/tests/architectures/generator.hpp.
"""

import json

from commands import run
from native_programs import program


def check_all(tool, only=None):
    """A dict an architecture and kind: arch, kind, n_layer, code, seen, equal, plain, rows, three, or why.

    only: these architectures.

    seen are layers whose inputs the graph showed, equal those that capture gave alike; plain is the code of a
    decode after it. rows: whether the logits of rows have the same bits when these are decoded one by one and
    together, None where neither is possible. three is the code of a decode of three sequences.
    """
    listed = run([tool, "list"]).stdout
    for line in listed.splitlines():
        arch, supported, dense, moe = line.split("\t")
        if arch == "(unknown)" or (only and arch not in only):
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
    for result in check_all(program("architectures")):
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
