"""Builds libeagle3 for many CPUs, and runs its native tests on each: scripts/cpus.

    scripts/cpus                      all that can be run here; the first time takes hours
    scripts/cpus haswell armv8.2      these alone
    scripts/cpus --list               their names, and what each needs

On each CPU: the check that follows a build (eagle3-proof); products and attention of 1 to 150 rows; rows of
batches of 1 to 64 rows against rows alone; prompts cut in other places; rounds with a head, whose text is
plain decoding's. For Windows also the other native tests, and how it finds the libraries. What this machine
has runs on it. The rest runs under qemu-user, which ends a program that uses an instruction that its CPU has
not, or under wine. Neither says anything of speed.

Builds stay in the cache (native/build.py), and what passed is not run again until the library or a test
changes. So an interrupted run goes on where it was. ccache is used where it is installed: the
builds for one architecture share most files. Exit status: 0 if all passed, 1 if a build or test failed or if
a named CPU cannot be run here, 2 if a tool is missing.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "kit"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "native"))

from fetch import cache_dir
from list import CPUS, SYSTEMS, Cpu, compiling_for, emulator, lacking, missing_tools, runs_on

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 3600.0  # seconds for one program; an emulator is 10 to 100 times slower than a processor
KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_K")


class Step(NamedTuple):
    part: str  # a column of the table: "run" or "same text"
    program: str
    arguments: tuple[str, ...] = ()  # TARGET-<kind>, HEAD: files of models()
    variables: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        words = [*(f"{name}={value}" for name, value in self.variables), self.program, *self.arguments]
        return " ".join(words)


class Result(NamedTuple):
    cpu: Cpu
    built: str
    run: str
    same_text: str
    failed: bool


_INTERLEAVED = (("EAGLE3_LLAMA_INTERLEAVE", "1"),)
STEPS = (
    Step("run", "eagle3-proof"),
    Step("run", "dots_test", ("1",)),
    Step("run", "products_test", ("1",)),
    Step("run", "interleaved_test", ("1",), _INTERLEAVED),
    Step("run", "together_test", ("1",)),
    *(Step("same text", "slots_test", ("bits", f"TARGET-{kind}")) for kind in KINDS),
    *(Step("same text", "slots_test", ("prompts", f"TARGET-{kind}")) for kind in KINDS),
    *(Step("same text", "failures_test", ("cuts", f"TARGET-{kind}", "HEAD")) for kind in KINDS[:5]),
    *(Step("same text", "rounds_test", (f"TARGET-{kind}", "HEAD", "1", "10")) for kind in KINDS[:5]),
)
_UPSTREAMS = (("EAGLE3_LLAMA_INTERLEAVE", "0"),)  # layout of weights
AMX_STEPS = (
    Step("run", "amx_test", ("1",)),
    *(
        Step("same text", "slots_test", (what, f"TARGET-{kind}"), _UPSTREAMS)
        for kind in KINDS[3:]
        for what in ("bits", "prompts")
    ),
    *(
        Step("same text", "rounds_test", (f"TARGET-{kind}", "HEAD", "1", "10"), _UPSTREAMS)
        for kind in KINDS[3:5]
    ),
)
# Where the system is another: how it finds the libraries, and the other native tests, whose processor is this
# machine's elsewhere.
_PAIR = ("TARGET-F32", "HEAD")
_FAILURES = ("features", "full", "throws", "measure", "close", "capture", "joint", "shapes", "split")
WINDOWS_STEPS = (
    Step("run", "dll_test"),
    Step("run", "planner_test"),
    Step("run", "planner_parts_test"),
    Step("run", "thread_test"),
    Step("run", "streams_test", _PAIR[:1]),
    Step("run", "grammar_mask_test", _PAIR[:1]),
    Step("run", "thoughts_test", _PAIR[:1]),
    *(Step("same text", "slots_test", (case, *_PAIR)) for case in ("rooms", "many")),
    *(Step("same text", "failures_test", (case, *_PAIR)) for case in _FAILURES),
    *(
        Step("same text", f"{name}_test", _PAIR)
        for name in ("states", "sources", "text", "text_memory", "plain_rounds")
    ),
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/cpus", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cpu", nargs="*", metavar="CPU", help="these alone (--list)")
    parser.add_argument("--list", action="store_true", help="the names, and what each needs")
    parser.add_argument("--again", action="store_true", help="run what has passed too")
    parser.add_argument("--build-only", action="store_true", help="build, and run nothing")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.cpu if name not in {cpu.name for cpu in CPUS}]:
        parser.error(f"no CPU is called {', '.join(unknown)}; there are {', '.join(c.name for c in CPUS)}")
    chosen = [cpu for cpu in CPUS if not options.cpu or cpu.name in options.cpu]
    if options.list:
        print(table(["CPU", "what it is", "run on"], [[c.name, c.what, runs_on(c)] for c in chosen]))
        return 0
    if lines := missing_tools(chosen, options.build_only):
        print("\n".join(f"error: {line}" for line in lines), file=sys.stderr)
        return 2
    results = []
    for i, cpu in enumerate(chosen):
        say(f"{cpu.name} ({i + 1} of {len(chosen)})")
        results.append(examine(cpu, options.again, options.build_only))
    print(
        table(
            ["CPU", "", "built", "run", "same text"],
            [[r.cpu.name, r.cpu.what, r.built, r.run, r.same_text] for r in results],
        )
    )
    return int(any(r.failed or (lacking(r.cpu) and options.cpu) for r in results))


def say(what: str, end: str = "\n") -> None:
    print(f"cpus: {what}", end=end, file=sys.stderr, flush=True)


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table, whose columns are as wide as their widest cell."""
    lines = [head, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    written = [
        "| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) + " |"
        for line in lines
    ]
    return "\n".join([written[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *written[1:]])


def examine(cpu: Cpu, again: bool = False, build_only: bool = False) -> Result:
    """Builds for a CPU, and runs its steps on it."""
    library = build(cpu)
    if library is None:
        return Result(cpu, "failed", "no", "no", True)
    if without := lacking(cpu):
        return Result(cpu, "yes", f"not here: no {', '.join(without)}", "not run", False)
    if build_only:
        return Result(cpu, "yes", "not run", "not run", False)
    failed = run_steps(cpu, library, again)
    columns = {part: said(failed, part) for part in ("run", "same text")}
    return Result(cpu, "yes", columns["run"], columns["same text"], bool(failed))


def said(failed: list[Step], part: str) -> str:
    names = [step.name for step in failed if step.part == part]
    return f"fails: {', '.join(names)}" if names else "yes"


def build(cpu: Cpu) -> Path | None:
    """The folder of the library and the programs of native/tests for this CPU. None if it cannot be built."""
    command = [sys.executable, ROOT / "native" / "build.py", "--tests", "--print-dir"]
    environment = {**os.environ, "CMAKE_ARGS": " ".join(f"-D{word}" for word in defines(cpu))}
    if shutil.which("ccache"):
        # the folders of builds differ; what is compiled in them is the same
        environment |= {"CCACHE_BASEDIR": str(cache_dir().resolve()), "CCACHE_NOHASHDIR": "1"}
        environment.setdefault("CCACHE_DIR", str(cache_dir() / "ccache"))
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    return Path(done.stdout.strip()) if done.returncode == 0 else None


def defines(cpu: Cpu) -> list[str]:
    """NAME=VALUE for CMake. The check after a build runs with the other programs, in the emulator."""
    words = ["GGML_NATIVE=OFF", "LLAMA_BUILD_MTMD=OFF", "EAGLE3_PROOF=OFF"]
    words += [*compiling_for(cpu.system), *cpu.options.split()]
    if shutil.which("ccache"):
        words += [f"CMAKE_{of}_COMPILER_LAUNCHER=ccache" for of in ("C", "CXX")]
    return words


def steps_of(cpu: Cpu) -> tuple[Step, ...]:
    if "amx" in cpu.sets:
        return (*AMX_STEPS, *STEPS)
    return (*STEPS, *WINDOWS_STEPS) if cpu.system == "windows" else STEPS


def run_steps(cpu: Cpu, library: Path, again: bool) -> list[Step]:
    """Runs what has not passed with this library. Returns the steps that fail."""
    folder = cache_dir() / "cpus"
    folder.mkdir(parents=True, exist_ok=True)
    files = models(folder)
    record = folder / f"{cpu.name}.json"
    state = {"library": str(library), "models": key(), "on": emulator(cpu), "passed": []}
    with contextlib.suppress(OSError, ValueError):
        earlier = json.loads(record.read_text(encoding="utf-8"))
        if not again and all(earlier.get(name) == state[name] for name in ("library", "models", "on")):
            state = earlier
    failed = []
    steps = steps_of(cpu)
    for i, step in enumerate(steps):
        may_differ = "prompts" in step.arguments and f"TARGET-{cpu.cuts}" in step.arguments
        if may_differ or step.name in state["passed"]:
            continue
        say(f"{cpu.name}, {i + 1} of {len(steps)}: {step.name} ...", end="")
        start = time.monotonic()
        fault = run_step(cpu, library, step, files)
        print(f" {time.monotonic() - start:.0f} s{', FAILED' if fault else ''}", file=sys.stderr, flush=True)
        if fault:
            print(fault, file=sys.stderr, flush=True)
            failed.append(step)
        else:
            state["passed"].append(step.name)
            write_text(record, json.dumps(state, indent=1))
    return failed


def run_step(cpu: Cpu, library: Path, step: Step, files: dict[str, Path]) -> str:
    """What went wrong, with the command that shows it again. Empty if the step passes."""
    words = [*emulator(cpu), str(library / f"{step.program}{SYSTEMS[cpu.system].ending}")]
    words += [str(files.get(word, word)) for word in step.arguments]
    variables = {"OMP_WAIT_POLICY": "passive", "WINEDEBUG": "-all", **dict(step.variables)}
    if cpu.system == "windows":
        variables["WINEPREFIX"] = str(cache_dir() / "cpus" / "wine")
    try:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**environment_without_choices(), **variables},
            timeout=LIMIT,
        )
        ended, output = done.returncode, done.stdout
    except subprocess.TimeoutExpired as late:
        ended, output = None, late.stdout or b""
    except OSError as error:
        return f"    it does not start: {error}"
    lines = output.decode(errors="replace").splitlines()
    if ended == 0 and lines and lines[-1].startswith("ok"):
        return ""
    how = f"it does not end within {LIMIT:.0f} s" if ended is None else f"exit status {ended}"
    command = " ".join([*(f"{name}={value}" for name, value in step.variables), *words])
    return "\n".join(f"    {line}" for line in [*lines[-12:], f"{how}: {command}"])


