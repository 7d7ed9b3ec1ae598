"""Build our libraries, libllama, libmtmd and ggml with CMake and ninja, or find a build in the cache.

    python native/build.py [--sanitize] [--tests] [--bench | --stock] [--print-dir] [-DNAME=VALUE ...]

Below fetch.cache_dir():
    build/<key>/          one for each combination of compiler, CPU and CMake flags; locked while in use
        llama.cpp/ native/    copies of the sources. Only files whose content changed are written, so ninja
                              compiles only what depends on them, whichever checkout the build comes from
        cmake-<version>/      CMake's build directory. Another version of CMake writes other commands, which
                              would compile everything again
        out/<hash>/           finished sets of libraries, never changed; the hash covers patches and sources.
                              proof.json in it says how the set was built and checked (see proof.py)
An interrupted build leaves nothing in out/; the next one continues where it stopped. CMAKE_ARGS
(CMAKE_ARGS=-DGGML_CUDA=on), CC, CXX, CFLAGS, CXXFLAGS and LDFLAGS have their usual effect.
-DEAGLE3_VARIANTS=ON builds a CPU backend for each kind of processor, of which one is chosen where the library
is used: so is a wheel made that runs everywhere (scripts/release/build_wheels.py).
CMAKE_ARGS=-DLLAMA_BUILD_MTMD=OFF leaves out libmtmd (images and audio). The sanitized build leaves out
libe3chat, and libmtmd unless CMAKE_ARGS turns it on. -DEAGLE3_LATER=ON leaves both for native/later.py,
unless the cache has them. CMAKE_ARGS=-DEAGLE3_PROOF=OFF leaves out the check on this processor. A build that
was not used for 30 days is removed by the next one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import proof
import toolchain
from compiling import Work, compile_all, configure
from fetch import COMMIT, PACKAGE, VERSION, BuildError, _prune, cache_dir, hash_files, say, using_tree
from locks import locked, take
from toolchain import InstructionSet

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
    "tests/test-llama-archs.cpp",
    "tools/mtmd",
    "vendor",
)
_MOST_DAYS = 30  # a build folder that nothing has used for so long is removed


def build(
    sanitize: bool = False,
    tests: bool = False,
    defines: dict[str, str] | None = None,
    cmake: str | None = None,
    ninja: str | None = None,
    bench: bool = False,
    stock: bool = False,
    if_built: bool = False,
) -> Path:
    """The folder with libeagle3, libllama, libmtmd, ggml and the headers, checked on this processor.

    sanitize: with the address and undefined behaviour sanitizers. tests: with the executables of
    native/tests. defines: CMake variables, which override CMAKE_ARGS. stock: instead, libllama and ggml as
    upstream has them, with the same flags. bench: those, with the executables of native/bench. Raises
    BuildError, with if_built also where it would have to compile.
    """
    given = {**toolchain.cmake_args(), **(defines or {})}
    options = toolchain.cmake_options(sanitize, given)
    source = options.pop("EAGLE3_LLAMA_CPP_DIR", None) or os.environ.get("EAGLE3_LLAMA_CPP_DIR")
    unpatched = bench or stock
    tests = toolchain.is_on(options.pop("EAGLE3_BUILD_TESTS", "OFF")) or tests
    mtmd = toolchain.is_on(options.pop("LLAMA_BUILD_MTMD", "OFF" if sanitize or unpatched else "ON"))
    later = toolchain.is_on(options.pop("EAGLE3_LATER", "OFF")) and not (sanitize or unpatched or tests)
    # proof.py waits for its child in ways that Windows does not have
    checked = toolchain.is_on(options.pop("EAGLE3_PROOF", "OFF" if sys.platform == "win32" else "ON"))
    variants = toolchain.is_on(options.get("EAGLE3_VARIANTS", "OFF"))
    if variants and (tests or unpatched):
        raise BuildError("EAGLE3_VARIANTS is for the libraries alone: build the rest without it")
    for name in ("EAGLE3_BUILD_BENCH", "EAGLE3_BUILD_CHAT", "EAGLE3_BUILD_MTMD", "EAGLE3_WITHOUT"):
        options.pop(name, None)
    kind = "sanitized-" if sanitize else "stock-" if unpatched else ""
    place = cache_dir() / "build" / (kind + toolchain.key(options))
    place.mkdir(parents=True, exist_ok=True)
    place = place.resolve()  # compile commands hold this path
    with locked(place / "lock", "waiting for another build of the same libraries"):
        ours = ["include", "kernels", "src", "chat", "proof"]
        sources = _native_sources(["proof", "bench"] if unpatched else [*ours, *["tests"] * tests])
        programs = [proof.PROGRAM, *_programs(sources, [*["tests"] * tests, *["bench"] * bench])]
        with using_tree(source, patched=not unpatched) as (tree, tree_key):
            wanted = f"{tree_key} {tests} {bench} {mtmd} {checked} {hash_files(NATIVE, sources)}"
            whole = place / "out" / hashlib.sha256(wanted.encode()).hexdigest()[:16]
            later = later and not whole.is_dir()
            out = whole.with_name(f"{whole.name}-first") if later else whole
            if if_built and not out.is_dir():
                raise BuildError("not built yet")
            if not out.is_dir():
                _remove_unused(place)
                _sync(tree, place / "llama.cpp", [p for part in _TREE_PARTS for p in _files(tree / part)])
        if not out.is_dir():
            # those of the tests too: else they would be new to the next build with tests, which compiles them
            _sync(NATIVE, place / "native", sources if unpatched else _native_sources([*ours, "tests"]))
            chat = not (sanitize or unpatched or later)
            parts_on = {"TESTS": tests, "BENCH": unpatched, "MTMD": mtmd and not later, "CHAT": chat}
            options |= {f"EAGLE3_BUILD_{name}": "ON" if on else "OFF" for name, on in parts_on.items()}
            tools = toolchain.tool(cmake, "cmake"), toolchain.tool(ninja, "ninja")
            shipped = [*["mtmd"] * parts_on["MTMD"], *["e3chat"] * chat]
            work = Work(place, *tools, programs, shipped, kind, variants)
            about = {**_versions(tree_key), "sources": whole.name}
            if later:
                about["later"] = {name: value for name, value in given.items() if name != "EAGLE3_LATER"}
            targets = ["llama", "ggml", *programs] if unpatched else ["all"]
            _make(work, options, out, targets, checked, about)
        os.utime(out)
    return out


def _make(
    work: Work,
    options: dict[str, str],
    out: Path,
    targets: list[str],
    checked: bool,
    about: dict[str, object],
) -> None:
    """Builds into `out`, all or nothing, without the instruction sets that fail on this processor.

    about: what the record says beside what was found.
    """
    out.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".new-") as tmp:
        fresh = Path(tmp) / "lib"

        def make(gone: list[InstructionSet]) -> proof.Built:
            build_dir = configure(work, {**options, **toolchain.without(gone)})
            compile_all(work, build_dir, targets)
            shutil.rmtree(fresh, ignore_errors=True)
            _collect(work, build_dir, fresh)
            if work.variants:
                return proof.Built(fresh, [], [], toolchain.variants(build_dir, work.ninja))
            return proof.Built(fresh, *toolchain.used_sets(build_dir, work.ninja))

        if work.variants:
            record = proof.prove_variants(make([]), checked)
        else:
            record = proof.prove(make, work.kind) if checked else proof.unchecked(make)
        _write_record(fresh, {**record, **toolchain.described(options), **about})
        os.rename(fresh, out)
    _prune(out.parent, 2 if work.kind == "sanitized-" else 6)  # a sanitized set has 200 MB


def _remove_unused(place: Path) -> None:
    """Removes the builds beside this one that nothing has used for _MOST_DAYS, and none that is in use."""
    last = lambda path: max((out.stat().st_mtime for out in path.glob("out/*")), default=path.stat().st_mtime)
    for old in place.parent.iterdir():
        days = (time.time() - last(old)) / 86400
        if old == place or days <= _MOST_DAYS:
            continue
        with (old / "lock").open("w") as file:
            if take(file):
                size = sum(path.lstat().st_size for path in _everything(old))
                shutil.rmtree(old, ignore_errors=True)
                say(f"removed {old}, {size / 1e6:.0f} MB: nothing has used it for {days:.0f} days")


def _everything(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def _versions(tree_key: str) -> dict[str, object]:
    return {PACKAGE: VERSION, "llama.cpp": COMMIT, "tree": tree_key}


def _write_record(folder: Path, record: dict[str, object]) -> None:
    (folder / proof.RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _native_sources(parts: list[str]) -> list[Path]:
    sources = [path for part in ["CMakeLists.txt", *parts] for path in _files(NATIVE / part)]
    if not any(path.suffix == ".cpp" for path in sources):
        raise BuildError(f"no source files in {NATIVE}")
    return sources


def _programs(sources: list[Path], folders: list[str]) -> list[str]:
    """The executables: one for each .cpp file of these folders, those for architectures with the tests."""
    folders = [*folders, *["architectures"] * ("tests" in folders)]
    return [path.stem for path in sources if path.parent.name in folders and path.suffix == ".cpp"]


def _files(path: Path) -> list[Path]:
    """A file, or those of a folder, without what systems, editors and Python leave there."""
    if path.is_file():
        return [path]
    left = lambda part: part.startswith(".") or part == "__pycache__"
    return sorted(p for p in path.rglob("*") if p.is_file() and not any(map(left, p.relative_to(path).parts)))


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


def _collect(work: Work, build_dir: Path, fresh: Path) -> None:
    """Copies the results to `fresh`, without a libmtmd or libe3chat that an earlier build left behind."""
    fresh.mkdir()
    stale = {"libmtmd", "libe3chat"} - {f"lib{name}" for name in work.extra}
    for path in (build_dir / "bin").iterdir():
        library = path.suffix in (".so", ".dylib", ".dll") and path.stem not in stale
        if library or path.name.removesuffix(".exe") in work.programs:
            shutil.copy2(path, fresh)
    if not work.stock:
        for header in (work.place / "native" / "include").glob("*.h"):
            shutil.copyfile(header, fresh / header.name)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Build our libraries and the patched llama.cpp, or find a finished build in the cache."
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
        "--stock",
        action="store_true",
        help="instead, the unpatched libllama and ggml, for llama-cpp-python's LLAMA_CPP_LIB_PATH",
    )
    parser.add_argument("--if-built", action="store_true", help="fail if it is not built yet")
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
            toolchain.parse_defines(rest, "arguments"),
            arguments.cmake,
            arguments.ninja,
            arguments.bench,
            arguments.stock,
            arguments.if_built,
        )
    except BuildError as error:
        error.exit()
    except KeyboardInterrupt:
        sys.exit("interrupted; the next build continues from here")
    print(out) if arguments.print_dir else say(f"libraries are in {out}")


if __name__ == "__main__":
    main()
