"""A built library is checked on this processor, and built again without an instruction set that fails.

Every child process here is real: it ends by a real signal, hangs, or computes wrong sums. The ladder is
climbed with a program of one file in the library's place; the check itself runs on the library, whole and
broken.
"""

import os
import re
import shutil
import subprocess
import sys

import pytest
from paths import ROOT
from tiers import each

from eagle3_llama.runtime.library import find_lib_dir

sys.path.insert(0, str(ROOT / "native"))

import compiling
import fetch
import proof
import toolchain

LIMITS = proof.Limits(computing=4, asleep=10, wall=600)  # seconds; only what does not end waits for them
SHORT = proof.Limits(computing=1, asleep=3, wall=600)  # for a program that does nothing
X86 = [each for each in toolchain.INSTRUCTION_SETS if each.flag]
LIB = find_lib_dir()

# Ends as asked while the instruction set FAULTY is there. AT_RUN_TIME: EAGLE3_LLAMA_AMX=0 leaves it out too.
PROGRAM = r"""
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
static int amx(void) {
    const char * s = getenv("EAGLE3_LLAMA_AMX");
    return !AT_RUN_TIME || !s || strcmp(s, "0");
}
int main(void) {
    puts("products in q4_0 (AMX)");
    fflush(stdout);
#ifdef FAULTY
    if (amx()) {
        FAULTY
    }
#endif
    puts("ok");
    return 0;
}
"""
FAULTS = {
    "signal": ("raise(SIGSEGV);", "products in q4_0 (AMX) end with SIGSEGV"),
    "instruction": ("__builtin_trap();", "products in q4_0 (AMX) end with SIG"),
    "abort": ("abort();", "products in q4_0 (AMX) end with SIGABRT"),
    "hang": ("sleep(100000);", "products in q4_0 (AMX) do not end"),
    "loop": ("for (volatile int i = 1; i;) {}", "products in q4_0 (AMX) do not end"),
    "wrong": ('fputs("2 where 1 is right\\n", stderr); return 1;', "are wrong (2 where 1 is right)"),
}
ROWS = 'fputs("products in q4_0: rows differ\\n", stderr); return 3;'


class Builder:
    """Builds the program above in the library's place, with a fault as long as one of `faulty` is left."""

    def __init__(self, folder, used, faulty, fault, at_run_time=False, foreign=()):
        self.foreign, self.folder, self.used, self.faulty = list(foreign), folder, used, set(faulty)
        self.fault, self.at_run_time, self.gone = fault, at_run_time, []

    def __call__(self, gone):
        self.gone.append([each.name for each in gone])
        left = [each for each in self.used if each not in gone]
        source = self.folder / "proof.c"
        source.write_text(PROGRAM)
        broken = [f"-DFAULTY={self.fault}"] if self.faulty & {each.name for each in left} else []
        flags = [f"-DAT_RUN_TIME={int(self.at_run_time)}", *broken]
        subprocess.run(["cc", *flags, source, "-o", self.folder / proof.PROGRAM], check=True, timeout=120)
        return proof.Built(self.folder, left, self.foreign)


def rungs_of(names):
    return [rung.name for rung in proof.RUNGS if set(rung.sets) & set(names)]


@pytest.mark.parametrize("kind", FAULTS)
def test_every_way_to_fail_is_one_line_and_a_build_without(tmp_path, capsys, kind):
    fault, said = FAULTS[kind]
    make = Builder(tmp_path, X86, {"avx512_vnni"}, fault)
    record = proof.prove(make, "stock-", limits=SHORT)
    assert record["checked"] and [each["what"] for each in record["left_out"]] == [
        "AMX",
        "AVX-512's VNNI, BF16, VBMI and FP16",
    ]
    assert said in record["left_out"][1]["why"]
    assert "avx512_vnni" not in record["used"] and {"avx512f", "avx2"} <= set(record["used"])
    assert len(make.gone) == 3 and make.gone[0] == [] and "amx_int8" in make.gone[1]
    lines = [line for line in capsys.readouterr().err.splitlines() if "on this processor" in line]
    assert len(lines) == 2 and all(said in line for line in lines)
    assert lines[1].endswith("building without AVX-512's VNNI, BF16, VBMI and FP16")


