"""Build libeagle3, libllama, libmtmd and ggml with CMake and ninja, or find a finished build in the cache.

    python native/build.py [--sanitize] [--tests] [--bench] [--print-dir] [-DNAME=VALUE ...]

Below fetch.cache_dir():
    build/<key>/          one for each combination of compiler, CPU and CMake flags; locked while in use
        llama.cpp/ native/    copies of the sources. Only files whose content changed are written, so ninja
                              compiles only what depends on them, whichever checkout the build comes from
        cmake-<version>/      CMake's build directory. Another version of CMake writes other commands, which
                              would compile everything again
        out/<hash>/           finished sets of libraries, never changed; the hash covers patches and sources
An interrupted build leaves nothing in out/; the next one continues where it stopped. CMAKE_ARGS
(CMAKE_ARGS=-DGGML_CUDA=on), CC, CXX, CFLAGS, CXXFLAGS and LDFLAGS have their usual effect.
CMAKE_ARGS=-DLLAMA_BUILD_MTMD=OFF leaves out libmtmd (images and audio). The sanitized build leaves it out
unless CMAKE_ARGS turns it on.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from fetch import BuildError, _prune, cache_dir, hash_files, patched_tree, say

NATIVE = Path(__file__).resolve().parent
_TREE_PARTS = (
    "CMakeLists.txt",
    "LICENSE",
    "cmake",
    "common",
    "ggml",
    "include",
    "licenses",
    "src",
    "tools/mtmd",
    "vendor",
)

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


def build(
    sanitize: bool = False,
    tests: bool = False,
    defines: dict[str, str] | None = None,
    cmake: str | None = None,
    ninja: str | None = None,
    bench: bool = False,
) -> Path:
    """The folder with libeagle3, libllama, libmtmd, ggml and eagle3.h.

    sanitize: with the address and undefined behaviour sanitizers. tests: with the executables of
    native/tests. defines: CMake variables, which override CMAKE_ARGS. bench: instead, the executables of
    native/bench and the unpatched llama.cpp that they measure. Raises BuildError.
    """
    options = _options(sanitize, {**_cmake_args(), **(defines or {})})
    source = options.pop("EAGLE3_LLAMA_CPP_DIR", None) or os.environ.get("EAGLE3_LLAMA_CPP_DIR")
    if options.get("EAGLE3_BUILD_TESTS", "").upper() in ("ON", "1", "TRUE", "YES"):
        tests = True
    mtmd = options.pop("LLAMA_BUILD_MTMD", "OFF" if sanitize or bench else "ON").upper() in (
        "ON",
        "1",
        "TRUE",
        "YES",
    )
    for name in ("EAGLE3_BUILD_TESTS", "EAGLE3_BUILD_BENCH", "EAGLE3_BUILD_MTMD"):
        options.pop(name, None)

    place = cache_dir() / "build" / ("bench-" * bench + _key(options))
    place.mkdir(parents=True, exist_ok=True)
    place = place.resolve()  # compile commands hold this path
    with _locked(place / "lock"):
        tree, tree_key = patched_tree(source, patched=not bench)
        sources = _native_sources(["tests"] * tests + ["bench"] * bench)
        out = (
            place
            / "out"
            / hashlib.sha256(
                f"{tree_key} {tests} {bench} {mtmd} {hash_files(NATIVE, sources)}".encode()
            ).hexdigest()[:16]
        )
        if not out.is_dir():
            _sync(tree, place / "llama.cpp", [p for part in _TREE_PARTS for p in _files(tree / part)])
            _sync(NATIVE, place / "native", sources)
            options["EAGLE3_BUILD_TESTS"] = "ON" if tests else "OFF"
            options["EAGLE3_BUILD_BENCH"] = "ON" if bench else "OFF"
            options["EAGLE3_BUILD_MTMD"] = "ON" if mtmd else "OFF"
            build_dir = _configure(place, options, _tool(cmake, "cmake"), _tool(ninja, "ninja"))
            _compile(place, build_dir, _tool(ninja, "ninja"))
            _collect(place, build_dir, out, sources, mtmd)
        os.utime(out)
    return out


def native_tests_dir() -> Path:
    """The folder with a sanitized executable for each native/tests/*.cpp; builds them if necessary."""
    return build(sanitize=True, tests=True)


def _options(sanitize: bool, given: dict[str, str]) -> dict[str, str]:
    """The CMake variables to set, given those that the user set."""
    if sanitize:
        return {**_SANITIZE, **{name: value for name, value in given.items() if _OF_SANITIZED.match(name)}}
    return {
        "CMAKE_BUILD_TYPE": "Release",
        **{name: value for name, value in given.items() if not _NOT_OURS.match(name)},
    }


def _cmake_args() -> dict[str, str]:
    return _parse_defines(shlex.split(os.environ.get("CMAKE_ARGS", "")), "CMAKE_ARGS")


def _parse_defines(arguments: list[str], where: str) -> dict[str, str]:
    """["-DA=1", "-D", "B:BOOL=ON"] as {"A": "1", "B": "ON"}."""
    result, words = {}, iter(arguments)
    for word in words:
        text = next(words, "") if word == "-D" else word[2:]
        match = re.match(r"(\w+)(?::\w+)?=(.*)$", text, re.DOTALL)
        if not word.startswith("-D") or not match:
            raise BuildError(f"{where}: cannot read {word!r}, only -DNAME=VALUE is understood")
        result[match[1]] = match[2]
    return result


def _key(options: dict[str, str]) -> str:
    """A hash of what changes every object file: flags, compilers and, because of -march=native, the CPU."""
    flags = {
        name: os.environ.get(name)
        for name in ("CFLAGS", "CXXFLAGS", "LDFLAGS", "CUDAFLAGS", "CUDACXX", "CUDA_HOME")
    }
    compilers = [
        _compiler(options, "C", "CC", ("cc", "gcc", "clang")),
        _compiler(options, "CXX", "CXX", ("c++", "g++", "clang++")),
    ]
    text = repr(
        (sorted(options.items()), sorted(flags.items(), key=str), compilers, platform.platform(), _cpu())
    )
    return ("sanitized-" if "EAGLE3_SANITIZE" in options else "") + hashlib.sha256(text.encode()).hexdigest()[
        :16
    ]


def _compiler(options: dict[str, str], language: str, variable: str, names: tuple[str, ...]) -> str:
    """Version and target of the compiler that CMake will use, whatever name it is called by."""
    asked = options.get(f"CMAKE_{language}_COMPILER") or os.environ.get(variable)
    found = (
        shutil.which(shlex.split(asked)[0]) if asked else next(filter(None, map(shutil.which, names)), None)
    )
    if not found:
        raise BuildError(
            f"no {'C' if language == 'C' else 'C++'} compiler: looked for {asked or ', '.join(names)}. "
            "Install one (Debian, Ubuntu: apt install build-essential; Fedora: dnf install gcc-c++; "
            f"macOS: xcode-select --install) or set {variable} to its path."
        )
    told = [
        subprocess.run([found, flag], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout
        for flag in ("--version", "-dumpmachine")
    ]
    return "\n".join(told).partition(" ")[2]  # the first word is the name


def _cpu() -> str:
    """A text that tells apart CPUs that -march=native compiles differently for."""
    try:
        text = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    kept = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU ")
    return "\n".join(line for line in text.splitlines() if line.startswith(kept))


def _native_sources(more: list[str]) -> list[Path]:
    parts = ["CMakeLists.txt", "include", "src", *more]
    sources = [path for part in parts for path in _files(NATIVE / part)]
    if not any(path.suffix == ".cpp" and path.parent.name == "src" for path in sources):
        raise BuildError(f"no source files in {NATIVE / 'src'}")
    return sources


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    return sorted(p for p in path.rglob("*") if p.is_file() and not p.name.startswith("."))


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One build at a time in a folder. The lock ends with the process, however that ends."""
    try:
        import fcntl
    except ImportError:
        raise BuildError("eagle3-llama builds on Linux and macOS only") from None
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            say("waiting for another build of the same libraries")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _sync(source: Path, target: Path, paths: list[Path]) -> None:
    """Copy these files of source to target, delete its others. Equal files keep their time for ninja."""
    wanted = {path.relative_to(source) for path in paths}
    for old in target.rglob("*") if target.is_dir() else ():
        if not old.is_dir() and old.relative_to(target) not in wanted:
            old.unlink()
    for name in wanted:
        data, path = (source / name).read_bytes(), target / name
        if not path.is_file() or path.read_bytes() != data:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)


def _configure(place: Path, options: dict[str, str], cmake: str, ninja: str) -> Path:
    version = subprocess.run(
        [cmake, "--version"], stdout=subprocess.PIPE, text=True, check=True
    ).stdout.split()[2]
    build_dir = (place / f"cmake-{version}").resolve()
    if not (build_dir / "build.ninja").is_file():  # configuring never finished
        shutil.rmtree(build_dir, ignore_errors=True)
    command = [
        cmake,
        "-S",
        str(place / "native"),
        "-B",
        str(build_dir),
        "-G",
        "Ninja",
        "--no-warn-unused-cli",
    ]
    command += [f"-DCMAKE_MAKE_PROGRAM={ninja}", f"-DEAGLE3_LLAMA_CPP_TREE={place / 'llama.cpp'}"]
    command += [f"-D{name}={value}" for name, value in sorted(options.items())]
    env = {k: v for k, v in os.environ.items() if k != "CMAKE_GENERATOR"}
    for _ in range(2):
        again = build_dir.is_dir()
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)
        if done.returncode == 0 or not again:
            break
        shutil.rmtree(build_dir)  # it may name a compiler or CMake that is gone: try again from scratch
    (place / "configure.log").write_text(done.stdout)
    if done.returncode != 0:
        raise BuildError(
            f"CMake cannot configure the build (see above; full log: {place / 'configure.log'})", done.stdout
        )
    return build_dir


def _compile(place: Path, build_dir: Path, ninja: str) -> None:
    jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL") or str(_cores())
    command = [ninja, "-C", str(build_dir), "-j", jobs, "all"]
    env = {**os.environ, "NINJA_STATUS": "[%f/%t] ", "LC_ALL": "C"}
    last: collections.deque[str] = collections.deque(maxlen=40)
    with (
        (place / "build.log").open("w") as log,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env=env
        ) as process,
    ):
        try:
            progress = _Progress("compiling, sanitized" if _is_sanitized(place) else "compiling")
            for line in process.stdout:
                log.write(line)
                last.append(line)
                progress.line(line)
        except BaseException:
            process.terminate()
            raise
    progress.end()
    if process.returncode != 0:
        raise BuildError(f"the compiler failed (see above; full log: {place / 'build.log'})", "".join(last))


class _Progress:
    """Shows [done/total]: on one line of a terminal, or every 30 s on a new line of a log."""

    def __init__(self, what: str) -> None:
        self.what, self.tty = what, sys.stderr.isatty()
        self.start = self.shown = time.monotonic()

    def line(self, text: str) -> None:
        match, now = re.match(r"\[(\d+)/(\d+)\] ", text), time.monotonic()
        if match and now - self.shown >= (0.5 if self.tty else 30):
            self.shown = now
            status = f"eagle3-llama: {self.what} {match[1]}/{match[2]}, {now - self.start:.0f} s"
            print(
                f"\r{status}" if self.tty else status,
                end="" if self.tty else "\n",
                file=sys.stderr,
                flush=True,
            )

    def end(self) -> None:
        seconds = time.monotonic() - self.start
        if self.tty:
            print("\r\033[K", end="", file=sys.stderr)
        if seconds > 2:
            say(f"{self.what} took {seconds:.0f} s")


def _collect(place: Path, build_dir: Path, out: Path, sources: list[Path], mtmd: bool) -> None:
    """Copy the results to out, all or nothing; without a libmtmd that an earlier build left behind."""
    programs = {
        path.stem for path in sources if path.parent.name in ("tests", "bench") and path.suffix == ".cpp"
    }
    out.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".new-") as tmp:
        fresh = Path(tmp) / "lib"
        fresh.mkdir()
        for path in (build_dir / "bin").iterdir():
            if (
                path.suffix in (".so", ".dylib") and (mtmd or path.stem != "libmtmd")
            ) or path.name in programs:
                shutil.copy2(path, fresh)
        shutil.copyfile(place / "native" / "include" / "eagle3.h", fresh / "eagle3.h")
        os.rename(fresh, out)
    _prune(out.parent, 2 if _is_sanitized(place) else 6)  # a sanitized set has 200 MB


def _is_sanitized(place: Path) -> bool:
    return place.name.startswith("sanitized-")


def _tool(given: str | None, name: str) -> str:
    """The path of a tool. A virtual environment's own comes first: every way to build uses the same CMake."""
    places = [Path(sys.executable).parent / name, NATIVE.parent / ".venv" / "bin" / name]
    found = given or next((str(path) for path in places if path.is_file()), None) or shutil.which(name)
    if not found:
        raise BuildError(f"{name} is missing: install it with '{sys.executable} -m pip install {name}'")
    return found


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Build libeagle3 and the patched llama.cpp, or find a finished build in the cache."
    )
    parser.add_argument(
        "--sanitize", action="store_true", help="address and undefined behaviour sanitizers, CPU only"
    )
    parser.add_argument("--tests", action="store_true", help="also build the executables of native/tests")
    parser.add_argument(
        "--bench",
        action="store_true",
        help="instead, build the executables of native/bench with the unpatched llama.cpp",
    )
    parser.add_argument(
        "--print-dir", action="store_true", help="print only the folder of the result to stdout"
    )
    parser.add_argument("--cmake", help="path of cmake")
    parser.add_argument("--ninja", help="path of ninja")
    arguments, rest = parser.parse_known_args()
    try:
        out = build(
            arguments.sanitize,
            arguments.tests,
            _parse_defines(rest, "arguments"),
            arguments.cmake,
            arguments.ninja,
            arguments.bench,
        )
    except BuildError as error:
        error.exit()
    except KeyboardInterrupt:
        sys.exit("interrupted; the next build continues from here")
    print(out) if arguments.print_dir else say(f"libraries are in {out}")


if __name__ == "__main__":
    main()
