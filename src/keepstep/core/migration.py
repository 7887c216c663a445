"""The rows of an attempt: who is asked for what, as soon as it can be asked for.

The theory of operation and the table of phases and rows stand in phases.py. Each row below looks
at all facts and asks whoever has not been asked; an answer that is known is never asked for. The
rows of unplanned attempts and of resumes run in `recover`; planned.py uses some of them too.
"""

from __future__ import annotations

from itertools import chain

from keepstep.core import checkpoints, placement
from keepstep.core.facts import SECOND, Attempt, Incident, Kind, Worker
from keepstep.core.fallback import fall_back
from keepstep.core.incidents import end_job
from keepstep.core.phases import (
    all_copied,
    all_filled,
    all_held,
    has_copied,
    has_reported,
    mark,
    members,
    newcomers,
    phase_now,
)
from keepstep.core.processes import NOWHERE, close_stores, give_buddy, may_get_spare, swap_of
from keepstep.core.state import Job, Out
from keepstep.core.together import ask_ranks
from keepstep.core.triage import group_mismatch, headline, judge_reports, name_ranks
from keepstep.model.agent_messages import OpenStore
from keepstep.model.commands import Abort, Assign, Checkpoint, Copy, Decide, Position, Source, Stage
from keepstep.model.messages import Address
from keepstep.model.page import CHECKPOINT_TICK, NEWEST
from keepstep.model.records import AttemptStarted, Decided

DEATHS_MAX = 3  # of one rank without the tick advancing
RECONNECTS_MAX = 5
SOURCES_MAX = 64  # told to a newcomer; far more than can serve it at once
NEWCOMERS_MAX = 5  # that fail in one unplanned incident
STAGE_FAILURES_MAX = 3
STAGE_PATIENCE_NS = 300 * SECOND

EXIT_USER = 1
EXIT_USAGE = 2
EXIT_GAVE_UP = 3


def start_attempt(
    job: Job,
    out: Out,
    kind: Kind,
    incident: Incident,
    moving: list[int],
    newcomers: dict[int, str],
    reason: str,
) -> Attempt:
    attempt = Attempt(
        kind=kind,
        incident=incident,
        generation=job.new_generation(),
        started_at=out.now,
        members=job.live(),
        moving=tuple(sorted(moving)),
        newcomers=newcomers,
    )
    incident.attempts += 1
    job.attempt = attempt
    checkpoints.interrupted(job, out.now)
    out.record(
        AttemptStarted(
            job=job.id,
            at_ns=out.now,
            incident=incident.id,
            generation=attempt.generation,
            kind=kind,
            ranks=list(attempt.moving),
            reason=reason,
        )
    )
    # The stores of undone attempts: whoever still waits in their rendezvous fails at once.
    close_stores(job, out, keep={job.generation})
    mark(attempt, out, "RESERVE")
    return attempt


# ------------------------------------------------------------------ unplanned and resume


def recover(job: Job, out: Out, attempt: Attempt) -> None:
    abort_row(job, out, attempt)
    store_row(job, out, attempt)
    assign_row(job, out, attempt)
    decide_row(job, out, attempt)
    if job.ended is not None or job.attempt is not attempt:
        return
    stage_row(job, out, attempt)
    position_row(job, out, attempt)
    copy_row(job, out, attempt)
    hold_without_spare(job, out, attempt)
    mark(attempt, out, phase_now(job, attempt))


def abort_row(job: Job, out: Out, attempt: Attempt) -> None:
    command = Abort(generation=attempt.generation, reason=attempt.incident.reason)
    for worker in job.watched_owners():
        if worker.resync and worker.rank in attempt.members and not has_reported(worker, attempt):
            if worker.swap is not None and worker.swapped < worker.swap.generation:
                # Committed, but it may not know: a newcomer only reports once it is a rank.
                out.tell(worker, swap_of(job, out, worker))
            worker.resync = False
            out.ask(worker, "abort", attempt.generation, command)
    if attempt.members:
        ask_ranks(out, "abort", attempt, command, attempt.reports)
    for worker in newcomers(job, attempt):
        kept = worker.asked.get("assign", (attempt.generation, 0))[0] != attempt.generation
        if kept and worker.staged != attempt.generation:
            out.ask(worker, "abort", attempt.generation, command)


