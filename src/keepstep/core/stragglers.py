"""A rank that holds all others up: found, said, and moved as for maintenance.

Theory of operation. A step takes as long as its slowest rank, and all ranks have its time. Agents
show what each rank takes for what it does alone (worker/step/pace.py: a median of its last steps),
and now and then all of them are compared. A rank is *slow* in a look if it takes `straggler_factor`
times the median of the ranks and if that costs: a tenth of a step at least. It is a straggler when
it was slow in every look for `straggler_after_ns` and `STEPS` steps. It stays one until it has come
half the way back to the median.

Nobody stands out if more than a quarter are slow: that has a common cause (a shared disk, a room
that is too warm), which moves do not cure. One rank is moved at a time, and only to a spare that
shares no failure domain with the place that is left. After a move there is a rest. A rank that is
slow in its second place, too, has slow work and not a slow place: it stays, and people are told.
What was moved when is in the incidents, which outlive the orchestrator; all else is measured anew.
"""

from __future__ import annotations

from collections.abc import Mapping

from keepstep.core import operator, placement
from keepstep.core.demand import shared
from keepstep.core.facts import SECOND, Worker
from keepstep.core.pace import Slow
from keepstep.core.state import Job, Out
from keepstep.model.records import SignalSeen

CAUSE = "straggler"
LOOKS = 8  # in the time after which a rank is a straggler
STEPS = 40
MEASURED_MIN = 8  # steps of a rank, before it is compared
COST_MIN = 0.1  # of a step
REST = 5  # times straggler_after_ns, between two moves
AGAIN_NS = 3600 * SECOND  # not the same rank before that


def ratios(own: Mapping[int, int]) -> tuple[dict[int, float], int]:
    """Of what each rank takes to the median of all, and that median."""
    if len(own) < 2:
        return {}, 0
    median = sorted(own.values())[(len(own) - 1) // 2]
    if median <= 0:
        return {}, 0
    return {rank: taken / median for rank, taken in own.items()}, median


def stand_out(
    own: Mapping[int, int], step_ns: float, factor: float, before: Mapping[int, bool]
) -> dict[int, float]:
    """Ranks that are slow, each with how much; `before`: those that were, and who of them is a
    straggler already. None if too many are."""
    measured, median = ratios(own)
    slow: dict[int, float] = {}
    for rank, ratio in measured.items():
        limit = (1 + factor) / 2 if before.get(rank) else factor
        costs = before.get(rank) or own[rank] - median >= COST_MIN * step_ns
        if ratio >= limit and costs:
            slow[rank] = ratio
    return slow if len(slow) <= max(1, len(own) // 4) else {}


def look(job: Job, out: Out) -> None:
    """Asked after every progress of an agent."""
    policy, pace = job.spec.policy, job.pace
    if policy.stragglers == "off" or out.now < pace.look_at:
        return
    pace.look_at = out.now + policy.straggler_after_ns // LOOKS
    if job.mode != "running" or job.attempt is not None or job.incidents or job.replayed:
        pace.slow.clear()  # what they do now is not what they do in training
        return
    owners = [w for w in job.rank_owners() if w.usable and w.own_steps >= MEASURED_MIN]
    seen = max((worker.own_steps for worker in owners), default=0)
    if len(owners) * 2 <= job.spec.world or seen == pace.seen:
        return
    pace.seen = seen
    speed = min((w.steps_per_s for w in owners if w.steps_per_s > 0), default=0.0)
    _compare(job, out, owners, 1e9 / speed if speed else 0.0)
    _act(job, out)


def _compare(job: Job, out: Out, owners: list[Worker], step_ns: float) -> None:
    pace, factor = job.pace, job.spec.policy.straggler_factor
    before = {rank: bool(one.said) for rank, one in pace.slow.items()}
    slow = stand_out({w.rank: w.own_ns for w in owners}, step_ns, factor, before)
    for rank in [rank for rank in pace.slow if rank not in slow]:
        gone = pace.slow.pop(rank)
        if gone.said and job.owners.get(rank) == gone.worker:
            _tell(job, out, job.workers[gone.worker], f"rank {rank} is no straggler any more")
    for rank, ratio in slow.items():
        worker, known = job.workers[job.owners[rank]], pace.slow.get(rank)
        if known is None or known.worker != worker.id:
            pace.slow[rank] = Slow(worker.id, out.now, worker.own_steps, ratio)
        else:
            known.ratio = ratio


def _act(job: Job, out: Out) -> None:
    policy = job.spec.policy
    ripe: list[tuple[float, Worker, Slow]] = []
    for one in job.pace.slow.values():
        worker = job.workers[one.worker]
        steps = worker.own_steps - one.steps
        if out.now - one.since < policy.straggler_after_ns or steps < STEPS:
            continue
        first = not one.said
        one.said = f"rank {worker.rank} takes {one.ratio:.1f} x the median of {steps} steps"
        if first:
            _tell(job, out, worker, one.said)
        ripe.append((one.ratio, worker, one))
    if not ripe or policy.stragglers != "move":
        return
    _, worker, one = max(ripe, key=lambda row: row[0])
    why = _why_not(job, worker, out.now)
    if not why:
        operator.leave(job, out, worker, CAUSE, f"straggler: {one.said}")
        job.pace.slow.clear()
    elif why != one.stays:
        one.stays = why
        _tell(job, out, worker, f"rank {worker.rank} stays: {why}")


def _why_not(job: Job, worker: Worker, now: int) -> str:
    """Why the rank is not moved now; empty if it is."""
    past = [view for view in job.closed if view.cause == CAUSE]
    mine = [view for view in past if worker.rank in view.victims]
    if mine and now < mine[-1].opened_at_ns + AGAIN_NS:
        return "it was moved for this before, so its work is slow and not its place"
    rest_ns = REST * job.spec.policy.straggler_after_ns
    if past and now < past[-1].opened_at_ns + rest_ns:
        return f"another was moved for this within {rest_ns // SECOND} s"
    if job.somebody_done():
        return "the script is ending"
    within = job.spec.policy.within
    spare, why = placement.choose_spare(
        job.spares(), job.nodes, away_from=worker.node, within=within
    )
    if spare is None:
        return f"no spare is ready ({why})"
    if spare.node == worker.node:
        return f"the only spare is on {spare.node}, too"
    if both := shared(within, job.nodes[worker.node], job.nodes[spare.node]):
        return f"all spares are in its own {', '.join(both)}"
    return ""


def _tell(job: Job, out: Out, worker: Worker, detail: str) -> None:
    out.record(
        SignalSeen(
            job=job.id,
            at_ns=out.now,
            node=worker.node,
            worker=worker.id,
            signal=CAUSE,
            detail=f"{worker.place}: {detail}",
        )
    )
