"""Files are written whole or not at all, by however many at once; what killed writers left goes."""

import os
import stat
import threading
import time

import pytest

from eagle3_llama import EagleError
from eagle3_llama.common.files import cache_dir, check_writable, locked, remove_stale, replacing
from eagle3_llama.errors import ErrorKind


def at_once(*calls):
    """Runs the calls in threads; returns what they raised."""
    raised = []

    def guarded(call):
        try:
            call()
        except BaseException as e:  # whatever it is, the test reports it
            raised.append(e)

    threads = [threading.Thread(target=guarded, args=[call]) for call in calls]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return raised


def test_two_writers_of_one_file(tmp_path):
    """Threads of one process, which share its id as processes in two containers do."""
    out, both = tmp_path / "out", threading.Barrier(2)

    def write(text):
        with replacing(out) as part:
            both.wait()
            part.write_text(text)
            both.wait()
            assert part.read_text() == text  # nobody else writes there
            both.wait()

    assert at_once(lambda: write("a" * 1000), lambda: write("b" * 10)) == []
    assert out.read_text() in ("a" * 1000, "b" * 10) and list(tmp_path.iterdir()) == [out]


def test_the_mode_is_that_of_any_new_file(tmp_path):
    before = os.umask(0o027)
    try:
        with replacing(tmp_path / "out") as part:
            part.write_text("x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o640


def test_what_killed_writers_left(tmp_path):
    """Old ones go: of the same file when it is written, of all files when the folder is cleaned."""
    names = (".out.7.part", ".out.0a1b2c3d.part", ".other.9.part", "mine.part", ".out.new.part")
    for name in (*names, ".out.1.part"):
        (tmp_path / name).write_text("x")
    for name in names:
        os.utime(tmp_path / name, (1, 1))
    with replacing(tmp_path / "out") as part:
        part.write_text("x")
    left = lambda: sorted(p.name for p in tmp_path.iterdir())
    assert left() == sorted([*names[2:], ".out.1.part", "out"])
    remove_stale(tmp_path)
    assert left() == sorted([*names[3:], ".out.1.part", "out"])
    remove_stale(tmp_path / "none")


def test_only_one_is_inside(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("EAGLE3_LLAMA_CACHE", str(tmp_path))
    inside, most = [], []

    def work():
        with locked("x", "waiting for another"):
            inside.append(1)
            most.append(len(inside))
            time.sleep(0.05)
            inside.pop()

    assert at_once(work, work, work) == [] and most == [1, 1, 1]
    assert "[waiting for another]" in capsys.readouterr().err


def test_without_a_place_for_locks_nothing_is_locked(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EAGLE3_LLAMA_CACHE", str(tmp_path / "file"))
    with locked("x", "waiting"):
        pass


def test_no_home_folder(monkeypatch):
    monkeypatch.delenv("EAGLE3_LLAMA_CACHE", raising=False)
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", lambda _: (_ for _ in ()).throw(KeyError("no entry")))
    with pytest.raises(EagleError, match="this user has none: set HOME, or EAGLE3_LLAMA_CACHE") as e:
        cache_dir()
    assert e.value.kind is ErrorKind.BAD_FILE


def test_places_that_cannot_be_written(tmp_path):
    check_writable(None)
    check_writable(tmp_path / "new")
    for out, said in ((tmp_path, "it is a folder"), (tmp_path / "none" / "x", "does not exist: create it")):
        with pytest.raises(EagleError, match=said):
            check_writable(out)
