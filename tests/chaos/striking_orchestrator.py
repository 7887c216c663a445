"""`keepstep orchestrator` that strikes somebody in a chosen phase of a migration.

While the file named by BRAIN_PLAN exists (a cell of the table of test_phases.py as JSON), every
decision is looked at. The first one that leaves a migration of that kind in that phase, and finds
the actor there, signals the actor's process: when the decision is durable and before anything of
it is sent, or in COMMIT, which lasts until its record is durable, before that. What was done is
written to `struck` beside the plan, which is removed: it fires once.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from keepstep.adapters.store.sqlite import SqliteLedger
from keepstep.cli.main import main
from keepstep.core.control import Core, Outcome
from keepstep.core.facts import Attempt, Worker
from keepstep.core.migration import sources_for
from keepstep.core.state import Job
from keepstep.model.job import CoreInput
from keepstep.model.records import Committed, Record

plan = Path(os.environ["BRAIN_PLAN"])
handle, append = Core.handle, SqliteLedger.append
deciding: Core | None = None
attempts: dict[str, Attempt] = {}  # job -> its attempt, or the last one it had


# ------------------------------------------------------------------ who is who


def owners(job: Job) -> list[Worker]:
    return [worker for worker in job.rank_owners() if worker.usable]


def victims(job: Job, attempt: Attempt) -> list[Worker]:
    if attempt.committed:
        return [w for w in job.workers.values() if w.role == "leaver" and w.usable]
    return [w for w in owners(job) if w.rank in attempt.moving]


def sources(job: Job, attempt: Attempt) -> list[Worker]:
    """As in the simulator: somebody else than the leaver, who is asked first in a planned move."""
    if attempt.committed:
        return owners(job)[-1:]
    staying = [w for w in owners(job) if w.rank not in attempt.moving]
    for _, newcomer in sorted(attempt.newcomers.items()):
        serving = [source.rank for source in sources_for(job, attempt, job.workers[newcomer])]
        staying.sort(key=lambda w: serving.index(w.rank) if w.rank in serving else len(serving))
    return staying[:1]


def spares(job: Job, attempt: Attempt) -> list[Worker]:
    newcomers = [job.workers[name] for _, name in sorted(attempt.newcomers.items())]
    return newcomers if job.attempt is attempt and newcomers else job.spares()


def bystanders(job: Job, attempt: Attempt) -> list[Worker]:
    known = {w.id for who in (victims, sources, spares) for w in who(job, attempt)}
    return [worker for worker in owners(job) if worker.id not in known]


PROCESSES = {"victim": victims, "source": sources, "spare": spares, "bystander": bystanders}


def target(job: Job, attempt: Attempt, cell: dict[str, str]) -> dict[str, Any] | None:
    if cell["actor"] == "orchestrator":
        return {"pid": os.getpid()}
    whose = cell["agent_of"] if cell["actor"] == "agent" else cell["actor"]
    for worker in PROCESSES[whose](job, attempt):
        pid = job.nodes[worker.node].pid if cell["actor"] == "agent" else worker.pid
        if worker.usable and pid:
            return {"pid": pid, "worker": worker.id, "rank": worker.rank, "node": worker.node}
    return None


# ------------------------------------------------------------------ when


def phase_now(job: Job, attempt: Attempt, records: Sequence[Record], durable: bool) -> str:
    """The core marks COMMIT and, in the same decision, REWIRE."""
    if not durable:
        return "COMMIT" if any(isinstance(record, Committed) for record in records) else ""
    return attempt.phase if job.attempt is attempt or attempt.phase == "RETIRE" else ""


def strike(records: Sequence[Record], durable: bool) -> None:
    if deciding is None:
        return
    for name in deciding.live():
        job = deciding.state(name)
        if job.attempt is not None:
            attempts[name] = job.attempt
        attempt = attempts.get(name)
        if attempt is None or not plan.exists():
            continue
        cell = json.loads(plan.read_text())
        phase = phase_now(job, attempt, records, durable)
        if (phase, attempt.incident.trigger) != (cell["phase"], cell["kind"]):
            continue
        found = target(job, attempt, cell)
        if found is not None:
            fire(cell, {**found, "phase": phase, "incident": attempt.incident.id})
    for name in [name for name, old in attempts.items() if old.phase == "RETIRE" and durable]:
        del attempts[name]  # it is over with the decision that ends it


def fire(cell: dict[str, str], done: dict[str, Any]) -> None:
    plan.unlink()
    report = plan.with_name("struck")
    report.with_suffix(".new").write_text(json.dumps(done))
    report.with_suffix(".new").rename(report)
    os.kill(done["pid"], signal.SIGKILL if cell["fault"] == "crash" else signal.SIGSTOP)


def handle_and_remember(self: Core, now_ns: int, event: CoreInput) -> Outcome:
    global deciding
    deciding = self
    return handle(self, now_ns, event)


def append_and_strike(self: SqliteLedger, records: Sequence[Record]) -> None:
    strike(records, durable=False)
    append(self, records)
    strike(records, durable=True)


if __name__ == "__main__":
    Core.handle = handle_and_remember  # type: ignore[method-assign]
    SqliteLedger.append = append_and_strike  # type: ignore[method-assign]
    main()
