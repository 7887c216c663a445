"""Gives nodes back for a `keepstep slurm|kubernetes launch` that cannot do so any more.

Started beside a launcher that holds the orchestrator; stdin is a pipe whose other end only the
launcher has. When that ends, whatever the reason (kill -9 too), nobody decides anything for the
job any more, and nobody would give its nodes back: so they are. A launcher that has given all back
itself says so. Where the cluster's own configuration is gone there is nobody to give to.

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
from typing import NamedTuple

import msgspec

from keepstep.adapters.schedule.kubernetes import KubernetesScheduler
from keepstep.adapters.schedule.kubernetes_requests import Settings
from keepstep.adapters.schedule.slurm import SlurmScheduler
from keepstep.errors import KeepstepError
from keepstep.model.schedule import Lease
from keepstep.ports.schedule import Scheduler

LOOK_S = 1.0
LOOKS = 2  # without anything: a request may have been under way
PATIENCE_S = 3600.0  # with a scheduler that does not answer


class ReleaseGuard(NamedTuple):
    pid: int
    pipe: int  # closed by nothing but the end of whoever has it

    def dismiss(self) -> None:
        """All is given back."""
        with contextlib.suppress(OSError):
            os.write(self.pipe, b".")


def begin(home: Path, job: str, kubernetes: Settings | None = None) -> ReleaseGuard:
    """Whoever calls it is who is watched."""
    hold(home, job)
    more = [msgspec.json.encode(kubernetes).decode()] if kubernetes is not None else []
    read, write = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "keepstep.cli.release_guard", str(home), job, *more],
        stdin=read,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(read)
    return ReleaseGuard(process.pid, write)


def hold(home: Path, job: str) -> None:
    """Until this process ends."""
    path = home / "jobs" / job / "launch.lock"
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    fcntl.flock(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), fcntl.LOCK_EX)


def main(home: Path, job: str, kubernetes: str = "", *, slurm_conf: str = "") -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if sys.stdin.buffer.read():
        return
    hold(home, job)
    if kubernetes:
        settings = msgspec.json.decode(kubernetes, type=Settings)
        give_back(KubernetesScheduler(settings), job, settings.kubeconfig)
    else:
        give_back(SlurmScheduler(), job, slurm_conf)


def give_back(scheduler: Scheduler, job: str, configuration: str = "") -> None:
    """`configuration`: a file that is there as long as the cluster is."""
    end, empty = time.monotonic() + PATIENCE_S, 0
    while empty < LOOKS and time.monotonic() < end:
        if configuration and not Path(configuration).exists():
            return
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
    main(Path(sys.argv[1]), *sys.argv[2:], slurm_conf=os.environ.get("SLURM_CONF", ""))
