"""`keepstep agent`: this machine as one node of a live job."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import click
import msgspec

from keepstep.adapters.identity.private_files import private_folder
from keepstep.adapters.identity.tokens import parse
from keepstep.agent import identity, keeper, leftovers
from keepstep.agent.agent import EXIT_REFUSED
from keepstep.cli import find, join, show
from keepstep.cli.agent_processes import (
    AgentProcess,
    become_subreaper,
    reap_orphans,
    start_agent,
    sweep,
)
from keepstep.cli.client import AsyncClient, JobHasEnded, NoJob, checked
from keepstep.cli.join import Membership
from keepstep.cli.launcher import LaunchNote
from keepstep.cli.surroundings import home, surroundings
from keepstep.errors import KeepstepError, PermanentError, TransientError, UsageError
from keepstep.model import labels
from keepstep.orchestrator import registry
from keepstep.orchestrator.requests import Ok

AGENT_END_S = 4.0
WAIT_S = 1.0
RESTART_S = 0.5
KEEPER_START_S = 20.0
LEASE_PERCENT = 80  # of the stall timeout


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """The command line, so far as it says which node of which job this is to be."""

    orchestrator: str | None
    token: str
    job: str | None
    node: str | None
    place: str
    bind: str


@click.command()
@click.option("--orchestrator", metavar="ID|URL", help="Which one, when it is not of this machine.")
@click.option(
    "--token-file", type=click.Path(path_type=Path), metavar="FILE",
    help="Holds a token of `keepstep token create` [default: KEEPSTEP_TOKEN].",
)  # fmt: skip
@click.option("--job", metavar="ID", help="Which job, when several are live.")
@click.option(
    "--node", metavar="NAME",
    help="Name of this node [default: the first of the job that has not joined, else the next nK].",
)  # fmt: skip
@click.option(
    "--place", metavar="NAME", default="",
    help="Be the node that the job is to have on this machine, which its scheduler calls NAME.",
)  # fmt: skip
@click.option("--slots", type=int, help="Places for processes [default: as the job says, else 1].")
@click.option(
    "--bind", metavar="ADDRESS", default="",
    help="Where other nodes reach this one [default: as the orchestrator does].",
)  # fmt: skip
@click.option(
    "--label", "named", multiple=True, metavar="NAME=VALUE",
    help="Where this node stands, e.g. rack=r1 (repeatable) [default: KEEPSTEP_LABELS].",
)  # fmt: skip
@click.option("--wait", is_flag=True, help="Wait for a job instead of failing without one.")
@click.option(
    "--adopt", is_flag=True,
    help="Let processes outlive this agent; started again under the same name, take them back.",
)  # fmt: skip
def agent(
    orchestrator: str | None,
    token_file: Path | None,
    job: str | None,
    node: str | None,
    place: str,
    slots: int | None,
    bind: str,
    named: tuple[str, ...],
    wait: bool,
    adopt: bool,
) -> None:
    """Join this machine to a live job as one of its nodes, or as one more with spares."""
    if slots is not None and slots < 1:
        raise UsageError(f"--slots is {slots}: it must be at least 1")
    environ = dict(surroundings().environ)
    if named:
        environ[labels.LABELS] = labels.joined(labels.parse(named))
    token = find.token_in(token_file)
    wanted = Wanted(
        orchestrator=orchestrator, token=token, job=job, node=node, place=place, bind=bind
    )
    member = _returning(wanted) if adopt else None
    if member is None:
        try:
            member = _patiently(wanted) if wait else _member(wanted)
        except JobHasEnded as ended:
            if not wait:
                raise
            show.words(ended.message)  # it was a spare that nobody needed
            sys.exit(0)
    folder = identity.folder(home(), member.job, member.node) if adopt else None
    sys.exit(asyncio.run(AgentParent(member, slots or member.slots or 1, folder, environ).run()))


def _returning(wanted: Wanted) -> Membership | None:
    """The node whose workers still live here under the name that is asked for. It has joined
    already, so no token is needed."""
    for folder in sorted((home() / "nodes").glob(f"*.{wanted.node}")) if wanted.node else []:
        if keeper.living(folder) is None or not (known := identity.load(folder)):
            continue
        if wanted.job in (None, known.job):
            return join.from_identity(folder, wanted.bind)
    return None


def _patiently(wanted: Wanted) -> Membership:
    said = ""
    while True:
        try:
            return _member(wanted)
        except (TransientError, UsageError) as error:
            if isinstance(error, UsageError) and not isinstance(error, NoJob):
                raise
            if error.message != said:
                said = error.message
                show.words(f"waiting: {said}")
            time.sleep(WAIT_S)


def _member(wanted: Wanted) -> Membership:
    """Join. UsageError if it cannot be, NoJob if it cannot be yet."""
    where = home()
    registry.prepare_home(where)
    named = wanted.orchestrator
    if named is None:
        entry = find.one_job(where, find.Which(job=wanted.job)).entry
        assert entry is not None, "nobody was named"
        there = find.external(where, entry.id, entry.token)
    elif "://" in named and parse(wanted.token) is not None:
        urls = [checked(url.strip()) for url in named.split(",")]
        ca = find.ca_for(urls, wanted.token)
        return _joined(where, wanted, urls=urls, ca=ca, token=wanted.token)
    else:
        there = find.external(where, named, wanted.token)
    if not there.ca:
        if wanted.place:
            raise UsageError(
                "--place: the orchestrator listens on loopback only", hint="name the --node"
            )
        return join.on_loopback(there, find.job_of(there, wanted.job), wanted.node)
    return _joined(where, wanted, urls=there.urls, ca=there.ca, operator=there.token)


def _joined(
    where: Path, wanted: Wanted, *, urls: list[str], ca: str, token: str = "", operator: str = ""
) -> Membership:
    return join.by_certificate(
        where,
        urls=urls,
        ca=ca,
        token=token,
        operator=operator,
        job=wanted.job or "",
        node=wanted.node or "",
        place=wanted.place,
        bind=wanted.bind,
    )


class AgentParent:
    """The agent's parent. Not an exec: an agent ends its whole session, which must not be the
    user's shell's. With `adopt` the workers are a keeper's, and an agent that ends before they
    do is started again."""

    def __init__(
        self, member: Membership, slots: int, keeper: Path | None, environ: Mapping[str, str]
    ) -> None:
        self._member = member
        self._slots = slots
        self._keeper = keeper
        self._environ = environ
        self._agent: AgentProcess | None = None
        self._sessions: set[int] = set()
        self._told = False  # to end
        self._left = False  # without the workers

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        member = self._member
        note = _note(member.directory)
        if note is not None and Path(note.cwd).is_dir():
            os.chdir(note.cwd)  # scripts and their data are named relative to where the job began
        become_subreaper()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._end)
        if self._keeper is not None:
            loop.add_signal_handler(signal.SIGHUP, self._leave)
        show.words(f"node {member.node} with {self._slots} slots joins job {member.job}")
        while True:
            code = await self._one_agent()
            if self._left:
                show.words("the agent has left its workers to the next one")
                return 0
            if self._keeper is None or self._told or keeper.living(self._keeper) is None:
                break
            if code == EXIT_REFUSED:  # it did not get at the workers: they are another's
                return self._last_words(code)
            show.words(f"the agent ended with {code}, its workers live: starting it again")
            await asyncio.sleep(RESTART_S)
        sweep(self._sessions)
        reap_orphans(())
        await _report_dead(member)
        if (folder := member.identity or self._keeper) is not None:
            identity.remove(folder)  # good for this node of this job, which is no more
        return self._last_words(code)

    async def _one_agent(self) -> int:
        """From its start to its end."""
        member = self._member
        if self._keeper is not None:
            self._sessions.add(await start_keeper(member, self._keeper, self._environ))
        process = self._agent = start_agent(
            streams=member.streams,
            token=member.token,
            job=member.job,
            node=member.node,
            slots=self._slots,
            directory=member.directory,
            stall_timeout_ns=member.stall_timeout_ns,
            environ=self._environ,
            bind=member.bind,
            identity=member.identity,
            keeper=self._keeper,
        )
        self._sessions.add(process.session)
        ended = asyncio.Event()
        process.watch(asyncio.get_running_loop(), lambda _: ended.set())
        while not ended.is_set():
            reap_orphans([process.process.pid])
            try:
                await asyncio.wait_for(ended.wait(), 1.0)
            except TimeoutError:
                continue
        code = process.process.wait()
        sweep([process.session])
        leftovers.remove(member.job, member.node, member.directory)
        return code

    def _end(self) -> None:
        if self._told or self._agent is None:
            sweep(self._sessions)
            return
        self._told = True
        self._agent.process.terminate()
        asyncio.get_running_loop().call_later(AGENT_END_S, sweep, self._sessions)

    def _leave(self) -> None:
        self._left = True
        if self._agent is not None and self._agent.process.stdin is not None:
            self._agent.process.stdin.close()  # as if we had died

    def _last_words(self, code: int) -> int:
        if code > 0 and self._agent is not None and (said := self._agent.last_words()):
            show.words(said)
        return 128 - code if code < 0 else code


async def start_keeper(member: Membership, folder: Path, environ: Mapping[str, str]) -> int:
    """Its session; one that lives is used again."""
    private_folder(folder)
    if (known := keeper.living(folder)) is not None:
        return known.pid
    # Shorter than what makes the orchestrator give the node up.
    lease_ns = member.stall_timeout_ns * LEASE_PERCENT // 100
    command = [sys.executable, "-P", "-m", "keepstep.agent.keeper", str(folder), str(lease_ns)]
    logs = member.directory / "logs"
    logs.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (logs / f"keeper-{member.node}.log").open("ab") as words:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=words,
            stderr=words,
            env=environ,
            start_new_session=True,
        )
    end = time.monotonic() + KEEPER_START_S
    while keeper.living(folder) is None:
        if process.poll() is not None or time.monotonic() > end:
            raise PermanentError(f"the keeper of {member.node} did not start", hint=f"see {logs}")
        await asyncio.sleep(0.02)
    return process.pid


async def _report_dead(member: Membership) -> None:
    client = AsyncClient(member.urls, member.token, member.ca)
    try:
        await client.post(f"/v1/jobs/{member.job}/nodes/{member.node}/dead", None, Ok)
    except KeepstepError:
        pass  # the job and its orchestrator have ended
    finally:
        await client.close()


def _note(directory: Path) -> LaunchNote | None:
    try:
        return msgspec.json.decode((directory / "launch.json").read_bytes(), type=LaunchNote)
    except (OSError, msgspec.DecodeError):
        return None
