"""llama-cpp-python mirrors structs of llama.cpp in ctypes: they are laid out as in the patched headers."""

import ctypes
import os
import sys

from commands import run
from paths import ROOT

import eagle3_llama  # noqa: F401

from llama_cpp import llama_cpp, mtmd_cpp

sys.path.insert(0, str(ROOT / "native"))

import fetch

_HEADERS = ("include", "ggml/include", "tools/mtmd")
_WRONG_IN_BINDING = {
    "llama_opt_params"
}  # 0.3.36 lacks its last field; only llama_opt_init takes it, which we do not call


def mirrored():
    """Name -> class, of the structs that both the binding and the headers have."""
    tree, _ = fetch.patched_tree(os.environ.get("EAGLE3_LLAMA_CPP_DIR"))
    text = "".join((tree / name).read_text() for name in ("include/llama.h", "tools/mtmd/mtmd.h"))
    found = {
        name: value
        for module in (llama_cpp, mtmd_cpp)
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, ctypes.Structure) and getattr(value, "_fields_", ())
    }
    return tree, {name: value for name, value in found.items() if f"struct {name} {{" in text}


def fields(struct):
    """A union of the binding stands for one that has no name in the header."""
    return [field[0] for field in struct._fields_ if not issubclass(field[1], ctypes.Union)]


def test_sizes_and_offsets(tmp_path):
    tree, structs = mirrored()
    assert {"llama_model_params", "llama_context_params", "llama_batch", "mtmd_context_params"} <= set(
        structs
    )
    lines = []
    for name, struct in structs.items():
        lines.append(f'printf("{name} %zu\\n", sizeof(struct {name}));')
        lines += [
            f'printf("{name}.{field} %zu\\n", offsetof(struct {name}, {field}));' for field in fields(struct)
        ]
    source = tmp_path / "structs.cpp"
    source.write_text(
        '#include "llama.h"\n#include "mtmd.h"\n#include <cstddef>\n#include <cstdio>\n'
        "int main() {\n" + "\n".join(lines) + "\n}\n"
    )
    command = [os.environ.get("CXX", "c++"), "-std=c++17", "-Wno-invalid-offsetof"]
    command += [f"-I{tree / name}" for name in _HEADERS] + [source, "-o", tmp_path / "structs"]
    run(command)  # fails for instance for a field that the header does not have
    said = run([tmp_path / "structs"]).stdout

    ours = []
    for name, struct in structs.items():
        ours.append(f"{name} {ctypes.sizeof(struct)}")
        ours += [f"{name}.{field} {getattr(struct, field).offset}" for field in fields(struct)]
    differ = {line.split()[0].partition(".")[0] for line in set(said.splitlines()) ^ set(ours)}
    assert differ == _WRONG_IN_BINDING
