"""Several orchestrators, one Lease of a real API server, one store: who leads, who takes over."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from keepstep.adapters.schedule.kubernetes import KubernetesScheduler
from keepstep.adapters.schedule.kubernetes_requests import Settings
from keepstep.errors import NoRight, UsageError
from keepstep.orchestrator import registry
from keepstep.orchestrator.main import Orchestrator
from tests.schedulers.cluster import until
from tests.schedulers.control_plane import NAMESPACE, ControlPlane
from tests.schedulers.jobs import ALL, KubernetesJob, access, address, end, ranks, run, same_bits

LEASE_S = 4.0
PATH = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases/keepstep"


@pytest.fixture
def store(postgres: Any, plane: ControlPlane) -> Iterator[str]:
    yield postgres.store()
    with contextlib.suppress(AssertionError):  # nobody has made it
        plane.ask("DELETE", PATH)


def holder(plane: ControlPlane) -> str:
    """The id of whoever has it."""
    with contextlib.suppress(AssertionError):
        return str(plane.ask("GET", PATH)["spec"]["holderIdentity"]).partition("_")[0]
    return ""


class Several:
    """Orchestrators of this process."""

    def __init__(self, plane: ControlPlane, home: Path, store: str) -> None:
        self._plane, self._home, self._store = plane, home, store
        self.running: list[Orchestrator] = []

    async def start(self, id: str, user: str = "", store: str = "") -> Orchestrator:
        file = self._plane.kubeconfig(user) if user else self._plane.kubeconfig()
        scheduler = KubernetesScheduler(Settings(kubeconfig=str(file)))
        made = await Orchestrator.start(
            self._home,
            id=id,
            store=store or self._store,
            lease_s=LEASE_S,
            election=functools.partial(scheduler.election, lease_s=LEASE_S),
        )
        self.running.append(made)
        return made

    async def end(self) -> None:
        for one in self.running:
            await one.stop()


def play(several: Several, scenario: Callable[[Several], Any]) -> None:
    async def body() -> None:
        try:
            await scenario(several)
        finally:
            await several.end()

    asyncio.run(body())


async def soon(condition: Callable[[], Any], what: str) -> None:
    stop = time.monotonic() + 60
    while not await asyncio.to_thread(condition):
        assert time.monotonic() < stop, f"timed out: {what}"
        await asyncio.sleep(0.05)


def test_who_has_the_lease_leads(plane: ControlPlane, store: str, tmp_path: Path) -> None:
    async def scenario(several: Several) -> None:
        a, b = await several.start("a"), await several.start("b")
        assert holder(plane) == "a" and b.terms.role == "standby"
        await soon(lambda: a.terms.role == "active" and b.terms.active_url == a.url, "a leader")
        # Somebody takes it away: the store lets nobody else write before the former one has gone.
        spec = {"holderIdentity": "c_1", "leaseDurationSeconds": 1}
        plane.ask("PATCH", PATH, {"spec": spec})
        await soon(lambda: a.terms.role == "standby", "a leader that steps down")
        await soon(lambda: "active" in (a.terms.role, b.terms.role), "the next one")
        first, second = (a, b) if a.terms.role == "active" else (b, a)
        assert holder(plane) == first.id and second.terms.role == "standby"
        # One that ends in order is not waited for.
        several.running.remove(first)
        await first.stop()
        await soon(lambda: second.terms.role == "active", "the other one")
        assert holder(plane) == second.id
        found = plane.ask("GET", PATH)["spec"]
        assert found["leaseTransitions"] >= 2 and found["renewTime"] >= found["acquireTime"]

    play(Several(plane, tmp_path, store), scenario)


@ALL
def test_a_leader_stays_while_the_api_server_is_away(
    plane: ControlPlane, store: str, tmp_path: Path
) -> None:
    async def scenario(several: Several) -> None:
        a, b = await several.start("a"), await several.start("b")
        await asyncio.to_thread(plane.stop_server)
        try:
            over = time.monotonic() + 2 * LEASE_S  # and the Lease's time with it
            while time.monotonic() < over:
                assert a.terms.role != "standby" and b.terms.role == "standby"
                await asyncio.sleep(0.1)
        finally:
            await asyncio.to_thread(plane.start_server)
        # Whoever is faster now has the Lease; whoever has it leads, soon.
        await soon(lambda: _agree(plane, a, b), "one leader, who has the Lease")

    play(Several(plane, tmp_path, store), scenario)


def _agree(plane: ControlPlane, *all_: Orchestrator) -> bool:
    active = [one.id for one in all_ if one.terms.role == "active"]
    return active == [holder(plane)]


def test_missing_rights_and_another_store_are_errors_at_the_start(
    plane: ControlPlane, store: str, postgres: Any, tmp_path: Path
) -> None:
    async def scenario(several: Several) -> None:
        with pytest.raises(NoRight, match="forbidden") as refused:
            await several.start("a", user="nobody")
        assert refused.value.hint
        await several.start("b")
        with pytest.raises(UsageError, match="another store") as other:
            await several.start("c", store=postgres.store())
        assert "namespace" in other.value.hint

    play(Several(plane, tmp_path, store), scenario)


@ALL
@pytest.mark.timeout(290)
def test_the_leader_is_killed_and_the_job_goes_on(
    plane: ControlPlane, store: str, tmp_path: Path
) -> None:
    """And the next one has all that it takes to move a rank to a node of Kubernetes."""
    home, lease_s = tmp_path / "home", 4
    processes: dict[str, subprocess.Popen[bytes]] = {}
    for id_ in "ab":
        words = ["-m", "keepstep", "orchestrator", "--id", id_, "--host", address()]
        words += ["--scheduler", "kubernetes", "--store", store, "--lease", str(lease_s)]
        log = tmp_path / f"orchestrator-{id_}.log"
        processes[id_] = run(log, home, *words, *access(plane, tmp_path))
        until(lambda id_=id_: registry.read(home, id_), f"orchestrator {id_}")
    assert holder(plane) == "a"
    job = KubernetesJob(tmp_path, plane, "--orchestrator", "a,b", orchestrator="b")
    try:
        job.until_step(3)
        job.until(lambda: sorted(ranks(plane).values()) == ["0", "1", "2"], "labels of ranks")
        end(processes["a"])
        killed = time.monotonic()
        job.until(lambda: holder(plane) == "b", "the Lease of the other one")
        took_s = time.monotonic() - killed
        print(f"the Lease was taken {took_s:.1f} s after the kill, its time is {lease_s} s")
        place = next(place for place, rank in ranks(plane).items() if rank == "1")
        plane.change_node(place, {"unschedulable": True})
        ((move,),) = job.moves(1)
        assert move.startswith("rank 1: n1/0 -> n3/0")
        assert job.resolved()[0].steps_lost == 0
        job.until(lambda: place not in ranks(plane), "the end of the old pod")
        job.finish()
        until(lambda: ranks(plane) == {}, "the end of all pods")
    finally:
        end(job.process, *processes.values())
    same_bits(job, tmp_path)
