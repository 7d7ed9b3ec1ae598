"""patches/to_send: what could be sent to llama.cpp applies to the pinned tree and is what the series has."""

import difflib
import re
import shutil
import subprocess
import sys

import pytest
from commands import run
from paths import ROOT
from pinned_tree import pinned_files

sys.path.insert(0, str(ROOT / "native"))

import apply_patches
import fetch

from eagle3_llama.runtime.library import find_lib_dir

FOLDER = ROOT / "patches" / "to_send"
PATCHES = sorted(FOLDER.glob("*.patch"))


def diffs(patch):
    return {diff.name: diff for diff in apply_patches.read_patch(patch)}


def changed(diff):
    """The lines that a diff removes and adds, in their order, without the lines around them."""
    found = []
    for hunk in diff.hunks:
        matched = difflib.SequenceMatcher(None, hunk.before, hunk.after, autojunk=False)
        for tag, i1, i2, j1, j2 in matched.get_opcodes():
            if tag != "equal":
                found.append((hunk.before[i1:i2], hunk.after[j1:j2]))
    return found


@pytest.fixture(scope="module")
def pinned():
    """The files of the pinned tree that these patches change, by name."""
    return pinned_files({name for patch in PATCHES for name in diffs(patch)})


@pytest.fixture
def tree(tmp_path, pinned):
    for name, data in pinned.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    return tmp_path


def test_each_has_notes():
    assert len(PATCHES) == 6
    text = (FOLDER / "README.md").read_text()
    for patch in PATCHES:
        notes = f"{patch.name[:4]}-notes.md"
        assert patch.name in text and notes in text and (FOLDER / notes).is_file()


@pytest.mark.parametrize("patch", PATCHES, ids=lambda p: p.name)
def test_each_applies_alone(patch, tree, pinned):
    """To the unpatched tree: each hunk at its line, without fuzz."""
    apply_patches.apply_patch(patch, tree)
    assert all((tree / name).read_bytes() != pinned[name] for name in diffs(patch))


@pytest.mark.parametrize("patch", PATCHES, ids=lambda p: p.name)
def test_sources_change_as_in_the_series(patch):
    """The same lines, in another place where earlier patches of the series move them. The rest are tests."""
    ours = diffs(next((ROOT / "patches").glob(f"{patch.name[:4]}-*.patch")))
    theirs = diffs(patch)
    tests = {name for name in theirs if name.startswith("tests/")}
    assert tests and theirs.keys() - tests == ours.keys()
    for name, diff in ours.items():
        assert changed(diff) == changed(theirs[name]), name


@pytest.mark.parametrize("patch", PATCHES, ids=lambda p: p.name)
def test_titles_and_no_message(patch):
    """As llama.cpp wants titles. A message is for whoever sends the patch."""
    header = patch.read_text().partition("\ndiff --git")[0]
    assert re.match(r"Subject: \[PATCH\] [a-z-]+ : \S.{10,70}\n\n---\n", header), header


@pytest.mark.thorough
def test_types_out_of_range(tree, tmp_path):
    """llama.cpp's own test of damaged files with the cases of 0001, under the sanitizer: stops without the
    patch, passes with it."""
    if sys.platform != "linux" or not shutil.which("g++"):
        pytest.skip("needs GCC on Linux")
    source = tree / "ggml" / "src" / "gguf.cpp"
    with fetch.using_tree(patched=False) as (stock, _):
        folders = [f"-I{stock / 'ggml' / folder}" for folder in ("include", "src")]
        # the test includes it by its place
        shutil.copy(stock / "ggml" / "src" / "ggml-impl.h", source.parent)
        upstreams = source.read_bytes()
        apply_patches.apply_patch(PATCHES[0], tree)
        after = types_test(tree, folders)
        source.write_bytes(upstreams)
        before = types_test(tree, folders)
    assert before.returncode != 0 and "not a valid value for type 'gguf_type'" in before.stderr
    assert after.returncode == 0 and "runtime error" not in after.stderr, after.stderr[-2000:]


def types_test(tree, folders):
    """Compiles tests/test-gguf.cpp with the tree's reader of GGUF files and runs it."""
    lib, program = find_lib_dir(), tree / "test-gguf"
    flags = ["-std=gnu++17", "-O1", "-w", "-fsanitize=undefined", "-fno-sanitize-recover=undefined"]
    files = [tree / "tests" / "test-gguf.cpp", tree / "ggml" / "src" / "gguf.cpp"]
    libraries = [f"-L{lib}", "-lggml", "-lggml-base", f"-Wl,-rpath,{lib}"]
    run(["g++", *flags, *folders, *files, "-o", program, *libraries])
    return subprocess.run([program, "1"], capture_output=True, text=True, timeout=120)