def store_row(job: Job, out: Out, attempt: Attempt) -> None:
    if attempt.store is not None or attempt.solo:
        return
    if attempt.store_node and job.nodes[attempt.store_node].state != "dead":
        node = job.nodes[attempt.store_node]
        if node.state == "connected" and attempt.store_asked_at == 0:
            node.stores.add(attempt.generation)
            out.send(node.name, OpenStore(generation=attempt.generation))
            attempt.store_asked_at = out.now
        return
    hit = [w.node for rank in attempt.moving if (w := job.owner(rank)) is not None]
    hit.append(job.bad_store)
    chosen = placement.store_node(job.nodes, hit)
    if chosen is None:
        return
    attempt.store_node = chosen.name
    attempt.store_asked_at = out.now
    chosen.stores.add(attempt.generation)
    out.send(chosen.name, OpenStore(generation=attempt.generation))


def assign_row(job: Job, out: Out, attempt: Attempt) -> None:
    if attempt.kind == "resume" and attempt.store is None:
        return
    homes = placement.home_slots(job.spec) if attempt.kind == "resume" else {}
    for rank in attempt.moving:
        if rank in attempt.newcomers:
            continue
        old = job.owner(rank)
        node, slot = homes.get(rank, ("", 0))
        prepared = prepared_places(job, attempt.incident, rank)
        toward = attempt.incident.toward.get(rank, "")
        spare, _ = placement.choose_spare(
            placement.only_at(toward, job.spares()),
            job.nodes,
            away_from="" if old is None or toward else old.node,
            home=f"{node}/{slot}",
            prepared=prepared,
            within=job.spec.policy.within,
        )
        if attempt.incident.give_up or (spare is None and not job.spec.policy.within):
            break
        if spare is None:
            continue  # there may be one in the domain of the next
        spare = prepared.get(spare.place, spare)
        attempt.newcomers[rank] = spare.id
        spare.role = "newcomer"
        spare.rank = rank
        spare.assigned_at = out.now
        spare.arrived, spare.ready, spare.positioned_at = False, None, None
        # An understudy has answered its Assign already, and takes nothing from another one.
        spare.buddy_heard = spare.presumed < 0
        spare.asked.clear()
    for worker in newcomers(job, attempt):
        if not worker.arrived and "assign" not in worker.asked:
            assign = Assign(
                rank=worker.rank,
                generation=attempt.generation,
                master=attempt.store or job.master or NOWHERE,
                buddy=give_buddy(job, out, worker),
                holders=side_state_holders(job, worker.rank),
                checkpoint=job.resume if attempt.kind == "resume" else "",
            )
            out.ask(worker, "assign", attempt.generation, assign)


def prepared_places(job: Job, incident: Incident, rank: int) -> dict[str, Worker]:
    """Where an understudy of `rank` is ready, and which."""
    if incident.no_understudies:
        return {}
    ready = (w for w in job.understudies() if w.ready is not None and w.presumed == rank)
    return {worker.place: worker for worker in ready}


def decide_row(job: Job, out: Out, attempt: Attempt) -> None:
    if attempt.kind == "resume":
        attempt.tick = CHECKPOINT_TICK
        return
    if attempt.tick is None:
        if attempt.reports.left > 0:
            return
        _decide(job, out, attempt)
    if attempt.tick is None or job.ended is not None:
        return
    decide = Decide(generation=attempt.generation, tick=attempt.tick)
    ask_ranks(out, "decide", attempt, decide, attempt.holds)


def _decide(job: Job, out: Out, attempt: Attempt) -> None:
    incident = attempt.incident
    reports = [
        (rank, report)
        for rank in attempt.reported
        if (report := job.workers[job.owners[rank]].report) is not None
    ]
    if blame_script(job, out, list(attempt.moving)):
        return
    verdict = judge_reports(reports, attempt.moving, incident.sticky_tick)
    if verdict.what == "fence":
        for rank in verdict.ranks:
            job.causes[rank] = ("device-error", verdict.reason)
            out.kill(job.workers[job.owners[rank]])
        return
    if verdict.what == "user":
        job.traceback = verdict.traceback
        end_job(job, out, "failed", EXIT_USER, verdict.reason)
        return
    if verdict.what == "fell_back":
        fall_back(job, out, verdict.reason)
        return
    if not _worth_trying(job, out, attempt, verdict.tick):
        return
    attempt.tick = verdict.tick
    attempt.decided_at = out.now
    attempt.solo = job.somebody_done() or any(report.done for _, report in reports)
    incident.sticky_tick = verdict.tick
    incident.decision = verdict.decision
    incident.timeline.longest("report", out.now - attempt.started_at)
    if verdict.decision == "RETRY" and any(report.computing for _, report in reports):
        incident.steps_recomputed = 1
    out.record(
        Decided(
            job=job.id,
            at_ns=out.now,
            incident=incident.id,
            generation=attempt.generation,
            tick=verdict.tick,
            decision=verdict.decision,
            reason=verdict.reason,
        )
    )


