"""What a build depends on: CMake variables, compilers, the processor and its instruction sets.

This file uses the standard library only, because it runs before anything is installed.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))
from fetch import BuildError

# Environment variables that compilers and CMake read. A build with another value is another build. Without
# MACOSX_DEPLOYMENT_TARGET, which packaging sets: it would build a second time.
FLAG_VARIABLES = (
    "CFLAGS",
    "CXXFLAGS",
    "LDFLAGS",
    "CUDACXX",
    "CUDAFLAGS",
    "CUDAARCHS",
    "CUDAHOSTCXX",
    "CUDA_HOME",
    "CUDA_PATH",
    "HIPCXX",
    "HIPFLAGS",
    "ROCM_PATH",
    "OBJC",
    "OBJCXX",
    "OBJCFLAGS",
    "OBJCXXFLAGS",
    "SDKROOT",
    "CMAKE_TOOLCHAIN_FILE",
    "SOURCE_DATE_EPOCH",  # where it is set, ggml's CMake turns GGML_NATIVE off
)
# The same, and those that the build knows by what they lead to: CMake variables, a compiler, a tree.
VARIABLES = ("CMAKE_ARGS", "CC", "CXX", "EAGLE3_LLAMA_CPP_DIR", *FLAG_VARIABLES)

# Flags of the packaging or of llama-cpp-python's own build, which change nothing here.
_NOT_OURS = re.compile(
    r"^(CMAKE_INSTALL_.*|CMAKE_MAKE_PROGRAM|CMAKE_MODULE_PATH|CMAKE_PREFIX_PATH|SKBUILD.*"
    r"|Python3?_.*|PYTHON_.*|LLAMA_BUILD|LLAVA_BUILD)$"
)

# Quick to compile, with readable stack traces. Without asserts, like a release: some of ggml's asserts test
# values (no NaN in a norm) that a model file decides. Of CMAKE_ARGS, only LLAMA_BUILD_MTMD and the flags that
# choose the processor's instructions apply.
_SANITIZE = {
    "EAGLE3_SANITIZE": "ON",
    "CMAKE_BUILD_TYPE": "Debug",
    "CMAKE_C_FLAGS_DEBUG": "-O1 -g1 -DNDEBUG",
    "CMAKE_CXX_FLAGS_DEBUG": "-O1 -g1 -DNDEBUG",
}
_OF_SANITIZED = re.compile(
    r"^(LLAMA_BUILD_MTMD|GGML_(NATIVE|SSE42|AVX\w*|FMA|F16C|BMI2|AMX_\w+|CPU_ARM_ARCH))$"
)


class InstructionSet(NamedTuple):
    macro: str  # that the compiler defines where it may use it
    name: str  # in /proc/cpuinfo
    flag: str  # -m<flag>, -mno-<flag>; "" where GGML_NATIVE decides
    option: str  # ggml's, "" for none


INSTRUCTION_SETS = (
    InstructionSet("__AMX_TILE__", "amx_tile", "amx-tile", "GGML_AMX_TILE"),
    InstructionSet("__AMX_INT8__", "amx_int8", "amx-int8", "GGML_AMX_INT8"),
    InstructionSet("__AMX_BF16__", "amx_bf16", "amx-bf16", "GGML_AMX_BF16"),
    InstructionSet("__AVX512VNNI__", "avx512_vnni", "avx512vnni", "GGML_AVX512_VNNI"),
    InstructionSet("__AVX512BF16__", "avx512_bf16", "avx512bf16", "GGML_AVX512_BF16"),
    InstructionSet("__AVX512VBMI__", "avx512vbmi", "avx512vbmi", "GGML_AVX512_VBMI"),
    InstructionSet("__AVX512FP16__", "avx512_fp16", "avx512fp16", ""),
    InstructionSet("__AVXVNNI__", "avx_vnni", "avxvnni", "GGML_AVX_VNNI"),
    InstructionSet("__AVX512F__", "avx512f", "avx512f", "GGML_AVX512"),
    InstructionSet("__AVX512BW__", "avx512bw", "avx512bw", ""),
    InstructionSet("__AVX512CD__", "avx512cd", "avx512cd", ""),
    InstructionSet("__AVX512DQ__", "avx512dq", "avx512dq", ""),
    InstructionSet("__AVX512VL__", "avx512vl", "avx512vl", ""),
    InstructionSet("__AVX2__", "avx2", "avx2", "GGML_AVX2"),
    InstructionSet("__FMA__", "fma", "fma", "GGML_FMA"),
    InstructionSet("__F16C__", "f16c", "f16c", "GGML_F16C"),
    InstructionSet("__BMI2__", "bmi2", "bmi2", "GGML_BMI2"),
    InstructionSet("__AVX__", "avx", "avx", "GGML_AVX"),
    InstructionSet("__SSE4_2__", "sse4_2", "sse4.2", "GGML_SSE42"),
    InstructionSet("__SSSE3__", "ssse3", "ssse3", ""),
    InstructionSet("__ARM_FEATURE_SME", "sme", "", "GGML_NATIVE"),
    InstructionSet("__ARM_FEATURE_SVE", "sve", "", "GGML_NATIVE"),
    InstructionSet("__ARM_FEATURE_MATMUL_INT8", "i8mm", "", "GGML_NATIVE"),
    InstructionSet("__ARM_FEATURE_DOTPROD", "asimddp", "", "GGML_NATIVE"),
)


def cmake_options(sanitize: bool, given: dict[str, str]) -> dict[str, str]:
    """The CMake variables to set, given those that the user set."""
    if sanitize:
        return {**_SANITIZE, **{name: value for name, value in given.items() if _OF_SANITIZED.match(name)}}
    return {
        "CMAKE_BUILD_TYPE": "Release",
        **{name: value for name, value in given.items() if not _NOT_OURS.match(name)},
    }


def cmake_args() -> dict[str, str]:
    return parse_defines(shlex.split(os.environ.get("CMAKE_ARGS", "")), "CMAKE_ARGS")


def parse_defines(arguments: list[str], where: str) -> dict[str, str]:
    """["-DA=1", "-D", "B:BOOL=ON"] as {"A": "1", "B": "ON"}."""
    result, words = {}, iter(arguments)
    for word in words:
        text = next(words, "") if word == "-D" else word[2:]
        match = re.match(r"([\w-]+)(?::\w+)?=(.*)$", text, re.DOTALL)
        if not word.startswith("-D") or not match:
            raise BuildError(f"{where}: cannot read {word!r}, only -DNAME=VALUE is understood")
        result[match[1]] = match[2]
    return result


def is_on(value: str) -> bool:
    return value.upper() in ("ON", "1", "TRUE", "YES")


def key(options: dict[str, str]) -> str:
    """A hash of what changes every object file: flags, compilers and, because of -march=native, the CPU."""
    flags = {name: os.environ.get(name) for name in FLAG_VARIABLES}
    compilers = [
        compiler(options, "C", "CC", ("cc", "gcc", "clang")),
        compiler(options, "CXX", "CXX", ("c++", "g++", "clang++")),
    ]
    text = repr(
        (sorted(options.items()), sorted(flags.items(), key=str), compilers, platform.platform(), cpu())
    )
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def compiler(options: dict[str, str], language: str, variable: str, names: tuple[str, ...]) -> str:
    """Version and target of the compiler that CMake will use, whatever name it is called by."""
    asked = options.get(f"CMAKE_{language}_COMPILER") or os.environ.get(variable)
    found = (
        shutil.which(shlex.split(asked)[0]) if asked else next(filter(None, map(shutil.which, names)), None)
    )
    if not found:
        raise BuildError(
            f"no {'C' if language == 'C' else 'C++'} compiler: looked for {asked or ', '.join(names)}. "
            "Install one (Debian, Ubuntu: apt install build-essential; Fedora: dnf install gcc-c++; "
            f"macOS: xcode-select --install; Windows: MSYS2's MinGW-w64) or set {variable} to its path. "
            "Without one, install the wheels that scripts/release/build_wheels.py makes elsewhere: "
            "pip install --find-links FOLDER eagle3-llama."
        )
    told = [
        subprocess.run([found, flag], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout
        for flag in ("--version", "-dumpmachine")
    ]
    return "\n".join(told).partition(" ")[2]  # the first word is the name


def cpu() -> str:
    """A text that tells apart CPUs that -march=native compiles differently for."""
    try:
        text = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    kept = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU ")
    return "\n".join(line for line in text.splitlines() if line.startswith(kept))


def cpu_sets() -> set[str]:
    """The instruction sets that /proc/cpuinfo names. Empty where there is none, as on macOS."""
    match = re.search(r"^(?:flags|Features)\s*:(.*)$", cpu(), re.MULTILINE)
    return set(match[1].split()) if match else set()


def used_sets(build_dir: Path, ninja: str) -> tuple[list[InstructionSet], list[str]]:
    """The instruction sets that the configured CPU backend may use, and which of them this processor lacks.

    A kernel may hide some of what the processor has, so the compiler is asked too. Both are empty where there
    are several such backends, of which one is chosen at run time (GGML_BACKEND_DL).
    """
    commands = _backend_commands(build_dir, ninja)
    if len(commands) != 1:
        return [], []
    [command] = commands.values()
    used = _sets_of(_preprocessing(command), build_dir)
    called = command[: next(i for i, word in enumerate(command) if word.startswith("-"))]
    native = _sets_of([*called, "-march=native", "-x", "c", os.devnull], build_dir)
    here = cpu_sets() | {each.name for each in native}
    return used, [each.name for each in used if here and each.name not in here]


def variants(build_dir: Path, ninja: str) -> dict[str, list[str]]:
    """The instruction sets of each CPU backend (EAGLE3_VARIANTS), by its name, such as "haswell"."""
    found = _backend_commands(build_dir, ninja)
    return {
        name: [each.name for each in _sets_of(_preprocessing(command), build_dir)]
        for name, command in found.items()
    }


def _backend_commands(build_dir: Path, ninja: str) -> dict[str, list[str]]:
    """How each CPU backend is compiled, by its name; "" where there is one, without a name."""
    told = subprocess.run(
        [ninja, "-C", str(build_dir), "-t", "compdb"], stdout=subprocess.PIPE, text=True, check=True
    )
    commands = [c for c in json.loads(told.stdout) if c["file"].endswith("/ggml-cpu/ggml-cpu.c")]
    name = lambda c: re.search(r"/ggml-cpu-?([^/]*)\.dir/", c["output"])[1]
    return {name(c): shlex.split(c["command"]) for c in commands}


def _preprocessing(command: list[str]) -> list[str]:
    """A compiler's call without what it writes."""
    words, kept = iter(command), []
    for word in words:
        if word in ("-o", "-MF", "-MT"):
            next(words)
        elif word not in ("-c", "-MD"):
            kept.append(word)
    return kept


