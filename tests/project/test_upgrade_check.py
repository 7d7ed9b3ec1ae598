"""scripts/release/upgrade_check.py on a small series and trees that moved on; nothing is downloaded."""

import io
import os
import subprocess
import sys
import tarfile

import pytest
from commands import run as run_command
from paths import ROOT

sys.path[:0] = [str(ROOT / "native"), str(ROOT / "scripts" / "release")]

import apply_patches  # noqa: E402
import upgrade_check  # noqa: E402

SOURCE = """#include <a.h>

int first(int x) {
    int y = x;
    y += 1;
    return y;
}

int second(int x) {
    int z = x;
    z += 2;
    return z;
}
"""
ADD = """Subject: [PATCH] one
--- a/src/f.cpp
+++ b/src/f.cpp
@@ -3,5 +3,6 @@ int first(int x) {
 int first(int x) {
     int y = x;
     y += 1;
+    y += 10;
     return y;
 }
@@ -9,5 +10,6 @@ int second(int x) {
 int second(int x) {
     int z = x;
     z += 2;
+    z += 20;
     return z;
 }
--- /dev/null
+++ b/src/new.h
@@ -0,0 +1,2 @@
+#pragma once
+int third(int x);
"""
BUILDS_ON_ADD = """Subject: [PATCH] two
--- a/src/f.cpp
+++ b/src/f.cpp
@@ -11,5 +11,6 @@ int second(int x) {
     int z = x;
     z += 2;
     z += 20;
+    z += 200;
     return z;
 }
"""


@pytest.fixture
def series(tmp_path):
    folder = tmp_path / "series"
    folder.mkdir()
    (folder / "0001-add.patch").write_text(ADD)
    (folder / "0002-builds-on-add.patch").write_text(BUILDS_ON_ADD)
    return folder


def run(series, capsys, source, name="src/f.cpp", more=(), **options):
    files = {name: source.encode().splitlines(keepends=True)}
    ok = upgrade_check.check(series, files, {name, *more}, **options)
    return ok, capsys.readouterr().out


def test_applies(series, capsys):
    ok, text = run(series, capsys, SOURCE)
    assert ok
    assert text.splitlines() == [
        "0001-add            applies",
        "0002-builds-on-add  applies",
        "all 2 patches apply",
    ]


def test_applies_with_an_offset(series, capsys, tmp_path):
    """Also where hunks of one file moved differently; the series is written anew and applies exactly."""
    moved = "// one\n// two\n" + SOURCE.replace("int second", "// three\nint second")
    ok, text = run(series, capsys, moved, write=tmp_path / "written")
    assert ok and "0001-add            applies with an offset of +2 to +3 lines\n" in text
    assert "0002-builds-on-add  applies with an offset of +3 lines\n" in text

    (tmp_path / "tree" / "src").mkdir(parents=True)
    (tmp_path / "tree" / "src" / "f.cpp").write_text(moved)
    with pytest.raises(apply_patches.PatchError, match="hunk 1: does not match"):
        apply_patches.apply_series(series, tmp_path / "tree")
    apply_patches.apply_series(tmp_path / "written", tmp_path / "tree")
    text = (tmp_path / "tree" / "src" / "f.cpp").read_text()
    assert text.count("\n") == moved.count("\n") + 3 and "    z += 20;\n    z += 200;\n    return z;" in text
    assert "@@ -5,5 +5,6 @@ int first(int x) {" in (tmp_path / "written" / "0001-add.patch").read_text()
    assert "@@ -12,5 +13,6 @@ int second(int x) {" in (tmp_path / "written" / "0001-add.patch").read_text()


