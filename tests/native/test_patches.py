"""The patch series on the pinned tree: it applies exactly; headers say why and what an upgrade costs."""

import difflib
import re
import sys
from pathlib import Path

import pytest
from paths import ROOT
from pinned_tree import pinned_files

sys.path[:0] = [str(ROOT / "native"), str(ROOT / "scripts" / "release")]

import apply_patches  # noqa: E402
import fetch  # noqa: E402
import upgrade_check  # noqa: E402

PATCHES = sorted((ROOT / "patches").glob("*.patch"))


@pytest.fixture(scope="module")
def touched():
    """The files of the pinned tree that the series changes, by name."""
    names = {m for p in PATCHES for m in re.findall(r"^--- a/(.+)$", p.read_text(), re.MULTILINE)}
    return pinned_files(names)


@pytest.fixture(scope="module")
def pinned():
    """The lines of the files that headers rely on, by name."""
    wanted = {name for patch in PATCHES for name, _ in upgrade_check.relied_on(patch)}
    return upgrade_check.read_tree(fetch.sdist(), wanted)[0]


@pytest.fixture
def tree(tmp_path, touched):
    for name, data in touched.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    return tmp_path


def test_series_applies(tree, touched):
    assert [p.name for p in apply_patches.apply_series(ROOT / "patches", tree)] == [p.name for p in PATCHES]
    assert all((tree / name).read_bytes() != data for name, data in touched.items())


def test_no_fuzz(tree):
    """One changed context line, or one line of offset, and nothing applies."""
    file = tree / re.search(r"^--- a/(.+)$", PATCHES[0].read_text(), re.MULTILINE)[1]
    file.write_text("\n" + file.read_text())
    with pytest.raises(apply_patches.PatchError, match=PATCHES[0].name):
        apply_patches.apply_series(ROOT / "patches", tree)


@pytest.mark.parametrize("patch", PATCHES, ids=lambda p: p.name)
def test_header_says_why_and_what_an_upgrade_costs(patch):
    header, _, diff = patch.read_text().partition("diff --git")
    assert header.startswith("Subject: [PATCH] ") and "Upstream lacks it because" in header
    n_hunks = len(re.findall(r"^@@ ", diff, re.MULTILINE))
    files = re.findall(r"^\+\+\+ b/(.+)$", diff, re.MULTILINE)
    cost = f"{n_hunks} hunk{'s' * (n_hunks > 1)} in {len(files)} file{'s' * (len(files) > 1)}"
    assert f"Cost at an upgrade: {cost}, " in header
    assert all(Path(file).stem in header for file in files)


@pytest.mark.parametrize("patch", PATCHES, ids=lambda p: p.name)
def test_header_says_what_the_patch_relies_on(patch, pinned):
    """In the pinned tree before the series. scripts/release/upgrade_check.py looks for it in another one."""
    relied_on = upgrade_check.relied_on(patch)
    assert relied_on
    assert upgrade_check.broken(patch, pinned) == []
    gone = {name: [b"// nothing\n"] for name, _ in relied_on}
    assert len(upgrade_check.broken(patch, gone)) == len(relied_on)


def test_no_patch_rewrites_another(touched):
    """Outside the CPU kernels, a line that one patch adds is not changed or removed by a later one.

    A line that is a brace alone may be either patch's.
    """
    owners = {name: [None] * len(data.splitlines()) for name, data in touched.items()}  # who added each line
    seen = 0
    for patch in PATCHES:
        for diff in apply_patches.read_patch(patch):
            if diff.name.startswith("ggml/src/ggml-cpu/"):
                continue
            for hunk in reversed(diff.hunks):  # the lines of those before it stay where they are
                old = owners.setdefault(diff.name, [])[hunk.start : hunk.start + len(hunk.before)]
                new, seen = [], seen + 1
                matched = difflib.SequenceMatcher(None, hunk.before, hunk.after, autojunk=False)
                for tag, i1, i2, j1, j2 in matched.get_opcodes():
                    words = [line.strip(b" {}\n") for line in hunk.before[i1:i2]]
                    kept = [owner if word else None for owner, word in zip(old[i1:i2], words)]
                    assert tag == "equal" or not any(kept), f"{patch.name}: {set(kept)} in {diff.name}"
                    new += old[i1:i2] if tag == "equal" else [patch.name] * (j2 - j1)
                owners[diff.name][hunk.start : hunk.start + len(hunk.before)] = new
    assert seen > 20


def test_public_headers_stay(touched):
    """llama-cpp-python mirrors their structs in ctypes."""
    public = ("include/", "ggml/include/", "tools/mtmd/mtmd.h", "tools/mtmd/mtmd-helper.h")
    assert not [name for name in touched if name.startswith(public)]


def test_documents_name_patches_that_exist():
    numbers = {patch.name[:4] for patch in PATCHES}
    for page in [ROOT / "README.md", *(ROOT / "eagle3_llama").rglob("*.md")]:
        assert set(re.findall(r"patches/(\d{4})", page.read_text())) <= numbers, page


def test_names_outside_the_tree_are_refused(tmp_path):
    evil = tmp_path / "evil.patch"
    evil.write_text("--- a/../x\n+++ b/../x\n@@ -0,0 +1 @@\n+x\n")
    with pytest.raises(apply_patches.PatchError, match="refusing"):
        apply_patches.apply_patch(evil, tmp_path)
