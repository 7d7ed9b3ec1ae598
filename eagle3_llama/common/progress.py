"""Progress of long work: a bar on a terminal, a line every few seconds in a file, a pipe or a log."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.progress import Progress, ProgressColumn, TaskID

EVERY = 10.0  # seconds between lines


def progress(
    console: Console, *columns: ProgressColumn | str, transient: bool = False, begins: bool = True
) -> Progress | Lines:
    """A context manager with the methods add_task(), update() and advance() of rich.progress.Progress.

    A task's field `unit` names what is counted; its field `note` is printed after the count.
    transient: remove the bar at the end. begins: without a terminal, print a line when a task begins.
    """
    if not console.is_terminal:
        return Lines(console, begins)
    return Progress(*columns, console=console, transient=transient)


class Lines:
    """Prints one line when a task begins, one when it ends, and one every EVERY seconds in between."""

    def __init__(self, console: Console, begins: bool = True) -> None:
        self._console, self._begins, self._tasks = console, begins, list[dict[str, Any]]()

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def add_task(self, description: str, total: float | None = None, **fields: Any) -> TaskID:
        now = time.monotonic()
        self._tasks.append(
            {"description": description, "total": total, "completed": 0, "start": now, "said": now, **fields}
        )
        if self._begins:
            self._say(f"{description}: begins")
        return TaskID(len(self._tasks) - 1)

    def advance(self, task: TaskID, advance: float = 1) -> None:
        self.update(task, completed=self._tasks[task]["completed"] + advance)

    def update(self, task: TaskID, **fields: Any) -> None:
        t, now = self._tasks[task], time.monotonic()
        goes_on = any(fields.get(name, t[name]) != t[name] for name in ("completed", "total"))
        t.update(fields)
        if now - t["said"] >= EVERY or (goes_on and t["completed"] == t["total"]):
            t["said"] = now
            of = f" of {t['total']:,.0f}" if t["total"] is not None else ""
            unit = f" {t['unit']}" if t.get("unit") else ""
            note = f", {t['note']}" if t.get("note") else ""
            self._say(f"{t['description']}: {t['completed']:,.0f}{of}{unit}, {now - t['start']:.0f} s{note}")

    def _say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)
