"""Between the core and a scheduler: sees to what `core.capacity` lists, until it is done.

Theory of operation. The broker decides nothing and remembers nothing that matters. Each *tour*
looks at what the core has on record (a place is wanted, an agent is to run there, a node is given
up, one is left) and at what the scheduler shows (places, leases), and brings them nearer to each
other by calls that may be repeated. What fails is said once in the job's notes and tried again by
the next tour; training never waits for any of it, save for the spare itself.

The other way round, what the scheduler says about a place of a job becomes an input of the core: a
place that somebody drains is drained, one that the scheduler has given up is dead.

Calls block, so they run in threads. Only `acquire` takes long, and has a task of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any

import msgspec

from keepstep.core.capacity import CapacityView, Want
from keepstep.errors import KeepstepError, NoRight, UsageError
from keepstep.model.job import (
    CoreInput,
    Drain,
    NodeDead,
    Note,
    PlaceHealthy,
    PlaceReturned,
    SpareGranted,
    SpareRefused,
    Untaint,
)
from keepstep.model.labels import LABELS, joined
from keepstep.model.schedule import AgentStart, Ask, Kind, Lease, Place
from keepstep.model.views import OfferView
from keepstep.ports.schedule import Scheduler
from keepstep.runtime.driver import Driver

log = logging.getLogger("keepstep.broker")

TOUR_S = 1.0
CLEAN_S = 10.0
START_AGAIN_S = 30.0  # an agent that has not joined by then may never have run
AGENTS_END_S = 10.0
COSTS: dict[Kind, str] = {
    "reserved": "kept for spares: costs nobody anything",
    "idle": "nobody uses it",
    "preempt": "a job of lower priority loses it",
    "queue": "it is waited for",
}


class Broker:
    def __init__(
        self,
        driver: Driver,
        scheduler: Scheduler,
        agent: Callable[[str, str], AgentStart],
    ) -> None:
        """`agent` says how the agent of a node of a job is started."""
        self._driver = driver
        self.scheduler = scheduler
        self._agent = agent
        self._places: dict[str, Place] = {}
        self._acquiring: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._started: dict[tuple[str, str], float] = {}
        self._well: dict[str, float] = {}  # place -> since when it could be had
        self._ended: dict[str, float] = {}  # job -> when that was seen
        self._said: dict[tuple[str, str], str] = {}
        self._no_right: set[str] = set()  # places that we may not taint
        self._watch_at = self._clean_at = 0.0
        self._stopping = False

    async def run(self) -> None:
        while True:
            if self._driver.running:
                try:
                    await self._tour()
                except Exception:
                    # A bug here must not end migrations that need no scheduler.
                    log.exception("a tour failed")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TOUR_S):
                    await self._driver.wait_any_change()

    async def stop(self) -> None:
        """Requests that wait are taken back: nobody would hear the answer. What was given and is on
        record stays, for whoever goes on with the same ledger."""
        self._stopping = True
        for (job, op), task in list(self._acquiring.items()):
            if not task.done():
                await self._do("", "abort", self.scheduler.abort_swap, job, op)
        await asyncio.gather(*self._acquiring.values(), return_exceptions=True)

    async def finish(self, job: str) -> None:
        """The job has ended: its agents get the time to do so too, then nothing of it is held."""
        end = time.monotonic() + AGENTS_END_S
        while time.monotonic() < end and self._connected(job):
            await asyncio.sleep(0.05)
        with contextlib.suppress(KeepstepError):  # it does not answer, and nobody waits for it
            for lease in await asyncio.to_thread(self.scheduler.leases, job):
                await self._do("", "release", self.scheduler.release, lease)

    async def offers(self, ask: Ask) -> list[OfferView]:
        """For people who want to see a plan; nothing is acquired."""
        found = await asyncio.to_thread(self.scheduler.spares, ask)
        return [OfferView(place=one.place, kind=one.kind, reason=COSTS[one.kind]) for one in found]

    # ----------------------------------------------------------------------- tours

    async def _tour(self) -> None:
        core = self._driver.core
        views = {job: view for job in core.live() if (view := core.capacity(job)) is not None}
        if views and time.monotonic() >= self._watch_at:
            self._watch_at = time.monotonic() + TOUR_S
            await self._do("", "places", self._watch)
            for job, view in views.items():
                await self._do("", job, self.scheduler.show, job, self._ranks_at(job, view))
        for job, view in views.items():
            await self._see_to(job, view)
        if time.monotonic() >= self._clean_at:
            self._clean_at = time.monotonic() + CLEAN_S
            try:
                leases = await asyncio.to_thread(self.scheduler.leases)
            except KeepstepError as error:
                log.info("%s", error.message)
            else:
                await self._clean(leases)

    def _watch(self) -> None:
        self._places.update({place.name: place for place in self.scheduler.watch()})

    def _ranks_at(self, job: str, view: CapacityView) -> dict[str, list[int]]:
        ranks: dict[str, list[int]] = {}
        for worker in self._driver.core.state(job).rank_owners():
            if (place := view.places.get(worker.node)) is not None:
                ranks.setdefault(place, []).append(worker.rank)
        return ranks

    async def _see_to(self, job: str, view: CapacityView) -> None:
        if view.want is not None and not view.want.place and view.turn:
            self._acquire(job, view.want)
        for node, place in view.fence.items():
            await self._fence(job, node, place)
        for node, place in view.away.items():
            if (seen := self._places.get(place)) is not None and seen.state == "down":
                self._submit(NodeDead(job=job, node=node))
        for node, place in view.start.items():
            await self._start(job, node, place)
        for node, place in view.places.items():
            await self._compare_taints(job, view, node, place)
        for place in view.origins:
            self._look_back(job, place)
        for node, (place, op) in view.leave.items():
            if await self._do(job, node, self.scheduler.commit_swap, job, place, op):
                log.info("%s: %s gave %s back", job, node, place)
                self._submit(NodeDead(job=job, node=node))
                self._submit(PlaceReturned(job=job, node=node))

    def _look_back(self, job: str, place: str) -> None:
        seen = self._places.get(place)
        if seen is None or seen.state != "free":
            self._well.pop(place, None)
            return
        since = self._well.setdefault(place, time.monotonic())
        spec = self._driver.core.state(job).spec.provision
        if spec is not None and time.monotonic() >= since + spec.back_after_ns / 1e9:
            self._well.pop(place)  # if it comes to nothing, the time begins anew
            self._submit(PlaceHealthy(job=job, place=place))

    def _acquire(self, job: str, want: Want) -> None:
        key = (job, want.op)
        if key in self._acquiring:
            return
        task = asyncio.create_task(self._acquire_now(job, want))
        self._acquiring[key] = task
        task.add_done_callback(lambda _: self._acquiring.pop(key, None))

    async def _acquire_now(self, job: str, want: Want) -> None:
        spec = self._driver.core.state(job).spec.provision
        assert spec is not None, "only a job with one wants anything"
        ask = Ask(
            job=job,
            op=want.op,
            constraints=spec.constraints,
            kinds=["idle"] if want.only else want.kinds or spec.kinds,
            avoid=want.avoid,
            only=want.only,
            near=want.near,
            apart=want.apart,
        )
        try:
            lease = await asyncio.to_thread(self.scheduler.acquire, ask, spec.patience_ns / 1e9)
        except KeepstepError as error:
            if not self._stopping:
                self._submit(SpareRefused(job=job, op=want.op, why=error.message))
            return
        if self._stopping:
            await self._do("", "abort", self.scheduler.abort_swap, job, want.op)
            return
        log.info("%s: %s gives %s (%s)", job, self.scheduler.name, lease.places[0], lease.kind)
        if not self._submit(SpareGranted(job=job, op=want.op, place=lease.places[0])):
            self._clean_at = 0.0  # too late, or we decide nothing now: the next look sees to it

    async def _start(self, job: str, node: str, place: str) -> None:
        key = (job, node)
        if time.monotonic() < self._started.get(key, -START_AGAIN_S) + START_AGAIN_S:
            return
        self._started[key] = time.monotonic()
        agent = self._agent(job, node)
        if (seen := self._places.get(place)) is not None and seen.labels:
            agent = msgspec.structs.replace(agent, env={**agent.env, LABELS: joined(seen.labels)})
        await self._do(job, node, self.scheduler.start_agent, place, agent)

    async def _fence(self, job: str, node: str, place: str) -> None:
        if place in self._no_right:
            return
        reason = f"job {job} has lost its node {node}"
        if await self._do(job, node, self.scheduler.taint, place, "fenced", reason):
            log.info("%s: %s is fenced at %s", job, node, place)
            self._submit(NodeDead(job=job, node=node))

    async def _compare_taints(self, job: str, view: CapacityView, node: str, place: str) -> None:
        seen = self._places.get(place)
        if seen is None or seen.state == "down" or place in self._no_right:
            return
        theirs = f"{self.scheduler.name}: "
        tainted, why = node in view.taint, view.taint.get(node, ("", ""))[1]
        if seen.state == "degraded":
            if not tainted and seen.ours:
                await self._do(job, node, self.scheduler.untaint, place)
            elif not tainted and node in view.connected:
                reason = f"{theirs}{seen.reason or 'the place is drained'}"
                self._submit(Drain(job=job, node=node, reason=reason))
        elif tainted and theirs in why:
            self._submit(Untaint(job=job, target=node))  # they have changed their mind
        elif tainted:
            reason = f"job {job}, node {node}: {why}"
            await self._do(job, node, self.scheduler.taint, place, "degraded", reason)

    async def _clean(self, leases: list[Lease]) -> None:
        """What belongs to no operation on record goes back, and all of jobs that have ended. A
        lease is acquired after its operation is on record, so the record is looked at last."""
        core = self._driver.core
        for lease in leases:
            if not self._driver.running or core is not self._driver.core:
                return
            if not core.knows(lease.job):
                continue  # another orchestrator's
            view = core.capacity(lease.job)
            if view is not None and lease.op not in view.ops:
                await self._do("", "abort", self.scheduler.abort_swap, lease.job, lease.op)
            elif view is None:
                since = self._ended.setdefault(lease.job, time.monotonic())
                late = time.monotonic() > since + AGENTS_END_S
                if late or not self._connected(lease.job):
                    await self._do("", "release", self.scheduler.release, lease)

    def _connected(self, job: str) -> bool:
        return bool(self._driver.core.state(job).connected())

    # ----------------------------------------------------------------------- words

    async def _do(self, job: str, about: str, call: Callable[..., Any], *given: Any) -> bool:
        """False: it did not work, and is worth another try."""
        key = (job, f"{about} {call.__name__}")
        try:
            await asyncio.to_thread(call, *given)
        except KeepstepError as error:
            if isinstance(error, NoRight) and call.__name__ == "taint":
                self._no_right.add(given[0])
            if self._said.get(key) != error.message:
                self._said[key] = error.message
                log.warning("%s %s: %s", self.scheduler.name, call.__name__, error)
                if job:
                    self._submit(
                        Note(
                            job=job,
                            target=about,
                            signal=self.scheduler.name,
                            reason=f"{error.message}; {error.hint}".rstrip("; "),
                        )
                    )
            return False
        self._said.pop(key, None)
        return True

    def _submit(self, given: CoreInput) -> bool:
        try:
            self._driver.submit(given)
        except UsageError as error:
            log.debug("not used: %s", error.message)  # too late, or too early: the next tour looks
            return False
        except KeepstepError as error:
            log.info("not used: %s", error.message)
            return False
        return True
