"""The CPUs that scripts/cpus builds for: what compiles for each, what runs it here, and what is missing."""

from __future__ import annotations

import platform
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "native"))

from toolchain import cpu_sets


class Cpu(NamedTuple):
    name: str
    what: str
    system: str  # one of SYSTEMS
    options: str  # CMake's, without -D
    sets: str = ""  # of /proc/cpuinfo: what this machine must have, if its processor is not emulated
    model: str = ""  # qemu-user's, if it is
    cuts: str = ""  # of KINDS: where a prompt is cut may be seen, as docs/how-it-works.md says


class System(NamedTuple):
    """What programs are compiled for. Packages are Debian's and Ubuntu's."""

    options: str  # CMake's
    compilers: tuple[str, ...]  # C and C++, where it is not this machine's own
    package: str  # that has them
    emulators: tuple[str, ...]  # the first that is found
    emulator_package: str
    root: str = ""  # the folder of its libraries, for the emulator
    ending: str = ""  # ends a program's file name


_LINUX = "CMAKE_SYSTEM_NAME=Linux CMAKE_SYSTEM_PROCESSOR={0}"
# what ggml turns on by itself for x86-64, unless it is compiled on another system
_X86 = "GGML_SSE42=ON GGML_AVX=ON GGML_AVX2=ON GGML_FMA=ON GGML_F16C=ON GGML_BMI2=ON"
SYSTEMS = {
    machine: System(
        _LINUX.format(machine) + (f" {_X86}" if machine == "x86_64" else ""),
        (f"{machine}-linux-gnu-gcc", f"{machine}-linux-gnu-g++"),
        f"g++-{machine.replace('_', '-')}-linux-gnu",
        (f"qemu-{machine}-static", f"qemu-{machine}"),
        "qemu-user-static",
        f"/usr/{machine}-linux-gnu",
    )
    for machine in ("x86_64", "aarch64")
}
SYSTEMS["windows"] = System(
    f"CMAKE_SYSTEM_NAME=Windows CMAKE_SYSTEM_PROCESSOR=x86_64 {_X86}",
    ("x86_64-w64-mingw32-gcc-posix", "x86_64-w64-mingw32-g++-posix"),
    "g++-mingw-w64-x86-64-posix",
    ("wine",),
    "wine wine64",
    ending=".exe",
)

_SSE = "GGML_AVX2=OFF GGML_FMA=OFF GGML_F16C=OFF GGML_BMI2=OFF GGML_AVX=OFF"
_AVX = _SSE.replace("GGML_AVX=OFF", "GGML_AVX=ON")
_VNNI = "GGML_AVX512=ON GGML_AVX512_VBMI=ON GGML_AVX512_VNNI=ON GGML_AVX512_BF16=ON"
_HAS_AVX2 = "avx2 fma f16c bmi2"
_HAS_AVX512 = f"{_HAS_AVX2} avx512f avx512bw avx512cd avx512dq avx512vl"
_HAS_VNNI = f"{_HAS_AVX512} avx512vbmi avx512_vnni avx512_bf16"
_AMX = "GGML_AMX_TILE=ON GGML_AMX_INT8=ON GGML_AMX_BF16=ON"
_HAS_AMX = "amx_tile amx_int8 amx_bf16"
_ARM = "GGML_CPU_ARM_ARCH="

