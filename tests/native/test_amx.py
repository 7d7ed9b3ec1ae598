"""AMX on processors without it: what a compiler makes of the products, read from the object code."""

import platform
import re
import shutil
import struct
import subprocess
import sys

import pytest
from commands import run
from paths import ROOT

sys.path.insert(0, str(ROOT / "native"))

import fetch

# palette 1; bytes of a row and rows of the eight tiles: B twice, A twice, C four times
CONFIGURATION = struct.pack("<BB14x16H16B", 1, 0, *[64, 64, 32, 32, 64, 64, 64, 64], *[0] * 8,
                            *[8, 8, 16, 16, 16, 16, 16, 16], *[0] * 8)  # fmt: skip
FUNCTION = re.compile(r"^[0-9a-f]+ <(.+)>:$")
RELOCATION = re.compile(r"^\s*[0-9a-f]+: R_X86_64_\w+\s+(\S+?)([+-]0x[0-9a-f]+)?$")
TARGET = re.compile(r"\b(?:call|jmp)q?\s+[0-9a-f]+ <(.+?)(?:[+-]0x[0-9a-f]+)?>")


class Object:
    """An object file, read with objdump."""

    def __init__(self, path):
        self.path = path
        self.functions = {}  # of each function: its instructions, relocations behind them
        lines = []
        for line in self._dump("-dr", "--no-show-raw-insn").splitlines():
            if match := FUNCTION.match(line):
                lines = self.functions.setdefault(match[1], [])
            elif line.strip():
                lines.append(line)

    def _dump(self, *arguments):
        return subprocess.run(
            ["objdump", *arguments, self.path], check=True, capture_output=True, text=True, timeout=120
        ).stdout

    def with_instruction(self, name):
        return {f for f, lines in self.functions.items() if any(name in line for line in lines)}

    def callers(self, function):
        def calls(lines):
            named = {m[1] for line in lines if (m := TARGET.search(line))}
            return function in named | {m[1] for line in lines if (m := RELOCATION.match(line))}

        return {f for f, lines in self.functions.items() if f != function and calls(lines)}

    def constants(self, instruction, size):
        """What each of these instructions reads: size bytes of read-only data, else the instruction."""
        found = []
        for lines in self.functions.values():
            for line, following in zip(lines, [*lines[1:], ""], strict=True):
                if instruction not in line:
                    continue
                match = RELOCATION.match(following)
                if match and "(%rip)" in line:
                    found.append(self._read_only(match[1], int(match[2] or "0", 16) + 4, size))
                else:
                    found.append(line.strip())
        return found

    def _read_only(self, name, offset, size):
        """size bytes of a section, or of a symbol's section, or a text that says why there are none."""
        if symbol := re.search(
            rf"^([0-9a-f]+) .* (\S+)\t[0-9a-f]+ {re.escape(name)}$", self._dump("-t"), re.MULTILINE
        ):
            name, offset = symbol[2], offset + int(symbol[1], 16)
        flags = re.search(rf"^\s*\d+ {re.escape(name)} .*\n(.*)$", self._dump("-h"), re.MULTILINE)
        if not flags or "READONLY" not in flags[1]:
            return f"{name} is not read-only"
        rows = re.findall(r"^ [0-9a-f]+ ((?:[0-9a-f]+ ){1,4})", self._dump("-s", "-j", name), re.MULTILINE)
        return bytes.fromhex("".join(rows))[offset : offset + size]


def problems(code):
    """What is wrong with the tile instructions of an object file."""
    found = [
        f"ldtilecfg loads {data if isinstance(data, str) else data.hex()}"
        for data in code.constants("ldtilecfg", 64)
        if data != CONFIGURATION
    ]
    configures, multiplies = code.with_instruction("ldtilecfg"), code.with_instruction("tdp")
    if not configures or not multiplies:
        found.append("no tile instructions")
    found += [f"{f} does not release its tiles" for f in configures - code.with_instruction("tilerelease")]

    def covered(function, above=()):
        callers = code.callers(function) - {*above}
        return function in configures or (
            bool(callers) and all(covered(f, (*above, function)) for f in callers)
        )

    return found + [f"{f} multiplies without a configuration" for f in multiplies if not covered(f)]


