"""Commands that tests run: each has an end, and one that fails shows what it said."""

import os
import signal
import subprocess

import pytest

SECONDS = 600  # what a loaded machine may need; below faulthandler_timeout, which ends the whole process


def run(command, code=0, seconds=SECONDS, input=None, **settings):
    """subprocess.CompletedProcess of a command, whose output is read as text. settings are Popen's.

    The test fails unless it ends with status `code` (None: any) within `seconds`. A command that does not
    end is killed with all that it started.
    """
    __tracebackhide__ = True
    pipe, words = subprocess.PIPE, [str(word) for word in command]
    settings = {"stdin": subprocess.DEVNULL, "stdout": pipe, "stderr": pipe, "text": True, **settings}
    settings |= {} if input is None else {"stdin": pipe}
    with subprocess.Popen(words, start_new_session=True, **settings) as child:
        try:
            out, err = child.communicate(input, timeout=seconds)
            late = False
        except subprocess.TimeoutExpired:
            kill(child)
            out, err = child.communicate()
            late = True
        except BaseException:
            kill(child)
            raise
    said = f"{out or ''}\n{err or ''}"[-4000:]
    if late:
        pytest.fail(f"still running after {seconds} s: {words}\n{said}")
    if code is not None and child.returncode != code:
        pytest.fail(f"exit status {child.returncode}, not {code}: {words}\n{said}")
    return subprocess.CompletedProcess(words, child.returncode, out, err)


def kill(child):
    """The session that it leads."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        child.kill()
