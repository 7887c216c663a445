"""Finding the orchestrator and the job that a command means."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from keepstep.adapters.identity.tokens import parse
from keepstep.cli.client import Client, NoJob, checked, fetch_ca
from keepstep.errors import TransientError, UsageError
from keepstep.model.messages import Address
from keepstep.model.views import JobView
from keepstep.orchestrator import registry
from keepstep.orchestrator.main import ENDED, is_unspecified
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
        raise NoJob(f"no live job {job}", hint=f"live jobs: {known}")
    if not found:
        raise NoJob("no job is running", hint=f"looked in {home}; is KEEPSTEP_HOME right?")
    if len(found) > 1:
        names = ", ".join(one.view.job for one in found)
        raise UsageError(f"{len(found)} jobs are running", hint=f"choose one with --job: {names}")
    return found[0]


class Reached(msgspec.Struct, frozen=True, kw_only=True):
    """An orchestrator that was named, and how to talk to it."""

    url: str
    token: str
    ca: str = ""
    stream: Address

    def client(self) -> Client:
        return Client(self.url, self.token, self.ca)


def external(home: Path, named: str, token: str) -> Reached:
    """`--orchestrator`, given by id or by URL."""
    entries = registry.live(home)
    for entry in entries:
        if named.rstrip("/") in (entry.id, entry.url):
            return reached(entry)
    if "://" not in named:
        known = ", ".join(entry.id for entry in entries) or "none"
        raise UsageError(f"no live orchestrator {named}", hint=f"live here: {known}")
    url = checked(named)
    if not token:
        raise UsageError(
            f"no token for {named}", hint="set KEEPSTEP_TOKEN, or name a file with --token-file"
        )
    ca = ca_for(url, token)
    info = Client(url, token, ca).get("/v1/orchestrator", Info)
    return Reached(url=url, token=token, ca=ca, stream=at_host(info.stream, url))


def reached(entry: registry.Entry) -> Reached:
    stream = at_host(entry.stream, entry.url)
    return Reached(url=entry.url, token=entry.token, ca=entry.ca, stream=stream)


def ca_for(url: str, token: str) -> str:
    """ "" for plain text on loopback, else the authority that the token names."""
    if not url.startswith("https:"):
        return ""
    parsed = parse(token)
    if parsed is None:
        raise UsageError(
            f"this token does not say whom to believe at {url}",
            hint="use one of `keepstep token create` (with --operator to run jobs)",
        )
    return fetch_ca(url, parsed.fingerprint)


def at_host(stream: Address, url: str) -> Address:
    """An orchestrator that listens everywhere is where it was reached."""
    if not stream.host or is_unspecified(stream.host):
        return Address(urlsplit(url).hostname or stream.host, stream.port)
    return stream


def job_of(there: Reached, job: str | None) -> JobView:
    """The same for one orchestrator that was named."""
    views = there.client().get("/v1/jobs", list[JobView])
    live = [view for view in views if view.state not in ENDED and job in (None, view.job)]
    if len(live) != 1:
        names = ", ".join(view.job for view in views if view.state not in ENDED) or "none"
        raise (UsageError if live else NoJob)(
            f"no live job {job}" if job else f"{len(live)} jobs are running",
            hint=f"live jobs there: {names}",
        )
    return live[0]
