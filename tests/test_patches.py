"""The patch series on the pinned tree: applies to the letter, each patch says why it is there."""

import re
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "native"))

import apply_patches  # noqa: E402
import fetch  # noqa: E402

PATCHES = sorted((ROOT / "patches").glob("*.patch"))


@pytest.fixture(scope="module")
def touched():
    """The files of the pinned tree that the series changes, by name."""
    names = {m for p in PATCHES for m in re.findall(r"^--- a/(.+)$", p.read_text(), re.MULTILINE)}
    with tarfile.open(fetch.sdist()) as sdist:
        return {
            name: sdist.extractfile(member).read()
            for member in sdist.getmembers()
            for name in [member.name.partition("/vendor/llama.cpp/")[2]]
            if name in names
        }


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
def test_header_says_why(patch):
    header = patch.read_text().split("diff --git")[0]
    assert header.startswith("Subject: ") and "pstream" in header and len(header) > 300


def test_names_outside_the_tree_are_refused(tmp_path):
    evil = tmp_path / "evil.patch"
    evil.write_text("--- a/../x\n+++ b/../x\n@@ -0,0 +1 @@\n+x\n")
    with pytest.raises(apply_patches.PatchError, match="refusing"):
        apply_patches.apply_patch(evil, tmp_path)