def environment_without_choices() -> dict[str, str]:
    """This process's environment, without what chooses products."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("EAGLE3_LLAMA_", "GGML_", "LLAMA_"))}


def key() -> str:
    """A hash of what makes the models."""
    return hashlib.sha256((ROOT / "tests" / "kit" / "tiny_models.py").read_bytes()).hexdigest()[:16]


def models(folder: Path) -> dict[str, Path]:
    """Tiny random targets in each of KINDS, and a head."""
    made = folder / f"models-{key()}"
    files = {f"TARGET-{kind}": made / f"target-{kind}.gguf" for kind in KINDS} | {"HEAD": made / "head.gguf"}
    if not made.is_dir():
        import tiny_models

        for old in folder.glob("models-*"):
            shutil.rmtree(old)
        with unfinished(made) as fresh:
            for kind in KINDS:
                path = fresh / files[f"TARGET-{kind}"].name
                if kind == "Q4_K":  # gguf's Python part cannot write it; its rows are 256 wide
                    quantize(tiny_models.target(fresh / "wide.gguf", n_embd=256), path)
                else:
                    tiny_models.target(path, kind=kind)
            tiny_models.head(fresh / "head.gguf")
    return files


def quantize(source: Path, path: Path) -> None:
    import eagle3_llama  # noqa: F401 - so that llama_cpp opens its library

    import llama_cpp
    from llama_cpp._logger import set_verbose

    set_verbose(False)
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_S
    if llama_cpp.llama_model_quantize(str(source).encode(), str(path).encode(), ctypes.byref(params)) != 0:
        raise SystemExit(f"error: llama.cpp cannot quantise {source}")


@contextlib.contextmanager
def unfinished(path: Path) -> Iterator[Path]:
    """A folder beside `path`, which becomes `path` at the end."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.mkdir()
    try:
        yield fresh
        fresh.rename(path)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.write_text(text + "\n", encoding="utf-8")
    fresh.replace(path)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted; the next run goes on from here")
