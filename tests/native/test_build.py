"""What can go wrong before anything is compiled: one clear line each, and nothing is left behind."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from paths import ROOT

sys.path.insert(0, str(ROOT / "native"))

import build as native_build
import fetch
import later
import locks
import toolchain


def build(cache, *args, script="build.py", **env):
    done = subprocess.run(
        [sys.executable, ROOT / "native" / script, *args],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "EAGLE3_LLAMA_CACHE": str(cache), **env},
    )
    return done.returncode, done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize(
    "env, said",
    [
        ({"CXX": "/none/c++"}, "no C++ compiler: looked for /none/c++. Install one"),
        ({"CC": "/none/cc"}, "set CC to its path"),
        ({"CMAKE_ARGS": "GGML_CUDA=on"}, "only -DNAME=VALUE is"),
        ({"EAGLE3_LLAMA_CPP_DIR": "/none"}, "no llama.cpp tree"),
        ({"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""}, "check the network"),
    ],
)
def test_one_clear_line(tmp_path, env, said):
    code, last = build(tmp_path, "--print-dir", **env)
    assert code == 1 and last.startswith("error: ") and said in last
    assert not [p for p in tmp_path.rglob("*") if p.is_file() and not p.name.endswith("lock")]


def test_other_instructions_reach_every_build(monkeypatch):
    """CMAKE_ARGS chooses them for the sanitized build too, which then has another folder in the cache.

    GPU flags do not reach that build.
    """
    places = []
    for given in ("", "-DGGML_NATIVE=OFF", "-DGGML_NATIVE=OFF -DGGML_AVX512=ON -DGGML_CUDA=ON"):
        monkeypatch.setenv("CMAKE_ARGS", given)
        told = [toolchain.cmake_options(sanitize, toolchain.cmake_args()) for sanitize in (False, True)]
        for name in ("GGML_NATIVE", "GGML_AVX512"):
            assert all((name in options) == (name in given) for options in told)
        assert (
            ("GGML_CUDA" in told[0]) == ("GGML_CUDA" in given)
            and "GGML_CUDA" not in told[1]
            and told[1]["EAGLE3_SANITIZE"] == "ON"
        )
        places += map(toolchain.key, told)
    assert len(set(places)) == 6


@pytest.fixture
def env_script(monkeypatch):
    """scripts/_env.py, with none of the variables set."""
    for name in toolchain.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    spec = importlib.util.spec_from_file_location("_env", ROOT / "scripts" / "_env.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", toolchain.VARIABLES)
def test_a_changed_variable_is_noticed_by_the_scripts(env_script, monkeypatch, name):
    """scripts/demo and scripts/test install again what the build would build again."""
    before = env_script.state_key()
    monkeypatch.setenv(name, "-DSOMETHING=else")
    assert env_script.state_key() != before
    monkeypatch.delenv(name)
    assert env_script.state_key() == before


@pytest.mark.parametrize("copied", [True, False])
def test_a_copy_in_place_of_the_checkout_is_mended(env_script, monkeypatch, tmp_path, copied):
    """`pip install '.[hub]'` leaves one in .venv, which no longer follows the checkout."""
    site = tmp_path / "lib" / "python3.12" / "site-packages" / "eagle3_llama"
    (site / "lib").mkdir(parents=True)  # the editable installation has the libraries there
    if copied:
        (site / "__init__.py").touch()
    (tmp_path / "python").touch()
    monkeypatch.setattr(env_script, "VENV", tmp_path)
    monkeypatch.setattr(env_script, "PYTHON", tmp_path / "python")
    monkeypatch.setattr(sys, "argv", ["_env.py"])
    asked = []
    monkeypatch.setattr(env_script, "pip", lambda what, *arguments, **_: asked.append((what, arguments)))
    env_script.stamp("package", env_script.state_key())
    env_script.main()
    assert len(asked) == copied
    for what, arguments in asked:
        assert "copy" in what and arguments[-2:] == ("-e", str(ROOT))


def test_another_processor_is_noticed_by_the_scripts(env_script, monkeypatch):
    before = env_script.state_key()
    monkeypatch.setattr(toolchain, "cpu", lambda: "flags: fpu")
    assert env_script.state_key() != before


@pytest.mark.parametrize("name", ["CFLAGS", "CXXFLAGS", "LDFLAGS", "CUDAFLAGS", "CUDAARCHS", "HIPFLAGS"])
def test_flags_have_a_build_of_their_own(monkeypatch, name):
    monkeypatch.delenv(name, raising=False)
    before = toolchain.key({})
    monkeypatch.setenv(name, "-DSOMETHING=else")
    assert toolchain.key({}) != before


def test_another_file_by_that_name(tmp_path, monkeypatch):
    """An index that serves something else: refused by hash, not kept."""

    def served(command, **_):
        (Path(command[command.index("-d") + 1]) / fetch.SDIST).write_bytes(b"not it")
        return subprocess.CompletedProcess(command, 0, "")

    monkeypatch.setenv("EAGLE3_LLAMA_CACHE", str(tmp_path))
    monkeypatch.setattr(fetch.subprocess, "run", served)
    with pytest.raises(fetch.BuildError, match="has sha256 .* expected " + fetch.SDIST_SHA256):
        fetch.sdist()
    assert not list((tmp_path / "downloads").iterdir())


def test_damaged_download_is_fetched_again(tmp_path, monkeypatch):
    (tmp_path / "downloads").mkdir()
    (tmp_path / "downloads" / fetch.SDIST).write_bytes(b"half of it")
    monkeypatch.setenv("EAGLE3_LLAMA_CACHE", str(tmp_path))
    asked = []
    monkeypatch.setattr(
        fetch.subprocess,
        "run",
        lambda command, **_: asked.append(command) or subprocess.CompletedProcess(command, 1, "no network"),
    )
    with pytest.raises(fetch.BuildError, match="cannot download"):
        fetch.sdist()
    assert asked


@pytest.mark.parametrize("extra", [["mtmd", "e3chat"], ["e3chat"], []])
def test_extra_libraries_are_shipped_where_they_are_built(tmp_path, extra):
    """Not where an earlier build of the same folder left one: it would be another llama.cpp's."""
    (tmp_path / "cmake" / "bin").mkdir(parents=True)
    (tmp_path / "native" / "include").mkdir(parents=True)
    for path in (
        "cmake/bin/libllama.so",
        "cmake/bin/libmtmd.so",
        "cmake/bin/libe3chat.so",
        "cmake/bin/CMakeFiles.txt",
        "native/include/eagle3.h",
    ):
        (tmp_path / path).write_text("")
    work = native_build.Work(tmp_path, "cmake", "ninja", [], extra, "")
    native_build._collect(work, tmp_path / "cmake", tmp_path / "lib")
    shipped = {path.name for path in (tmp_path / "lib").iterdir()}
    assert shipped == {"libllama.so", "eagle3.h", *(f"lib{name}.so" for name in extra)}


