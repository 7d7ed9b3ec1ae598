"""Makes the files of a release, tries them in clean places, and says what to upload. It uploads nothing.

    python3 scripts/release/release.py [--out dist] [--machine NAME ...] [--trial]

1. The checkout is what was committed. Its version is the same everywhere, and the changelog has its section.
   With --trial, what is wrong with that is said, and the script goes on.
2. The sdist, and the wheels by build_wheels.py: for this machine's architecture, or for those that --machine
   names. twine checks their metadata, this script their names, sizes and contents.
3. In a new environment, with no compiler on PATH: pip installs the wheels, and the shipped head drafts. In
   another: pip builds the sdist, as on a system that has no wheel, and the shipped head drafts. Wheels of
   other architectures are not tried here: tests/by_hand/wheels.py does that in an emulator.
4. The files' names, sizes and SHA-256, and the command that would upload them.

SmolLM2, the model that the installed packages generate with, is downloaded if the cache does not have it.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import _env

TOOLS = ["build", "twine>=6.1", "validate-pyproject[all]"]
DEFAULT_CACHE = str(Path.home() / ".cache" / "eagle3-llama")
CACHE = {"EAGLE3_LLAMA_CACHE": os.environ.get("EAGLE3_LLAMA_CACHE") or DEFAULT_CACHE}
LIMIT = 100 << 20  # bytes a file: https://docs.pypi.org/project-management/storage-limits/
NEEDED = (
    "LICENSE",
    "README.md",
    "pyproject.toml",
    "patches/",
    "native/build.py",
    "native/wheel/CMakeLists.txt",
)
MODEL = "from eagle3_llama.models import smollm2; print(smollm2('Q4_1'))"
GENERATE = """
import sys
from eagle3_llama import EagleLlama
from eagle3_llama.models import shipped_head
llm = EagleLlama(sys.argv[1], eagle=str(shipped_head()), n_ctx=512, verbose=False)
said = [{"role": "user", "content": "Why is the sky blue?"}]
answer = llm.create_chat_completion(said, max_tokens=48, temperature=0.0)
if not answer["choices"][0]["message"]["content"].strip() or not llm.stats.drafted:
    sys.exit("no text came, or the head drafted nothing")
