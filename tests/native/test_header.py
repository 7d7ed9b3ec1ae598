"""eagle3.h: its example compiles as C and generates, and Python has its limits."""

import os
import re
import subprocess
import sys

import pytest
import tiny_models
from commands import run
from paths import ROOT

import eagle3_llama
from eagle3_llama.common import limits
from eagle3_llama.runtime.library import find_lib_dir, load

HEADER = ROOT / "native" / "include" / "eagle3.h"
sys.path.insert(0, str(ROOT / "native"))

import fetch  # noqa: E402

_BEFORE = """
#include "eagle3.h"
#include "llama.h"
#include <stdio.h>
"""
_MAIN = """
int main(int argc, char ** argv) {
    (void) argc;
    ggml_backend_load_all();
    struct llama_model * model = llama_model_load_from_file(argv[1], llama_model_default_params());
    struct llama_context * ctx = llama_init_from_model(model, llama_context_default_params());
    eagle3_head * head = NULL;
    eagle3_session * s = NULL;
    const int32_t prompt[] = {5, 6, 7};
    int32_t out[40 + EAGLE3_MAX_DRAFT];
    struct llama_sampler * greedy = llama_sampler_init_greedy();
    int32_t n = eagle3_head_open(argv[2], model, &head);
    if (n == 0) n = eagle3_session_open(ctx, head, 1, &s);
    if (n == 0) n = eagle3_prefill(s, 0, prompt, 3, 0);
    if (n == 0) n = generate(s, greedy, eagle3_sample(s, greedy, -1), out, 40);
    if (n < 40) {
        fprintf(stderr, "%d: %s\\n", n, eagle3_last_error());
        return 1;
    }
    for (int i = 0; i < 40; ++i) printf("%d ", out[i]);
    eagle3_session_close(s);
    eagle3_head_close(head);
    llama_sampler_free(greedy);
    llama_free(ctx);
    llama_model_free(model);
    return 0;
}
"""


def example():
    """The function in the header's comment."""
    lines = HEADER.read_text(encoding="utf-8").splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("//     int32_t generate("))
    last = next(i for i in range(first, len(lines)) if lines[i] == "//     }")
    return "\n".join(line.removeprefix("//     ") for line in lines[first : last + 1])


@pytest.mark.skipif(sys.platform != "linux", reason="the linker's options are those of Linux")
def test_the_example_generates_what_plain_decoding_does(tmp_path):
    tree, _ = fetch.patched_tree(os.environ.get("EAGLE3_LLAMA_CPP_DIR"))
    lib = find_lib_dir()
    files = [tiny_models.target(tmp_path / "target.gguf"), tiny_models.head(tmp_path / "head.gguf")]
    said = []
    for kind in ("EAGLE3_CHAIN", "EAGLE3_PLAIN"):
        source = tmp_path / f"{kind}.c"
        source.write_text(_BEFORE + example().replace("EAGLE3_CHAIN", kind) + _MAIN)
        command = [
            os.environ.get("CC", "cc"),
            "-std=c11",
            "-Wall",
            "-Wextra",
            "-Wno-missing-field-initializers",
        ]
        command += ["-Werror", f"-I{HEADER.parent}", f"-I{tree / 'include'}", f"-I{tree / 'ggml/include'}"]
        command += [source, "-o", tmp_path / kind, f"-L{lib}", f"-Wl,-rpath,{lib},-rpath-link,{lib}"]
        run([*command, "-leagle3", "-lllama", "-lggml", "-lggml-base"])
        done = subprocess.run([tmp_path / kind, *files], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr[-2000:]
        said.append(done.stdout)
    assert said[0] == said[1] and len(said[0].split()) == 40


def test_python_has_the_limits_of_the_library():
    _, lib = load()
    found = {name: getattr(lib, f"EAGLE3_MAX_{name}") for name in ("ROWS", "DRAFT", "WIDTH")}
    assert found == {name: getattr(limits, f"MAX_{name}") for name in found}


def test_a_limit_that_no_header_has(monkeypatch, tmp_path):
    monkeypatch.setattr(limits, "_PLACES", (tmp_path / "eagle3.h",))
    with pytest.raises(eagle3_llama.EagleError, match=re.escape("reinstall eagle3-llama")):
        limits._read_limit("ROWS")
