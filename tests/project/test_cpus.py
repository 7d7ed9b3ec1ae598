"""scripts/cpus: what it asks for, runs, remembers and says. The matrix itself is run by hand: it takes hours.

The programs here are small scripts in the native tests' places.
"""

import os
import sys
from pathlib import Path

import pytest
from commands import run
from paths import ROOT

sys.path.insert(0, str(ROOT / "scripts" / "processors"))

import list as cpu_list
import matrix as cpu_matrix
from matrix import CPUS, STEPS, Cpu, Step
from toolchain import parse_defines

BY_NAME = {cpu.name: cpu for cpu in CPUS}
HERE = Cpu("here", "this machine", "x86_64", "")


def matrix(*arguments, code=0, **env):
    script = [sys.executable, ROOT / "scripts" / "processors" / "matrix.py", *arguments]
    return run(script, code, env={**os.environ, **env})


def test_the_list_says_what_each_runs_on():
    lines = matrix("--list", "armv8.2", "windows", "haswell").stdout.splitlines()
    assert [line.split("|")[1].strip(" -") for line in lines] == ["CPU", "", "haswell", "armv8.2", "windows"]
    assert "qemu-x86_64 -cpu Haswell" in lines[2] and "qemu-aarch64 -cpu neoverse-n1" in lines[3]
    assert len({len(line) for line in lines}) == 1


def test_a_name_that_there_is_not():
    said = matrix("armv9", code=2).stderr
    assert "no CPU is called armv9" in said and all(name in said for name in BY_NAME)


def test_missing_tools_are_named_before_anything_is_built(tmp_path):
    """Each once, with the CPUs that need it, and one command that installs all."""
    done = matrix(
        "sve-128", "sve-256", "windows", code=2, PATH=str(tmp_path), EAGLE3_LLAMA_CACHE=str(tmp_path / "c")
    )
    said = done.stderr
    assert "error: x86_64-w64-mingw32-g++-posix is missing, for windows\n" in said
    assert "error: wine is missing, for windows\n" in said
    assert "error: qemu-aarch64-static is missing, for sve-128, sve-256\n" in said
    packages = said.splitlines()[-1].partition("apt-get install ")[2].split()
    assert {"g++-mingw-w64-x86-64-posix", "wine", "wine64", "qemu-user-static"} <= set(packages)
    assert len(packages) == len(set(packages)) and not done.stdout and not (tmp_path / "c").exists()


def test_cpus_that_need_no_tool_are_offered(monkeypatch):
    monkeypatch.setattr(cpu_list, "own", lambda system: system == "x86_64")
    monkeypatch.setattr(cpu_list.shutil, "which", lambda name: None)
    lines = cpu_list.missing_tools([BY_NAME["avx2"], BY_NAME["windows"]], False)
    assert lines[-1].endswith("leave those CPUs out: scripts/cpus avx2")
    assert cpu_list.missing_tools([BY_NAME["avx2"]], False) == []
    assert cpu_list.missing_tools([BY_NAME["haswell"]], True) == []  # only built


def test_what_this_machine_lacks_is_built_and_not_run(monkeypatch, tmp_path):
    """No failure, unless it was asked for by its name."""
    monkeypatch.setattr(cpu_list, "cpu_sets", lambda: {"avx2"})
    monkeypatch.setattr(cpu_matrix, "build", lambda cpu: tmp_path)
    result = cpu_matrix.examine(BY_NAME["avx512"])
    assert result.built == "yes" and result.run.startswith("not here: no fma, f16c") and not result.failed
    monkeypatch.setattr(cpu_matrix, "missing_tools", lambda *_: [])
    assert cpu_matrix.main(["avx512"]) == 1
    monkeypatch.setattr(cpu_matrix, "CPUS", (BY_NAME["avx512"],))
    assert cpu_matrix.main([]) == 0


def test_a_build_that_fails(capsys, monkeypatch, tmp_path):
    """The compiler's error is shown, the table says so, and the other CPUs are still tried."""
    monkeypatch.setenv("EAGLE3_LLAMA_CACHE", str(tmp_path))
    for name in ("CC", "CXX"):
        monkeypatch.setenv(name, "/none/compiler")
    monkeypatch.setattr(cpu_list, "own", lambda system: True)
    monkeypatch.setattr(cpu_matrix, "lacking", lambda cpu: [])
    assert cpu_matrix.main(["avx", "avx2"]) == 1
    rows = capsys.readouterr().out.splitlines()[2:]
    assert len(rows) == 2 and all("| failed | no  | no " in row for row in rows)


def test_every_cpu_has_options_that_cmake_reads():
    for cpu in CPUS:
        words = cpu_matrix.defines(cpu)
        assert all(len(word.split("=")) == 2 for word in words) and "GGML_NATIVE=OFF" in words
        assert bool(cpu.model) != bool(cpu.sets), cpu.name  # emulated, or this machine must have it
    assert "CMAKE_CXX_COMPILER=x86_64-w64-mingw32-g++-posix" in cpu_matrix.defines(BY_NAME["windows"])
    assert any("-cpu" in cpu_list.emulator(cpu) for cpu in CPUS)


def test_what_compiles_for_another_system(monkeypatch):
    """For this machine's own system nothing is said: the compiler is the one that CMake finds."""
    monkeypatch.setattr(cpu_list, "own", lambda system: system == "x86_64")
    assert cpu_list.compiling_for("x86_64") == []
    words = cpu_list.compiling_for("aarch64")
    assert "CMAKE_SYSTEM_PROCESSOR=aarch64" in words and "CMAKE_CXX_COMPILER=aarch64-linux-gnu-g++" in words