def test_libraries_and_programs_of_windows(tmp_path):
    """Found by their names, with the libraries of the compiler, and without what the linker needs alone."""
    (tmp_path / "cmake" / "bin").mkdir(parents=True)
    (tmp_path / "native" / "include").mkdir(parents=True)
    kept = {"libllama.dll", "libeagle3.dll", "libstdc++-6.dll", "eagle3-proof.exe"}
    for name in (*kept, "libllama.dll.a", "other.exe"):
        (tmp_path / "cmake" / "bin" / name).write_text("")
    (tmp_path / "native" / "include" / "eagle3.h").write_text("")
    work = native_build.Work(tmp_path, "cmake", "ninja", ["eagle3-proof"], [], "")
    native_build._collect(work, tmp_path / "cmake", tmp_path / "lib")
    assert {path.name for path in (tmp_path / "lib").iterdir()} == {*kept, "eagle3.h"}


def test_what_is_left_in_a_folder_is_no_source(tmp_path):
    """Python writes its caches beside what it runs, systems and editors their own files."""
    for name in ("ggml/CMakeLists.txt", "src/a.cpp", "src/deep/b.cpp"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    sources, tree = native_build._files(tmp_path), fetch._hash_tree(str(tmp_path))
    assert len(sources) == 3
    for name in ("src/__pycache__/x.pyc", "ggml/deep/__pycache__/x.pyc"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    assert native_build._files(tmp_path) == sources and fetch._hash_tree(str(tmp_path)) == tree
    ignored = fetch._ignore_at(tmp_path)
    assert ignored(str(tmp_path / "src"), ["a.cpp", "build", "__pycache__"]) == ["__pycache__"]
    for name in (".idea/x.cpp", "src/.a.cpp.swp"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    assert native_build._files(tmp_path) == sources


def test_one_build_at_a_time(tmp_path):
    with (tmp_path / "lock").open("w") as first, (tmp_path / "lock").open("w") as second:
        assert locks.take(first) and not locks.take(second)
        first.close()
        assert locks.take(second)


def test_what_is_in_use_is_not_deleted(tmp_path):
    """Of four entries the newest one stays, and an older one that another process uses."""
    for i, name in enumerate("abcd"):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (i, i))
    with locks.locked(fetch._lock_of(tmp_path / "b")):
        fetch._prune(tmp_path, 1)
    left = lambda: {path.name for path in tmp_path.iterdir() if path.is_dir()}
    assert left() == {"b", "d"}
    fetch._prune(tmp_path, 1)
    assert left() == {"d"}


def test_a_tree_is_in_use_while_it_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(fetch, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(fetch, "_make_tree", lambda tree, source, patched: tree.mkdir())
    with fetch.using_tree() as (tree, _):
        fetch._prune(tree.parent, 0)
        assert tree.is_dir()
    fetch._prune(tree.parent, 0)
    assert not tree.is_dir()


def test_builds_that_nothing_uses_are_removed(tmp_path, capsys):
    """After 30 days, with a line; not those that are in use, nor the one that is made."""
    places = {name: tmp_path / name for name in ("old", "held", "new", "own")}
    for name, place in places.items():
        (place / "out" / "one").mkdir(parents=True)
        (place / "big").write_bytes(b"0" * 2_000_000)
        days = 1 if name == "new" else 40
        for path in (place / "out" / "one", place):
            os.utime(path, (time.time() - days * 86400,) * 2)
    with locks.locked(places["held"] / "lock"):
        native_build._remove_unused(places["own"])
    assert {name for name, place in places.items() if place.is_dir()} == {"held", "new", "own"}
    assert f"removed {places['old']}, 2 MB: nothing has used it for 40 days" in capsys.readouterr().err


def test_libraries_for_later(tmp_path, monkeypatch):
    """They are built as the others were, and copied; not if the sources have changed meanwhile."""
    made, folder = tmp_path / "made", tmp_path / "lib"
    for path, names in ((made, ["libllama.so", "libe3chat.so"]), (folder, ["libllama.so"])):
        path.mkdir()
        for name in names:
            (path / name).write_text(path.name)
    record = lambda path, **more: (path / "proof.json").write_text(json.dumps({"sources": "a", **more}))
    record(made)
    asked = []

    def build(defines):
        asked.append((defines, os.environ.get("CMAKE_ARGS"), os.environ.get("CFLAGS")))
        return made

    monkeypatch.setattr(later, "build", build)
    for name in toolchain.VARIABLES:
        monkeypatch.setenv(name, "-of-today")
    installed = {"later": {"GGML_NATIVE": "OFF"}, "environment": {"CMAKE_ARGS": "-DX=Y"}}
    record(folder, **{**installed, "sources": "b"})
    with pytest.raises(fetch.BuildError, match="have changed since the libraries in .*: install them again"):
        later.complete(folder)
    assert not (folder / "libe3chat.so").exists()

    record(folder, **installed)
    (folder / "libe3chat.so").write_text("of an earlier installation")
    for _ in range(2):  # the second finds nothing left to do
        later.complete(folder)
    assert asked[1:] == [({"GGML_NATIVE": "OFF"}, "-DX=Y", None)]
    assert (folder / "libllama.so").read_text() == "lib" and (folder / "libe3chat.so").read_text() == "made"
    assert json.loads((folder / "proof.json").read_text()) == {"sources": "a"}
    assert {path.suffix for path in folder.iterdir()} == {".so", ".json", ".lock"}
