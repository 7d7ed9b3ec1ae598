"""scripts/release/release.py, without what takes minutes: what may not be released, and what to upload."""

import hashlib
import io
import shutil
import subprocess
import sys
import tarfile

import pytest
from commands import run
from paths import ROOT

sys.path.insert(0, str(ROOT / "scripts" / "release"))

import release


@pytest.fixture
def checkout(tmp_path):
    """A committed one of version 1.2.3 that may be released."""
    for name, text in (
        ("pyproject.toml", '[project]\nname = "x"\nversion = "1.2.3"\n'),
        ("eagle3_llama/__init__.py", '__version__ = "1.2.3"\n'),
        ("eagle3_llama/docs/changelog.md", "# Changelog\n\n## Unreleased\n\n## 1.2.3\n"),
        ("README.md", "# x\n"),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "-c", "user.name=x", "-c", "user.email=x@x", "commit", "-qm", "x")
    return tmp_path


def git(folder, *words):
    subprocess.run(["git", *words], cwd=folder, check=True, timeout=60)


def test_what_may_be_released(checkout):
    assert release.version_of(checkout) == "1.2.3" and not list(release.problems(checkout))


@pytest.mark.parametrize(
    "name, text, said",
    [
        ("eagle3_llama/__init__.py", '__version__ = "1.2.2"\n', "another one"),
        ("eagle3_llama/docs/changelog.md", "## Unreleased\n\n## 1.2.30\n", "has no section 1.2.3"),
        ("new.py", "", "git status says: ?? new.py"),
    ],
)
def test_what_may_not(checkout, name, text, said):
    (checkout / name).write_text(text)
    assert [p for p in release.problems(checkout) if said in p]


def test_it_builds_nothing_of_what_may_not(checkout):
    (checkout / "scripts" / "release").mkdir(parents=True)
    for name in ("release/release.py", "_env.py"):
        shutil.copy(ROOT / "scripts" / name, checkout / "scripts" / name)
    done = run([sys.executable, checkout / "scripts/release/release.py", "--out", checkout / "dist"], 1)
    assert "not ready: git status says: ?? scripts/\nerror: nothing was built" in done.stderr
    assert not (checkout / "dist").exists()


def sdist_of(path, *names):
    with tarfile.open(path, "w:gz") as tar:
        for name in names:
            tar.addfile(tarfile.TarInfo(f"{path.name.removesuffix('.tar.gz')}/{name}"), io.BytesIO())
    return path


WHOLE = ["LICENSE", "README.md", "pyproject.toml", "native/build.py", "native/wheel/CMakeLists.txt"]
WHOLE += ["patches/0001-x.patch", "eagle3_llama/__init__.py"]


def test_faults_of_files(tmp_path, monkeypatch):
    sdist = tmp_path / "eagle3_llama-1.2.3.tar.gz"
    assert not list(release.faults(sdist_of(sdist, *WHOLE)))
    for gone in WHOLE[:-1]:
        [fault] = release.faults(sdist_of(sdist, *(n for n in WHOLE if n != gone)))
        assert f"{sdist.name} has no {gone.partition('0001')[0]}" == fault
    [fault] = release.faults(sdist_of(sdist, *WHOLE, "eagle3_llama/__pycache__/x.pyc"))
    assert fault.endswith("has eagle3_llama/__pycache__/x.pyc")
    [fault] = release.faults(sdist_of(sdist, *WHOLE, "native/.DS_Store"))
    assert fault.endswith("has native/.DS_Store")
    wheel = tmp_path / "eagle3_llama-1.2.3-py3-none-manylinux_2_28_x86_64.whl"
    wheel.write_bytes(b"x" * 11)
    assert not list(release.faults(wheel))
    monkeypatch.setattr(release, "LIMIT", 10)
    [fault] = release.faults(wheel)
    assert "PyPI takes" in fault
    monkeypatch.undo()
    [fault] = release.faults(wheel.rename(tmp_path / "eagle3_llama-1.2.3-py3-none-linux_x86_64.whl"))
    assert "manylinux" in fault