def blame_script(job: Job, out: Out, dead: list[int]) -> bool:
    """A script that raises outside any step ends its process. If nothing else died, that is no
    fault of the machine, and a newcomer would only raise again."""
    workers = [job.workers[job.owners[rank]] for rank in dead]
    if not workers or not all(worker.raised for worker in workers):
        return False
    first = next((worker for worker in workers if worker.refused), workers[0])
    job.traceback = first.raised
    last = headline(first.raised)
    reason = f"rank {first.rank} raised {last} and ended; nothing else failed before it"
    end_job(job, out, "failed", EXIT_USAGE if first.refused else EXIT_USER, reason)
    return True


def _worth_trying(job: Job, out: Out, attempt: Attempt, tick: int) -> bool:
    """Replacing a rank that dies each time at the same place only repeats the death."""
    for rank in attempt.moving:
        if job.causes.get(rank, ("",))[0] == "node-lost":
            continue  # that was its place, not the rank
        seen_tick, workers = job.deaths.get(rank, (tick, set()))
        workers = workers if seen_tick == tick else set()
        job.deaths[rank] = (tick, workers | {job.owners[rank]})
        if len(job.deaths[rank][1]) >= DEATHS_MAX:
            end_job(
                job,
                out,
                "failed",
                EXIT_GAVE_UP,
                f"rank {rank} died {DEATHS_MAX} times at tick {tick}, in different processes: "
                "the cause is not the place it runs in",
            )
            return False
    # Decided again before COMMIT: there were no connections to lose. Groups that cannot be built
    # have a patience of their own (stage_failed).
    if not attempt.moving and attempt.incident.sticky_tick is None:
        seen_tick, count = job.reconnects
        job.reconnects = (tick, count + 1 if seen_tick == tick else 1)
        if job.reconnects[1] > RECONNECTS_MAX:
            end_job(
                job,
                out,
                "failed",
                EXIT_GAVE_UP,
                f"the ranks lost their connections {RECONNECTS_MAX + 1} times at tick {tick}",
            )
            return False
    return True


def stage_row(job: Job, out: Out, attempt: Attempt) -> None:
    if attempt.store is None or not _may_stage(job, attempt):
        return
    stage = Stage(generation=attempt.generation, store=attempt.store)
    told = False
    if attempt.members:
        leaving = [job.owners[rank] for rank in attempt.moving if rank in attempt.members]
        told = ask_ranks(out, "stage", attempt, stage, attempt.stages, leaving)
    for worker in newcomers(job, attempt):
        if worker.staged != attempt.generation:
            told |= out.ask(worker, "stage", attempt.generation, stage)
    if told:
        attempt.staged_at = out.now


def _may_stage(job: Job, attempt: Attempt) -> bool:
    if attempt.solo or attempt.retry_at is not None:
        return False
    # A process that is moved as a whole has no connections until it has arrived.
    if job.transparent and not all_copied(job, attempt):
        return False
    # A rank's old groups are gone once it has reported; in a planned attempt it keeps them.
    if attempt.kind != "planned" and attempt.tick is None:
        return False
    # A rendezvous has a time limit, and it cannot complete without the newcomers: whoever is told
    # to wait in it before they are there, or before a spare is found, gives up in vain.
    return all_filled(job, attempt) and all(w.arrived for w in newcomers(job, attempt))


def position_row(job: Job, out: Out, attempt: Attempt) -> None:
    if attempt.kind == "planned":
        tick, final = NEWEST, False
    elif attempt.tick is None:
        return
    else:
        tick, final = attempt.tick, True
    for worker in newcomers(job, attempt):
        if not worker.arrived or worker.ready is not None or "position" in worker.asked:
            continue
        position = Position(
            generation=attempt.generation,
            tick=tick,
            final=final,
            holders=side_state_holders(job, worker.rank),
        )
        out.ask(worker, "position", attempt.generation, position)
        if "position" in worker.asked:
            worker.positioned_at = out.now


def group_trouble(job: Job, rank: int, members: dict[str, list[int]]) -> str:
    """The others would wait for it in groups that it does not build, until a timeout."""
    others = {owner: w.groups for owner, w in job.owning() if owner != rank and w.groups}
    return group_mismatch({**others, rank: members}) if others else ""


def side_state_holders(job: Job, rank: int) -> list[Address]:
    owner = job.owner(rank)
    if owner is None:  # resumed: everything is in the checkpoint
        return []
    return placement.holders(job.nodes, owner.node, owner.buddy)


def _no_other_lost(job: Job, rank: int) -> bool:
    owner = job.owner(rank)
    own = owner.node if owner is not None else ""
    return all(node.state not in ("absent", "dead") or node.name == own for node in job.order)


