"""Prepares .venv/ of this checkout. scripts/demo and scripts/test use it.

    python3 scripts/_env.py [--extra NAME ...]

It creates .venv, installs llama-cpp-python without compiling a second llama.cpp, builds the native libraries
(or takes them from the cache, see native/build.py), and installs this package in editable mode. libmtmd and
libe3chat are compiled when they are first asked for. While the compiler runs, the dependencies and the demo's
model are downloaded. Each step ends with writing its stamp. So a new run continues an interrupted one, and
does nothing if nothing has changed.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
LATER = "EAGLE3_LATER=ON"  # see native/build.py
NO_LIBRARIES = {**os.environ, "CMAKE_ARGS": "-DLLAMA_BUILD=OFF -DLLAVA_BUILD=OFF"}  # of llama-cpp-python
TOOLS = ["cmake>=3.21", "ninja", "scikit-build-core>=0.11"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Prepare .venv/ of this checkout.")
    parser.add_argument("--extra", action="append", default=[], help="an extra of pyproject.toml to install")
    extras = sorted(set(parser.parse_args().extra))
    if sys.version_info < (3, 10):
        restart_with_newer_python()
    with locked():
        key = state_key()
        if not stamped("package", key):
            unstamp("package")
            make_venv()
            install_tools()
            sdist = native("fetch.py", "--sdist")
            with meanwhile(sdist):
                # here, because pip would hide minutes of progress output
                native("build.py", "--print-dir", f"-D{LATER}")
            install_llama_cpp_python(sdist)
            install("installing eagle3-llama")
            stamp("package", key)
        elif is_copy():
            install("installing the checkout in place of a copy of it, which pip left in .venv")
        listed = hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest()
        for extra in extras:  # one by one: pip needs minutes to find versions that suit all of them at once
            if not stamped(f"extra-{extra}", listed):
                install(f"installing the dependencies of [{extra}]", f"[{extra}]")
                stamp(f"extra-{extra}", listed)


def state_key() -> str:
    """A hash of everything that the installation depends on: this script, the environment, the processor."""
    sys.path.insert(0, str(ROOT / "native"))
    from toolchain import VARIABLES, cpu  # here, because an older Python must reach restart_with_newer_python

    paths = [ROOT / "pyproject.toml", Path(__file__).resolve(), *(ROOT / "patches").glob("*.patch")]
    suffixes = (".cpp", ".hpp", ".h", ".txt", ".py")
    paths += [path for path in (ROOT / "native").rglob("*") if path.suffix in suffixes]
    digest = hashlib.sha256(repr([[os.environ.get(name) for name in VARIABLES], cpu()]).encode())
    for path in sorted(paths):
        digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def is_copy() -> bool:
    """True if `pip install .` or `'.[hub]'` replaced the editable installation by a copy of the package."""
    return any((VENV / "lib").glob("python*/site-packages/eagle3_llama/__init__.py"))


def make_venv() -> None:
    check = "import sys, pip; sys.exit(sys.version_info < (3, 10))"
    if PYTHON.exists() and subprocess.run([PYTHON, "-c", check], stderr=subprocess.DEVNULL).returncode == 0:
        return
    step(
        "creating .venv",
        [sys.executable, "-m", "venv", "--clear", VENV],
        mend="On Debian and Ubuntu, install the package python3-venv.",
    )


def install_tools() -> None:
    if not stamped("tools", repr(TOOLS)):
        pip("installing cmake, ninja and scikit-build-core", *TOOLS)
        stamp("tools", repr(TOOLS))


def install_llama_cpp_python(sdist: str) -> None:
    """Installs only its Python part, because the libraries are ours. An installed one stays unchanged."""
    probe = (
        "import sys, importlib.metadata as m; sys.path.insert(0, 'native'); import fetch; "
        "sys.exit(m.version(fetch.PACKAGE) != fetch.VERSION)"
    )
    if subprocess.run([PYTHON, "-c", probe], cwd=ROOT, stderr=subprocess.DEVNULL).returncode != 0:
        pip("installing llama-cpp-python (its Python part)", *without_libraries(sdist), env=NO_LIBRARIES)


def without_libraries(sdist: str) -> list[str]:
    # --no-cache-dir: other projects must not find a wheel without libraries in pip's cache
    return ["--no-build-isolation", "--no-cache-dir", sdist]


@contextlib.contextmanager
def meanwhile(sdist: str):
    """Installs what the package needs, and downloads the demo's model. What fails is tried again later."""
    listed = re.search(r"^dependencies = \[(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.M | re.S)
    needed = [name for name in re.findall(r'^ *"(.+?)"', listed[1], re.M) if "llama-cpp-python" not in name]
    model = "from eagle3_llama.models import smollm2; smollm2('Q4_1')"
    commands = [pip_command(*without_libraries(sdist)), pip_command(*needed), [PYTHON, "-c", model]]
    script = " && ".join(shlex.join(map(str, command)) for command in commands)
    with tempfile.TemporaryFile() as said:
        child = subprocess.Popen(
            ["sh", "-c", script], cwd=ROOT, env=tools_first(NO_LIBRARIES), stdout=said, stderr=said,
            start_new_session=True,
        )  # fmt: skip
        try:
            yield
            child.wait()
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGTERM)