@pytest.mark.parametrize(
    "rung", [rung for rung in proof.RUNGS if "avx" in rung.sets[0]], ids=lambda r: r.name
)
def test_the_ladder_ends_where_the_fault_ends(tmp_path, rung):
    make = Builder(tmp_path, X86, rung.sets, "raise(SIGILL);")
    record = proof.prove(make, "stock-", limits=LIMITS)
    wanted = [r for r in proof.RUNGS[: proof.RUNGS.index(rung) + 1]]
    assert [each["what"] for each in record["left_out"]] == [r.name for r in wanted]
    below = {each.name for each in X86} - {name for r in wanted for name in r.sets}
    assert set(record["used"]) == below


def test_amx_is_told_apart_at_run_time(tmp_path):
    """It alone is left out if the same library passes without it; otherwise the next set goes with it."""
    alone = Builder(tmp_path, X86, {"amx_int8"}, "raise(SIGSEGV);", at_run_time=True)
    record = proof.prove(alone, limits=LIMITS)
    assert [each["what"] for each in record["left_out"]] == ["AMX"] and len(alone.gone) == 2
    assert "avx512_vnni" in record["used"] and "amx_tile" not in record["used"]

    other = Builder(tmp_path, X86, {"avx512_bf16"}, "raise(SIGSEGV);")
    record = proof.prove(other, limits=LIMITS)
    assert len(other.gone) == 2, "one build for both"
    assert "AMX and AVX-512's VNNI" in record["left_out"][0]["what"] and "avx512f" in record["used"]


def test_what_passes_is_built_once(tmp_path, capsys):
    make = Builder(tmp_path, X86, (), "")
    record = proof.prove(make, limits=LIMITS)
    assert make.gone == [[]] and record["checked"] and not record["left_out"]
    assert "checking the library ..." in capsys.readouterr().err


def test_nothing_left_to_leave_out(tmp_path):
    make = Builder(tmp_path, X86, {"bmi2"}, "raise(SIGBUS);")
    make.faulty = {each.name for each in X86} | {""}
    make.used = [toolchain.InstructionSet("", "", "", ""), *X86]  # what cannot be left out
    with pytest.raises(fetch.BuildError, match="SIGBUS on this processor, also without AMX.*CC, CXX"):
        proof.prove(make, "stock-", limits=LIMITS)


def test_rows_that_differ_cost_no_set_but_amx(tmp_path, capsys):
    """The sums are right: a library without AVX-512 would be slower and no better."""
    make = Builder(tmp_path, X86, {"avx512f"}, ROWS)
    record = proof.prove(make, limits=LIMITS)
    assert make.gone == [[]] and not record["left_out"] and record["note"] == "products in q4_0: rows differ"
    assert "rows differ on this processor: two tokens of nearly" in capsys.readouterr().err

    amx = Builder(tmp_path, X86, {"amx_int8"}, ROWS, at_run_time=True)
    record = proof.prove(amx, limits=LIMITS)
    assert len(amx.gone) == 2 and record["left_out"][0]["what"] == "AMX" and "note" not in record


def test_a_build_for_another_machine_is_not_judged_by_this_one(tmp_path, capsys):
    make = Builder(tmp_path, X86, {"amx_int8"}, "raise(SIGILL);", foreign=["amx_tile"])
    record = proof.prove(make, limits=LIMITS)
    assert make.gone == [[]] and not record["checked"] and "amx_tile" in record["why_not"]
    assert "the library was not checked: " in capsys.readouterr().err
    (tmp_path / proof.PROGRAM).write_text("of another system")
    (tmp_path / proof.PROGRAM).chmod(0o755)
    record = proof.prove(lambda gone: proof.Built(tmp_path, [], []), limits=LIMITS)
    assert not record["checked"] and "does not run" in record["why_not"]


# What a machine that is busy with something else does to a child, without such a machine.
STARVED = {
    "slow": "for (int i = 0; i < 60; ++i) { usleep(50000); for (volatile int j = 1e6; j; --j) {} }",
    "stopped": "raise(SIGSTOP);",  # it is never given a core
}


@pytest.mark.skipif(sys.platform != "linux", reason="only there a slow child is told from one that waits")
def test_a_slow_machine_is_no_fault(tmp_path):
    """It passes, though it takes longer than one that waits for nothing may."""
    make = Builder(tmp_path, X86, {"amx_int8"}, STARVED["slow"])
    record = proof.prove(make, limits=proof.Limits(computing=20, asleep=1, wall=120))
    assert make.gone == [[]] and record["checked"] and not record["left_out"]


