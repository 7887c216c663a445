"""What the launcher shows: ranks' lines on stdout, words and the progress line on stderr.

The progress line exists only on a terminal. It is erased before anything else is written and drawn
again after, so lines of the ranks never run into it, even when both go to the same screen.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.text import Text

from keepstep.model.views import IncidentView, JobView

ERASE_LINE = "\r\x1b[2K"
READ_BYTES_MAX = 1 << 20
UNNAMED_S_MAX = 3.0  # how long lines of a worker wait for its rank to become known


class Output:
    def __init__(
        self, *, quiet: bool = False, out: TextIO | None = None, err: TextIO | None = None
    ) -> None:
        self.quiet = quiet
        self._out: TextIO | None = out or sys.stdout
        self._is_stdout = out is None
        self._err = err or sys.stderr
        self._console = Console(file=self._err, highlight=False)
        self.live = self._console.is_terminal and not quiet
        self._progress = ""

    def lines(self, lines: Iterable[str]) -> None:
        text = "".join(f"{line}\n" for line in lines)
        if not text or self._out is None:
            return
        self._erase()
        try:
            self._out.write(text)
            self._out.flush()
        except (BrokenPipeError, ValueError):
            # The reader of our output is gone (`| head`). Training is worth more than its echo.
            self._out = None
            if self._is_stdout:
                silence_stdout()
        self._draw()

    def words(self, text: str, *, always: bool = False) -> None:
        if self.quiet and not always:
            return
        self._erase()
        self._err.write(f"keepstep: {text}\n")
        self._err.flush()
        self._draw()

    def raw_words(self, text: str) -> None:
        self._erase()
        self._err.write(text.rstrip("\n") + "\n")
        self._err.flush()

    def progress(self, text: str) -> None:
        if self.live:
            self._erase()
            self._progress = text
            self._draw()

    def _erase(self) -> None:
        if self.live and self._progress:
            self._err.write(ERASE_LINE)
            self._err.flush()

    def _draw(self) -> None:
        if self.live and self._progress:
            line = Text(self._progress, style="bold")
            line.truncate(max(self._console.width - 1, 10), overflow="ellipsis")
            self._console.print(line, end="")
            self._err.flush()


def silence_stdout() -> None:
    """So that the interpreter's own flush at exit does not fail on the broken pipe."""
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
    except (OSError, ValueError):
        pass


class LogTail:
    """Follows DIRECTORY/logs/<worker>.log and puts each line under the name of its rank."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._names: dict[str, str] = {}
        self._offsets: dict[str, int] = {}
        self._partial: dict[str, bytes] = {}
        self._first_seen: dict[str, float] = {}
        # What an earlier job left in the same folder is not ours to repeat.
        for path in self._logs():
            self._offsets[path.stem] = path.stat().st_size

    def learn(self, view: JobView) -> None:
        for spare in view.spares:
            self._names[spare.worker] = f"spare {spare.slot}"
            for one in spare.understudies:
                self._names[one.worker] = f"understudy of {one.rank}"
        # After the spares: one that has a rank assigned is listed as both.
        for owner in view.ranks:
            if owner.worker:
                self._names[owner.worker] = f"rank {owner.rank}"

    def poll(self, now_s: float, *, last: bool = False) -> list[str]:
        """Whole lines that are new; with `last` also what has no end of line yet."""
        lines: list[str] = []
        for path in self._logs():
            worker = path.stem
            seen_s = self._first_seen.setdefault(worker, now_s)
            if worker in self._names or last or now_s - seen_s > UNNAMED_S_MAX:
                lines += self._read(path, worker, last)
        return lines

    def _read(self, path: Path, worker: str, last: bool) -> list[str]:
        offset = self._offsets.get(worker, 0)
        try:
            if path.stat().st_size <= offset and not (last and self._partial.get(worker)):
                return []
            with path.open("rb") as file:
                file.seek(offset)
                data = file.read(-1 if last else READ_BYTES_MAX)
        except OSError:
            return []
        self._offsets[worker] = offset + len(data)
        *whole, rest = (self._partial.get(worker, b"") + data).split(b"\n")
        if last and rest:
            whole.append(rest)
            rest = b""
        self._partial[worker] = rest
        name = self._names.get(worker, worker)
        return [f"[{name}] {line.decode(errors='replace')}" for line in whole]

    def _logs(self) -> list[Path]:
        try:
            names = os.listdir(self._folder)
        except OSError:
            return []
        return sorted(
            self._folder / name
            for name in names
            if name.endswith(".log") and not name.startswith(("agent-", "store-"))
        )


# --------------------------------------------------------------------------- sentences


def progress_text(view: JobView, incident: IncidentView | None) -> str:
    parts = [
        view.state,
        f"step {view.committed_step}",
        f"{view.steps_per_s:.1f} steps/s",
        f"generation {view.generation}",
    ]
    if incident is not None:
        parts.append(f"last incident {incident.id} {incident.outcome}")
    return " · ".join(parts)


def ranks_text(ranks: list[int]) -> str:
    if not ranks:
        return "no rank"
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def opened_text(incident: IncidentView) -> str:
    what = incident.reason or ranks_text(incident.victims)
    return f"incident {incident.id} opened, {incident.trigger} ({incident.cause}): {what}"


def closed_text(incident: IncidentView) -> str:
    parts = [f"incident {incident.id} {incident.outcome}"]
    parts += incident.moves
    parts.append(f"pause {incident.pause_ms:.0f} ms")
    parts.append(f"{incident.steps_lost} steps lost, {incident.steps_recomputed} recomputed")
    if incident.outcome != "RESOLVED" and incident.reason:
        parts.append(incident.reason)
    return ", ".join(parts)


def closing_text(view: JobView, incidents: list[IncidentView]) -> str:
    lost = sum(incident.steps_lost for incident in incidents)
    text = (
        f"job {view.job} {view.state.replace('_', ' ')}: step {view.committed_step}, "
        f"{len(incidents)} incidents, {lost} steps lost"
    )
    return f"{text}: {view.reason}" if view.reason and view.state != "done" else text
