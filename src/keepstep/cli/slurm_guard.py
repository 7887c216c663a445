"""Gives nodes back for a `keepstep slurm|kubernetes launch` that cannot do so any more.

Started beside a launcher that holds the orchestrator; stdin is a pipe whose other end only the
launcher has. When that ends, whatever the reason (kill -9 too), nobody decides anything for the
job any more, and nobody would give its nodes back: so they are. After an orderly end there is
nothing left to do.

A job may be launched once more under the same id. Launcher and guard hold a lock while they have
to do with its allocations, so that a guard never gives back what is the next launcher's.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from keepstep.adapters.schedule.kubernetes import KubernetesScheduler, Settings
from keepstep.adapters.schedule.slurm import SlurmScheduler
from keepstep.errors import KeepstepError
from keepstep.model.schedule import Lease
from keepstep.ports.schedule import Scheduler

LOOK_S = 1.0
LOOKS = 2  # without anything: a request may have been under way
PATIENCE_S = 3600.0  # with a scheduler that does not answer


def begin(home: Path, job: str, kubernetes: Settings | None = None) -> int:
    """Whoever calls it is who is watched: its end of the pipe is closed by nothing but its end."""
    hold(home, job)
    more = [msgspec.json.encode(kubernetes).decode()] if kubernetes is not None else []
    read, _ = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "keepstep.cli.slurm_guard", str(home), job, *more],
        stdin=read,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(read)
    return process.pid


def hold(home: Path, job: str) -> None:
    """Until this process ends."""
    path = home / "jobs" / job / "launch.lock"
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    fcntl.flock(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), fcntl.LOCK_EX)


def main(home: Path, job: str, kubernetes: str = "") -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    hold(home, job)
    if kubernetes:
        settings = msgspec.json.decode(kubernetes, type=Settings)
        give_back(KubernetesScheduler(settings), job)
    else:
        give_back(SlurmScheduler(), job)


def give_back(scheduler: Scheduler, job: str) -> None:
    end, empty = time.monotonic() + PATIENCE_S, 0
    while empty < LOOKS and time.monotonic() < end:
        with contextlib.suppress(KeepstepError):  # it is asked again
            left = [one for one in scheduler.leases(job) if not _stays(scheduler, one)]
            empty = 0 if left else empty + 1
            for lease in left:
                with contextlib.suppress(KeepstepError):
                    scheduler.release(lease)
        time.sleep(LOOK_S)


def _stays(scheduler: Scheduler, lease: Lease) -> bool:
    """Pods of another controller keep the label that its template gives them."""
    return lease.adopted and scheduler.name == KubernetesScheduler.name


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