def test_sets_that_ggml_turns_on_only_where_it_runs(monkeypatch):
    """On another system they are named, and what the CPU lacks overrides them."""
    monkeypatch.setattr(cpu_list, "own", lambda system: False)

    def options(name):
        words = [f"-D{word}" for word in cpu_matrix.defines(BY_NAME[name])]
        return parse_defines(words, "")

    for name, avx, avx2 in (
        ("windows", "ON", "ON"),
        ("haswell", "ON", "ON"),
        ("sandy-bridge", "ON", "OFF"),
        ("x86-64", "OFF", "OFF"),
    ):
        assert (options(name)["GGML_AVX"], options(name)["GGML_AVX2"]) == (avx, avx2), name
    assert options("x86-64")["GGML_SSE42"] == "OFF" and options("windows-avx512")["GGML_AVX512"] == "ON"
    assert "GGML_AVX2" not in options("armv8.2")
    monkeypatch.setattr(cpu_list, "own", lambda system: system == "x86_64")
    assert "GGML_AVX2" not in options("haswell") and options("windows")["GGML_AVX2"] == "ON"


def test_windows_runs_all_native_tests_that_end_by_themselves():
    """Elsewhere tests/native/test_native.py runs them."""
    there = {path.stem for path in (ROOT / "native" / "tests").glob("*_test.cpp")}
    elsewhere = {
        "memory_test",  # no program's function stands before a library's
        "boundary_test",  # the same
        "kept_graphs_test",  # the same
        "logits_stay_test",  # the same
        "pre_tokenizers_test",  # reads llama.cpp's source, on the machine that compiled it
        "amx_test",  # of a processor
        "widths_test",  # opens a device's library as Linux does
        "draft_model_test",  # a pair of models that a test makes
        "recurrent_test",  # models that a compiled generator makes
        "heads_test",  # reads names of files
        "planner_states_test",  # a simulated clock
        "pruned_windows_test",  # a target of llama.cpp's generator
    }
    assert {step.program for step in cpu_matrix.steps_of(BY_NAME["windows"])} == {
        "eagle3-proof",
        *(there - elsewhere),
    }
    assert cpu_matrix.steps_of(BY_NAME["haswell"]) == STEPS


def program(folder, name, script):
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


@pytest.mark.parametrize(
    "script, said",
    [
        ("kill -ILL $$", "exit status -4: "),
        ("echo 'q4_0: 3 rows differ' >&2; exit 1", "    q4_0: 3 rows differ\n    exit status 1: "),
        ("echo almost", "    almost\n    exit status 0: "),
        ("sleep 1000", "it does not end within 1 s: "),
    ],
)
def test_a_program_that_fails(tmp_path, monkeypatch, script, said):
    """What it said last, how it ended, and the command that shows it again."""
    monkeypatch.setattr(cpu_matrix, "LIMIT", 1 if "sleep" in script else 600)
    program(tmp_path, "products_test", f"exec {script}" if "sleep" in script else script)
    step = Step("run", "products_test", ("1",), (("EAGLE3_LLAMA_INTERLEAVE", "1"),))
    fault = cpu_matrix.run_step(HERE, tmp_path, step, {})
    assert said in fault and f"EAGLE3_LLAMA_INTERLEAVE=1 {tmp_path}/products_test 1" in fault
    missing = cpu_matrix.run_step(HERE, tmp_path, Step("run", "dots_test"), {})
    assert "does not start" in missing


def test_a_run_goes_on_where_it_was(tmp_path, monkeypatch, capsys):
    """What passed with this library is not run again; what failed is, and all is with another library."""
    monkeypatch.setenv("EAGLE3_LLAMA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("EAGLE3_LLAMA_INTERLEAVE", "0")  # the user's choice is not the matrix's
    library, told = tmp_path / "lib", tmp_path / "told"
    library.mkdir()
    log = f'echo "$EAGLE3_LLAMA_INTERLEAVE $*" >> {told}; '
    for name in {step.program for step in STEPS}:
        program(library, name, log + "echo ok")
    program(library, "slots_test", log + "exit 1")

    def run_all(folder, again=False):
        told.write_text("")
        failed = cpu_matrix.run_steps(HERE, folder, again)
        return failed, told.read_text().splitlines()

    failed, lines = run_all(library)
    assert {step.program for step in failed} == {"slots_test"} and len(lines) == len(STEPS)
    assert sum(line.startswith("1 ") for line in lines) == 1 and not any(
        line.startswith("0 ") for line in lines
    )
    files = [Path(word) for line in lines for word in line.split() if word.endswith(".gguf")]
    assert files and all(path.read_bytes()[:4] == b"GGUF" for path in files)
    program(library, "slots_test", log + "echo ok")
    failed, lines = run_all(library)
    assert not failed and len(lines) == sum(step.program == "slots_test" for step in STEPS)
    assert run_all(library) == ([], [])
    assert len(run_all(library, again=True)[1]) == len(STEPS)
    library.rename(tmp_path / "other")
    assert len(run_all(tmp_path / "other")[1]) == len(STEPS)
    assert "slots_test bits TARGET-Q4_K ... " in capsys.readouterr().err
