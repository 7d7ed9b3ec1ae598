"""Hooks for conftest: the end of the summary says what was skipped, with one line for each reason.

EAGLE3_MAY_SKIP is for CI, which has what can be installed: a test that is skipped fails the run, unless the
hardware is the reason or the reason matches this regular expression ("" matches none).
"""

import collections
import os
import re
from pathlib import Path

import pytest

FILES = {}  # skipped as a whole, and why: xdist tells nobody
NO_INSTALLATION_HELPS = (
    r"processor|AMX|AVX|GPU|GNU's OpenMP counts|screenshots are taken with|an environment of its own"
)


def reason(report):
    return (
        report.longrepr[2].removeprefix("Skipped: ")
        if isinstance(report.longrepr, tuple)
        else str(report.longrepr)
    )


def pytest_collectreport(report):
    if report.skipped:
        FILES[report.nodeid] = reason(report)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["skipped_files"] = FILES
    elif session.exitstatus == pytest.ExitCode.OK:
        reporter = session.config.pluginmanager.getplugin("terminalreporter")
        if forbidden(skipped_lines(reporter)):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


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
        "not tried: a GPU's kernels: the device of tests/device is served by the CPU"
    ]


def skipped_lines(terminalreporter):
    """[(what, reason)] of files that were skipped as a whole, and of the tests of others."""
    reports = [r for r in terminalreporter.stats.get("skipped", []) if r.nodeid not in FILES]
    found = collections.Counter((r.nodeid.partition("::")[0], reason(r)) for r in reports)
    lines = [(f"{name}, all of it", why) for name, why in FILES.items()]
    return sorted(lines + [(f"{name}, {n} test{'s' * (n > 1)}", why) for (name, why), n in found.items()])


def forbidden(lines):
    """Those of skipped_lines that EAGLE3_MAY_SKIP makes a failure."""
    may = os.environ.get("EAGLE3_MAY_SKIP")
    allowed = "|".join(filter(None, (NO_INSTALLATION_HELPS, may)))
    return [] if may is None else [(what, why) for what, why in lines if not re.search(allowed, why)]


def pytest_terminal_summary(terminalreporter):
    lines = skipped_lines(terminalreporter)
    terminalreporter.section("not run here, and why")
    for what, why in lines:
        terminalreporter.write_line(f"skipped: {what}: {why}")
    for line in untried():
        terminalreporter.write_line(line)
    for what, why in forbidden(lines):
        terminalreporter.write_line(f"must not be skipped here: {what}: {why}")