def compiled(tmp_path, tree):
    if platform.machine() not in ("x86_64", "AMD64") or sys.platform != "linux":
        pytest.skip("AMX is x86's")
    compiler = shutil.which("g++") or shutil.which("clang++")
    if not compiler or not shutil.which("objdump"):
        pytest.skip("needs a compiler and objdump")
    cpu = tree / "ggml" / "src" / "ggml-cpu"
    options = ["-std=gnu++17", "-O3", "-DNDEBUG", "-D_GNU_SOURCE", "-fPIC", "-march=sapphirerapids"]
    folders = [f"-I{folder}" for folder in (cpu, cpu.parent, tree / "ggml" / "include")]
    out = tmp_path / "mmq.o"
    done = subprocess.run(
        [compiler, *options, *folders, "-c", cpu / "amx" / "mmq.cpp", "-o", out],
        capture_output=True,
        text=True,
        timeout=600,
    )
    if "bad value" in done.stderr or "unsupported argument" in done.stderr:
        pytest.skip("the compiler does not know AMX")
    assert done.returncode == 0, done.stderr[-3000:]
    return Object(out)


@pytest.mark.thorough
def test_each_product_loads_the_whole_configuration(tmp_path):
    tree, _ = fetch.patched_tree()
    assert problems(compiled(tmp_path, tree)) == []


AMX = "tile int8".split()
AVX512 = "f bw vl dq vnni vbmi".split()


@pytest.mark.thorough
def test_rows_that_are_permuted_are_taken(tmp_path):
    """A loader asks with contiguous activations, the graph of a model with MLA has permuted ones: one answer.
    Otherwise such a model ends the process as it is loaded."""
    from eagle3_llama.runtime.library import find_lib_dir

    if platform.machine() not in ("x86_64", "AMD64") or sys.platform != "linux" or not shutil.which("g++"):
        pytest.skip("needs GCC on Linux, for x86")
    tree, lib = fetch.patched_tree()[0], find_lib_dir()
    cpu = tree / "ggml" / "src" / "ggml-cpu"
    program, products = tmp_path / "amx", tmp_path / "mmq.o"
    flags = [f"-mamx-{x}" for x in AMX] + [f"-mavx512{x}" for x in AVX512] + ["-mavx2", "-mfma", "-mf16c"]
    folders = [f"-I{folder}" for folder in (cpu, cpu.parent, tree / "ggml" / "include")]
    libraries = [f"-L{lib}", "-lggml-cpu", "-lggml-base", "-lggml", f"-Wl,-rpath,{lib}", "-pthread"]
    source = ROOT / "tests" / "kit" / "amx.cpp"
    compiler = ["g++", "-std=gnu++17", "-O1", "-w", *folders]
    run([*compiler, *flags, "-c", cpu / "amx" / "mmq.cpp", "-o", products])
    run([*compiler, source, products, "-o", program, *libraries])
    done = subprocess.run([program], capture_output=True, text=True, timeout=60)
    *taken, same = done.stdout.split("\n", 3)
    assert taken == ["q8_0 1 1", "q4_0 1 1", "f16 1 1"], (done.returncode, done.stderr)
    assert done.returncode == 77 or (done.returncode == 0 and same == "same\n"), done.stderr


# what GCC 12 made of upstream's function, shortened: the rows and columns are never stored
UPSTREAM = """
    .text
    .globl product, helper
product:
    cmpb $0, done(%rip)
    jne 1f
    vpxor %xmm0, %xmm0, %xmm0
    vmovdqa64 %zmm0, -64(%rsp)
    movb $1, -64(%rsp)
    ldtilecfg -64(%rsp)
1:  call helper
    ret
helper:
    tdpbssd %tmm0, %tmm2, %tmm4
    ret
stranger:
    call helper
    ret
    .bss
done: .zero 1
"""


def test_the_check_sees_what_was_wrong(tmp_path):
    """Stores that are missing, tiles that stay, a product that a function without configuration calls."""
    if platform.machine() not in ("x86_64", "AMD64") or not all(map(shutil.which, ("as", "objdump"))):
        pytest.skip("needs an assembler for x86")
    out = tmp_path / "upstream.o"
    subprocess.run(["as", "-o", out], input=UPSTREAM, text=True, check=True, timeout=60)
    found = "\n".join(problems(Object(out)))
    assert "ldtilecfg loads" in found and "-0x40(%rsp)" in found
    assert "product does not release its tiles" in found
    assert "helper multiplies without a configuration" in found