def test_a_machine_too_busy_is_told_from_a_fault(tmp_path, capsys):
    make = Builder(tmp_path, X86, {"amx_int8"}, STARVED["stopped"])
    record = proof.prove(make, limits=proof.Limits(computing=20, asleep=1, wall=3))
    assert make.gone == [[]] and not record["checked"] and not record["left_out"]
    assert record["why_not"] == "products in q4_0 (AMX) took more than 3 s, as the machine is too busy"
    said = capsys.readouterr().err
    assert " s, not checked\n" in said and "failed" not in said
    assert f"the library was not checked: {record['why_not']}\n" in said


def test_a_variant_that_was_not_checked_stays(tmp_path, capsys):
    """One that fails does not. The record has both, apart from each other."""
    ends = {"a": "kill -STOP $$", "b": "kill -SEGV $$", "c": "echo ok"}
    for name, end in ends.items():
        (tmp_path / proof.checking.backend_file(name)).write_text(end)
    program = '#!/bin/sh\n[ "$1" = --score ] && { echo 1; exit; }\necho "products in q4_0"\n. "$1"\n'
    (tmp_path / proof.PROGRAM).write_text(program)
    (tmp_path / proof.PROGRAM).chmod(0o755)
    built = proof.Built(tmp_path, [], [], {name: ["avx"] for name in ends})
    record = proof.prove_variants(built, limits=proof.Limits(computing=20, asleep=1, wall=3))
    assert list(record["variants"]) == ["a", "c"] and record["checked_variants"] == ["c"]
    assert [each["what"] for each in record["left_out"]] == ["the variant b"]
    assert not record["checked"] and record["why_not"].startswith("the variant a: products in q4_0 took more")
    assert (tmp_path / proof.checking.backend_file("a")).is_file()
    said = capsys.readouterr().err
    assert re.search(r"checking the variant a \.\.\. \d+ s, not checked", said)
    assert "leaving out the variant b" in said


def test_on_windows_the_check_says_that_it_cannot_be_made(tmp_path, monkeypatch):
    """Before anything is started: there is no fork there, and pipes cannot be waited for."""
    monkeypatch.setattr(sys, "platform", "win32")
    record = proof.prove(lambda gone: proof.Built(tmp_path, [], []), limits=LIMITS)
    assert not record["checked"] and "Windows" in record["why_not"]


def test_no_flag_of_a_rung_stays():
    """What -mno-... is passed for is gone, by the compiler's own word, and the others stay."""
    empty = ["-dM", "-E", "-x", "c", os.devnull]
    target = ["cc", "-march=sapphirerapids", "-mavxvnni"]
    if subprocess.run([*target, *empty], capture_output=True, timeout=60).returncode != 0:
        pytest.skip("the compiler knows no processor with AMX")

    def macros(flags):
        done = subprocess.run(
            [*target, *flags, *empty], capture_output=True, text=True, timeout=60, check=True
        )
        return {line.split()[1] for line in done.stdout.splitlines()}

    here = macros([])
    assert {"__AMX_INT8__", "__AVX512VNNI__", "__AVX512FP16__", "__AVX2__", "__SSSE3__"} <= here
    gone, known = [], [each for each in X86 if each.macro in here]
    for rung in proof.RUNGS[:5]:
        gone += [each for each in known if each.name in rung.sets]
        left = macros(toolchain.without(gone)["EAGLE3_WITHOUT"].split(";"))
        assert not left & {each.macro for each in gone}, rung.name
        assert {each.macro for each in known if each not in gone} <= left, rung.name


