"""Finding the orchestrator and the job that a command means."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from keepstep.adapters.identity.tokens import parse
from keepstep.cli import show
from keepstep.cli.client import Client, NoJob, checked, fetch_ca
from keepstep.errors import NotActive, TransientError, UsageError
from keepstep.model.messages import Address
from keepstep.model.views import JobView
from keepstep.orchestrator import registry
from keepstep.orchestrator.main import ENDED, is_unspecified
from keepstep.orchestrator.requests import Info


class Reached(msgspec.Struct, frozen=True, kw_only=True):
    """How to talk to an orchestrator, or to several of which one is active."""

    urls: list[str]
    streams: list[Address]
    token: str
    ca: str = ""

    @property
    def url(self) -> str:
        return self.urls[0]

    def client(self) -> Client:
        return Client(self.urls, self.token, self.ca)


class Found(msgspec.Struct, frozen=True, kw_only=True):
    entry: registry.Entry
    view: JobView


def all_jobs(home: Path) -> list[Found]:
    """Jobs of every live orchestrator, ended ones that it still knows included."""
    found: dict[str, Found] = {}
    for entry in registry.live(home):
        try:
            views = Client.of(entry).get("/v1/jobs", list[JobView])
        except NotActive as error:
            show.words(error.message)
            continue
        except TransientError:
            continue  # it ended between the look at its pid and the request
        # Through a standby the active one has answered, which may be asked itself as well.
        for view in views:
            found.setdefault(view.job, Found(entry=entry, view=view))
    return list(found.values())


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


def external(home: Path, named: str, token: str) -> Reached:
    """The orchestrators of `--orchestrator`, given by ids or URLs with commas between them.

    Those that share a store know each other, so one that answers is enough."""
    entries = registry.live(home)
    urls: list[str] = []
    ca = ""
    for word in (part.strip().rstrip("/") for part in named.split(",")):
        entry = next((e for e in entries if word in (e.id, e.url)), None)
        if entry is None and "://" not in word:
            known = ", ".join(entry.id for entry in entries) or "none"
            raise UsageError(f"no live orchestrator {word}", hint=f"live here: {known}")
        urls.append(entry.url if entry is not None else checked(word))
        if entry is not None:
            token, ca = entry.token, entry.ca
    if not token:
        raise UsageError(
            f"no token for {named}", hint="set KEEPSTEP_TOKEN, or name a file with --token-file"
        )
    ca = ca or ca_for(urls[0], token)
    streams: list[Address] = []
    failure: TransientError | None = None
    for url in list(urls):
        try:
            info = Client(url, token, ca).get("/v1/orchestrator", Info)
        except TransientError as error:
            failure = error
            continue
        urls += [peer.url for peer in info.peers if peer.url not in urls]
        peers = [at_host(info.stream, url), *(peer.stream for peer in info.peers)]
        streams += [stream for stream in dict.fromkeys(peers) if stream not in streams]
    if not streams:
        assert failure is not None
        raise failure
    return Reached(urls=urls, streams=streams, token=token, ca=ca)


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
    """The same for orchestrators that were named."""
    views = there.client().get("/v1/jobs", list[JobView])
    live = [view for view in views if view.state not in ENDED and job in (None, view.job)]
    if len(live) != 1:
        names = ", ".join(view.job for view in views if view.state not in ENDED) or "none"
        raise (UsageError if live else NoJob)(
            f"no live job {job}" if job else f"{len(live)} jobs are running",
            hint=f"live jobs there: {names}",
        )
    return live[0]
