"""What /proc says about processes, and ending all of a session.

An agent leads its own session and everything it starts stays inside, whatever process groups the
user's code makes, so "every process of this node" has an exact meaning without a container.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

_CLOCK_TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class ProcessStat:
    state: str
    group: int
    session: int
    cpu_ns: int  # user and system time
    started: int  # clock ticks since boot

    @property
    def stopped(self) -> bool:
        return self.state in ("T", "t")

    @property
    def gone(self) -> bool:
        return self.state in ("Z", "X")


def process_stat(pid: int) -> ProcessStat | None:
    return _stat(f"/proc/{pid}/stat")


def main_thread_stat(pid: int) -> ProcessStat | None:
    return _stat(f"/proc/{pid}/task/{pid}/stat")


def _stat(path: str) -> ProcessStat | None:
    try:
        line = Path(path).read_bytes()
    except OSError:
        return None
    # The command name stands in parentheses and may hold anything, parentheses included.
    fields = line[line.rfind(b")") + 2 :].split()
    if len(fields) < 20:
        return None
    cpu_ns = (int(fields[11]) + int(fields[12])) * _CLOCK_TICK_NS
    return ProcessStat(
        fields[0].decode(), int(fields[2]), int(fields[3]), cpu_ns, started=int(fields[19])
    )


def process_started(pid: int) -> int | None:
    """Tells a process from a later one with the same number; None if it is gone."""
    stat = process_stat(pid)
    return None if stat is None or stat.gone else stat.started


def leads_session() -> bool:
    return os.getsid(0) == os.getpid()


def others_of_session(session: int) -> list[int]:
    """Processes of `session` that can still run, except the caller."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        stat = process_stat(int(name))
        if stat is not None and stat.session == session and not stat.gone:
            found.append(int(name))
    return found


def sweep_session(session: int, *, deadline_s: float = 5.0) -> bool:
    """SIGKILL every other process of `session` until none is left; blocks for a few milliseconds.

    Repeated, because a process may fork between the scan and its death.
    """
    until = time.monotonic() + deadline_s
    while pids := others_of_session(session):
        for pid in pids:
            _kill_in_session(pid, session)
        if time.monotonic() > until:
            return False
        time.sleep(0.002)
    return True


def _kill_in_session(pid: int, session: int) -> None:
    # The pidfd pins the process, so a reused number can not be hit after the second look.
    with contextlib.suppress(OSError):
        fd = os.pidfd_open(pid)
        try:
            stat = process_stat(pid)
            if stat is not None and stat.session == session:
                signal.pidfd_send_signal(fd, signal.SIGKILL)
        finally:
            os.close(fd)


def kill_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
