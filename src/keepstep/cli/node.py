"""`keepstep agent`: this machine as one node of a live job."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import click
import msgspec

from keepstep.adapters.identity.tokens import parse
from keepstep.cli import find, join, show
from keepstep.cli.client import AsyncClient, NoJob, checked
from keepstep.cli.home import home
from keepstep.cli.join import Membership
from keepstep.cli.launcher import LaunchNote
from keepstep.cli.processes import become_subreaper, reap_orphans, start_agent, sweep
from keepstep.errors import KeepstepError, TransientError, UsageError
from keepstep.orchestrator import registry
from keepstep.orchestrator.requests import Ok

AGENT_END_S = 4.0
WAIT_S = 1.0


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """The command line, so far as it says which node of which job this is to be."""

    orchestrator: str | None
    token: str
    job: str | None
    node: str | None
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
@click.option("--slots", type=int, help="Places for processes [default: as the job says, else 1].")
@click.option(
    "--bind", metavar="ADDRESS", default="",
    help="Where other nodes reach this one [default: as the orchestrator does].",
)  # fmt: skip
@click.option("--wait", is_flag=True, help="Wait for a job instead of failing without one.")
def agent(
    orchestrator: str | None,
    token_file: Path | None,
    job: str | None,
    node: str | None,
    slots: int | None,
    bind: str,
    wait: bool,
) -> None:
    """Join this machine to a live job as one of its nodes, or as one more with spares."""
    if slots is not None and slots < 1:
        raise UsageError(f"--slots is {slots}: it must be at least 1")
    token = _token(token_file)
    wanted = Wanted(orchestrator=orchestrator, token=token, job=job, node=node, bind=bind)
    member = _patiently(wanted) if wait else _member(wanted)
    sys.exit(asyncio.run(_serve(member, slots or member.slots or 1)))


def _token(file: Path | None) -> str:
    if file is None:
        return os.environ.pop("KEEPSTEP_TOKEN", "")
    try:
        return file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the token in {file}: {error}") from error


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
        there = find.reached(find.one_job(where, wanted.job).entry)
    elif "://" in named and parse(wanted.token) is not None:
        url = checked(named)
        ca = find.ca_for(url, wanted.token)
        return _joined(where, wanted, url=url, ca=ca, token=wanted.token)
    else:
        there = find.external(where, named, wanted.token)
    if not there.ca:
        return join.on_loopback(there, find.job_of(there, wanted.job), wanted.node)
    return _joined(where, wanted, url=there.url, ca=there.ca, operator=there.token)


def _joined(
    where: Path, wanted: Wanted, *, url: str, ca: str, token: str = "", operator: str = ""
) -> Membership:
    return join.by_certificate(
        where,
        url=url,
        ca=ca,
        token=token,
        operator=operator,
        job=wanted.job or "",
        node=wanted.node or "",
        bind=wanted.bind,
    )


async def _serve(member: Membership, slots: int) -> int:
    """Not an exec: an agent ends its whole session, which must not be the user's shell's."""
    loop = asyncio.get_running_loop()
    note = _note(member.directory)
    if note is not None and Path(note.cwd).is_dir():
        os.chdir(note.cwd)  # scripts and their data are named relative to where the job began
    become_subreaper()
    process = start_agent(
        stream=member.stream,
        token=member.token,
        job=member.job,
        node=member.node,
        slots=slots,
        directory=member.directory,
        stall_timeout_ns=member.stall_timeout_ns,
        environ=os.environ,
        bind=member.bind,
        identity=member.identity,
    )
    ended, told = asyncio.Event(), asyncio.Event()
    process.watch(loop, lambda _: ended.set())

    def leave() -> None:
        if told.is_set():
            sweep([process.session])
        else:
            told.set()
            process.process.terminate()
            loop.call_later(AGENT_END_S, sweep, [process.session])

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, leave)
    show.words(f"node {member.node} with {slots} slots joins job {member.job}")
    while not ended.is_set():
        reap_orphans([process.process.pid])
        try:
            await asyncio.wait_for(ended.wait(), 1.0)
        except TimeoutError:
            continue
    code = process.process.wait()
    sweep([process.session])
    reap_orphans(())
    await _report_dead(member)
    if code > 0 and (said := process.last_words()):
        show.words(said)
    return 128 - code if code < 0 else code


async def _report_dead(member: Membership) -> None:
    client = AsyncClient(member.url, member.token, member.ca)
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
