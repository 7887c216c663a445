"""What ledgers say about jobs whose orchestrator is not there to be asked."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import msgspec

from keepstep.adapters.store.sqlite import read_records
from keepstep.core.control import Core
from keepstep.errors import UsageError
from keepstep.model.records import IncidentClosed, JobEnded, JobSubmitted, Record
from keepstep.model.views import IncidentView, JobView

KINDS = (JobSubmitted.__name__, JobEnded.__name__, IncidentClosed.__name__)


class Past(msgspec.Struct, frozen=True, kw_only=True):
    view: JobView
    incidents: list[IncidentView]
    at_ns: int  # of its end, or of its submission


def ledgers(home: Path) -> list[Path]:
    """Newest first, by the last write; the newest records may still be in the -wal file, of which a
    reader makes an empty one."""

    def written_ns(path: Path) -> int:
        wal = path.with_name(path.name + "-wal")
        files = [path, wal] if wal.exists() and wal.stat().st_size else [path]
        return max(file.stat().st_mtime_ns for file in files)

    return sorted((home / "ledgers").glob("*.db"), key=written_ns, reverse=True)


def past_jobs(
    home: Path, *, store: str = "", skip: Collection[str] = (), latest: bool = False
) -> list[Past]:
    """Jobs from ledgers, newest first; `latest` stops at the newest ledger that has one.

    `store`: a shared one, looked at first. `skip`: jobs that a live orchestrator has told about
    already."""
    found: list[Past] = []
    for source in [*([shared(store)] if store else []), *map(_file, ledgers(home))]:
        found += _of_ledger(source, skip)
        if latest and found:
            break
    found.sort(key=lambda past: past.at_ns, reverse=True)
    return found[:1] if latest else found


class HistorySource(msgspec.Struct, frozen=True):
    read: Callable[[Collection[str]], Iterator[Record]]  # records of these kinds; (): of all
    reason: str  # why a job that has not ended is as it is


def _file(path: Path) -> HistorySource:
    return HistorySource(
        lambda kinds: read_records(path, kinds),
        f"its orchestrator {path.stem} is not running: this is the last state known",
    )


def shared(url: str) -> HistorySource:
    try:
        from keepstep.adapters.store import postgres
    except ImportError as error:
        raise UsageError(
            f"--store needs psycopg: {error}", hint="pip install 'keepstep[postgres]'"
        ) from error
    return HistorySource(
        lambda kinds: postgres.read_records(url, kinds),
        "as the store has it: --orchestrator asks the one that is active",
    )


def _of_ledger(source: HistorySource, skip: Collection[str]) -> list[Past]:
    submitted: dict[str, int] = {}
    ended: dict[str, JobEnded] = {}
    incidents: dict[str, list[IncidentView]] = {}
    for record in source.read(KINDS):
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
    return past + (_interrupted(source, lost, submitted) if lost else [])


def _interrupted(source: HistorySource, jobs: list[str], submitted: dict[str, int]) -> list[Past]:
    """Their orchestrator was killed; the last state that it made durable is known."""
    core = Core()
    core.replay(list(source.read(())))
    return [
        Past(
            view=msgspec.structs.replace(view, reason=source.reason),
            incidents=list(core.incidents(view.job)),
            at_ns=submitted[view.job],
        )
        for view in core.jobs()
        if view.job in jobs
    ]