def copy_row(job: Job, out: Out, attempt: Attempt) -> None:
    if attempt.tick is None or attempt.holds.left > 0:
        return
    for worker in newcomers(job, attempt):
        if worker.ready is None or has_copied(worker, attempt):
            continue
        checkpoint = job.resume if attempt.kind == "resume" else ""
        sources = [] if checkpoint else sources_for(job, attempt, worker)
        copy = Copy(
            generation=attempt.generation,
            tick=attempt.tick,
            sources=sources,
            holders=side_state_holders(job, worker.rank),
            checkpoint=checkpoint,
            everybody=_no_other_lost(job, worker.rank),
        )
        if sources or checkpoint:
            out.ask(worker, "copy", attempt.generation, copy)


def sources_for(job: Job, attempt: Attempt, newcomer: Worker) -> list[Source]:
    """The leaver itself first, then ranks on the newcomer's node (shortest way), then others that
    have something of what it needs; anybody if none has, for what is the same on all ranks.
    Whoever fails is not named again, so the rest has its turn too."""
    wanted = frozenset(newcomer.ready.classes if newcomer.ready is not None else ())
    near = [newcomer.rank, *(w.rank for w in job.owners_on(newcomer.node))]
    share = SOURCES_MAX // max(1, len(wanted))
    mates = (_having(job, attempt, kind)[:share] for kind in sorted(wanted))
    found: dict[int, Source] = {}  # by rank
    for rank in chain(near, chain.from_iterable(mates) if wanted else attempt.members):
        source = _source(job, attempt, newcomer, rank)
        if source is not None and (not wanted or wanted.intersection(source.classes)):
            found.setdefault(rank, source)
        if len(found) == SOURCES_MAX:
            break
    if not found:
        others = (_source(job, attempt, newcomer, rank) for rank in attempt.members)
        found = {s.rank: s for s in [next((s for s in others if s is not None), None)] if s}
    return list(found.values())


def _source(job: Job, attempt: Attempt, newcomer: Worker, rank: int) -> Source | None:
    if rank in newcomer.bad_sources or rank not in attempt.members:
        return None
    worker = job.workers[job.owners[rank]]
    held = worker.held
    if held is None:
        return None
    return Source(rank=rank, pid=held.pid, node=worker.node, serve=held.serve, classes=held.classes)


def _having(job: Job, attempt: Attempt, kind: str) -> list[int]:
    """Ranks that hold tensors of this class. Asked when all hold, so they are looked at once."""
    if not attempt.having:
        for rank in attempt.members:
            held = job.workers[job.owners[rank]].held
            for one in held.classes if held is not None else ():
                attempt.having.setdefault(one, []).append(rank)
    return attempt.having.get(kind, [])


def hold_without_spare(job: Job, out: Out, attempt: Attempt) -> None:
    """The state is safe in the survivors' memory; put it on disk too while waiting."""
    attempt.no_spare = ""
    if attempt.incident.give_up:
        attempt.no_spare = attempt.incident.give_up
    elif not all_filled(job, attempt) and not may_get_spare(job):
        missing = [rank for rank in attempt.moving if rank not in attempt.newcomers]
        attempt.no_spare = (
            f"no spare for {name_ranks(missing)} and no free healthy slot to start one: "
            "the other ranks hold their state until a node joins or a taint is removed"
        )
    if not attempt.no_spare or attempt.kind == "resume" or not all_held(job, attempt):
        return
    if attempt.no_checkpoint:
        attempt.no_spare += f"; the state is in their memory only: {attempt.no_checkpoint}"
    tick = attempt.tick
    if tick is None or job.checkpoint_tick == tick:
        return
    holding = members(job, attempt)
    lead = min((w.rank for w in holding), default=-1)
    path = checkpoint_path(job, tick)
    gone = sorted(attempt.moving)
    dead = {rank: side_state_holders(job, rank) for rank in gone}
    kept = [rank for rank in gone if (owner := job.owner(rank)) and owner.kept_bytes]
    for worker in holding:
        if worker.checkpointed == attempt.generation:
            continue
        command = Checkpoint(
            generation=attempt.generation,
            path=path,
            lead=worker.rank == lead,
            tick=tick,
            world=job.spec.world,
            dead=dead if worker.rank == lead else {},
            gone=gone,
            kept=kept if worker.rank == lead else [],
        )
        out.ask(worker, "checkpoint", attempt.generation, command)


def checkpoint_path(job: Job, tick: int) -> str:
    return f"{job.spec.directory}/checkpoint-{tick}"
