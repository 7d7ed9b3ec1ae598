"""What a terminal, a file or a system may hand to the commands: other encodings, places that take no file."""

import os
import subprocess
import sys

import pytest
from tiers import each
from typer.testing import CliRunner

from eagle3_llama import EagleError, EagleLlama
from eagle3_llama.bench.prompts import read_prompts
from eagle3_llama.cli.main import app
from eagle3_llama.errors import ErrorKind
from eagle3_llama.runtime import cost_files

CLI = [sys.executable, "-m", "eagle3_llama.cli"]


def command(*args, **env):
    return subprocess.run(
        [*CLI, *args], capture_output=True, timeout=600, env={**os.environ, **env}, stdin=subprocess.DEVNULL
    )


def test_a_prompt_that_is_no_utf8(files):
    done = command("generate", "-m", files[0], "--prompt", b"caf\xe9", "-t", "1")
    assert done.returncode == 2 and b"Traceback" not in done.stderr
    assert (
        done.stderr.startswith(b"error: the text is not UTF-8 at character 4")
        and done.stderr.count(b"\n") == 1
    )


def test_a_terminal_that_is_no_utf8(files):
    """The tiny model's answers have bytes of all kinds. What the terminal cannot show is a ?."""
    args = ["generate", "-m", files[0], "-p", "x", "--raw", "-n", "40", "-t", "1", "--seed", "3", "-c", "256"]
    done = command(*args, PYTHONIOENCODING="ascii:strict")
    assert done.returncode == 0, done.stderr
    assert b"?" in done.stdout and done.stdout.isascii()


def closed(command, which):
    """A shell's words that run it with a stream closed or full."""
    return ["sh", "-c", f'exec "$0" "$@" {which}', *map(str, command)]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
@pytest.mark.parametrize(
    "which", each(["2>&-", "1>&-", "<&- >&- 2>&-", ">/dev/full", "2>/dev/full"], ["2>&-", ">/dev/full"])
)
def test_streams_that_are_closed_or_full(files, which):
    """A closed one takes what is written. A full one is one line, and no traceback."""
    for args in (["info", files[0]], ["info", files[0] + ".none"]):
        done = subprocess.run(closed([*CLI, *args], which), capture_output=True, text=True, timeout=600)
        full, wrong = which == ">/dev/full", args[-1].endswith("none")
        assert done.returncode == (2 if full or wrong else 0), (args, done.stderr)
        assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr, done.stderr
        told = "no such file" if wrong else "error: the output cannot be written" if full else ""
        told = "" if "2>" in which else told
        assert told in done.stderr and done.stderr.count("\n") == bool(told), done.stderr
        if "1" not in which and ">&- " not in which and not full and not wrong:
            assert done.stdout


def test_lines_of_prompts(tmp_path):
    """U+2028 may stand inside a JSON string, and it is no end of a line there."""
    path = tmp_path / "p.jsonl"
    path.write_bytes('"e"\r\n"a\u2028b\u0085c"\n'.encode())
    assert read_prompts(path) == [("all", "e"), ("all", "a\u2028b\u0085c")]
    path.write_bytes('"café"\n'.encode("latin-1"))
    with pytest.raises(EagleError, match="p.jsonl is not UTF-8 at byte 4: save it") as e:
        read_prompts(path)
    assert e.value.kind is ErrorKind.BAD_VALUE
    with pytest.raises(EagleError, match="cannot read .*none.jsonl"):
        read_prompts(tmp_path / "none.jsonl")


@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_bench_looks_first_where_it_writes(files, tmp_path, option, monkeypatch):
    """Not after the whole run."""
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("eagle3_llama.cli.main.run_bench", lambda _: pytest.fail("it ran"))
    place = tmp_path / "none/x.json" if option == "--json" else tmp_path / "file/plots"
    done = CliRunner().invoke(app, ["bench", "-m", files[0], option, str(place)])
    assert isinstance(done.exception, EagleError) and "cannot write" in str(done.exception)
    assert done.exception.kind is ErrorKind.BAD_FILE and str(place.parent) in str(done.exception)


def test_plots_without_matplotlib_are_refused_first(files, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("eagle3_llama.cli.main.run_bench", lambda _: pytest.fail("it ran"))
    done = CliRunner().invoke(app, ["bench", "-m", files[0], "--plot", str(tmp_path / "plots")])
    assert "plots need matplotlib" in str(done.exception) and not (tmp_path / "plots").exists()


def test_the_demo_looks_first_where_it_writes(tmp_path, monkeypatch):
    monkeypatch.setattr("eagle3_llama.cli.demo._run", lambda *_: pytest.fail("it ran"))
    done = CliRunner().invoke(app, ["demo", "--json", str(tmp_path / "none/x.json")])
    assert done.exit_code == 2 and "does not exist: create it" in done.output.replace("\n", " ")


def test_a_load_without_a_home_folder(files, monkeypatch):
    """The cache is optional: costs are measured at each load then."""
    for name in ("HOME", "EAGLE3_LLAMA_CACHE", "EAGLE3_LLAMA_COSTS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda _: (_ for _ in ()).throw(KeyError("no entry")))
    with pytest.raises(EagleError, match="set HOME"):
        cost_files.costs_dir()
    with EagleLlama(files[0], eagle=files[1], n_ctx=128, n_threads=1, verbose=False) as llm:
        assert llm("ab", max_tokens=4)["usage"]["completion_tokens"] > 0