"""


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the files of a release, try them, say what to upload.")
    parser.add_argument("--out", type=Path, default=_env.ROOT / "dist", help="the folder for the files")
    parser.add_argument("--machine", action="append", help="build a wheel for it, such as aarch64")
    parser.add_argument("--trial", action="store_true", help="go on with a checkout that is not ready")
    args = parser.parse_args()
    out: Path = args.out.resolve()
    found = list(problems(_env.ROOT))
    for problem in found:
        print(f"not ready: {problem}", file=sys.stderr)
    if found and not args.trial:
        sys.exit("error: nothing was built; mend this, or use --trial to see whether the rest works")
    out.mkdir(parents=True, exist_ok=True)
    for old in (old for ending in ("tar.gz", "whl") for old in out.glob(f"eagle3_llama-*.{ending}")):
        old.unlink()  # an earlier commit's
    machines = args.machine or [platform.machine()]
    for machine in machines:
        script = Path(__file__).with_name("build_wheels.py")
        run(f"the wheels, {machine}", [sys.executable, script, "--out", out, "--machine", machine])
    _env.pip("installing build, twine and validate-pyproject", *TOOLS)
    run("the sdist", [_env.PYTHON, "-m", "build", "--sdist", "--outdir", out, _env.ROOT])
    patterns = ("eagle3_llama-*.tar.gz", "eagle3_llama-*.whl", "llama_cpp_python-*.whl")
    files = sorted(file for pattern in patterns for file in out.glob(pattern))
    run("pyproject.toml", [_env.PYTHON, "-m", "validate_pyproject", _env.ROOT / "pyproject.toml"])
    run("their metadata", [_env.PYTHON, "-m", "twine", "check", "--strict", *files])
    if wrong := [fault for file in files for fault in faults(file)]:
        sys.exit("\n".join(f"error: {fault}" for fault in wrong))
    if platform.machine() in machines:
        try_wheels(out)
    try_sdist(out)
    print(what_to_upload(files, (_env.ROOT / "README.md").read_text(encoding="utf-8")))


def problems(root: Path) -> Iterator[str]:
    """Why this checkout is not to be released."""
    version = version_of(root)
    package = (root / "eagle3_llama" / "__init__.py").read_text(encoding="utf-8")
    if f'__version__ = "{version}"' not in package:
        yield f"pyproject.toml has version {version}, eagle3_llama/__init__.py another one"
    log = (root / "eagle3_llama" / "docs" / "changelog.md").read_text(encoding="utf-8")
    if not re.search(rf"^## {re.escape(version)}\b", log, re.MULTILINE):
        yield f"eagle3_llama/docs/changelog.md has no section {version}: rename Unreleased"
    done = subprocess.run(["git", "status", "--porcelain"], cwd=root, capture_output=True, text=True)
    if done.returncode != 0 or done.stdout.strip():
        yield f"git status says: {(done.stderr or done.stdout).strip().splitlines()[0]}"


def version_of(root: Path) -> str:
    [version] = re.findall(r'^version = "(.+)"$', (root / "pyproject.toml").read_text(), re.MULTILINE)
    return version


def faults(file: Path) -> Iterator[str]:
    """Why PyPI or a user would not take a file."""
    if file.stat().st_size > LIMIT:
        yield f"{file.name} has {file.stat().st_size / 1e6:.0f} MB, and PyPI takes {LIMIT >> 20} MiB"
    if re.search(r"-linux_\w+\.whl$", file.name):
        yield f"{file.name} names no system: PyPI takes manylinux wheels, which auditwheel makes"
    if file.name.endswith(".tar.gz"):
        with tarfile.open(file) as tar:
            names = {name.partition("/")[2] for name in tar.getnames()}
        for needed in NEEDED:
            if not any(name == needed or name.startswith(needed) and needed[-1] == "/" for name in names):
                yield f"{file.name} has no {needed}"
        if junk := sorted(n for n in names if re.search(r"(^|/)(\.|__pycache__/)|^(dist|build)/", n)):
            yield f"{file.name} has {junk[0]}"


def try_wheels(out: Path) -> None:
    """Installs and generates where no compiler is found."""
    with tempfile.TemporaryDirectory(prefix="eagle3-release-") as tmp:
        python = new_environment(Path(tmp))
        env = {**clean(Path(tmp)), "PATH": str(python.parent)}
        ours = ["--only-binary", "eagle3-llama,llama-cpp-python", "--find-links", str(out)]
        wanted = f"eagle3-llama=={version_of(_env.ROOT)}"
        run("the wheels, installed", [python, "-m", "pip", "install", "-q", *ours, wanted], env)
        generate("the wheels, generating", python, env)


def try_sdist(out: Path) -> None:
    """Builds and generates. What was compiled before is taken from the cache."""
    [sdist] = out.glob("eagle3_llama-*.tar.gz")
    with tempfile.TemporaryDirectory(prefix="eagle3-release-") as tmp:
        python = new_environment(Path(tmp))
        env = {**clean(Path(tmp)), **CACHE}
        bindings = ["--only-binary", "llama-cpp-python", "--find-links", str(out)]
        run("the sdist, installed", [python, "-m", "pip", "install", "-q", *bindings, sdist], env)
        generate("the sdist, generating", python, env)


def new_environment(folder: Path) -> Path:
    """The Python of a new virtual environment."""
    run("a new environment", [sys.executable, "-m", "venv", folder / "venv"])
    return folder / "venv" / "bin" / "python"


def clean(folder: Path) -> dict[str, str]:
    """This process's variables, without its Python's, its home and its settings of ours."""
    names = ("PYTHON", "EAGLE3_", "CMAKE_", "LLAMA_", "GGML_", "VIRTUAL_ENV")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(names)}
    (folder / "home").mkdir()
    return {**kept, "HOME": str(folder / "home")}


def generate(what: str, python: Path, env: dict[str, str]) -> None:
    """A few tokens with the shipped head. Only the model is taken from this user's cache."""
    model = run("the model", [python, "-c", MODEL], {**env, **CACHE}).strip()
    run(what, [python, "-c", GENERATE, model], env)


def run(what: str, command: list[str | Path], env: dict[str, str] | None = None) -> str:
    """Its output. It runs outside the checkout, so that Python imports the installed package."""
    print(f"eagle3-llama: {what} ...", file=sys.stderr, flush=True)
    words, place = list(map(str, command)), tempfile.gettempdir()
    done = subprocess.run(words, cwd=place, env=env, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(f"{done.stdout}\nerror: {what}: this failed, see above. Nothing was uploaded.")
    return done.stdout


def what_to_upload(files: list[Path], readme: str) -> str:
    """A table of the files, and the commands. llama-cpp-python is another project's on PyPI."""
    ours = [file for file in files if file.name.startswith("eagle3_llama-")]
    others = [file for file in files if file not in ours]
    lines = ["", "To upload to PyPI:"]
    for file in ours:
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        lines.append(f"  {file.name}  {file.stat().st_size / 1e6:.1f} MB  sha256 {digest}")
    lines += ["", f"  twine upload {' '.join(str(file) for file in ours)}"]
    if others:
        lines += ["", "To put beside them on a page of releases, for pip install --find-links; not on PyPI:"]
        lines += [f"  {file.name}  {file.stat().st_size / 1e6:.1f} MB" for file in others]
    if links := re.findall(r"\]\((?![a-z]+:|#)([^)\s]+)\)", readme):
        lines += [
            "",
            f"README.md has {len(links)} links into the checkout, such as {links[0]}. On PyPI's page they",
        ]
        lines += ["lead nowhere until they have the repository's address."]
    return "\n".join([*lines, "", "Nothing was uploaded."])


if __name__ == "__main__":
    main()
