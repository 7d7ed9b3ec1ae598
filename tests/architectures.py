"""Tiny random models of every architecture that llama.cpp's own test can make, and what capture gives on each.

    python tests/architectures.py FOLDER    # makes the models, checks each, prints one JSON line a model

llama.cpp's tests/test-llama-archs.cpp is compiled as it is, against our libraries, and asked to save its models.
"""

import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
N_TOKENS = 24


def make_models(folder):
    """Compiles the generator, runs it once for each architecture; {name: why there is no model}."""
    sys.path.insert(0, str(HERE.parent / "native"))
    from fetch import patched_tree

    from eagle3_llama._library import find_lib_dir

    tree, lib = Path(patched_tree()[0]), find_lib_dir()
    tool = folder / "make"
    includes = [f"-I{p}" for p in (HERE / "shim", tree / "include", tree / "ggml" / "include", tree / "src")]
    subprocess.run(["c++", "-std=c++17", "-O0", "-w", *includes, tree / "tests" / "test-llama-archs.cpp", "-o", tool, f"-L{lib}",
                    "-lllama", "-lggml", "-lggml-base", f"-Wl,-rpath,{lib}"], check=True)  # fmt: skip
    missing = {}
    for arch in architectures(tree):
        done = subprocess.run([tool, "-a", arch, "-s", "7", "-o", folder, "-v", "5"], capture_output=True, text=True, timeout=120)
        if not list(folder.glob(f"{arch}-dense.gguf")) + list(folder.glob(f"{arch}-moe.gguf")):
            lines = [x for x in done.stderr.splitlines() if "unsupported" in x or "error" in x.lower()] or done.stderr.splitlines()[-1:] or ["nothing said"]
            missing[arch] = lines[-1]
    return missing


def architectures(tree):
    """Names of llm_arch, as src/llama-arch.cpp lists them."""
    import re

    table = (tree / "src" / "llama-arch.cpp").read_text().split("LLM_ARCH_NAMES = {", 1)[1].split("};", 1)[0]
    return [name for name in re.findall(r'"([^"]+)"', table) if name != "(unknown)"]


def check(path):
    """What capture gives on a model: {"captured": [layers equal to the graph's], "n_layer": ..., "code": of llama_decode}."""
    import numpy as np

    from eagle3_llama import EagleError
    from eagle3_llama.capture import Capture
    from eagle3_llama.compare.graph import GraphLayers

    graph = GraphLayers(path, n_ctx=128, n_batch=64, n_ubatch=64)
    layers = list(range(1, graph.n_layer + 1))
    tokens = [3 + 5 * i % 100 for i in range(N_TOKENS)]
    out = {"n_layer": graph.n_layer, "captured": [], "seen": []}
    try:
        with Capture(graph.ctx, layers, graph.n_embd) as capture:
            out["code"] = graph.decode(tokens, range(N_TOKENS))
            features = capture.read(N_TOKENS) if out["code"] == 0 else None
        for j, k in enumerate(layers):
            if k in graph._seen:
                out["seen"].append(k)
                if features is not None and np.array_equal(features[:, j], graph.truth(k)) and np.isfinite(features[:, j]).all():
                    out["captured"].append(k)
    except (EagleError, ValueError) as e:
        out["error"] = str(e)[:200]
    graph.clear()
    out["plain"] = graph.decode(tokens, range(N_TOKENS))  # and the process goes on
    graph.close()
    return out


def main():
    folder = Path(sys.argv[1])
    if sys.argv[2:] == ["check"]:
        done = {line.split("\t")[0] for line in (folder / "results").read_text().splitlines()}
        for path in sorted(folder.glob("*.gguf")):
            if path.stem not in done:
                with open(folder / "results", "a") as f:  # the name first: whoever reads it knows what a crash was about
                    f.write(f"{path.stem}\t")
                    f.flush()
                    f.write(json.dumps(check(path)) + "\n")
        return
    missing = make_models(folder)
    (folder / "results").write_text("")
    while True:
        done = subprocess.run([sys.executable, __file__, folder, "check"], capture_output=True, text=True)
        if done.returncode == 0:
            break
        with open(folder / "results", "a") as f:
            f.write(json.dumps({"died": done.returncode, "why": done.stderr.strip().splitlines()[-1:]}) + "\n")
    results = dict(line.split("\t") for line in (folder / "results").read_text().splitlines())
    for name, result in results.items():
        print(json.dumps({"model": name, **json.loads(result)}))
    for name, why in missing.items():
        print(json.dumps({"model": name, "missing": why}))


if __name__ == "__main__":
    main()