def _sets_of(command: list[str], folder: Path) -> list[InstructionSet]:
    """The instruction sets that this call of a compiler may use. None if the call fails."""
    done = subprocess.run(
        [*command, "-dM", "-E"],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        errors="replace",
    )
    macros = set(re.findall(r"^#define (\w+)", done.stdout, re.MULTILINE))
    return [each for each in INSTRUCTION_SETS if each.macro in macros]


def without(sets: list[InstructionSet]) -> dict[str, str]:
    """The CMake variables that take these instruction sets away from the CPU backend."""
    options = {each.option: "OFF" for each in sets if each.option}
    flags = ";".join(f"-mno-{each.flag}" for each in sets if each.flag)
    return {**options, "EAGLE3_WITHOUT": flags}


def described(options: dict[str, str]) -> dict[str, object]:
    """What a report of a fault needs: compiler, processor, and the variables that the user set."""
    told = compiler(options, "CXX", "CXX", ("c++", "g++", "clang++"))
    name = ("GCC " if "Free Software Foundation" in told else "") + told.partition("\n")[0]
    set_here = {name: os.environ[name] for name in VARIABLES if os.environ.get(name)}
    return {
        "compiler": f"{name}, {told.split()[-1]}",
        "processor": cpu_model(),
        "processor_sets": sorted(cpu_sets() & {each.name for each in INSTRUCTION_SETS}),
        "environment": set_here,
    }


def cpu_model() -> str:
    """The name of the processor, as far as something tells it."""
    match = re.search(r"^model name\s*:\s*(.*)$", cpu(), re.MULTILINE)
    return match[1] if match else platform.processor() or platform.machine()


def tool(given: str | None, name: str) -> str:
    """The path of a tool. A virtual environment's own comes first: every way to build uses the same CMake."""
    here = Path(__file__).resolve().parent.parent
    places = [Path(sys.executable).parent / name, here / ".venv" / "bin" / name]
    found = given or next((str(path) for path in places if path.is_file()), None) or shutil.which(name)
    if not found:
        raise BuildError(f"{name} is missing: install it with '{sys.executable} -m pip install {name}'")
    return found


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
