"""Numbers differ that must be equal: the job stands, and says what and since when.

Theory of operation. A witness in the ranks (or in a newcomer) finds a difference and does not let
its step be committed: every rank that takes part says Diverged and waits. What they said is
collected for a moment, named (differences.py), and put on record. From then on the incident is
DIVERGED, whatever becomes of it: it is never counted as resolved. What follows is the job's policy:

    hold       the job stands as it is. Nothing is lost and nothing is written. An operator says
               Proceed or ends the job; if nobody does within `hold_ns`, it ends
    fall-back  back to the newest checkpoint of a step at which all agreed; without one it ends
    continue   the ranks are told to go on, which is on record as an exception to the guarantee

While it stands nothing else is decided: a rank that dies meanwhile is replaced once the job goes
on, a move waits, no timer of an attempt runs. Nobody could say which of the ranks have the right
numbers, so a newcomer must not be built from any of them.

What was accepted is remembered by witness, site and tick: a rank whose Proceed was lost says its
word again, and a step that is repeated because somebody died finds the same once more; both are
answered at once. With `continue` a witness that has spoken about a site is not asked again.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from keepstep.core import differences
from keepstep.core.differences import Divergence
from keepstep.core.facts import SECOND, Incident, Worker
from keepstep.core.fallback import fall_back
from keepstep.core.incidents import (
    EXIT_DIVERGED,
    close_incident,
    end_job,
    open_incident,
    widen_incident,
)
from keepstep.core.phases import newcomers
from keepstep.core.saves import Complete
from keepstep.core.state import Job, Out
from keepstep.errors import UsageError
from keepstep.model.commands import Proceed
from keepstep.model.messages import Diverged
from keepstep.model.records import DivergenceAccepted, DivergenceFound

COLLECT_NS = 2 * SECOND
CAUSE = "divergence"
EVERY_TICK = -1
ACCEPTED_MAX = 256  # the oldest are forgotten, and would be asked about again


def said(job: Job, out: Out, worker: Worker, word: Diverged) -> None:
    """A rank that is being asked to report will come upon it again when it repeats the step."""
    attempt = job.attempt
    if worker.role == "rank":
        asked = attempt is not None and attempt.kind == "unplanned" and not attempt.committed
        if word.generation < job.generation or asked:
            return
    elif attempt is None or attempt.newcomers.get(worker.rank) != worker.id:
        return
    worker.version = max(worker.version, word.version)
    key = _key(word)
    if key in job.accepted or (*key[:2], EVERY_TICK) in job.accepted:
        _proceed(job, out, worker, word.number)
        return
    if job.divergence is None:
        job.divergence = Divergence(since=out.now)
    before = job.divergence.said.get(worker.rank)
    if before is not None and before.number == word.number and not word.table:
        word = msgspec.structs.replace(word, table=before.table)  # seldom said again
    job.divergence.said[worker.rank] = word
    job.divergence.waiting[worker.id] = word.number


def _key(word: Diverged) -> tuple[str, str, int]:
    return word.witness, word.site, word.tick


def advance(job: Job, out: Out) -> None:
    """Called instead of any other look while numbers differ."""
    found = job.divergence
    assert found is not None
    if not found.text:
        if not _complete(job, found) and out.now < found.since + COLLECT_NS:
            return
        _name(job, out, found)
    policy = job.spec.policy.on_divergence
    if policy == "continue":
        accept(job, out, "--on-divergence continue", always=True)
    elif policy == "fall-back":
        _fall_back(job, out, found)
    elif not job.live():
        end(job, out, f"{found.text}; no rank is left alive")


def deadline(job: Job) -> int | None:
    found = job.divergence
    if found is None or job.replayed:
        return None
    if not found.text:
        return found.since + COLLECT_NS
    hold_ns = job.spec.policy.hold_ns
    return found.named_at + hold_ns if hold_ns else None


def late(job: Job, out: Out) -> None:
    """Nobody has said what is to be done."""
    if job.divergence is not None and job.divergence.text:
        waited_s = job.spec.policy.hold_ns // SECOND
        end(job, out, f"{job.divergence.text}; nobody decided within {waited_s} s")


def _complete(job: Job, found: Divergence) -> bool:
    return all(w.rank in found.said for w in job.rank_owners() if w.usable and not w.done)


def _name(job: Job, out: Out, found: Divergence) -> None:
    first = found.said[min(found.said)]
    what, odd = differences.describe(found.said)
    agreed = min(word.agreed for word in found.said.values())
    found.key, found.agreed = _key(first), agreed
    before = checkpoint_before(job, agreed)
    since = f"all ranks agreed at step {agreed}" if agreed >= 0 else "since when is not known"
    kept = f"{before.path} of step {before.version}" if before is not None else "none"
    found.text = f"{what}; {since}; newest checkpoint before it: {kept}"
    found.named_at = out.now
    incident = job.unplanned()
    if incident is None:
        incident = open_incident(
            job, out, trigger="unplanned", cause=CAUSE, victims=odd, reason=found.text
        )
    else:
        widen_incident(job, out, incident, CAUSE, odd, found.text)
    found.incident = incident.id
    incident.diverged = True
    move = job.attempt.incident if job.attempt is not None else incident
    move.diverged = True  # a planned one may be in progress
    out.record(
        DivergenceFound(
            job=job.id,
            at_ns=out.now,
            incident=incident.id,
            witness=first.witness,
            site=first.site,
            tick=first.tick,
            version=first.version,
            agreed=agreed,
            text=found.text,
            checkpoint=before.path if before is not None else "",
            move=move.id if move is not incident else "",
        )
    )


def checkpoint_before(job: Job, agreed: int) -> Complete | None:
    """The newest complete one of a step at which all are known to have agreed."""
    kept = (job.saves.newest, job.saves.older)
    return next((one for one in kept if one is not None and one.version <= agreed), None)


def _incident(job: Job, found: Divergence) -> Incident | None:
    return next((one for one in job.incidents if one.id == found.incident), None)


def accept(job: Job, out: Out, by: str, *, always: bool = False) -> None:
    """The ranks go on all the same, and the ledger says so."""
    found = job.divergence
    assert found is not None and found.text
    witness, site, tick = found.key
    out.record(
        DivergenceAccepted(
            job=job.id,
            at_ns=out.now,
            incident=found.incident,
            witness=witness,
            site=site,
            tick=EVERY_TICK if always else tick,
            by=by,
        )
    )
    accepted(job, (witness, site, EVERY_TICK if always else tick))
    later = ", also if it finds more there" if always else ""
    incident = _incident(job, found)
    if incident is not None:
        incident.also(f"went on all the same ({by}{later}): an exception to the guarantee")
    _restart_clocks(job, out.now)
    for worker_id, number in found.waiting.items():
        _proceed(job, out, job.workers[worker_id], number)
    goes_on = job.attempt is not None and job.attempt.incident is incident
    goes_on = goes_on or bool(job.dead()) or job.alarm is not None  # it is widened by that
    if incident is not None and not goes_on:
        close_incident(job, out, incident, "DIVERGED", "")


def accepted(job: Job, key: tuple[str, str, int]) -> None:
    """The facts of it, also when they are read from the ledger."""
    job.divergence = None
    job.accepted[key] = None
    while len(job.accepted) > ACCEPTED_MAX:
        job.accepted.pop(next(iter(job.accepted)))


def _proceed(job: Job, out: Out, worker: Worker, number: int) -> None:
    out.tell(worker, Proceed(generation=job.generation_max, number=number))


def _restart_clocks(job: Job, now: int) -> None:
    """Nobody was asked to hurry while the job stood."""
    attempt = job.attempt
    if attempt is None:
        return
    attempt.hold_at = now
    attempt.told = {what: replace(told, at=now) for what, told in attempt.told.items()}
    for worker in [*newcomers(job, attempt), *attempt.alone.values()]:
        worker.assigned_at = now
        if worker.positioned_at is not None:
            worker.positioned_at = now
        worker.asked = {what: (generation, now) for what, (generation, _) in worker.asked.items()}


def _fall_back(job: Job, out: Out, found: Divergence) -> None:
    to = checkpoint_before(job, found.agreed)
    if to is None:
        end(job, out, f"{found.text}; there is nothing to fall back to")
        return
    job.saves.back_to(to.path)
    fall_back(job, out, "numbers differ between ranks")


def end(job: Job, out: Out, reason: str) -> None:
    end_job(job, out, "diverged", EXIT_DIVERGED, reason)


def proceed(job: Job, out: Out, by: str) -> None:
    """An operator's word."""
    if job.divergence is None or not job.divergence.text:
        raise UsageError(
            f"job {job.id} does not stand because of numbers that differ",
            hint="`keepstep status` says what it waits for",
        )
    accept(job, out, by)


def replayed(job: Job, record: DivergenceFound | DivergenceAccepted) -> None:
    """From the ledger. Who waits is not on record: each of them says its word again."""
    if isinstance(record, DivergenceAccepted):
        accepted(job, (record.witness, record.site, record.tick))
        return
    found = Divergence(since=record.at_ns)
    found.key = (record.witness, record.site, record.tick)
    found.incident, found.text = record.incident, record.text
    found.agreed, found.named_at = record.agreed, record.at_ns
    job.divergence = found
    for incident in job.incidents:
        if incident.id in (record.incident, record.move):
            incident.diverged = True