def test_names_file_hunk_function_and_what_is_there(series, capsys):
    changed = SOURCE.replace("int second(int x)", "long renamed(long x)").replace("z += 2", "z = add(z, 2)")
    ok, text = run(series, capsys, "// up\n" + changed)
    assert not ok and "0001-add            1 of 3 hunks do not match\n" in text
    assert "  src/f.cpp, hunk 2 of 2, in long renamed(long x)\n" in text
    assert "      -    z += 2;\n      +    z = add(z, 2);\n" in text
    assert "int first" not in text  # that hunk applies
    assert "note: it builds on 0001-add.patch, hunk 2, which does not match" in text
    assert text.endswith("2 hunks in 2 of 2 patches need work\n")


def test_result_is_there_already(series, capsys):
    ok, text = run(series, capsys, SOURCE.replace("    z += 2;\n", "    z += 2;\n    z += 20;\n"))
    assert not ok and "note: the tree has the result already" in text
    assert "0002-builds-on-add  applies\n" in text


def test_a_file_is_gone_or_moved(series, capsys):
    ok, text = run(series, capsys, SOURCE, name="lib/f.cpp", more=["src/new.h"])
    assert not ok and "note: the file is gone; of the same name: lib/f.cpp" in text
    assert "in int second(int x)\n" in text  # as the patch has it
    assert "note: upstream has a file of this name now" in text


def make_sdist(folder, version, source):
    folder.mkdir(parents=True)
    top = f"llama_cpp_python-{version}"
    with tarfile.open(folder / f"{top}.tar.gz", "w:gz") as tar:
        for name, data in {
            "vendor/llama.cpp/src/f.cpp": source,
            ".git/modules/vendor/llama.cpp/HEAD": "0123456789abcdef\n",
        }.items():
            member = tarfile.TarInfo(f"{top}/{name}")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data.encode()))


def script(tmp_path, series, *args, **env):
    done = run_command(
        [sys.executable, ROOT / "scripts" / "release" / "upgrade_check.py", "--patches", series, *args],
        None,
        env={**os.environ, "EAGLE3_LLAMA_CACHE": str(tmp_path / "cache"), **env},
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("source, code", [(SOURCE, 0), (SOURCE.replace("y += 1", "++y"), 1)])
def test_script(tmp_path, series, source, code):
    downloads = tmp_path / "cache" / "downloads"
    make_sdist(downloads, "9.8.7", source)
    before = sorted(tmp_path.rglob("*"))
    returned, out, err = script(tmp_path, series, "9.8.7")
    assert returned == code and out.startswith("llama-cpp-python 9.8.7, llama.cpp 012345678\nsha256 ")
    assert "reading llama_cpp_python-9.8.7.tar.gz" in err
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "version, env, said",
    [
        ("9.8.6", {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""}, "check the network"),
        ("next", {}, "'next' is not a version"),
        ("9.8.5", {}, "delete it to download it again"),
    ],
)
def test_one_clear_line(tmp_path, series, version, env, said):
    downloads = tmp_path / "cache" / "downloads"
    downloads.mkdir(parents=True)
    (downloads / "llama_cpp_python-9.8.5.tar.gz").write_bytes(b"half a file")
    code, out, err = script(tmp_path, series, version, **env)
    last = err.strip().splitlines()[-1]
    assert code == 2 and last.startswith("error: ") and said in last and "Traceback" not in err
    assert [path.name for path in downloads.iterdir()] == ["llama_cpp_python-9.8.5.tar.gz"]


def test_a_version_that_is_not_there(tmp_path, monkeypatch):
    said = "ERROR: Could not find a version that satisfies it (from versions: 0.3.34, 0.3.35, 0.3.36)"
    monkeypatch.setenv("EAGLE3_LLAMA_CACHE", str(tmp_path))
    monkeypatch.setattr(
        upgrade_check.fetch.subprocess,
        "run",
        lambda command, **_: subprocess.CompletedProcess(command, 1, said),
    )
    with pytest.raises(upgrade_check.fetch.BuildError, match="no version 0.3.99; .* 0.3.35, 0.3.36"):
        upgrade_check.get_sdist("0.3.99")
    assert not list((tmp_path / "downloads").iterdir())