def install(what: str, extras: str = "") -> None:
    pip(what, "--no-build-isolation", f"-Ccmake.define.{LATER}", "-e", f"{ROOT}{extras}")


def native(script: str, *arguments: str) -> str:
    """Runs a script of native/ and returns its output. Its progress and errors go to the terminal."""
    done = subprocess.run(
        [PYTHON, ROOT / "native" / script, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    if done.returncode != 0:
        sys.exit(done.returncode)
    return done.stdout.strip()


def pip(what: str, *arguments: str, env: dict[str, str] | None = None) -> None:
    mend = "Check the network and pip's index settings."
    step(what, pip_command(*arguments), mend=mend, env=tools_first(env or dict(os.environ)))


def pip_command(*arguments: str) -> list:
    return [PYTHON, "-m", "pip", "install", "--disable-pip-version-check", "--no-input", *arguments]


def tools_first(env: dict[str, str]) -> dict[str, str]:
    """With the environment's cmake and ninja before others."""
    return {**env, "PATH": f"{PYTHON.parent}{os.pathsep}{os.environ.get('PATH', '')}"}


def step(what: str, command: list, mend: str, env: dict[str, str] | None = None) -> None:
    """Runs a command. Its output is shown only if it fails. mend: what to do then."""
    print(f"eagle3-llama: {what} ...", end="", file=sys.stderr, flush=True)
    start = time.monotonic()
    words, out, err = [str(word) for word in command], subprocess.PIPE, subprocess.STDOUT
    done = subprocess.run(words, cwd=ROOT, env=env, text=True, stdout=out, stderr=err)
    print(f" {time.monotonic() - start:.0f} s", file=sys.stderr)
    if done.returncode != 0:
        tail = "\n".join(done.stdout.rstrip().splitlines()[-40:])
        sys.exit(f"{tail}\nerror: {what} failed, see above. {mend}")


class locked:
    """Allows one run at a time in a checkout. The lock is released when the process ends, in any way."""

    def __enter__(self) -> None:
        import fcntl

        self.file = (ROOT / "scripts" / "_env.py").open("r")
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            print("eagle3-llama: waiting until another run in this checkout ends", file=sys.stderr)
            fcntl.flock(self.file, fcntl.LOCK_EX)

    def __exit__(self, *exc: object) -> None:
        self.file.close()


def _stamp_path(name: str) -> Path:
    return VENV / f".eagle3-llama-{name}"


def stamped(name: str, key: str) -> bool:
    path = _stamp_path(name)
    return PYTHON.exists() and path.is_file() and path.read_text() == key


def stamp(name: str, key: str) -> None:
    path = _stamp_path(name)
    path.with_suffix(".new").write_text(key)
    os.replace(path.with_suffix(".new"), path)


def unstamp(name: str) -> None:
    _stamp_path(name).unlink(missing_ok=True)


def restart_with_newer_python() -> None:
    for minor in range(14, 9, -1):
        newer = shutil.which(f"python3.{minor}")
        if newer:
            os.execv(newer, [newer, *sys.argv])
    sys.exit(f"error: python3 is {sys.version.split()[0]}, but 3.10 is required: install a newer Python")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("\ninterrupted; the next run continues from here")
