"""Telling all ranks the same with one command, instead of one command for each.

Theory of operation. `TellRanks` goes to every connected node, and each agent hands it to the ranks
it has, except those that the command names. It names every worker that is not ordinary (a newcomer,
a leaver, one that is done, stalled or to be killed), and those that were asked alone in this
attempt already. `Attempt.told` remembers it for everybody at once; nothing is noted for each.

Why this is as safe as telling each of them:

* Records come first: it leaves with the same outcome as single commands would.
* It reaches whom it is meant for and nobody else. Streams keep their order, so at an agent that
  takes the command each living process is one that the core knew as living when it was sent, and
  was then named or meant, or one that the agent was told to kill before and passes over.
* What is lost is sent again. It does not count for a worker that was named, nor for one whose agent
  has joined since (`Worker.synced`): those are asked alone, as if it had never been sent. A node
  that was away at the time has no other way back than to join.
* Silence is noticed. `timers` has a row for all who were told together, and one for each who was
  not.
* It carries the generation of its attempt like every command, and can be repeated.
"""

from __future__ import annotations

from collections.abc import Collection

from keepstep.core.facts import Attempt, Worker
from keepstep.core.ranks import Tally, Told
from keepstep.core.state import Job, Out
from keepstep.model.agent_messages import TellRanks
from keepstep.model.commands import WorkerCommand


def tell_ranks(out: Out, command: WorkerCommand, besides: Collection[str] = ()) -> Told:
    """Tell all ordinary ranks on connected nodes but `besides`."""
    job = out.job
    named = {w.id for w in job.watched.values() if w.alive and w.rank >= 0}
    named.update(besides)
    out.send_all(TellRanks(command=command, besides=sorted(named)))
    job.tellings += 1
    return Told(number=job.tellings, at=out.now, besides=frozenset(named))


def ask_ranks(
    out: Out,
    what: str,
    attempt: Attempt,
    command: WorkerCommand,
    tally: Tally,
    besides: Collection[str] = (),
) -> bool:
    """Ask all whose answer is missing, each of them once. True: somebody was told now."""
    told = False
    if what not in attempt.told:
        attempt.told[what] = tell_ranks(out, command, {*besides, *attempt.alone})
        told = True
    for worker in aside(out.job, attempt):
        if worker.id not in besides and tally.lacks(worker.rank):
            told |= out.ask(worker, what, attempt.generation, command)
    return told


def aside(job: Job, attempt: Attempt) -> list[Worker]:
    """Owners for which what all were told at once may not count, in order of ranks."""
    owners = job.owners
    found = [w for w in attempt.alone.values() if owners.get(w.rank) == w.id and w.ordinary]
    return sorted(job.watched_owners() + found, key=lambda w: w.rank)
