"""Hooks for conftest: the end of the summary says what was skipped, with one line for each reason."""

import collections
from pathlib import Path

import pytest

FILES = {}  # skipped as a whole, and why: xdist tells nobody


def reason(report):
    return (
        report.longrepr[2].removeprefix("Skipped: ")
        if isinstance(report.longrepr, tuple)
        else str(report.longrepr)
    )


def pytest_collectreport(report):
    if report.skipped:
        FILES[report.nodeid] = reason(report)


def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["skipped_files"] = FILES


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    FILES.update(getattr(node, "workeroutput", {}).get("skipped_files", {}))


def untried():
    """What no test can try on this machine, though it passes them all."""
    flags = (
        Path("/proc/cpuinfo").read_text().partition("\n\n")[0].split()
        if Path("/proc/cpuinfo").is_file()
        else []
    )
    lacking = [
        name
        for name, flag in (
            ("AVX-512", "avx512f"),
            ("AVX-512 VNNI", "avx512_vnni"),
            ("AMX", "amx_int8"),
            ("i8mm of ARM", "i8mm"),
        )
        if flag not in flags
    ]
    return [f"not tried: {', '.join(lacking)}: this processor has none"] * bool(lacking) + [
        "not tried: a GPU: every test computes on the CPU"
    ]


def pytest_terminal_summary(terminalreporter):
    reports = [r for r in terminalreporter.stats.get("skipped", []) if r.nodeid not in FILES]
    found = collections.Counter((r.nodeid.partition("::")[0], reason(r)) for r in reports)
    lines = [f"skipped: {name}, all of it: {why}" for name, why in FILES.items()]
    lines += [f"skipped: {name}, {n} test{'s' * (n > 1)}: {why}" for (name, why), n in found.items()]
    terminalreporter.section("not run here, and why")
    for line in sorted(lines) + untried():
        terminalreporter.write_line(line)
