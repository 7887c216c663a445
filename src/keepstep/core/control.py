"""The core as the shell sees it: inputs in, records and commands out.

    outcome = core.handle(now_ns, event)    # raises UsageError: nothing was changed
    ledger.append(outcome.records)          # durable first
    for send in outcome.sends: ...          # then act, in this order
    core.deadline()                         # when to hand in Wake()

`now_ns` is the wall clock; it may jump, and the core never lets it go backwards. The shell answers
an agent's Hello itself (Accepted, or Refused when `handle` raised), because it owns the token.
A Send to an agent that is not connected is never produced: what it would have said is part of
the state and is said when the agent joins again. A Send to EVERY_NODE is for all that are
connected, in its place in the order of each stream.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from keepstep.core import balance, faults, operator, priorities, provision, restart
from keepstep.core import decide as jobs_
from keepstep.core.capacity import CapacityView
from keepstep.core.job_views import incident_view, job_view
from keepstep.core.move_plan import plan, with_offers
from keepstep.core.state import EVERY_NODE, Job, Out, Outcome, Send
from keepstep.core.timers import fire, timers
from keepstep.errors import UsageError
from keepstep.model.agent_messages import Stop
from keepstep.model.job import (
    AgentGone,
    AgentJoined,
    AgentSaid,
    AgentsSaid,
    Cancel,
    CoreInput,
    Drain,
    InjectNow,
    Migrate,
    NodeDead,
    Note,
    PlaceHealthy,
    PlaceReturned,
    ProceedAnyway,
    Rebalance,
    SpareGranted,
    SpareRefused,
    Submit,
    Taint,
    Untaint,
    Wake,
)
from keepstep.model.records import JobSubmitted, Record, SpareWanted
from keepstep.model.schedule import Ask
from keepstep.model.views import IncidentView, JobView, PlanView

BACK = "the place it stood in for is well again"

# What a job that has ended does not hear.
UNHEARD = AgentSaid | AgentsSaid | AgentGone | NodeDead | PlaceReturned | PlaceHealthy

__all__ = ["EVERY_NODE", "Core", "Outcome", "Send"]


class Core:
    def __init__(self) -> None:
        self._jobs: dict[str, Job] = {}
        self._now = 0

    def replay(self, records: Iterable[Record]) -> None:
        """Before the first `handle`, with everything the ledger holds."""
        for record in records:
            self._now = max(self._now, record.at_ns)
            restart.apply(self._jobs, record)

    def handle(self, now_ns: int, event: CoreInput) -> Outcome:
        self._now = max(self._now, now_ns)
        outcome = Outcome(records=[], sends=[])
        for job in self._jobs.values():
            if job.replayed and job.rejoin_until is None and job.ended is None:
                restart.begin_waiting(job, self._now)
                job.due_known = False
        if isinstance(event, Submit):
            self._submit(event, outcome)
        elif isinstance(event, Wake):
            for job in self._jobs.values():
                if job.ended is None:
                    out = Out(self._now, job, outcome)
                    fire(job, out)
                    self._settle(job, out)
                job.due_known = False
            self._trade(outcome)
        else:
            job = self._job(event.job)
            out = Out(self._now, job, outcome)
            if job.ended is not None:
                self._after_the_end(job, out, event)
            else:
                self._dispatch(job, out, event)
                if jobs_.follows_nothing(job, out, event):
                    return outcome
                self._settle(job, out)
            job.due_known = False
            self._trade(outcome)
        return outcome

    def deadline(self, now_ns: int | None = None) -> int | None:
        """None: only an event can change anything. Never too late, but maybe too early: whoever
        wakes up asks once more with the time it is, and hands in Wake if that has come."""
        times: list[int] = []
        for job in self._jobs.values():
            early = now_ns is not None and job.due is not None and job.due <= now_ns
            if not job.due_known or early:
                job.due = min((at for at, _, _ in timers(job)), default=None)
                job.due_known = True
            if job.due is not None:
                times.append(job.due)
        waiting = [j for j in self._jobs.values() if j.replayed and j.ended is None]
        if any(job.rejoin_until is None for job in waiting):
            times.append(self._now)  # the wait for the agents begins with the first event
        return min(times, default=None)

    def jobs(self) -> list[JobView]:
        return [job_view(job) for job in self._jobs.values()]

    def knows(self, job_id: str) -> bool:
        return job_id in self._jobs

    def live(self) -> list[str]:
        """Jobs that have not ended."""
        return [job.id for job in self._jobs.values() if job.ended is None]

    def job(self, job_id: str) -> JobView:
        return job_view(self._job(job_id))

    def capacity(self, job_id: str) -> CapacityView | None:
        """What a scheduler is to do for the job; None: nothing (any more)."""
        job = self._job(job_id)
        view = provision.look(job)
        if view is None or view.want is None or len(self._jobs) == 1:
            return view
        waits = priorities.before(self._jobs.values(), job, self._now)
        return msgspec.structs.replace(view, turn=not waits)

    def plan(self, given: Migrate | Drain | Rebalance) -> tuple[PlanView, Ask | None]:
        """What the request would lead to, and what the scheduler would be asked for."""
        job = self._job(given.job)
        if isinstance(given, Rebalance):
            return balance.plan(job), None
        view, ask = plan(job, given)
        if ask is None or not provision.may_preempt(job):
            return view, ask
        rank = next(move.rank for move in view.moves if move.cost == "scheduler")
        return with_offers(view, priorities.offers(self._jobs.values(), job, rank)), ask

    def state(self, job_id: str) -> Job:
        """The facts themselves, for those who check and never change them."""
        return self._job(job_id)

    def incidents(self, job_id: str | None = None) -> list[IncidentView]:
        jobs = [self._job(job_id)] if job_id is not None else list(self._jobs.values())
        views: list[IncidentView] = []
        for job in jobs:
            views += job.closed
            views += [incident_view(job, incident, self._now) for incident in job.incidents]
        return sorted(views, key=lambda view: (view.opened_at_ns, view.id))

    def _job(self, job_id: str) -> Job:
        job = self._jobs.get(job_id)
        if job is None:
            known = ", ".join(self._jobs) or "none"
            raise UsageError(f"there is no job {job_id!r}", hint=f"known jobs: {known}")
        return job

    def _submit(self, event: Submit, outcome: Outcome) -> None:
        spec = event.spec
        if spec.job in self._jobs:
            raise UsageError(f"job {spec.job} exists already", hint="choose another name")
        operator.check_spec(spec)
        job = restart.new_job(spec, self._now)
        self._jobs[spec.job] = job
        out = Out(self._now, job, outcome)
        out.record(JobSubmitted(job=spec.job, at_ns=self._now, spec=spec))
        jobs_.settle(job, out)

    def _trade(self, outcome: Outcome) -> None:
        """Between jobs: see priorities.py. Each one alone has nobody to trade with."""
        jobs = [job for job in self._jobs.values() if job.ended is None and job.asks]
        if len(jobs) < 2 and not any(job.capacity.yields for job in jobs):
            return
        outs = {job.id: Out(self._now, job, outcome) for job in jobs}
        for _ in range(len(jobs) + 1):
            changed = priorities.trade(jobs, outs)
            for job in changed:
                self._settle(job, outs[job.id])
                job.due_known = False
            if not changed:
                break
        wanted = {record.job for record in outcome.records if isinstance(record, SpareWanted)}
        for job in jobs:
            if job.id in wanted:
                priorities.wake(jobs, job, self._now)

    def _settle(self, job: Job, out: Out) -> None:
        jobs_.settle(job, out)
        if spare := provision.retired(job):
            operator.drain(job, out, Drain(job=job.id, node=spare, reason=BACK))
            jobs_.settle(job, out)

    def _dispatch(self, job: Job, out: Out, event: CoreInput) -> None:
        if isinstance(event, AgentJoined):
            operator.check_node(event.node, event.hello.slots)
            restart.add_node(job, event.node, event.hello.slots)
            jobs_.agent_joined(job, out, event.node, event.hello)
        elif isinstance(event, AgentSaid):
            if event.node in job.nodes and job.nodes[event.node].state == "connected":
                jobs_.agent_said(job, out, event.node, event.message)
        elif isinstance(event, AgentsSaid):
            for one in event.said:
                if job.ended is None:
                    self._dispatch(job, out, one)
        elif isinstance(event, AgentGone):
            if event.node in job.nodes:
                jobs_.agent_gone(job, out, event.node)
        elif isinstance(event, NodeDead):
            if event.node in job.nodes:
                faults.lose_node(job, out, event.node, "died")
        elif isinstance(event, SpareGranted | SpareRefused | PlaceReturned):
            provision.answered(job, out, event)
        elif isinstance(event, PlaceHealthy):
            provision.go_back(job, out, event.place)
        elif isinstance(event, Migrate):
            operator.migrate(job, out, event)
        elif isinstance(event, Rebalance):
            balance.rebalance(job, out, event)
        elif isinstance(event, Drain):
            operator.drain(job, out, event)
        elif isinstance(event, Taint):
            operator.taint(job, out, event)
        elif isinstance(event, Note):
            operator.note(job, out, event)
        elif isinstance(event, Untaint):
            operator.untaint(job, out, event)
        elif isinstance(event, InjectNow):
            operator.inject(job, out, event)
        elif isinstance(event, ProceedAnyway):
            operator.proceed(job, out, event)
        elif isinstance(event, Cancel):
            operator.cancel(job, out, event)

    def _after_the_end(self, job: Job, out: Out, event: CoreInput) -> None:
        """Agents that come back are stopped; what workers still say does not matter."""
        if isinstance(event, AgentJoined):
            node = restart.add_node(job, event.node, event.hello.slots)
            node.state = "connected"
            out.send(node.name, Stop(grace_ns=0))
        elif isinstance(event, AgentGone) and event.node in job.nodes:
            job.nodes[event.node].state = "disconnected"  # its place can go back
        elif not isinstance(event, UNHEARD):
            operator.check_open(job)
