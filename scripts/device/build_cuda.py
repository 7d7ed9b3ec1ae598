#!/usr/bin/env python3
"""Builds the libraries with CUDA on a machine without a card, and packs what travels to one with a card.

    scripts/device/build_cuda.py [--architecture 90] [--jobs N] [--background] [--archive FILE]

It takes half an hour or more of two cores, 0.6 GB of memory a job, 480 MB to download and 3 GB of disk.
NVIDIA's compiler is installed by pip into the cache (toolkit.py). An interrupted build goes on where it
stopped. A change to a patch compiles CUDA's files again only if it touches ggml's headers. The unpatched
llama.cpp, which upstream's drafter runs on, is built too: ccache, where it is installed, has its CUDA files.

--architecture: the card's compute capability, such as 90 (H100, H200), 80 (A100), 86, 89 (RTX 40), 120.
--background: with the lowest priority, with its progress in a file, whose name is printed. The last line of
the file is "done: ARCHIVE", or begins with "error:".

The archive has lib/ (this project's libraries), upstream/ (unpatched, and the program of native/bench) and
python/ (what this package imports, for the Python of the machine with the card: --python). It holds no
library of NVIDIA's: run_on_card.py finds those of PyTorch or of an installed toolkit. Linux alone.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import _env
import toolkit
from pack import MOST_MEGABYTES, pack
from toolkit import BuildError, cache_dir, say


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--architecture", default="90", help="compute capability without its point: 90")
    parser.add_argument("--jobs", type=int, default=toolkit.cores(), help="compilers at a time (the cores)")
    parser.add_argument("--archive", type=Path, help="where to pack it (dist/cuda-sm90.tar.xz)")
    parser.add_argument("--python", default="3.12", help="the other machine's Python (3.12)")
    parser.add_argument("--background", action="store_true", help="go on in the background")
    given = parser.parse_args()
    if not given.architecture.isalnum() or given.jobs < 1:
        parser.error("--architecture is a number such as 90, --jobs at least 1")
    archive = given.archive or _env.ROOT / "dist" / f"cuda-sm{given.architecture}.tar.xz"
    if given.background:
        return in_background(given.architecture)
    try:
        make(given.architecture, given.jobs, archive.absolute(), given.python)
    except BuildError as error:
        error.exit()
    print(f"done: {archive}")
    return 0


def in_background(architecture: str) -> int:
    """Starts this command again, without a terminal, and prints the name of its log."""
    log = cache_dir() / "cuda" / f"build-sm{architecture}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    words = [word for word in sys.argv[1:] if word != "--background"]
    with log.open("w") as out:
        subprocess.Popen(
            [sys.executable, __file__, *words],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
            preexec_fn=lambda: os.nice(19),
        )
    print(log)
    return 0


def make(architecture: str, jobs: int, archive: Path, python: str) -> None:
    """Builds both sets of libraries, checks that they load, and packs them. Raises BuildError."""
    if not _env.PYTHON.is_file():
        raise BuildError("there is no .venv yet: run python3 scripts/_env.py first")
    folder = toolkit.toolkit()
    options = {**toolkit.options(folder, architecture), "LLAMA_BUILD_MTMD": "OFF"}
    env = toolkit.environment(folder, options, jobs)
    ours = build(env)
    check(ours, env)
    upstream = build(env, "--bench")
    size = pack(archive, ours, upstream, python)
    say(f"{archive.name} has {size:.1f} MB")
    with tempfile.TemporaryDirectory() as tmp:  # without their symbols, and beside each other alone
        subprocess.run(["tar", "-xJf", str(archive), "-C", tmp], check=True)
        check(Path(tmp) / "lib", env)
    if size > MOST_MEGABYTES:
        raise BuildError(f"{archive} has {size:.0f} MB, and {MOST_MEGABYTES} may travel: see pack.py")


def build(env: dict[str, str], *arguments: str) -> Path:
    """The folder that native/build.py prints. Its progress goes to stderr."""
    command = [str(_env.PYTHON), str(_env.ROOT / "native" / "build.py"), "--print-dir", *arguments]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise BuildError("the build failed, see above; the next run goes on where it stopped")
    return Path(done.stdout.strip())


# The product's own way to load its libraries. A machine without a driver has no device.
_LOADS = """
from eagle3_llama.runtime import devices, library
library.load()
print(", ".join(devices.beside_the_processor(library.find_lib_dir())) or "none")
"""


def check(folder: Path, env: dict[str, str]) -> None:
    """Loads the libraries as the package does, and says which devices they find: none, or a card."""
    if not (folder / "libggml-cuda.so").is_file():
        raise BuildError(f"{folder} has no libggml-cuda.so: the build had no CUDA")
    env = {**env, "EAGLE3_LLAMA_LIB_DIR": str(folder)}
    done = subprocess.run([str(_env.PYTHON), "-c", _LOADS], env=env, capture_output=True, text=True)
    if done.returncode != 0:
        raise BuildError(f"the libraries in {folder} do not load (see above)", done.stderr)
    say(f"the libraries load; devices: {done.stdout.strip()}")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("\ninterrupted; the next run goes on where it stopped")
