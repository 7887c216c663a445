"""What ledgers say about jobs whose orchestrator is not there to be asked."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import msgspec

from keepstep.adapters.store.sqlite import read_records
from keepstep.core.orchestrator import Core
from keepstep.model.records import IncidentClosed, JobEnded, JobSubmitted
from keepstep.model.views import IncidentView, JobView

KINDS = (JobSubmitted.__name__, JobEnded.__name__, IncidentClosed.__name__)


class Past(msgspec.Struct, frozen=True, kw_only=True):
    view: JobView
    incidents: list[IncidentView]
    at_ns: int  # of its end, or of its submission


def ledgers(home: Path) -> list[Path]:
    """Newest first, by the last write; the newest records may still be in the -wal file."""

    def written_ns(path: Path) -> int:
        wal = path.with_name(path.name + "-wal")
        return max(p.stat().st_mtime_ns for p in (path, wal) if p.exists())

    return sorted((home / "ledgers").glob("*.db"), key=written_ns, reverse=True)


def past_jobs(home: Path, *, skip: Collection[str] = (), latest: bool = False) -> list[Past]:
    """Jobs from ledgers, newest first; `latest` stops at the newest ledger that has one.

    `skip`: jobs that a live orchestrator has told about already."""
    found: list[Past] = []
    for path in ledgers(home):
        found += _of_ledger(path, skip)
        if latest and found:
            break
    found.sort(key=lambda past: past.at_ns, reverse=True)
    return found[:1] if latest else found


def _of_ledger(path: Path, skip: Collection[str]) -> list[Past]:
    submitted: dict[str, int] = {}
    ended: dict[str, JobEnded] = {}
    incidents: dict[str, list[IncidentView]] = {}
    for record in read_records(path, KINDS):
        if record.job in skip:
            continue
        if isinstance(record, JobSubmitted):
            submitted[record.job] = record.at_ns
        elif isinstance(record, IncidentClosed):
            incidents.setdefault(record.job, []).append(record.view)
        elif isinstance(record, JobEnded):
            ended[record.job] = record
    past = [
        Past(view=end.view, incidents=incidents.get(job, []), at_ns=end.at_ns)
        for job, end in ended.items()
    ]
    lost = [job for job in submitted if job not in ended]
    return past + (_interrupted(path, lost, submitted) if lost else [])


def _interrupted(path: Path, jobs: list[str], submitted: dict[str, int]) -> list[Past]:
    """Their orchestrator was killed; the last state that it made durable is known."""
    core = Core()
    core.replay(list(read_records(path)))
    reason = f"its orchestrator {path.stem} is not running: this is the last state known"
    return [
        Past(
            view=msgspec.structs.replace(view, reason=reason),
            incidents=list(core.incidents(view.job)),
            at_ns=submitted[view.job],
        )
        for view in core.jobs()
        if view.job in jobs
    ]
