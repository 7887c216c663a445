"""Schedulers to try everything with, and what other people do there."""

from __future__ import annotations

from pathlib import Path

from keepstep.adapters.schedule.local import LocalScheduler
from keepstep.adapters.schedule.slurm import SlurmScheduler
from keepstep.model.schedule import Ask, Constraints, Kind, Lease, Place
from keepstep.ports.schedule import Scheduler
from tests.schedulers.cluster import RACKS, RESERVED, Cluster, until


class Lab:
    """A scheduler with six places, five of one type of GPU, and what others may do there."""

    def __init__(self, scheduler: Scheduler, places: list[str]) -> None:
        self.scheduler = scheduler
        self.places = places

    def again(self) -> Scheduler:
        """As a process sees it that was started after the first one died."""
        raise NotImplementedError

    def reserve(self, place: str) -> str:
        raise NotImplementedError

    def occupy(self, places: list[str], *, low: bool) -> None:
        """Somebody else's job, which a job of ours may preempt if `low`."""
        raise NotImplementedError

    def taint(self, place: str) -> None:
        """Somebody else's."""
        raise NotImplementedError

    def state(self, place: str) -> Place:
        return next(one for one in self.scheduler.places() if one.name == place)


class LocalLab(Lab):
    def __init__(self, folder: Path) -> None:
        names = [f"c{i}" for i in range(1, 7)]
        self._folder = folder
        made = LocalScheduler.create(folder, names, gpu_type="h200")
        with made.pool() as pool:
            pool.places = {
                name: Place(
                    name=name,
                    state="free",
                    gpu_type="a100" if name == "c6" else "h200",
                    labels={"rack": RACKS[name]},
                )
                for name in names
            }
        super().__init__(made, names)
        self._made = made

    def again(self) -> Scheduler:
        return LocalScheduler(self._folder)

    def reserve(self, place: str) -> str:
        with self._made.pool() as pool:
            pool.reserved[RESERVED] = [place]
        return RESERVED

    def occupy(self, places: list[str], *, low: bool) -> None:
        with self._made.pool() as pool:
            pool.others.update(dict.fromkeys(places, low))

    def taint(self, place: str) -> None:
        with self._made.pool() as pool:
            pool.places[place] = Place(name=place, state="degraded", reason="theirs")


class SlurmLab(Lab):
    def __init__(self, cluster: Cluster) -> None:
        super().__init__(SlurmScheduler(), cluster.nodes)
        self.cluster = cluster

    def again(self) -> Scheduler:
        return SlurmScheduler()

    def reserve(self, place: str) -> str:
        words = f"ReservationName={RESERVED} Users=root Nodes={place} StartTime=now Duration=60"
        self.cluster.ask(
            "scontrol", "create", "reservation", *words.split()[0:], "Flags=IGNORE_JOBS"
        )
        return RESERVED

    def occupy(self, places: list[str], *, low: bool) -> None:
        for place in places:
            words = ["sbatch", "-p", "low" if low else "train", "-w", place, "--exclusive", "-N1"]
            self.cluster.ask(*words, "-J", f"other-{place}", "--wrap", "exec sleep 600")
        want = {f"other-{place}|{place}" for place in places}
        until(lambda: want <= set(self.cluster.jobs()), "the jobs of others")

    def taint(self, place: str) -> None:
        words = [f"NodeName={place}", "State=DRAIN", "Reason=theirs"]
        self.cluster.ask("scontrol", "update", *words)


GPUS = Constraints(gpus=4, gpu_type="h200")


def ask(op: str, *kinds: Kind, count: int = 1, avoid: list[str] | None = None) -> Ask:
    return Ask(
        job="job-1",
        op=op,
        constraints=GPUS,
        kinds=list(kinds) or ["idle"],
        avoid=avoid or [],
        count=count,
    )


def start(lab: Lab, count: int = 3) -> Lease:
    return lab.scheduler.acquire(ask("start", "queue", count=count), 20)
