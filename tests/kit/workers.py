"""Hooks for conftest: what the death of a worker process means for the run, and which file is run first.

xdist 3.8 alone waits for ever after a crash: the tests that the dead worker had finished go back into the
queue too, and nobody reports them again. Nor does it notice how a process ends that has finished its tests.
"""

import math
import signal
import subprocess

import pytest
from xdist.scheduler import LoadFileScheduling

EXIT_SECONDS = 120  # a process that has finished its tests has this long to end
# Files that take minutes, in falling order: they start first where no run has measured the files. One that
# begins last would run alone.
LONG = [
    "native/test_native",
    "server/test_tool_schemas",
    "native/test_drafting_table",
    "server/clients/test_replays",
    "runtime/test_windows",
    "runtime/test_memories",
    "device/test_other_folders",
    "native/test_pre_tokenizers",
    "native/test_recurrent",
    "llama/test_same_text",
    "native/test_invariance",
    "server/test_tools",
    "device/test_device_texts",
    "server/test_server_hostile",
    "train/test_train_runs",
    "heads/test_variants",
    "runtime/test_prefix_memories",
    "runtime/test_memory_use",
    "heads/test_self_test",
]
KEYS = {
    False: "eagle3/seconds",
    True: "eagle3/seconds-all",
}  # of pytest's cache: {file: seconds of its tests}


class FileScheduling(LoadFileScheduling):
    """xdist's, except that a dead worker's files go on behind the test that killed it."""

    def __init__(self, config, log=None):
        super().__init__(config, log)
        self.running, self.last = set(), {}
        config.pluginmanager.register(self)

    def pytest_runtest_logstart(self, nodeid):
        self.running.add(nodeid)

    def mark_test_complete(self, node, item_index, duration=0):
        self.last[node] = self.registered_collections[node][item_index]
        self.running.discard(self.last[node])
        super().mark_test_complete(node, item_index, duration)

    def remove_node(self, node):
        """The test that the node was running, or None. Its other tests go to the nodes that are left."""
        units = self.assigned_work.pop(node)
        left = [nodeid for unit in units.values() for nodeid, done in unit.items() if not done]
        crashed = next((nodeid for nodeid in left if nodeid in self.running), None)
        if crashed is not None:
            units[self._split_scope(crashed)][crashed] = True
        for scope, unit in units.items():
            if not all(unit.values()):
                self.workqueue[scope] = unit
        for other in self.nodes:
            self._reschedule(other)
        return crashed

    def _reschedule(self, node):
        """Gives a node files until it has more than two tests: it starts its last one when another follows.

        A node that replaces a dead one is known before it has collected the tests. It is asked again then.
        """
        if node.shutting_down or node not in self.registered_collections:
            return
        while self.workqueue and self._pending_of(self.assigned_work[node]) <= 2:
            try:
                self._assign_work_unit(node)
            except OSError:  # it is dead, which is told behind what it had said: remove_node gets the files
                return
        if not self.workqueue:
            node.shutdown()


class Workers:
    """Fails a run of which a part is missing, and says which. Orders the files of the next one."""

    def __init__(self, config):
        cache = getattr(config, "cache", None)
        # a file has fewer tests without --all: what it took then says nothing of it with --all
        self.key = KEYS[bool(config.getoption("all", False))]
        self.config, self.known = config, cache.get(self.key, {}) if cache else {}
        self.took, self.collected, self.reported = {}, set(), set()
        self.sched, self.finished, self.lost = None, [], []

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config, log):
        if config.getvalue("dist") == "loadfile":
            self.sched = FileScheduling(config, log)
            return self.sched

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node):
        node.workerinput["seconds"] = self.known
        node.nodemanager.EXIT_TIMEOUT = EXIT_SECONDS

    def pytest_collection_modifyitems(self, config, items):
        """In a worker: first what was not measured, LONG and by size, then those that took longest."""
        if hasattr(config, "workerinput"):
            seconds = config.workerinput["seconds"]
            size = {path: path.stat().st_size for path in {item.path for item in items}}

            def place(item):
                file = file_of(item.nodeid)
                name = file.removeprefix("tests/").removesuffix(".py")
                long = LONG.index(name) if name in LONG else len(LONG)
                return -seconds.get(file, math.inf), long, -size[item.path], str(item.path)

            items.sort(key=place)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids):
        self.collected.update(ids)

    def pytest_runtest_logreport(self, report):
        self.reported.add(report.nodeid)
        file = file_of(report.nodeid)
        self.took[file] = self.took.get(file, 0.0) + getattr(report, "duration", 0.0)

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, report):
        report.longrepr = f"{report.longrepr}: {ending(report.node)}"

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node, error):
        if error is None:
            self.finished.append(node)
        elif error != "keyboard-interrupt":
            last = getattr(self.sched, "last", {}).get(node, "none")
            self.lost.append(
                f"{node.gateway.id}: {error}: {ending(node)}; the last test that it finished: {last}"
            )

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session):
        """Behind xdist's, which waits for the processes."""
        if hasattr(session.config, "workerinput"):
            return
        for node in self.finished:
            if code(node) != 0:
                last = getattr(self.sched, "last", {}).get(node, "none")
                self.lost.append(f"{node.gateway.id}, after its last test, {last}: {ending(node)}")
        if session.exitstatus == pytest.ExitCode.OK and (self.lost or self.collected - self.reported):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if self.known_files_are_whole():
            self.config.cache.set(self.key, {**self.known, **{f: round(s, 1) for f, s in self.took.items()}})

    def known_files_are_whole(self):
        """True if each file that ran did so as a whole: what a selection took says nothing of the file."""
        option = self.config.option
        selected = option.keyword or option.markexpr or getattr(option, "lf", False) or option.collectonly
        return (
            hasattr(self.config, "cache")
            and not selected
            and not self.lost
            and not self.collected - self.reported
            and not any("::" in a for a in self.config.args)
        )

    def pytest_terminal_summary(self, terminalreporter):
        n = len(self.collected - self.reported)
        lines = [f"a worker ended before its time: {line}" for line in self.lost]
        lines += [f"{n} collected test{'s' * (n > 1)} did not run"] * bool(n)
        if lines:
            terminalreporter.section("the run is not whole")
        for line in lines:
            terminalreporter.write_line(line)


def file_of(nodeid):
    return nodeid.partition("::")[0]


def code(node):
    """The exit status of a worker's process, negative for a signal; None if it still runs."""
    try:
        return node.gateway._io.popen.wait(timeout=10)
    except subprocess.TimeoutExpired:
        return None


def ending(node):
    status = code(node)
    if status is None:
        return "its process still runs"
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    return f"exit status {status} (1: a test took longer than faulthandler_timeout, its stack is above)"
