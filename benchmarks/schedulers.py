"""From the decision that a node is needed to an agent that has joined from it.

A real orchestrator with a job that waits, a real scheduler (the local one, a private Slurm or a
private Kubernetes control plane of tests/schedulers) and real agents: a place is acquired,
`keepstep agent` is started there, and the clock stops when the orchestrator shows the node as
connected. What comes after that, a process that is started and parks, does not depend on the
scheduler and is part of `pause`. Of Kubernetes the kubelet is simulated: no image, no container.

* dedicated: a place of a reservation that is kept for spares
* idle: one that nobody uses
* floating: one that a job of lower priority is using, and loses
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import report
from keepstep.model.job import JobSpec, NodeSpec, Submit
from keepstep.model.schedule import Ask, Constraints, Kind
from keepstep.orchestrator.main import Orchestrator

KINDS: dict[str, Kind] = {"dedicated": "reserved", "idle": "idle", "floating": "preempt"}
JOB = "bench"
LIMIT_S = 60.0
LOOK_S = 0.005


@contextlib.contextmanager
def laboratory(adapter: str, folder: Path) -> Iterator[Any]:
    """A scheduler with six places, and what others do there."""
    from tests.schedulers import cluster, labs

    if adapter == "local":
        yield labs.LocalLab(folder / "pool")
        return
    if adapter == "kubernetes":
        yield from _kubernetes()
        return
    if why := cluster.missing():
        raise SystemExit(why)
    made = cluster.Cluster()
    os.environ["SLURM_CONF"] = str(made.conf)
    try:
        yield labs.SlurmLab(made)
    finally:
        made.remove()


def _kubernetes() -> Iterator[Any]:
    from tests.schedulers import control_plane, control_plane_build, kubernetes_lab

    if why := control_plane_build.missing():
        raise SystemExit(why)
    made = control_plane.ControlPlane()
    try:
        yield kubernetes_lab.KubernetesLab(made)
    finally:
        made.remove()


async def until(condition: Callable[[], Any], what: str) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"waited {LIMIT_S:g} s for {what}")
        await asyncio.sleep(LOOK_S)


class Bench:
    def __init__(self, lab: Any, orchestrator: Orchestrator) -> None:
        self.lab, self.orchestrator = lab, orchestrator
        self._count = 0

    async def measure(self, name: str) -> dict[str, float]:
        kind, place = KINDS[name], self.lab.places[0]
        limits = Constraints(gpus=4, gpu_type="h200")
        if kind == "reserved" and self._count == 0:
            self.lab.reserve(place)
        if kind == "reserved":
            limits = Constraints(gpus=4, gpu_type="h200", reservation="keepstep-spares")
        if kind == "preempt":
            await asyncio.to_thread(self.lab.occupy, [place], low=True)
        self._count += 1
        op, node = f"{name}-{self._count}", f"{name}{self._count}"
        others = [one for one in self.lab.places if one != place]
        ask = Ask(job=JOB, op=op, constraints=limits, kinds=[kind], avoid=others)
        start = self.orchestrator.agent_start(JOB, node)
        began = time.monotonic()
        lease = await asyncio.to_thread(self.lab.scheduler.acquire, ask, LIMIT_S)
        given = time.monotonic()
        await asyncio.to_thread(self.lab.scheduler.start_agent, lease.places[0], start)
        started = time.monotonic()
        await until(lambda: self._connected(node), f"agent {node}")
        joined = time.monotonic()
        await asyncio.to_thread(self.lab.scheduler.release, lease)
        await self._cleared(kind, place)
        return {
            "place_s": given - began,
            "start_s": started - given,
            "join_s": joined - started,
            "total_s": joined - began,
        }

    def _connected(self, node: str) -> bool:
        view = self.orchestrator.driver.core.job(JOB)
        return any(one.node == node and one.state == "connected" for one in view.nodes)

    async def _cleared(self, kind: Kind, place: str) -> None:
        """Whoever lost the place does not come back to it."""
        cluster = getattr(self.lab, "cluster", None)
        if kind == "preempt" and cluster is not None:
            await asyncio.to_thread(cluster.run, "scancel", "-u", "root")
        await until(lambda: self.lab.state(place).state == "free", "a free place")


async def _measure(adapter: str, rounds: int, folder: Path) -> dict[str, list[dict[str, float]]]:
    with laboratory(adapter, folder) as lab:
        orchestrator = await Orchestrator.start(folder / "home", id="bench")
        spec = JobSpec(
            job=JOB,
            world=1,
            local_world=1,
            nodes=[NodeSpec(name="n0", slots=1)],  # it never comes: the job waits
            spares=0,
            stall_timeout_ns=10**13,
            script=["train.py"],
            directory=str(folder / "job"),
        )
        orchestrator.driver.submit(Submit(spec=spec))
        found: dict[str, list[dict[str, float]]] = {}
        try:
            for name in ("idle", "floating", "dedicated"):
                bench = Bench(lab, orchestrator)
                report.say(f"schedulers: {adapter}, {name}, {rounds} rounds")
                await bench.measure(name)  # files and caches are warm then
                found[name] = [await bench.measure(name) for _ in range(rounds)]
        finally:
            await orchestrator.stop()
        return found


def slurm_version() -> dict[str, str]:
    said = subprocess.run(["slurmctld", "-V"], capture_output=True, text=True).stdout
    return {"slurm": said.strip()}


def run(quick: bool, rounds: int | None = None, adapter: str = "local") -> list[str]:
    provenance = report.Provenance()
    rounds = rounds or (2 if quick else 10)
    folder = Path(tempfile.mkdtemp(prefix="keepstep-bench-"))
    try:
        found = asyncio.run(_measure(adapter, rounds, folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    parts = ("place_s", "start_s", "join_s", "total_s")
    summary = {
        name: {part: report.summary([one[part] for one in runs]) for part in parts}
        for name, runs in found.items()
    }
    made = provenance.close()
    if adapter == "slurm":
        made["versions"] |= slurm_version()
    if adapter == "kubernetes":
        import control_plane_build

        made["versions"] |= {"kubernetes": f"{control_plane_build.VERSION}, simulated kubelet"}
    body = {"adapter": adapter, "rounds": rounds, "summary": summary, "runs": found}
    path = report.write(f"schedulers-{adapter}", quick, made, body)
    rows = [
        [name, *(1e3 * one[part]["p50"] for part in parts), 1e3 * one["total_s"]["max"]]
        for name, one in summary.items()
    ]
    names = (f"{adapter}, ms (p50)", "place", "start", "join", "all of it", "largest")
    return [report.table("", names, rows), f"written: {path.name}"]
