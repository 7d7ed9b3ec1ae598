"""Stock llama-cpp-python on an unpatched libllama of the same version and flags, in processes of its own."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from eagle3_llama.bench.child import of_checkout

environment, stock_dir = of_checkout("stock").environment, of_checkout("stock").libraries

# Reads a path and settings, and writes what greedy decoding gives: the prompt's tokens, the text's, and the
# logits that chose each of them. It imports llama_cpp alone.
_DECODE = """
import json, sys
import llama_cpp, numpy as np
given, out = json.loads(sys.argv[1]), sys.argv[2]
llm = llama_cpp.Llama(given["path"], n_ctx=given["n_ctx"], n_batch=given["n_ctx"], n_threads=given["threads"],
                      n_threads_batch=given["threads"], flash_attn=given["flash"], verbose=False)
prompt = given["prompt"] if isinstance(given["prompt"], list) else llm.tokenize(given["prompt"].encode())
text, rows, last = [], [], prompt
for _ in range(given["n"]):
    llm.eval(last)
    row = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(llm.ctx, -1), shape=(llm.n_vocab(),)).copy()
    rows.append(row)
    last = [int(row.argmax())]
    text += last
np.savez(out, prompt=prompt, text=text, logits=np.stack(rows), library=llama_cpp.llama_cpp._lib._name)
"""


def run_stock(code, *arguments, timeout=900):
    """Runs Python code whose llama_cpp opens the unpatched libllama. Returns the finished process."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment(stock_dir()),
    )


def decode_stock(path, prompt, n, flash, threads=2, n_ctx=512):
    """Greedy decoding by the unpatched library: {prompt [p], text [n], logits [n, n_vocab]}.

    prompt: text, or token ids. Skips the test if the unpatched library crashes on this processor.
    """
    settings = {
        "path": str(path),
        "prompt": prompt,
        "n": n,
        "flash": flash,
        "threads": threads,
        "n_ctx": n_ctx,
    }
    with tempfile.TemporaryDirectory() as tmp:
        out = Path(tmp) / "out.npz"
        done = run_stock(_DECODE, json.dumps(settings), str(out))
        if done.returncode < 0:
            left_out = json.loads((stock_dir() / "proof.json").read_text())["left_out"]
            pytest.skip(
                f"unpatched llama.cpp ends with signal {-done.returncode} in {Path(path).name} on this "
                f"processor; left out of it: {left_out or 'nothing'}"
            )
        assert done.returncode == 0, done.stderr[-2000:]
        with np.load(out) as arrays:
            found = {name: arrays[name] for name in arrays.files}
    assert Path(str(found.pop("library"))).parent.resolve() == stock_dir().resolve()
    return found