def test_what_to_upload(tmp_path):
    """Ours with its hash; never llama-cpp-python's, which is another project's."""
    names = ("eagle3_llama-1.2.3.tar.gz", "llama_cpp_python-0.3.36-py3-none-any.whl")
    for name in names:
        (tmp_path / name).write_bytes(name.encode())
    said = release.what_to_upload(
        [tmp_path / name for name in names], "[a](docs/a.md) [b](https://b) [c](#c)"
    )
    ours, theirs = said.split("To put beside them")
    assert hashlib.sha256(names[0].encode()).hexdigest() in ours and names[1] not in ours
    assert f"twine upload {tmp_path / names[0]}\n" in ours and names[1] in theirs
    assert "1 links into the checkout, such as docs/a.md" in theirs and "Nothing was uploaded." in theirs


def check_sdist(path):
    """All that a build needs, the licence, and no tests."""
    assert not list(release.faults(path))
    with tarfile.open(path) as tar:
        names = [n.partition("/")[2] for n in tar.getnames()]
        [about] = [n for n in tar.getnames() if n.count("/") == 1 and n.endswith("/PKG-INFO")]
        metadata = tar.extractfile(about).read().decode()
    assert {"native/src/head/head.cpp", "eagle3_llama/data/heads.json"} <= set(names)
    assert not [n for n in names if n.startswith(("tests/", ".")) or n.endswith((".so", ".o"))]
    assert not [n for n in names if n.startswith("scripts/data/measurements/")]
    assert "\nLicense-Expression: MIT\n" in metadata and "\nLicense-File: LICENSE\n" in metadata
    assert "\nDescription-Content-Type: text/markdown\n" in metadata
    assert "\nClassifier: License ::" not in metadata  # the expression says it, and PyPI refuses both
    return set(names)


@pytest.mark.thorough  # the next one is the same in a copy
def test_the_sdist(tmp_path):
    """As pip's build backend makes it."""
    make = f"from scikit_build_core.build import build_sdist; print(build_sdist({str(tmp_path)!r}))"
    check_sdist(tmp_path / run([sys.executable, "-c", make], cwd=ROOT).stdout.split()[-1])


# What Python, builds, tests, installations and systems leave in a checkout, also where an sdist looks.
LEFT = [
    "native/__pycache__/build.cpython-313.pyc",
    "native/src/__pycache__/x.cpython-313.pyc",
    "native/x.pyo",
    "native/src/build/x.o",
    "native/src/.DS_Store",
    "native/.head.cpp.swp",
    "patches/.DS_Store",
    "patches/x.egg-info/PKG-INFO",
    "eagle3_llama/__pycache__/x.cpython-313.pyc",
    "eagle3_llama/lib/libllama.so",
    "eagle3_llama/runtime/.DS_Store",
    "eagle3_llama/model.gguf",
    "scripts/__pycache__/_env.cpython-313.pyc",
    "eagle3_llama.egg-info/PKG-INFO",
    ".venv/pyvenv.cfg",
    ".pytest_cache/README.md",
    "build/x.o",
    "dist/x.whl",
]


def test_the_sdist_has_nothing_that_git_has_not(tmp_path):
    """In a copy of the checkout in which somebody has worked, whatever the environment lets Python write."""
    listed = run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT).stdout
    known = [name for name in listed.split("\0") if name and not name.startswith("tests/")]
    copy = tmp_path / "copy"
    for name in known:
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
    for name in LEFT:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_text("")
    make = f"from scikit_build_core.build import build_sdist; print(build_sdist({str(tmp_path)!r}))"
    name = run([sys.executable, "-c", make], cwd=copy).stdout.split()[-1]
    names = check_sdist(tmp_path / name)
    assert names - {*known, "PKG-INFO"} == set()
    packed = {n for n in known if n.startswith(("native/", "patches/", "eagle3_llama/", "scripts/"))}
    assert {n for n in packed if not n.startswith("scripts/data/measurements/")} <= names
