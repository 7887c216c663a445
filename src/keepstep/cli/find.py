"""Finding the orchestrator and the job that a command means."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from keepstep.adapters.identity.tokens import parse
from keepstep.cli import show
from keepstep.cli.client import Client, NoJob, checked, fetch_ca
from keepstep.cli.surroundings import surroundings
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


class Which(msgspec.Struct, frozen=True, kw_only=True):
    """What a command line says about whom it means."""

    job: str | None = None
    orchestrator: str | None = None  # None: those of this machine
    token: str = ""


class FoundOrchestrator(msgspec.Struct, frozen=True, kw_only=True):
    view: JobView
    entry: registry.Entry | None = None  # of an orchestrator of this machine
    there: Reached | None = None  # one that was named

    def client(self) -> Client:
        if self.there is not None:
            return self.there.client()
        assert self.entry is not None
        return Client.of(self.entry)


def token_in(file: Path | None) -> str:
    if file is None:
        return surroundings().token
    try:
        return file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the token in {file}: {error}") from error


def all_jobs(home: Path, which: Which) -> list[FoundOrchestrator]:
    """Jobs of every live orchestrator, or of the one that is named; ended ones that it still
    knows included."""
    if which.orchestrator is not None:
        there = external(home, which.orchestrator, which.token)
        views = there.client().get("/v1/jobs", list[JobView])
        return [FoundOrchestrator(view=view, there=there) for view in views]
    found: dict[str, FoundOrchestrator] = {}
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
            found.setdefault(view.job, FoundOrchestrator(entry=entry, view=view))
    return list(found.values())


def live_jobs(home: Path, which: Which) -> list[FoundOrchestrator]:
    return [one for one in all_jobs(home, which) if one.view.state not in ENDED]


def one_job(home: Path, which: Which) -> FoundOrchestrator:
    """The live job that is meant: the named one, or the only one."""
    found = live_jobs(home, which)
    if which.job is not None:
        for one in found:
            if one.view.job == which.job:
                return one
        known = ", ".join(one.view.job for one in found) or "none"
        raise NoJob(f"no live job {which.job}", hint=f"live jobs: {known}")
    if not found and which.orchestrator is not None:
        raise NoJob(f"no job is running at {which.orchestrator}")
    if not found:
        raise NoJob(
            "no job is running",
            hint=f"looked in {home}; is KEEPSTEP_HOME right? --orchestrator asks elsewhere",
        )
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
    ca = ca or ca_for(urls, token)
    streams: list[Address] = []
    failure: TransientError | None = None
    for url in list(urls):
        try:
            info = Client(url, token, ca).get("/v1/orchestrator", Info)
        except TransientError as error:
            failure = error
            urls.remove(url)
            urls.append(url)  # one whose machine is gone costs every question its time limit
            continue
        urls += [peer.url for peer in info.peers if peer.url not in urls]
        peers = [at_host(info.stream, url), *(peer.stream for peer in info.peers)]
        streams += [stream for stream in dict.fromkeys(peers) if stream not in streams]
    if not streams:
        assert failure is not None
        raise failure
    return Reached(urls=urls, streams=streams, token=token, ca=ca)


def ca_for(urls: list[str], token: str) -> str:
    """ "" for plain text on loopback, else the authority that the token names, from whichever
    answers."""
    asked = [url for url in urls if url.startswith("https:")]
    if not asked:
        return ""
    parsed = parse(token)
    if parsed is None:
        raise UsageError(
            f"this token does not say whom to believe at {asked[0]}",
            hint="use one of `keepstep token create` (with --operator to run jobs)",
        )
    for url in asked[:-1]:
        try:
            return fetch_ca(url, parsed.fingerprint)
        except TransientError:
            continue
    return fetch_ca(asked[-1], parsed.fingerprint)


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