CPUS = (
    Cpu(
        "amx",
        "x86-64, AVX-512 with VNNI and AMX (Sapphire Rapids)",
        "x86_64",
        f"{_VNNI} {_AMX}",
        f"{_HAS_VNNI} {_HAS_AMX}",
    ),
    Cpu("avx512-vnni", "x86-64, AVX-512 with VNNI", "x86_64", _VNNI, _HAS_VNNI),
    Cpu(
        "cascade-lake",
        "x86-64, AVX-512 with VNNI, without VBMI and BF16 (Cascade Lake)",
        "x86_64",
        "GGML_AVX512=ON GGML_AVX512_VNNI=ON",
        f"{_HAS_AVX512} avx512_vnni",
    ),
    Cpu("avx512", "x86-64, AVX-512 without VNNI", "x86_64", "GGML_AVX512=ON", _HAS_AVX512),
    Cpu("avx2-vnni", "x86-64, AVX2 with VNNI", "x86_64", "GGML_AVX_VNNI=ON", f"{_HAS_AVX2} avx_vnni"),
    Cpu("avx2", "x86-64, AVX2", "x86_64", "", _HAS_AVX2),
    Cpu("avx", "x86-64, AVX", "x86_64", _AVX, "avx", cuts="Q4_K"),
    Cpu("haswell", "x86-64, AVX2 (Haswell)", "x86_64", "", model="Haswell"),
    Cpu("sandy-bridge", "x86-64, AVX (Sandy Bridge)", "x86_64", _AVX, model="SandyBridge", cuts="Q4_K"),
    Cpu("nehalem", "x86-64, SSE4.2 (Nehalem)", "x86_64", _SSE, model="Nehalem"),
    Cpu("x86-64", "x86-64 without SSE4.2", "x86_64", f"GGML_SSE42=OFF {_SSE}", model="qemu64"),
    Cpu("armv8.0", "arm64 v8.0 (Cortex-A72)", "aarch64", f"{_ARM}armv8-a", model="cortex-a72"),
    Cpu(
        "armv8.2",
        "arm64 v8.2, dot products, half floats (Neoverse N1)",
        "aarch64",
        f"{_ARM}armv8.2-a+dotprod+fp16",
        model="neoverse-n1",
    ),
    Cpu("armv8.6", "arm64 v8.6, i8mm", "aarch64", f"{_ARM}armv8.6-a+i8mm+fp16", model="max,sve=off,sme=off"),
    Cpu(
        "sve-128",
        "arm64 v8.6, SVE of 128 bits",
        "aarch64",
        f"{_ARM}armv8.6-a+sve",
        model="max,sve128=on,sve256=off,sme=off",
    ),
    Cpu(
        "sve-256",
        "arm64 v8.6, SVE of 256 bits",
        "aarch64",
        f"{_ARM}armv8.6-a+sve",
        model="max,sve128=on,sve256=on,sve512=off,sme=off",
    ),
    Cpu("windows", "Windows, x86-64, AVX2 (wine)", "windows", "", _HAS_AVX2),
    Cpu("windows-avx512", "Windows, x86-64, AVX-512 with VNNI (wine)", "windows", _VNNI, _HAS_VNNI),
)


def own(system: str) -> bool:
    """True if this machine's own compiler and libraries are those of the system."""
    return sys.platform == "linux" and platform.machine() == system


def is_emulated(cpu: Cpu) -> bool:
    """True if it takes qemu-user or wine to run it."""
    return bool(cpu.model) or cpu.system == "windows"


def lacking(cpu: Cpu) -> list[str]:
    """The instruction sets that this machine would need to run it."""
    return [name for name in cpu.sets.split() if name not in cpu_sets()]


def runs_on(cpu: Cpu) -> str:
    if without := lacking(cpu):
        return f"not here: this machine has no {', '.join(without)}"
    if not is_emulated(cpu):
        return "this machine"
    return SYSTEMS[cpu.system].emulators[-1] + (f" -cpu {cpu.model}" if cpu.model else "")


def emulator(cpu: Cpu) -> list[str]:
    """The words before a program. Empty if it runs on this machine itself."""
    if not is_emulated(cpu):
        return []
    system = SYSTEMS[cpu.system]
    found = next(filter(None, map(shutil.which, system.emulators)), system.emulators[0])
    words = [found, *(["-cpu", cpu.model] if cpu.model else [])]
    return [*words, *(["-L", system.root] if system.root and not own(cpu.system) else [])]


def missing_tools(cpus: Sequence[Cpu], build_only: bool) -> list[str]:
    """What must be installed first, one line each. Empty if nothing is missing."""
    needed: dict[tuple[str, str], list[str]] = {}  # (tool, package): the CPUs that need it
    for cpu in cpus:
        system = SYSTEMS[cpu.system]
        tools = [] if own(cpu.system) else [(tool, system.package) for tool in system.compilers]
        tools = [(tool, package) for tool, package in tools if not shutil.which(tool)][-1:]
        if is_emulated(cpu) and not build_only and not any(map(shutil.which, system.emulators)):
            tools.append((system.emulators[0], system.emulator_package))
        for tool in tools:
            needed.setdefault(tool, []).append(cpu.name)
    if not needed:
        return []
    lines = [f"{tool} is missing, for {', '.join(names)}" for (tool, _), names in needed.items()]
    rest = [cpu.name for cpu in cpus if not any(cpu.name in names for names in needed.values())]
    choice = f", or leave those CPUs out: scripts/cpus {' '.join(rest)}" if rest else ""
    packages = dict.fromkeys(package for _, package in needed)
    return [*lines, f"on Debian and Ubuntu: apt-get install {' '.join(packages)}{choice}"]


def compiling_for(system: str) -> list[str]:
    """NAME=VALUE for CMake, to compile for a system of SYSTEMS. Empty where it is this machine's own."""
    if own(system):
        return []
    options, compilers = SYSTEMS[system][:2]
    named = zip(("C", "CXX"), compilers, strict=True)
    return [*options.split(), *(f"CMAKE_{of}_COMPILER={name}" for of, name in named)]
