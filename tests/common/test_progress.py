"""Progress where no terminal shows a bar."""

import io
import sys

from commands import run
from rich.console import Console
from rich.progress import Progress, TextColumn

from eagle3_llama.common import progress
from eagle3_llama.common.progress import Lines


def lines_of(every, monkeypatch):
    monkeypatch.setattr(progress, "EVERY", every)
    out = io.StringIO()
    with progress.progress(Console(file=out), TextColumn("")) as bar:
        task = bar.add_task("model.gguf", total=3)
        for _ in range(3):
            bar.advance(task)
        other = bar.add_task("training", note="")
        for step in range(1, 5):
            bar.update(other, total=4, completed=step, note=f"loss {step}")
        bar.update(other, note="late")
    return out.getvalue().splitlines()


def test_a_line_now_and_then(monkeypatch):
    assert lines_of(1e9, monkeypatch) == [
        "model.gguf: begins",
        "model.gguf: 3 of 3, 0 s",
        "training: begins",
        "training: 4 of 4, 0 s, loss 4",
    ]
    lines = lines_of(0, monkeypatch)
    assert lines[:4] == [
        "model.gguf: begins",
        "model.gguf: 1 of 3, 0 s",
        "model.gguf: 2 of 3, 0 s",
        "model.gguf: 3 of 3, 0 s",
    ]
    assert lines[5] == "training: 1 of 4, 0 s, loss 1"


def test_a_bar_on_a_terminal():
    out = Console(file=io.StringIO(), force_terminal=True)
    assert isinstance(progress.progress(out), Progress) and isinstance(
        progress.progress(Console(file=io.StringIO())), Lines
    )


def test_bench_says_how_far_it_is(files, tmp_path):
    (tmp_path / "prompts.jsonl").write_text('"a1 b2"\n"c3"\n')
    done = run(
        [
            sys.executable,
            "-m",
            "eagle3_llama.cli",
            "bench",
            "-m",
            files[0],
            "--eagle",
            files[1],
            "--prompts",
            tmp_path / "prompts.jsonl",
            "-n",
            "8",
            "-c",
            "256",
            "-t",
            "1",
        ]
    )
    assert done.returncode == 0, done.stderr
    assert [line.partition(",")[0] for line in done.stderr.splitlines()][:1] == [
        "target.gguf: begins"
    ] and "target.gguf: 2 of 2, " in done.stderr
