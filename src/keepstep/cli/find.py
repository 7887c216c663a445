"""Finding the orchestrator and the job that a command means."""

from __future__ import annotations

from pathlib import Path

import msgspec

from keepstep.cli.client import Client
from keepstep.errors import TransientError, UsageError
from keepstep.model.messages import Address
from keepstep.model.views import JobView
from keepstep.orchestrator import registry
from keepstep.orchestrator.main import ENDED
from keepstep.orchestrator.requests import Info


class Found(msgspec.Struct, frozen=True, kw_only=True):
    entry: registry.Entry
    view: JobView


def all_jobs(home: Path) -> list[Found]:
    """Jobs of every live orchestrator, ended ones that it still knows included."""
    found = []
    for entry in registry.live(home):
        try:
            views = Client.of(entry).get("/v1/jobs", list[JobView])
        except TransientError:
            continue  # it ended between the look at its pid and the request
        found += [Found(entry=entry, view=view) for view in views]
    return found


def live_jobs(home: Path) -> list[Found]:
    return [one for one in all_jobs(home) if one.view.state not in ENDED]


def one_job(home: Path, job: str | None) -> Found:
    """The live job that is meant: the named one, or the only one."""
    found = live_jobs(home)
    if job is not None:
        for one in found:
            if one.view.job == job:
                return one
        known = ", ".join(one.view.job for one in found) or "none"
        raise UsageError(f"no live job {job}", hint=f"live jobs: {known}")
    if not found:
        raise UsageError("no job is running", hint=f"looked in {home}; is KEEPSTEP_HOME right?")
    if len(found) > 1:
        names = ", ".join(one.view.job for one in found)
        raise UsageError(f"{len(found)} jobs are running", hint=f"choose one with --job: {names}")
    return found[0]


def external(home: Path, named: str, token: str) -> tuple[str, str, Address]:
    """url, token and stream address of `--orchestrator`, given by id or by URL."""
    entries = registry.live(home)
    for entry in entries:
        if named.rstrip("/") in (entry.id, entry.url):
            return entry.url, entry.token, entry.stream
    if "://" not in named:
        known = ", ".join(entry.id for entry in entries) or "none"
        raise UsageError(f"no live orchestrator {named}", hint=f"live here: {known}")
    if not token:
        raise UsageError(
            f"no token for {named}", hint="set KEEPSTEP_TOKEN to the orchestrator's token"
        )
    info = Client(named.rstrip("/"), token).get("/v1/orchestrator", Info)
    return named.rstrip("/"), token, info.stream


def job_of(url: str, token: str, job: str | None) -> JobView:
    """The same for one orchestrator that was named."""
    views = Client(url, token).get("/v1/jobs", list[JobView])
    live = [view for view in views if view.state not in ENDED and job in (None, view.job)]
    if len(live) != 1:
        names = ", ".join(view.job for view in views if view.state not in ENDED) or "none"
        raise UsageError(
            f"no live job {job}" if job else f"{len(live)} jobs are running",
            hint=f"live jobs there: {names}",
        )
    return live[0]
