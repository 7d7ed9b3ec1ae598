"""scripts/test itself: a crash, a hang or a missing part ends the run as a failure that names the test."""

import ast
import os
import re
import shlex
import sys
import time
from collections import OrderedDict
from types import SimpleNamespace

import pytest
import skipped
from commands import run
from paths import ROOT
from tiers import each
from workers import LONG, FileScheduling, Workers

HOOKS = """import skipped, tiers, workers
from tiers import pytest_addoption

def pytest_configure(config):
    config.pluginmanager.register(tiers.Tiers(config), "tiers")
    config.pluginmanager.register(skipped)
    config.pluginmanager.register(workers.Workers(config))
"""
GOOD = "def test_one(): pass\n\ndef test_two(): pass\n"
DIES = """import os, signal

def test_before(): pass

def test_dies(): os.kill(os.getpid(), signal.{})

def test_behind(): pass
"""


def options():
    """Those that scripts/test gives pytest."""
    [line] = re.findall(r"-m pytest (.*) \"\$@\"$", (ROOT / "scripts/test").read_text(), re.MULTILINE)
    return shlex.split(line)


def tried(folder, files, *more, code=1, whole=True, **env):
    """The output of a run of these files in two processes, with the options, settings and hooks of ours."""
    folder.mkdir(exist_ok=True)
    (folder / "conftest.py").write_text(HOOKS)
    for name, text in files.items():
        (folder / f"test_{name}.py").write_text(text)
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "EAGLE3_MAY_SKIP"))}
    kept["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # other plugins take seconds to import, in each process
    command = [sys.executable, "-m", "pytest", *options(), "-vv", "-n", 2, "-c", ROOT / "pyproject.toml"]
    command += [
        "-p",
        "xdist",
        "-o",
        f"cache_dir={folder}/.cache",
        "--rootdir",
        folder,
        *more,
        *[folder] * whole,
    ]
    return run(command, code, cwd=folder, env={**kept, "PYTHONPATH": f"{ROOT}/tests/kit", **env}).stdout


def outcomes(out):
    """{test: PASSED or FAILED} of what was reported."""
    return {name: word for word, name in re.findall(r"^\[gw\d+\].* (PASSED|FAILED) (\S+)", out, re.MULTILINE)}


def good(n=4):
    return {f"good{i}": GOOD for i in range(n)}


def test_these_are_the_hooks_of_the_suite(pytestconfig):
    plugins = pytestconfig.pluginmanager.get_plugins()
    assert skipped in plugins and any(isinstance(p, Workers) for p in plugins)


CRASHES = [("SIGSEGV", "a"), ("SIGKILL", "z")]


@pytest.mark.parametrize("signal, where", each(CRASHES, CRASHES[:1], ids=["first", "last"]))
def test_a_crash(tmp_path, signal, where):
    """The test is named, all others are run, those of its own file too."""
    out = tried(tmp_path / "t", {**good(), f"{where}_dies": DIES.format(signal)})
    assert f"crashed while running 'test_{where}_dies.py::test_dies': killed by {signal}" in out
    assert "1 failed, 10 passed" in out and "did not run" not in out


@pytest.mark.thorough
def test_crash_after_crash(tmp_path):
    """As many as the command bears, in both processes; then the run ends, and says what it left out."""
    every = {f"d{i:02}": DIES.format("SIGKILL") for i in range(12)}
    out = tried(tmp_path / "t", {**every, **good()})
    n = len(set(re.findall(r"crashed while running '(\S+)'", out)))
    assert n >= 8 and re.search(r"^\d+ collected tests did not run$", out, re.MULTILINE), out


def test_files_for_a_worker_that_is_dead_already():
    """Its death is told behind the tests that it finished before: these bring it more files."""

    class Node:
        shutting_down = False

        def __init__(self, dead):
            self.dead, self.sent = dead, []

        def send_runtest_some(self, indices):
            if self.dead:
                raise OSError("cannot send (already closed?)")
            self.sent += indices

        def shutdown(self):
            self.shutting_down = True

    sched = object.__new__(FileScheduling)  # without a session
    tests = ["a.py::first", "a.py::dies", "b.py::one", "c.py::one"]
    dead, other = Node(True), Node(False)
    sched.registered_collections = {dead: tests, other: tests}
    sched.assigned_work = OrderedDict(
        {dead: {"a.py": {"a.py::first": False, "a.py::dies": False}}, other: {}}
    )
    sched.workqueue = OrderedDict({"b.py": {"b.py::one": False}, "c.py": {"c.py::one": False}})
    sched.running, sched.last = {"a.py::first", "a.py::dies"}, {}
    sched.mark_test_complete(dead, 0)
    assert sched.remove_node(dead) == "a.py::dies"
    assert sorted(other.sent) == [2, 3] and not sched.workqueue


@pytest.mark.thorough
def test_a_hang(tmp_path):
    """The test's process is ended, the test is named and its line shown, all others are run."""
    sleeps = "import time\n\ndef test_sleeps():\n    time.sleep(1e6)\n\ndef test_behind(): pass\n"
    out = tried(tmp_path / "t", {**good(), "sleeps": sleeps}, "-o", "faulthandler_timeout=20")
    assert "crashed while running 'test_sleeps.py::test_sleeps'" in out and "faulthandler_timeout" in out
    assert "1 failed, 9 passed" in out and "did not run" not in out


def test_every_test_has_a_limit():
    """And commands that tests run have a lower one, so that what they said is seen."""
    import commands

    text = (ROOT / "pyproject.toml").read_text()
    limit = int(re.search(r"^faulthandler_timeout = (\d+)$", text, re.MULTILINE)[1])
    assert commands.SECONDS < limit <= 1800 and "\nfaulthandler_exit_on_timeout = true\n" in text


def test_every_command_of_a_test_has_a_limit():
    for path in (ROOT / "tests").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and re.match(
                r"subprocess\.(run|check_\w+|call)$", ast.unparse(node.func)
            ):
                named = {k.arg for k in node.keywords}
                assert "timeout" in named, f"{path.name}:{node.lineno}: take commands.run, or give a timeout"


EXITS = [
    "import atexit, os, signal\n\ndef test_it(): atexit.register(os.kill, os.getpid(), signal.SIGSEGV)\n",
    "import atexit, os\n\ndef test_it(): atexit.register(os._exit, 3)\n",
]


@pytest.mark.parametrize("text", each(EXITS, EXITS[:1], ids=["signal", "status"]))
def test_a_crash_behind_the_last_test(tmp_path, text):
    """At the interpreter's exit, when every test has passed."""
    out = tried(tmp_path / "t", {**good(2), "exit": text})
    assert "5 passed" in out and "failed" not in out
    assert re.search(
        r"a worker ended before its time: gw\d, after its last test, \S+: (killed by|exit status)", out
    )


@pytest.mark.thorough
def test_a_crash_between_tests(tmp_path):
    """No test is blamed, none is lost, and the run fails."""
    text = (
        "import os, signal, pytest\n\n@pytest.fixture\ndef late(request):\n"
        "    request.config.pluginmanager.register(Late())\n\n"
        "class Late:\n    @pytest.hookimpl(trylast=True)\n    def pytest_runtest_logfinish(self, nodeid):\n"
        "        import time; time.sleep(1); os.kill(os.getpid(), signal.SIGKILL)\n\n"
        "def test_before(late): pass\n"
    )
    out = tried(tmp_path / "t", {"between": text, **good(2)})
    assert "a worker ended before its time" in out and "killed by SIGKILL" in out


@pytest.mark.thorough
def test_all_is_well(tmp_path):
    out = tried(tmp_path / "t", good(), code=0)
    assert "8 passed" in out and "not whole" not in out


def test_what_took_longest_comes_first(tmp_path):
    """Of the files of a worker, behind those that no run has measured, of which the largest comes first."""
    seconds = {"s0.py": 0.1, "s3.py": 3.0, "s1.py": 1.0}
    for name in (*seconds, "small.py", "large.py"):
        (tmp_path / name).write_text("#" * 5000 if name == "large.py" else "#")
    items = [
        SimpleNamespace(path=path, nodeid=f"{path.name}::test_it") for path in sorted(tmp_path.iterdir())
    ]
    config = SimpleNamespace(workerinput={"seconds": seconds})
    Workers.pytest_collection_modifyitems(None, config, items)
    assert [item.path.stem for item in items] == ["large", "small", "s3", "s1", "s0"]


@pytest.mark.thorough
def test_longest_file_first(tmp_path):
    """By the seconds of the last run; before them what has none, the largest first."""
    sleeps = (
        "import time\n\ndef test_{0}(): time.sleep({0})\n\ndef test_more(): pass\n\ndef test_rest(): pass\n"
    )
    files = {f"s{n}": sleeps.format(n) for n in (0, 3, 1)}
    folder = tmp_path / "t"
    tried(folder, files, "-n", 1, code=0)
    more = {"large": GOOD + "#" * 5000, "small": GOOD}
    out = tried(folder, {**files, **more}, "-n", 1, code=0)
    order = list(dict.fromkeys(re.findall(r"PASSED test_(\w+)\.py", out)))
    assert order == ["large", "small", "s3", "s1", "s0"]


def test_long_files_are_there():
    assert all((ROOT / "tests" / f"{name}.py").is_file() for name in LONG)


@pytest.mark.thorough
def test_a_part_of_a_file_is_no_measure(tmp_path):
    files = {"a": "import time\n\ndef test_long(): time.sleep(2)\n\ndef test_short(): pass\n", "b": GOOD}
    folder = tmp_path / "t"
    for more in ((), ("-k", "short or one")):
        tried(folder, files, "-n", 1, *more, code=0)
    out = tried(folder, files, "-n", 1, code=0)
    assert list(dict.fromkeys(re.findall(r"PASSED test_(\w+)\.py", out))) == ["a", "b"]


SKIPS = "import pytest\n\n@pytest.mark.skip(reason='{}')\ndef test_it(): pass\n"


REASONS = [
    ("no Chromium: install one", None, 0),
    ("no Chromium: install one", "", 1),
    ("no Chromium: install one", "no Chromium|no printer", 0),
    ("this processor has no AMX", "", 0),
]


@pytest.mark.parametrize("why, may, code", each(REASONS, REASONS[1:2]))
def test_skipped_where_nothing_may_be(tmp_path, why, may, code):
    """EAGLE3_MAY_SKIP makes every other reason than the hardware's and its own a failure."""
    env = {} if may is None else {"EAGLE3_MAY_SKIP": may}
    out = tried(tmp_path / "t", {**good(1), "skips": SKIPS.format(why)}, code=code, **env)
    assert f"skipped: test_skips.py, 1 test: {why}" in out
    assert ("must not be skipped here: test_skips.py" in out) == (code == 1)


def test_a_file_that_is_skipped(tmp_path):
    text = "import pytest\n\npytest.importorskip('no_such_module')\n"
    out = tried(tmp_path / "t", {**good(1), "skips": text}, EAGLE3_MAY_SKIP="")
    assert "must not be skipped here: test_skips.py, all of it: could not import 'no_such_module'" in out


def test_commands_end():
    """What a command started is ended with it; the failure shows what it said."""
    start = time.monotonic()
    with pytest.raises(pytest.fail.Exception, match="still running after 3 s.*\n.*it said"):
        run(["sh", "-c", "echo it said; sleep 1000 & sleep 1000"], seconds=3)
    assert time.monotonic() - start < 300
    with pytest.raises(pytest.fail.Exception, match="exit status 3, not 0.*\n.*it said"):
        run(["sh", "-c", "echo it said; exit 3"])
    assert run(["cat"], input="text").stdout == "text"
