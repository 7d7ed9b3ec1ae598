#!/usr/bin/env python3
"""Builds the library with Vulkan and tests it, by default on Mesa's Vulkan for processors: scripts/test_gpu.

    scripts/test_gpu [--own] [--jobs N]

What lavapipe shows: ggml's shaders, its queues and its memory, with heads of 64 and all layers on the device.
A text that is known must come out in every format and mode, a random model's logits must be the processor's,
and drafts may change a text only where two tokens are nearly equally likely: the steps machine, texts,
random and ties of run_on_card.py. It shows no card's kernels, no speed, and no races between queues. --own:
on this machine's own Vulkan device instead.

As root on Debian or Ubuntu: apt-get install glslc spirv-headers libvulkan-dev mesa-vulkan-drivers. Where its
headers are older than the sources want, as on Debian 12, those of Debian 13 are taken: two packages of
headers, unpacked into the cache. The first run compiles shaders for half an hour of a core.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "native"))

from fetch import ROOT, BuildError, cache_dir, say
from toolchain import cores

STEPS = "machine,texts,random,ties"
NEWEST = 287  # VK_HEADER_VERSION that ggml-vulkan.cpp has code for; older ones lack names that it uses
PACKAGES = ("glslc", "spirv-headers", "libvulkan-dev", "mesa-vulkan-drivers")
INCLUDE = Path("/usr/include/vulkan/vulkan_core.h")
_KEYS = "/usr/share/keyrings/debian-archive-keyring.gpg"
_SOURCE = f"deb [signed-by={_KEYS}] http://deb.debian.org/debian trixie main"
_MEND = "install Vulkan headers of 1.4 or newer"
_DRIVERS = ("/usr/share/vulkan/icd.d", "/etc/vulkan/icd.d")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--own", action="store_true", help="on this machine's own device, not on lavapipe")
    parser.add_argument("--jobs", type=int, default=cores(), help="compilers at a time (the cores)")
    given = parser.parse_args()
    try:
        driver = None if given.own else lavapipe()
        env = environment(build(given.jobs), driver)
    except BuildError as error:
        error.exit()
    with tempfile.TemporaryDirectory(prefix="eagle3-vulkan-") as tmp:
        out = Path(tmp) / "out.jsonl"
        command = [sys.executable, str(ROOT / "scripts" / "device" / "run_on_card.py"), "--tiny"]
        command += ["--steps", STEPS, "--out", str(out), "--folder", tmp]
        done = subprocess.run(command, env=env, stdout=subprocess.DEVNULL)
        lines = [json.loads(line) for line in out.read_text().splitlines()] if out.is_file() else []
    print("\n".join(summary(lines)))
    return done.returncode


def lavapipe() -> str:
    """Its driver's file. Raises BuildError if something of PACKAGES is missing."""
    found = [str(path) for folder in _DRIVERS for path in sorted(Path(folder).glob("lvp_icd*.json"))]
    if not found or not shutil.which("glslc") or not INCLUDE.is_file():
        raise BuildError(f"Vulkan is missing: as root, apt-get install {' '.join(PACKAGES)}")
    return found[0]


def build(jobs: int) -> Path:
    """The folder of the libraries with Vulkan. Raises BuildError."""
    options = {"GGML_VULKAN": "ON", "LLAMA_BUILD_MTMD": "OFF"}
    if version(INCLUDE) < NEWEST:
        usr = headers() / "usr"
        options["Vulkan_INCLUDE_DIR"] = str(usr / "include")
        options["SPIRV-Headers_DIR"] = str(usr / "share" / "cmake" / "SPIRV-Headers")
    env = {**os.environ, "CMAKE_BUILD_PARALLEL_LEVEL": str(jobs)}
    env["CMAKE_ARGS"] = " ".join(f"-D{name}={value}" for name, value in options.items())
    command = [sys.executable, str(ROOT / "native" / "build.py"), "--print-dir"]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise BuildError("the library with Vulkan could not be built, see above")
    return Path(done.stdout.strip())


def version(header: Path) -> int:
    """VK_HEADER_VERSION. 0 if the file is not there."""
    if not header.is_file():
        return 0
    match = re.search(r"^#define VK_HEADER_VERSION (\d+)", header.read_text(), re.MULTILINE)
    return int(match[1]) if match else 0


def headers() -> Path:
    """A folder with those of Debian 13, which apt downloads once beside the lists of this system."""
    place = cache_dir() / "vulkan" / "headers-trixie"
    if place.is_dir():
        return place
    say("downloading Debian 13's Vulkan headers (2 MB, and 10 MB of lists)")
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent, prefix=".headers-") as tmp:
        top = Path(tmp)
        (top / "lists" / "partial").mkdir(parents=True)
        (top / "sources.list").write_text(_SOURCE + "\n")
        settings = {"Etc::sourcelist": top / "sources.list", "Etc::sourceparts": "/dev/null"}
        settings |= {"State::Lists": top / "lists", "Cache": top / "cache"}
        apt = ["apt-get", "-q", *(f"-oDir::{name}={value}" for name, value in settings.items())]
        run([*apt, "update"], top)
        run([*apt, "download", "libvulkan-dev", "spirv-headers"], top)
        for package in top.glob("*.deb"):
            run(["dpkg", "-x", str(package), "unpacked"], top)
        os.rename(top / "unpacked", place)
    return place


def run(command: list[str], folder: Path) -> None:
    try:
        done = subprocess.run(
            command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    except OSError as error:
        raise BuildError(f"{command[0]} does not run ({error.strerror}): {_MEND}") from None
    if done.returncode != 0:
        raise BuildError(f"{command[0]} failed (see above): {_MEND}", done.stdout)


def environment(libraries: Path, driver: str | None) -> dict[str, str]:
    """For the steps. The loader of Debian 12 knows the driver's variable by its old name alone."""
    env = {**os.environ, "EAGLE3_LLAMA_LIB_DIR": str(libraries)}
    if driver is not None:
        env |= {"VK_DRIVER_FILES": driver, "VK_ICD_FILENAMES": driver}
        env["GGML_VK_VISIBLE_DEVICES"] = "0"  # ggml leaves out what is a processor, unless it is named
    return env


def summary(lines: list[dict[str, Any]]) -> Iterator[str]:
    """A line for each step, and one for each fault."""
    for line in lines[1:]:
        rows = line["rows"]
        for row in rows:
            if row.get("what") == "device":
                yield f"device: {row['name']}, {row['description']}"
        same = [row["same"] for row in rows if "same" in row]
        told = f", {sum(same)} of {len(same)} texts right" if same else ""
        differ = sum(row.get("differ", 0) for row in rows)
        of = sum(row.get("texts", 0) for row in rows)
        told += f", {differ} of {of} texts differ, at near ties" if of and line["ended"] == "done" else ""
        yield f"{line['step']}: {line['ended']}{told}"
        if "message" in line:
            yield f"  {line['message']}"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("\ninterrupted; the next run goes on where it stopped")
