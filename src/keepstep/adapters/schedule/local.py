"""A scheduler for one machine: places are names, agents are processes.

For trying things out and for tests of whatever uses a scheduler. What is given to whom stands in
one file, under a lock, so that several processes may ask and a killed one leaves nothing half done.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec
import psutil  # type: ignore[import-untyped]

from keepstep.errors import NoSpare, TransientError, UsageError
from keepstep.model.schedule import (
    AgentStart,
    Ask,
    Capabilities,
    Constraints,
    Kind,
    Lease,
    Level,
    Place,
    Spare,
)

LOOK_S = 0.05
END_S = 10.0


class LocalAgent(msgspec.Struct, kw_only=True):
    job: str
    node: str
    place: str
    pid: int
    started: float  # with the pid it names one process for ever


class Pool(msgspec.Struct, kw_only=True):
    places: dict[str, Place]
    reserved: dict[str, list[str]] = {}  # reservation -> places
    others: dict[str, bool] = {}  # place that somebody else uses -> may be preempted
    leases: list[Lease] = []
    agents: list[LocalAgent] = []
    leases_ever: int = 0


class LocalScheduler:
    name = "local"

    def __init__(self, folder: Path) -> None:
        self._file = folder / "pool.json"
        self._seen: dict[str, Place] = {}

    @classmethod
    def create(cls, folder: Path, places: list[str], gpu_type: str = "") -> LocalScheduler:
        self = cls(folder)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        free = {name: Place(name=name, state="free", gpu_type=gpu_type) for name in places}
        self._file.write_bytes(msgspec.json.encode(Pool(places=free)))
        return self

    @contextlib.contextmanager
    def pool(self) -> Iterator[Pool]:
        """Read, and written back in one piece unless something was raised."""
        draft = self._file.with_suffix(".draft")
        with self._file.with_suffix(".lock").open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                pool = msgspec.json.decode(self._file.read_bytes(), type=Pool)
            except OSError as error:
                raise TransientError(f"cannot read {self._file}: {error.strerror}") from error
            yield pool
            draft.write_bytes(msgspec.json.encode(pool))
            draft.replace(self._file)

    # ----------------------------------------------------------------------- looking

    def capabilities(self) -> Capabilities:
        return Capabilities(taint=True, preempt=True, shrink=True)

    def check(self, constraints: Constraints, kinds: list[Kind], count: int = 1) -> None:
        with self.pool() as pool:
            there = [place.gpu_type for place in pool.places.values()]
            types = set(there) - {""}
            reservations = list(pool.reserved)
        if constraints.partition:
            raise UsageError(f"no partition {constraints.partition}", hint="there are none here")
        if constraints.gpu_type and constraints.gpu_type not in types:
            raise UsageError(
                f"no place has GPUs of type {constraints.gpu_type}",
                hint=f"types: {', '.join(sorted(types)) or 'none'}",
            )
        fit = [one for one in there if constraints.gpu_type in ("", one)]
        if len(fit) < count:
            raise UsageError(f"{count} nodes are wanted, and there are {len(fit)}")
        if constraints.reservation and constraints.reservation not in reservations:
            raise UsageError(
                f"no reservation {constraints.reservation}",
                hint=f"reservations: {', '.join(reservations) or 'none'}",
            )

    def places(self) -> list[Place]:
        with self.pool() as pool:
            used = {name for lease in pool.leases for name in lease.places} | set(pool.others)
            return [
                msgspec.structs.replace(place, state="used")
                if place.state == "free" and place.name in used
                else place
                for place in pool.places.values()
            ]

    def watch(self) -> list[Place]:
        now = {place.name: place for place in self.places()}
        news = [place for name, place in now.items() if self._seen.get(name) != place]
        self._seen = now
        return news

    def leases(self, job: str = "") -> list[Lease]:
        with self.pool() as pool:
            return [lease for lease in pool.leases if job in ("", lease.job)]

    def spares(self, ask: Ask) -> list[Spare]:
        with self.pool() as pool:
            return _spares(pool, ask)

    # ----------------------------------------------------------------------- leases

    def acquire(self, ask: Ask, timeout_s: float) -> Lease:
        end = time.monotonic() + timeout_s
        while True:
            with self.pool() as pool:
                for lease in pool.leases:
                    if (lease.job, lease.op) == (ask.job, ask.op):
                        return lease
                for kind in ask.kinds:
                    found = [one.place for one in _spares(pool, ask) if one.kind == kind]
                    if len(found) >= ask.count:
                        return _give(pool, ask, kind, found[: ask.count])
            if "queue" not in ask.kinds or time.monotonic() > end:
                kinds = ", ".join(ask.kinds)
                raise NoSpare(f"no place for job {ask.job} ({kinds})")
            time.sleep(LOOK_S)

    def release(self, lease: Lease) -> None:
        self._end_agents(lease.job, lease.places)
        with self.pool() as pool:
            pool.leases = [one for one in pool.leases if one.id != lease.id]

    def commit_swap(self, job: str, place: str, op: str = "") -> None:
        self._end_agents(job, [place])
        with self.pool() as pool:
            kept: list[Lease] = []
            for lease in pool.leases:
                if lease.job == job and place in lease.places:
                    rest = [one for one in lease.places if one != place]
                    lease = msgspec.structs.replace(lease, places=rest)
                if lease.job == job and op and lease.op == op:
                    lease = msgspec.structs.replace(lease, instead_of=place)
                kept += [lease] if lease.places else []
            pool.leases = kept

    def abort_swap(self, job: str, op: str) -> None:
        for lease in self.leases(job):
            if lease.op == op:
                self.release(lease)

    # ----------------------------------------------------------------------- agents

    def start_agent(self, place: str, agent: AgentStart) -> None:
        with self.pool() as pool:
            if not any(place in one.places for one in pool.leases if one.job == agent.job):
                raise TransientError(f"job {agent.job} has no lease of {place}")
            key = (agent.job, agent.node)
            if any((one.job, one.node) == key and _lives(one) for one in pool.agents):
                return
            Path(agent.log).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with Path(agent.log).open("ab") as log:
                process = subprocess.Popen(
                    agent.command,
                    cwd=agent.directory,
                    env={**os.environ, **agent.env},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            started = psutil.Process(process.pid).create_time()
            pool.agents = [one for one in pool.agents if (one.job, one.node) != key]
            pool.agents.append(
                LocalAgent(
                    job=agent.job,
                    node=agent.node,
                    place=place,
                    pid=process.pid,
                    started=started,
                )
            )

    def stop_agent(self, job: str, node: str) -> None:
        with self.pool() as pool:
            found = [one for one in pool.agents if (one.job, one.node) == (job, node)]
        _end(found)

    def _end_agents(self, job: str, places: list[str]) -> None:
        with self.pool() as pool:
            found = [one for one in pool.agents if one.job == job and one.place in places]
        _end(found)

    def show(self, job: str, ranks: dict[str, list[int]]) -> None:
        """Nobody looks here."""

    # ----------------------------------------------------------------------- taints

    def taint(self, place: str, level: Level, reason: str) -> None:
        with self.pool() as pool:
            before = pool.places.get(place)
            if before is None:
                raise UsageError(f"there is no place {place}", hint=", ".join(pool.places))
            if before.state == "down" or (before.state == "degraded" and level == "degraded"):
                return
            state: Literal["degraded", "down"] = "degraded" if level == "degraded" else "down"
            pool.places[place] = msgspec.structs.replace(
                before, state=state, reason=reason, ours=True
            )
            agents = [one for one in pool.agents if one.place == place]
        if level == "fenced":
            _end(agents, signal.SIGKILL)

    def untaint(self, place: str) -> bool:
        with self.pool() as pool:
            before = pool.places.get(place)
            if before is None or not before.ours:
                return False
            pool.places[place] = msgspec.structs.replace(
                before, state="free", reason="", ours=False
            )
        return True


def _spares(pool: Pool, ask: Ask) -> list[Spare]:
    taken = {name for lease in pool.leases for name in lease.places} | set(ask.avoid)
    good = [
        name
        for name, place in pool.places.items()
        if place.state == "free"
        and name not in taken
        and ask.only in ("", name)
        and ask.constraints.gpu_type in ("", place.gpu_type)
        and ask.near.items() <= place.labels.items()
    ]
    good.sort(key=lambda name: len(ask.apart.items() & pool.places[name].labels.items()))
    kept = {name for names in pool.reserved.values() for name in names}
    mine = pool.reserved.get(ask.constraints.reservation, [])
    idle = [name for name in good if name not in pool.others and name not in kept]
    offers: dict[Kind, list[str]] = {
        "reserved": [name for name in good if name in mine and name not in pool.others],
        "idle": idle,
        "preempt": [name for name in good if pool.others.get(name)],
        "queue": idle,
    }
    return [Spare(place=name, kind=kind) for kind in ask.kinds for name in offers[kind]]


def _give(pool: Pool, ask: Ask, kind: Kind, places: list[str]) -> Lease:
    pool.leases_ever += 1
    for place in places:
        pool.others.pop(place, None)
    lease = Lease(id=str(pool.leases_ever), job=ask.job, op=ask.op, kind=kind, places=places)
    pool.leases.append(lease)
    return lease


def _process(agent: LocalAgent) -> psutil.Process | None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(agent.pid)
        if process.create_time() == agent.started and process.status() != psutil.STATUS_ZOMBIE:
            return process
    return None


def _lives(agent: LocalAgent) -> bool:
    return _process(agent) is not None


def _end(agents: list[LocalAgent], number: int = signal.SIGTERM) -> None:
    """All that they have started too, whatever sessions that is in."""
    roots = [process for agent in agents if (process := _process(agent)) is not None]
    below: list[psutil.Process] = []
    for root in roots:
        with contextlib.suppress(psutil.NoSuchProcess):
            below += root.children(recursive=True)
            root.send_signal(number)
    _, alive = psutil.wait_procs(roots, timeout=END_S)
    for process in [*alive, *below]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs([*alive, *below], timeout=END_S)
