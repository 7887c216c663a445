"""Agents as child processes: started in sessions of their own, and never survived by anything.

A session is the unit that dies together: an agent leads one, and its workers (each in a process
group of its own) and their children stay in it. Whatever ends an agent, its session is swept with
SIGKILL before anybody is told that the node is dead, because "dead" is a promise that no process
of it computes any more. As a child subreaper this process inherits the orphans and reaps them.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from keepstep.errors import PermanentError
from keepstep.model.messages import Address

PR_SET_CHILD_SUBREAPER = 36
SWEEP_S_MAX = 5.0
SWEEP_ROUND_S = 0.002


class AgentProcess:
    """One running agent. Closing `stdin` (or our death) tells it to end its node."""

    def __init__(self, node: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.node = node
        self.process = process
        self.log = log
        self.pidfd = os.pidfd_open(process.pid)

    @property
    def session(self) -> int:
        return self.process.pid  # start_new_session: the leader's pid is the session's id

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def watch(self, loop: asyncio.AbstractEventLoop, ended: Callable[[AgentProcess], None]) -> None:
        def on_exit() -> None:
            loop.remove_reader(self.pidfd)
            ended(self)

        loop.add_reader(self.pidfd, on_exit)

    def last_words(self, lines: int = 15) -> str:
        try:
            with self.log.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - 8192))
                text = file.read().decode(errors="replace")
        except OSError:
            return ""
        return "\n".join(text.splitlines()[-lines:])


def start_agent(
    *,
    streams: Sequence[Address],
    token: str,
    job: str,
    node: str,
    slots: int,
    directory: Path,
    stall_timeout_ns: int,
    environ: Mapping[str, str],
    bind: str = "127.0.0.1",
    identity: Path | None = None,
    keeper: Path | None = None,
) -> AgentProcess:
    # -P: a module of the user's directory named like one of the standard library must not
    # replace it in the agent. (Workers import from the script's directory, as always.)
    command = [sys.executable, "-P", "-m", "keepstep.agent"]
    where = ",".join(f"{stream.host}:{stream.port}" for stream in streams)
    command += ["--orchestrator", where, "--job", job, "--node", node]
    command += ["--slots", str(slots), "--directory", str(directory)]
    command += ["--stall-timeout-ns", str(stall_timeout_ns), "--bind", bind]
    if identity is not None:
        command += ["--identity", str(identity)]
    if keeper is not None:
        command += ["--keeper", str(keeper)]
    log = directory / "logs" / f"agent-{node}.log"
    try:
        log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with log.open("ab") as words:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=words,
                stderr=words,
                env={**environ, "KEEPSTEP_TOKEN": token if identity is None else ""},
                start_new_session=True,
            )
    except OSError as error:
        raise PermanentError(
            f"cannot start the agent of node {node}: {error}", hint="see limits of this user"
        ) from error
    return AgentProcess(node, process, log)


def become_subreaper() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise PermanentError(f"cannot become a child subreaper: {os.strerror(code)}")


def members(sessions: Iterable[int]) -> list[int]:
    """Live processes (zombies do not count) whose session is one of `sessions`."""
    wanted = set(sessions)
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            fields = Path(f"/proc/{name}/stat").read_bytes().rpartition(b")")[2].split()
        except OSError:
            continue  # it ended while we looked
        if fields[0] not in (b"Z", b"X") and int(fields[3]) in wanted:
            found.append(int(name))
    return found


def sweep(sessions: Iterable[int]) -> bool:
    """SIGKILL whole sessions until nothing of them runs. Forking against it does not help: every
    round kills what the last one missed. False if something is stuck in the kernel."""
    wanted, end = list(sessions), time.monotonic() + SWEEP_S_MAX
    while _kill_members(wanted):
        if time.monotonic() > end:
            return False
        time.sleep(SWEEP_ROUND_S)
    return True


async def sweep_beside(sessions: Iterable[int]) -> bool:
    """The same, without stopping the event loop: a large process takes a while to be gone."""
    wanted, end = list(sessions), time.monotonic() + SWEEP_S_MAX
    while _kill_members(wanted):
        if time.monotonic() > end:
            return False
        await asyncio.sleep(SWEEP_ROUND_S)
    return True


def _kill_members(sessions: list[int]) -> bool:
    """One round; True if there was anything to kill."""
    own = os.getsid(0)
    pids = members(session for session in sessions if session != own)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return bool(pids)


def reap_orphans(keep: Iterable[int]) -> int:
    """Collect ended children that nobody waits for; `keep` are waited for elsewhere."""
    kept = set(keep)
    count = 0
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return count
        if ended is None or ended.si_pid in kept:
            return count
        with contextlib.suppress(ChildProcessError):
            os.waitpid(ended.si_pid, os.WNOHANG)
        count += 1