@pytest.mark.skipif(not {"avx2", "fma"} <= toolchain.cpu_sets(), reason="no AVX2 here")
@pytest.mark.parametrize(
    "given",
    [pytest.param({}, marks=pytest.mark.thorough), {"GGML_NATIVE": "OFF", "GGML_AVX2": "ON"}],
    ids=["native", "chosen"],
)
def test_the_second_build_has_no_such_flag(tmp_path, monkeypatch, given):
    """CMake and ninja, as build.py calls them: nothing is compiled, the commands are read."""
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    tree, _ = fetch.patched_tree(os.environ.get("EAGLE3_LLAMA_CPP_DIR"))
    (tmp_path / "llama.cpp").symlink_to(tree)
    (tmp_path / "native").symlink_to(ROOT / "native")
    tools = [toolchain.tool(None, name) for name in ("cmake", "ninja")]
    work = compiling.Work(tmp_path, *tools, [], [], "")
    options = {"CMAKE_BUILD_TYPE": "Release", "EAGLE3_BUILD_MTMD": "OFF", **given}

    def used(gone):
        build_dir = compiling.configure(work, {**options, **toolchain.without(gone)})
        return toolchain.used_sets(build_dir, tools[1])[0]

    first = used([])
    names = {name for rung in proof.RUNGS[:4] for name in rung.sets}  # AVX2, and all that needs it
    gone = [each for each in first if each.name in names]
    assert {"avx2", "fma"} <= {each.name for each in gone}
    assert used(gone) == [each for each in first if each not in gone]
    assert used([]) == first, "a later build of the folder begins with everything"


def test_this_library_is_right():
    assert proof.check(LIB) is None
    assert proof.check(LIB, ["--stock", "--few"]) is None


@pytest.mark.thorough
def test_each_step_may_compute_as_long_as_the_limit_says():
    """All of them together compute for two seconds, and in an emulator for a hundred times as long."""
    assert proof.check(LIB, limits=proof.LIMITS._replace(computing=1)) is None


# a product of the library, replaced
BROKEN = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stddef.h>
#include <unistd.h>
typedef void (*dot)(int, float *, size_t, const void *, size_t, const void *, size_t, int);
void ggml_vec_dot_q3_K_q8_K(int n, float * s, size_t bs, const void * x, size_t bx, const void * y, size_t by,
                            int nrc) {
    static int calls;
    (void) calls;
    ((dot) dlsym(RTLD_NEXT, "ggml_vec_dot_q3_K_q8_K"))(n, s, bs, x, bx, y, by, nrc);
    FAULT
}
"""


BREAKS = {
    "whole": ("(void) n;", None, None),
    "signal": ("raise(SIGSEGV);", "failed", "products in q3_K end with SIGSEGV"),
    "hang": ("sleep(100000);", "failed", "products in q3_K do not end"),
    "loop": ("for (volatile int i = 1; i;) {}", "failed", "products in q3_K do not end"),
    "scale": ("*s *= 1.02f;", "failed", "products in q3_K are wrong (with 64 rows"),
    "sum": ("*s += 1.0f;", "failed", "products in q3_K are wrong (with 64 rows"),
    "rows": ("if (++calls % 97 == 0) *s *= 1.000001f;", "rows", "products in q3_K (CPU): rows differ"),
}


@pytest.mark.skipif(sys.platform != "linux", reason="LD_PRELOAD")
@pytest.mark.parametrize("fault", each(BREAKS, quick=["signal", "scale", "rows"]))
def test_a_broken_product_is_found(tmp_path, fault):
    fault, kind, said = BREAKS[fault]
    (tmp_path / "broken.c").write_text(BROKEN.replace("FAULT", fault))
    broken = tmp_path / "broken.so"
    flags = ["-shared", "-fPIC", "-o", broken, tmp_path / "broken.c", "-ldl"]
    subprocess.run(["cc", *flags], check=True, timeout=120)
    found = proof.check(LIB, limits=LIMITS, env={"LD_PRELOAD": str(broken)})
    assert (found.kind if found else None) == kind
    assert found is None or said in found.text


def test_nothing_stays_of_a_child_that_died(tmp_path, monkeypatch):
    """Neither a core file nor the model that it had written."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(proof.checking.tempfile, "tempdir", None)
    folder = tmp_path / "lib"
    folder.mkdir()
    program = '#!/bin/sh\necho "a generation in f32"\n: > "$TMPDIR/model"\nkill -SEGV $$\n'
    (folder / proof.PROGRAM).write_text(program)
    (folder / proof.PROGRAM).chmod(0o755)
    assert proof.check(folder, limits=LIMITS).text == "a generation in f32 ends with SIGSEGV"
    assert list(tmp_path.iterdir()) == [folder] and shutil.rmtree(folder) is None
