"""Which CPU backend of a library with several is used: chosen, checked once, remembered, named by hand.

A build with all variants takes ten minutes (tests/by_hand/wheels.py tests one). Here a variant is a small
library in front of the CPU backend that there is: the choice, the check in a child process and its memory are
the real ones.
"""

import json
import os
import shutil
import subprocess
import sys

import pytest
from commands import run

from eagle3_llama import EagleError
from eagle3_llama.llama.model_costs import cost_key
from eagle3_llama.runtime import machine, variants
from eagle3_llama.runtime.library import find_lib_dir
from eagle3_llama.runtime.variants import choose

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the linker's options are those of Linux")
SOURCE = """
void * ggml_backend_cpu_reg(void);
__attribute__((constructor)) static void loaded(void) { LOADED; }
int ggml_backend_score(void) { return SCORE; }
void * ggml_backend_init(void) { INIT; return ggml_backend_cpu_reg(); }
"""
TRAP = "__builtin_trap()"
GENERATES = """
from eagle3_llama import EagleLlama
llm = EagleLlama({!r}, eagle={!r}, n_ctx=128, n_max=3, verbose=False)
print([t for t, _ in zip(llm.generate([1, 5, 9], temp=0.0), range(20))], llm.stats.drafted > 3)
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """A folder with the libraries, without a variant."""
    return shutil.copytree(find_lib_dir(), tmp_path_factory.mktemp("variants") / "lib")


@pytest.fixture
def there(library, tmp_path, monkeypatch):
    """Makes variants and gives the folder. Each is its score, or (score, what its start does, loading it)."""
    monkeypatch.setenv("EAGLE3_LLAMA_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(variants.VARIABLE, raising=False)
    monkeypatch.setattr(variants, "_chosen", {})

    def make(**named):
        for old in library.glob("libggml-cpu-*.so"):
            old.unlink()
        for name, what in named.items():
            score, init, loaded = (*(what if isinstance(what, tuple) else (what,)), "", "")[:3]
            (tmp_path / "v.c").write_text(SOURCE)
            given = [f"-DSCORE={score}", f"-DINIT={init}", f"-DLOADED={loaded}"]
            made = ["-shared", "-fPIC", "-o", library / f"libggml-cpu-{name}.so", tmp_path / "v.c"]
            linked = [f"-L{library}", "-lggml-cpu", "-Wl,-rpath,$ORIGIN"]
            subprocess.run(["cc", *given, *made, *linked], check=True, timeout=120)
        return library

    return make


def kept(tmp_path):
    return [json.loads(path.read_text()) for path in (tmp_path / "cache" / "variants").glob("*.json")]


def test_a_library_for_one_processor_has_none(there, monkeypatch):
    lib = there()
    assert variants.names(lib) == [] and choose(lib) is None
    monkeypatch.setenv(variants.VARIABLE, "haswell")
    with pytest.raises(EagleError, match="EAGLE3_LLAMA_CPU is haswell.*built for one processor"):
        choose(lib)


@pytest.mark.thorough
def test_a_variant_that_traps(there, files, tmp_path, monkeypatch, capsys):
    """It is left out with one line, once; the next lower one generates, and `info --system` tells of it."""
    lib = there(low=1, middle=5, high=(9, TRAP), other=0, worse=(12, "", TRAP))
    env = {**os.environ, "EAGLE3_LLAMA_LIB_DIR": str(lib), "EAGLE3_LLAMA_CACHE": str(tmp_path / "cache")}
    code = [sys.executable, "-c", GENERATES.format(*files)]
    first, second = run(code, env=env), run(code, env=env)
    lines = [line for line in first.stderr.splitlines() if "on this processor" in line]
    assert len(lines) == 3 and "checking the variant high" in lines[0] and "the variant middle" in lines[2]
    why = lines[1].partition(" on this processor: trying the variant middle, not high]")
    assert why[1] and why[0].startswith("[the start ends with SIG")
    assert "variant" not in second.stderr and second.stdout == first.stdout and "True" in first.stdout
    own = run(code, env={**env, "EAGLE3_LLAMA_LIB_DIR": str(find_lib_dir())})
    assert own.stdout == first.stdout
    assert kept(tmp_path) == [["middle", [["high", why[0][1:]]], ""]]

    told = run([sys.executable, "-m", "eagle3_llama.cli", "info", "--system"], env=env)
    rows = dict(line.partition(": ")[::2] for line in told.stdout.splitlines())
    assert rows["variant"].startswith("middle, chosen here") and "high, low, middle, other" in rows["variant"]
    assert rows["not used here"] == f"the variant high, because {why[0][1:]}"
    assert rows["products"] == "right on this processor" and rows["library"].startswith("loads")


@pytest.mark.thorough
def test_another_processor_and_another_library_are_checked_again(there, tmp_path, monkeypatch, capsys):
    def checks():
        variants._chosen.clear()
        choose(lib)
        return capsys.readouterr().err.count("checking the variant")

    lib = there(one=1)
    assert [checks(), checks()] == [1, 0]
    monkeypatch.setattr(machine, "cpu", lambda: "another one")
    assert [checks(), checks()] == [1, 0] and len(kept(tmp_path)) == 2
    os.utime(lib / "libggml-base.so", (1, 1))
    assert [checks(), checks()] == [1, 0] and len(kept(tmp_path)) == 3
    for path in (tmp_path / "cache" / "variants").glob("*.json"):
        path.write_text('["none", [], ""]')
    assert checks() == 1
    for path in (tmp_path / "cache" / "variants").glob("*.json"):
        path.write_text("[")
    assert [checks(), checks()] == [1, 0]
    assert not [p for p in (tmp_path / "cache" / "variants").iterdir() if p.suffix != ".json"]


@pytest.mark.thorough
def test_without_a_place_to_remember(there, tmp_path, monkeypatch):
    lib = there(one=1)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EAGLE3_LLAMA_CACHE", str(tmp_path / "file" / "cache"))
    assert choose(lib).name == "one"


@pytest.mark.parametrize(
    "asked, said",
    [
        ("none", "which the library in .* has not: its variants are low, traps, unfit"),
        ("unfit", "which this processor cannot run: it can run traps, low"),
        ("traps", "and the start ends with SIG.* on this processor: unset EAGLE3_LLAMA_CPU"),
    ],
)
def test_a_name_that_cannot_be_had(there, tmp_path, files, asked, said):
    lib = there(low=1, traps=(9, TRAP), unfit=0)
    env = {**os.environ, "EAGLE3_LLAMA_LIB_DIR": str(lib), variants.VARIABLE: asked}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(variants.VARIABLE, asked)
        with pytest.raises(EagleError, match=said):
            choose(lib)
    assert not (tmp_path / "cache").exists()
    code = "import eagle3_llama\ntry: eagle3_llama.EagleLlama\nexcept eagle3_llama.EagleError as e: print(e)"
    assert f"{variants.VARIABLE} is {asked}" in run([sys.executable, "-c", code], env=env).stdout


def test_a_name(there, monkeypatch):
    lib = there(low=1, high=9)
    monkeypatch.setenv(variants.VARIABLE, "low")
    assert choose(lib) == ("low", [], "")


# eagle3-proof: each variant scores and ends as its file's words say
PROGRAM = '#!/bin/sh\n[ "$1" = --score ] && { echo 1; exit; }\necho "products in q4_0"\n. "$1"\n'


@pytest.mark.parametrize(
    "ends, name, remark",
    [
        ({"a": "echo ok", "b": "kill -9 $$"}, "a", ""),
        ({"a": "echo differ >&2; exit 3", "b": "echo differ >&2; exit 3"}, "a", "differ"),
        ({"a": "echo differ >&2; exit 3", "b": "echo 2 for 1 >&2; exit 1", "c": "echo ok"}, "c", ""),
        ({"a": "echo no folder >&2; exit 4", "b": "echo ok"}, "a", "not checked here: no folder"),
    ],
    ids=["right", "rows", "wrong", "cannot"],
)
def test_every_end_of_the_check(tmp_path, monkeypatch, ends, name, remark):
    monkeypatch.setattr(variants, "_chosen", {})
    monkeypatch.setenv("EAGLE3_LLAMA_CACHE", str(tmp_path / "cache"))
    lib = tmp_path / "lib"
    lib.mkdir()
    for variant, end in ends.items():
        (lib / f"libggml-cpu-{variant}.so").write_text(end)
    (lib / "eagle3-proof").write_text(PROGRAM)
    (lib / "eagle3-proof").chmod(0o755)
    choice = choose(lib)
    assert (choice.name, choice.remark) == (name, remark)
    assert [which for which, _ in choice.dropped] == [v for v in ends if v < name]
    assert len(kept(tmp_path)) == ("not checked" not in remark)


def test_no_variant_is_right(tmp_path, monkeypatch):
    monkeypatch.setattr(variants, "_chosen", {})
    monkeypatch.setenv("EAGLE3_LLAMA_CACHE", str(tmp_path / "cache"))
    (tmp_path / "libggml-cpu-a.so").write_text("kill -9 $$")
    (tmp_path / "eagle3-proof").write_text(PROGRAM)
    (tmp_path / "eagle3-proof").chmod(0o755)
    with pytest.raises(EagleError, match=r"\(a: products in q4_0 end with SIGKILL\): build the library here"):
        choose(tmp_path)


def test_a_program_that_may_not_run(there):
    """A file system without execution, or a wheel unpacked by hand: ggml's own choice, without the check."""
    lib = there(low=1, high=9)
    (lib / "eagle3-proof").chmod(0o644)
    try:
        choice = choose(lib)
    finally:
        (lib / "eagle3-proof").chmod(0o755)
    assert choice.name == "high" and "not checked here: eagle3-proof does not run" in choice.remark


def test_costs_are_those_of_the_variant(files, monkeypatch):
    from eagle3_llama import EagleLlama

    llm = EagleLlama(files[0], eagle=files[1], n_ctx=128, verbose=False)
    keys = []
    for name in ("haswell", "zen4"):
        monkeypatch.setattr(variants, "_chosen", {find_lib_dir(): variants.CpuBackend(name, [], "")})
        keys.append(str(cost_key(llm, llm._eagle_path)))
    llm.close()
    assert keys[0] != keys[1] and "haswell" in keys[0]
