"""The machine: the cores that this process may use, and what identifies it in the cache of measured costs.

Several machines may share a home directory.
"""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .devices import devices

# lines of /proc/cpuinfo that identify the processor, on x86 and ARM
_CPU_LINES = ("model name", "flags", "CPU implementer", "CPU part", "Features")


def identity(lib_dir: Path | None) -> list[object]:
    """Processor, usable cores, OpenMP's wait policy, and the devices that the ggml in lib_dir finds."""
    found = [device.description for device in devices(lib_dir)] if lib_dir is not None else []
    return [cpu(), cores(), os.environ.get("OMP_WAIT_POLICY"), found]


def cpu(info: Path = Path("/proc/cpuinfo")) -> str:
    """Model and features of the processor, from `info`: platform.processor() is often empty on Linux."""
    try:
        text = info.read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    lines = sorted({line for line in text.splitlines() if line.startswith(_CPU_LINES)})
    return "\n".join([platform.machine(), *(lines or [platform.processor()])])


def sets(info: Path = Path("/proc/cpuinfo")) -> set[str]:
    """The features of the processor, by the names that Linux gives them. Empty on another system."""
    return {
        word
        for line in cpu(info).splitlines()
        if line.startswith(("flags", "Features"))
        for word in line.partition(":")[2].split()
    }


def model(info: Path = Path("/proc/cpuinfo")) -> str:
    """The name of the processor and its architecture, for people."""
    names = [
        line.partition(":")[2].strip() for line in cpu(info).splitlines() if line.startswith("model name")
    ]
    return f"{names[0] if names else platform.processor() or 'unknown'}, {platform.machine()}"


def cores() -> int:
    """The number of cores that this process may use: those of its affinity, and no more than its quota."""
    mine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(math.ceil(min(mine, quota())), 1)


def default_threads(given: Mapping[str, Any]) -> dict[str, int]:
    """Numbers of threads where none are given: the cores that this process may use, as in the commands.

    Llama takes half of the machine's cores for single tokens. The text does not depend on it.
    """
    return {name: cores() for name in ("n_threads", "n_threads_batch") if not given.get(name)}


def quota(proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> float:
    """The cores' worth of time that the control groups (version 2) of this process may use; inf without one.

    A container that is given 1.5 CPUs sees all cores of its host. Threads above the quota only wait: all
    threads of a product meet at its end, and each period's time is used up the sooner the more there are.
    """
    try:
        paths = [
            line[3:].strip("/") for line in proc.read_text(encoding="utf-8").splitlines() if line[:3] == "0::"
        ]
    except OSError:
        return math.inf
    found = [math.inf]
    for group in (root / path for path in paths):
        for folder in (group, *group.parents):
            found.append(_limit(folder / "cpu.max"))
            if folder == root:
                break
    return min(found)


def _limit(cpu_max: Path) -> float:
    """The limit in a file such as "150000 100000" (quota and period in microseconds); inf for "max"."""
    try:
        given, period = cpu_max.read_text(encoding="ascii").split()
        return int(given) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return math.inf
